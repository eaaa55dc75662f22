"""int8 keeps the accuracy: ranges, sensitivities, and which layers stay in float."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch

from tests.exporting.models import build_graph, build_model, preprocess_of
from vitrail.exporting.calibrate import (
    LEVELS,
    WEIGHT_LIMIT,
    Range,
    calibrate_ranges,
    fit_range,
    linear_layers,
    measure_sensitivity,
    quantise_weight,
)
from vitrail.exporting.engine import open_onnx
from vitrail.exporting.equalize import equalize_channels, measure_channels
from vitrail.exporting.onnx_file import build_onnx, write_onnx
from vitrail.exporting.proof import collect_reference, generate_images, run_torch, to_float
from vitrail.exporting.quantize import (
    TARGET_ERROR,
    Calibration,
    measure_calibration,
    quantize_onnx,
    quantize_weight,
    split_calibration,
)

FC2 = "blocks.1.mlp.fc2"


@pytest.fixture(scope="module")
def graph():
    return build_graph("pretraining")  # two blocks


@pytest.fixture(scope="module")
def images(graph):
    return to_float(graph.preprocess, generate_images(graph.preprocess))


@pytest.fixture(scope="module")
def calibration(graph, images):
    return measure_calibration(graph.model, images)


@pytest.fixture(scope="module")
def model(graph):
    return build_onnx(graph, collect_reference(graph, None, None).example())


@pytest.fixture
def run(graph, tmp_path, images):
    """Relative error of the logits of a quantised model."""

    def measure(quantised):
        write_onnx(quantised, tmp_path / "model.onnx", {})
        output = open_onnx(tmp_path / "model.onnx", 1).run(images.numpy())["logits"]
        reference = run_torch(graph, images.numpy())["logits"]
        return float(np.square(output - reference).mean() / reference.var())

    return measure


def test_products_cannot_saturate_sixteen_bits():
    assert 2 * LEVELS * WEIGHT_LIMIT <= 2**15 - 1 < 2 * LEVELS * 127


def test_weights_keep_within_their_limit_and_scale():
    weight = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    weight[:, 1] = 0
    values, scales = quantize_weight(weight, 1, 63)
    assert np.abs(values[:, [0, 2, 3]]).max(axis=0).tolist() == [63, 63, 63]
    assert scales.shape == (4,)
    assert np.abs(values * scales - weight).max() <= scales.max() / 2 * 1.0001


def test_torch_and_onnx_round_weights_alike():
    weight = torch.randn(5, 7)
    values, scales = quantize_weight(weight.numpy(), 0, WEIGHT_LIMIT)
    np.testing.assert_allclose(quantise_weight(weight), values * scales[:, None], rtol=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_range_clips_outliers_where_that_helps(sign):
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    values = sign * torch.cat([values, torch.tensor([8.0])])
    low, high = float(values.min()), float(values.max())
    full = Range((high - low) / LEVELS, round(-low / (high - low) * LEVELS))
    clipped = fit_range(values)
    errors = [(one.quantise(values) - values).square().mean() for one in (clipped, full)]
    assert clipped.scale < 0.9 * full.scale
    assert errors[0] < 0.9 * errors[1]


def test_only_the_end_with_the_outliers_is_clipped():
    generator = torch.Generator().manual_seed(0)
    values = torch.nn.functional.gelu(torch.randn(100_000, generator=generator))
    values = torch.cat([values, torch.tensor([9.0])])
    fitted = fit_range(values)
    assert -fitted.zero * fitted.scale == pytest.approx(-0.17, abs=0.03)
    assert (LEVELS - fitted.zero) * fitted.scale < 8.5


@pytest.mark.parametrize("values", [torch.zeros(5), torch.full((5,), 3.0), torch.full((5,), -3.0)])
def test_a_constant_input_has_a_range(values):
    torch.testing.assert_close(fit_range(values).quantise(values), values, atol=0.02, rtol=0)


def test_every_linear_layer_of_the_blocks_is_calibrated(graph, calibration):
    assert len(linear_layers(graph.model)) == 8
    assert calibration.ranges.keys() == calibration.sensitivity.keys()
    assert calibration.ranges.keys() == linear_layers(graph.model).keys()


def test_calibration_leaves_no_hooks_and_no_gradients(graph, images):
    measure_calibration(graph.model, images[:2])
    for layer in linear_layers(graph.model).values():
        assert not layer._forward_hooks and not layer._forward_pre_hooks
        assert layer.weight.grad is None


def test_sensitivity_predicts_the_error_of_quantising_one_layer(graph, calibration, model, run):
    others = calibration.ranges.keys() - {FC2}
    alone = run(quantize_onnx(model, calibration, others))
    none = run(quantize_onnx(model, calibration, list(calibration.ranges)))
    predicted = calibration.sensitivity[FC2]
    assert 0.3 * predicted < alone < 3 * predicted + none


def test_an_outlier_makes_its_layer_the_most_sensitive():
    torch.manual_seed(0)
    model = build_model("pretraining")
    with torch.no_grad():  # one hidden unit is 300 times larger, as in trained models
        model.blocks[1].mlp.fc1.bias[3] = 300.0
        model.blocks[1].mlp.fc2.weight[:, 3] = 1e-3
    preprocess = preprocess_of(model)
    images = to_float(preprocess, generate_images(preprocess))
    scores, _ = measure_sensitivity(model, images, calibrate_ranges(model, images))
    assert max(scores, key=scores.__getitem__) == FC2


def test_the_worst_layers_stay_in_float_until_the_target_is_met():
    scores = {"a": 0.1, "b": 0.004, "c": 0.0009, "d": 0.003, "e": 1e-4, "f": 1e-4, "g": 0, "h": 0}
    calibration = Calibration({}, scores, {})
    choices = list(calibration.float_layers())
    assert choices[0] == ("a", "b")
    assert sum(scores.values()) - 0.104 <= TARGET_ERROR < sum(scores.values()) - 0.1
    assert [len(choice) for choice in choices] == [2, 4, 8]
    assert next(Calibration({}, dict.fromkeys("abcd", 1e-3), {}).float_layers()) == ()


def test_calibration_images_are_spread_over_all_and_do_not_judge():
    chosen, others = split_calibration(1000)
    assert len(chosen) == 64 and chosen[0] == 0 and chosen[-1] == 999
    assert sorted([*chosen, *others]) == list(range(1000))
    assert len(split_calibration(30)[0]) == 10
    assert [part.tolist() for part in split_calibration(1)] == [[0], [0]]


def test_quantised_layers_compute_in_integers_and_float_layers_do_not(calibration, model):
    quantised = quantize_onnx(model, calibration, [FC2])
    onnx.checker.check_model(quantised, full_check=True)
    inputs = {node.output[0] for node in quantised.graph.node if node.op_type == "DequantizeLinear"}
    products = [node for node in quantised.graph.node if node.op_type == "MatMul"]
    both = [node for node in products if set(node.input[:2]) <= inputs]
    muls = [node for node in quantised.graph.node if node.op_type == "Mul"]
    restored = {node.output[0] for node in muls if node.input[1].endswith(".scale")}
    weight_only = [node for node in products if node.input[1] in restored]
    assert len(both) == 7 and len(weight_only) == 1


def test_every_matrix_is_int8(calibration, model):
    quantised = quantize_onnx(model, calibration, [FC2])
    matrices = [entry for entry in quantised.graph.initializer if len(entry.dims) >= 2]
    stored = {entry.name: entry for entry in matrices if entry.data_type == onnx.TensorProto.INT8}
    assert len(stored) == 4 * 2 + 3  # the blocks, the patch embedding, and both layers of the head
    left = [one.name for one in matrices if one.name not in stored and "scale" not in one.name]
    assert left == ["model.cls_token"]


def test_seven_bits_where_the_product_is_in_integers(calibration, model):
    quantised = quantize_onnx(model, calibration, [FC2])
    largest = sorted(
        int(np.abs(onnx.numpy_helper.to_array(entry)).max())
        for entry in quantised.graph.initializer
        if entry.data_type == onnx.TensorProto.INT8
    )
    assert largest == [63] * 7 + [127] * 4


def test_the_error_is_small_and_smaller_with_float_layers(calibration, model, run):
    everything = run(quantize_onnx(model, calibration, []))
    weight_only = run(quantize_onnx(model, calibration, list(calibration.ranges)))
    assert weight_only < everything < 0.02


def test_an_answer_does_not_depend_on_the_other_images(graph, calibration, model, tmp_path, images):
    write_onnx(quantize_onnx(model, calibration, []), tmp_path / "model.onnx", {})
    engine = open_onnx(tmp_path / "model.onnx", 1)
    alone = engine.run(images[:1].numpy())["logits"]
    together = engine.run(images.numpy())["logits"][:1]
    np.testing.assert_allclose(alone, together, atol=1e-5)


def test_the_original_model_is_unchanged(calibration, model):
    before = model.SerializeToString(deterministic=True)
    quantize_onnx(model, calibration, [])
    assert model.SerializeToString(deterministic=True) == before


def test_the_bias_corrects_the_mean_error(graph, calibration, model, images, tmp_path):
    shifted = replace(calibration, errors={n: x + 0.5 for n, x in calibration.errors.items()})
    found = {}
    for name, one in (("corrected", calibration), ("shifted", shifted)):
        write_onnx(quantize_onnx(model, one, []), tmp_path / "model.onnx", {})
        logits = open_onnx(tmp_path / "model.onnx", 1).run(images.numpy())["logits"]
        found[name] = np.abs(logits - run_torch(graph, images.numpy())["logits"]).mean()
    assert found["shifted"] > 2 * found["corrected"]


@pytest.mark.parametrize("kind", ["cls", "map", "rotary"])
def test_equal_channels_leave_the_logits_unchanged(kind):
    model = build_model(kind)
    with torch.no_grad():  # one channel is a hundred times as large, as in trained models
        model.blocks[0].norm1.weight[2] *= 100
        model.blocks[0].norm2.weight[3] *= 100
    preprocess = preprocess_of(model)
    images = to_float(preprocess, generate_images(preprocess))
    expected = model(images)
    layers = [model.blocks[0].attn.qkv, model.blocks[0].attn.proj, model.blocks[0].mlp.fc1]
    before = measure_channels(model, layers, images)
    equalize_channels(model, images)
    torch.testing.assert_close(model(images), expected, atol=1e-3, rtol=1e-4)
    after = measure_channels(model, layers, images)
    for layer in (layers[0], layers[2]):
        assert after[layer].max() / after[layer].mean() < before[layer].max() / before[layer].mean()
