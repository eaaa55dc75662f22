"""Every kind of model is equal in PyTorch and in ONNX, at every batch size."""

import os
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import pytest
import torch

from tests.exporting.models import KINDS, OPTIONS, TINY, build_graph, build_model, preprocess_of
from vitrail.data.preprocess import normalise
from vitrail.errors import UserError
from vitrail.exporting import onnx_file
from vitrail.exporting.engine import OnnxEngine, open_onnx, open_openvino
from vitrail.exporting.graph import ExportGraph, GraphOptions, prepare_model
from vitrail.exporting.onnx_file import OPSET, build_onnx, write_onnx
from vitrail.exporting.openvino_file import write_openvino
from vitrail.exporting.proof import collect_reference, run_torch
from vitrail.model.config import ViTConfig

CONVERTED = {"avg", "map", "rotary", "hybrid", "conv"}  # to OpenVINO: all operators, all options


class Exported(NamedTuple):
    kind: str
    graph: ExportGraph
    path: Path
    engine: OnnxEngine
    printed: str


@pytest.fixture(scope="module", params=KINDS)
def exported(request, tmp_path_factory):
    """One ONNX file of each kind; the tests of this module share it."""
    graph = build_graph(request.param)
    example = collect_reference(graph, None, None).example()
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    reader, writer = os.pipe()
    saved = [os.dup(number) for number in (1, 2)]
    for number in (1, 2):
        os.dup2(writer, number)
    try:
        model = build_onnx(graph, example)
    finally:
        for number, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, number)
        os.close(writer)
    with os.fdopen(reader) as pipe:
        printed = pipe.read()
    write_onnx(model, path, {"classes": ["a"]})
    return Exported(request.param, graph, path, open_onnx(path, 1), printed)


def images_for(graph, count, size=None):
    config, generator = graph.model.config, torch.Generator().manual_seed(count)
    shape = (count, config.channels, *(size or config.size))
    if graph.options.pixels == "uint8":
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).numpy()
    return torch.randn(shape, generator=generator).numpy()


@pytest.mark.parametrize("batch", [1, 2, 17])
def test_onnx_equals_torch_at_every_batch_size(exported, batch):
    pixels = images_for(exported.graph, batch)
    expected = run_torch(exported.graph, pixels)
    outputs = exported.engine.run(pixels)
    assert outputs.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(outputs[name], expected[name], atol=1e-4, rtol=0)


def test_openvino_equals_torch(exported, tmp_path):
    if exported.kind not in CONVERTED and os.environ.get("VITRAIL_FAULTS") != "full":
        pytest.skip("only in `make faults`")
    write_openvino(exported.path, tmp_path / "model.xml", {})
    engine = open_openvino(tmp_path / "model.xml", 1)
    for batch in (1, 3):
        pixels = images_for(exported.graph, batch)
        expected, outputs = run_torch(exported.graph, pixels), engine.run(pixels)
        for name in expected:
            np.testing.assert_allclose(outputs[name], expected[name], atol=1e-4, rtol=0)


def test_the_logits_depend_on_the_image(exported):
    pixels = images_for(exported.graph, 2)
    output = exported.engine.run(pixels)[exported.graph.outputs[0]]
    assert np.abs(output[0] - output[1]).max() > 1e-2  # so equality means something


def test_the_checker_of_onnx_accepts_the_file(exported):
    model = onnx.load(exported.path)
    onnx.checker.check_model(model, full_check=True)
    assert [(entry.domain, entry.version) for entry in model.opset_import] == [("", OPSET)]


def test_inputs_and_outputs_have_their_names(exported):
    graph = onnx.load(exported.path).graph
    assert [entry.name for entry in graph.input] == ["pixels"]
    assert tuple(entry.name for entry in graph.output) == exported.graph.outputs
    first = graph.input[0].type.tensor_type.shape.dim[0]
    assert first.dim_param == "batch"


def test_the_file_holds_its_metadata_and_no_paths(exported):
    assert exported.engine.metadata == {"classes": ["a"]}
    content = exported.path.read_bytes()
    assert b"site-packages" not in content and b"/vitrail/" not in content


def test_the_exporter_prints_nothing(exported):
    assert exported.printed == ""


def test_kinds_use_every_setting():
    base = ViTConfig(**TINY)
    used = {key for changes in KINDS.values() for key in changes}
    assert used | TINY.keys() >= vars(base).keys() - {"eps", "mlp_ratio"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_graph_is_the_model(kind):
    model = build_model(kind)
    x = torch.randn(2, model.config.channels, *model.config.size)
    with torch.inference_mode():
        expected, tokens = model(x), model.encode(x)
        options = GraphOptions(attention=True, features=True)
        graph = ExportGraph(model, preprocess_of(model), options)
        outputs = dict(zip(graph.outputs, graph(x), strict=True))
        first = "features" if kind == "headless" else "logits"
        torch.testing.assert_close(outputs[first], expected)
        torch.testing.assert_close(outputs["features"], model.pool(tokens))


def test_attention_maps_are_exact():
    model = build_model("rotary", depth=2)
    graph = ExportGraph(model, preprocess_of(model), GraphOptions(attention=True))
    x = torch.randn(3, 2, 16, 16)
    with torch.inference_mode():
        maps = graph(x)[1]
        z, rope = model.embed(x)
        z = model.blocks[0](z, rope)
        block = model.blocks[1]
        expected = block.attn.weights(block.norm1(z), rope=rope)
    tokens = model.config.tokens
    assert maps.shape == (3, 2, 2, tokens, tokens)  # images, blocks, heads
    torch.testing.assert_close(maps[:, 1], expected)


def test_bytes_are_normalised_inside_the_graph_as_outside():
    model = build_model("avg")
    preprocess = preprocess_of(model)
    graph = ExportGraph(model, preprocess, GraphOptions(pixels="uint8"))
    images = torch.randint(0, 256, (2, 5, 12, 20), dtype=torch.uint8)
    with torch.inference_mode():
        torch.testing.assert_close(graph(images)[0], model(normalise(preprocess, images)))


def test_a_any_size_is_equal_at_another_size(exported):
    if not exported.graph.options.any_size:
        height, width = exported.graph.model.config.size
        patch = exported.graph.model.config.patch
        with pytest.raises(UserError, match="onnxruntime cannot run the model"):
            exported.engine.run(images_for(exported.graph, 1, (height + patch, width)))
        return
    for size in ((20, 16), (16, 32), (8, 8)):
        pixels = images_for(exported.graph, 2, size)
        outputs, expected = exported.engine.run(pixels), run_torch(exported.graph, pixels)
        np.testing.assert_allclose(outputs["logits"], expected["logits"], atol=1e-4, rtol=0)


def test_learned_positions_have_one_size():
    model = build_model("cls")
    with pytest.raises(UserError, match="learned positions belong to one image size"):
        prepare_model(model, preprocess_of(model), any_size=True)


@pytest.mark.parametrize("kind", ["cls", "distilled", "rotary"])
def test_positions_are_interpolated_before_the_export(kind):
    model = build_model(kind)
    larger = preprocess_of(build_model(kind, image=(20, 24)))
    prepared = prepare_model(model, larger, any_size=False)
    x = torch.randn(2, model.config.channels, 20, 24)
    with torch.inference_mode():
        torch.testing.assert_close(prepared(x), model(x))
    assert prepared.config.size == (20, 24)
    assert model.config.size == (16, 16)  # the user's model is unchanged


def test_the_copy_is_float32_and_the_model_stays_as_it_is():
    model = build_model("cls").double().train()
    prepared = prepare_model(model, preprocess_of(model), any_size=False)
    assert next(prepared.parameters()).dtype == torch.float32 and not prepared.training
    assert next(model.parameters()).dtype == torch.float64 and model.training
    assert next(model.parameters()).requires_grad


def test_preprocessing_must_have_the_channels_of_the_model():
    with pytest.raises(UserError, match="gives 1 channels, the model reads 3"):
        prepare_model(build_model("cls"), preprocess_of(build_model("distilled")), False)


def test_a_model_above_two_gigabytes_is_refused(monkeypatch):
    monkeypatch.setattr(onnx_file, "MAX_BYTES", 1000)
    graph = build_graph("cls")
    with pytest.raises(UserError, match=r"holds at most 2 GB; export with `to='torch'`"):
        build_onnx(graph, torch.zeros(2, 3, 16, 16))


def test_an_operator_that_onnx_lacks_is_one_line():
    class Eigenvalues(ExportGraph):
        def forward(self, pixels):
            return (torch.linalg.eigvals(pixels[:, 0]).real,)

    model = build_model("cls")
    graph = Eigenvalues(model, preprocess_of(model), GraphOptions())
    with pytest.raises(
        UserError, match=r"cannot express this model in ONNX .*linalg_eig"
    ) as caught:
        build_onnx(graph, torch.zeros(2, 3, 16, 16))
    assert "\n" not in str(caught.value)


def test_options_cover_both_inputs_and_all_outputs():
    assert {option.pixels for option in OPTIONS.values()} >= {"uint8", "float32"}
    for name in ("attention", "features", "odd", "any_size"):
        assert any(getattr(option, name) for option in OPTIONS.values())


@pytest.mark.parametrize("pixels", ["uint16", "float32"])
def test_models_of_deeper_pixels_are_refused_in_one_line(pixels):
    model = build_model("cls")
    view = replace(preprocess_of(model), pixels=pixels)
    with pytest.raises(UserError, match=f"reads {pixels} images; only models of 8-bit images can"):
        ExportGraph(model, view, GraphOptions())
