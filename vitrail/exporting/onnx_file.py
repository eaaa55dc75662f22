"""ONNX: builds the graph with PyTorch's exporter, and writes it with its metadata."""

import ast
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitrail.errors import UserError
from vitrail.exporting.engine import INPUT, METADATA_KEY, shorten
from vitrail.exporting.graph import ExportGraph
from vitrail.exporting.packages import import_package

OPSET = 20  # the first with Gelu; onnxruntime >= 1.17, onnxruntime-web and OpenVINO read it
MAX_BYTES = 2**31 - 2**20  # protobuf's limit of 2 GiB, less some room for the graph itself
SCOPES = "pkg.torch.onnx.name_scopes"  # node metadata of PyTorch's exporter: the modules it is in
DIMENSIONS = ("batch", "channels", "height", "width")


def build_onnx(graph: ExportGraph, example: Tensor) -> Any:
    """The ONNX model of a graph; `example` is a batch of at least two images.

    Its nodes still carry the names of their modules, which `write_onnx` removes.
    """
    onnx = import_package("onnx")
    import_package("onnxscript")
    check_onnx_size(graph)
    try:
        with silence_exporter(), torch.no_grad():
            program = torch.onnx.export(
                graph,
                (example,),
                dynamo=True,
                external_data=False,
                opset_version=OPSET,
                input_names=[INPUT],
                output_names=list(graph.outputs),
                dynamic_shapes=(dynamic_dimensions(graph),),
                verbose=False,
            )
            assert program is not None
            model = program.model_proto
    except torch.onnx.OnnxExporterError as error:
        raise UserError(describe_exporter_error(error)) from error
    name_dimensions(model, graph.options.any_size)
    onnx.checker.check_model(model)
    return model


def write_onnx(model: Any, path: Path, metadata: Mapping[str, Any]) -> None:
    """Writes an ONNX model with metadata, without what the exporter noted about this machine."""
    onnx = import_package("onnx")
    clean = onnx.ModelProto()
    clean.CopyFrom(model)
    for node in clean.graph.node:
        del node.metadata_props[:]  # stack traces with the paths of this machine
        node.doc_string = ""
    for part in (clean.graph, *clean.graph.input, *clean.graph.output, *clean.graph.value_info):
        del part.metadata_props[:]
    del clean.graph.value_info[:]  # inferred shapes: every runtime infers them again
    del clean.metadata_props[:]
    onnx.helper.set_model_props(clean, {METADATA_KEY: json.dumps(metadata)})
    path.write_bytes(clean.SerializeToString())


def node_module(node: Any) -> str:
    """The name of the module that a node was traced in, such as "model.blocks.7.mlp.fc2"."""
    for entry in node.metadata_props:
        if entry.key == SCOPES:
            scopes = ast.literal_eval(entry.value)  # [..., "module", "operation"]
            return str(scopes[-2])
    return ""


def dynamic_dimensions(graph: ExportGraph) -> dict[int, Any]:
    """The dimensions of the input that vary: the batch always, height and width where asked."""
    dimensions: dict[int, Any] = {0: torch.export.Dim("batch", min=1)}
    if graph.options.any_size:
        # without a named range: that they are multiples of the patch follows from the graph
        dimensions |= {2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}
    return dimensions


def name_dimensions(model: Any, any_size: bool) -> None:
    """Gives height and width of the input their names, where the exporter made some up."""
    dimensions = model.graph.input[0].type.tensor_type.shape.dim
    if any_size:
        for dimension, name in zip(dimensions[2:], DIMENSIONS[2:], strict=True):
            dimension.dim_param = name


def check_onnx_size(graph: ExportGraph) -> None:
    """Raises if the weights do not fit into one ONNX file."""
    count = sum(tensor.numel() * tensor.element_size() for tensor in graph.state_dict().values())
    if count > MAX_BYTES:
        raise UserError(
            f"the weights take {count / 1e9:.1f} GB, and an ONNX file holds at most 2 GB; "
            f"export with `to='torch'`"
        )


def describe_exporter_error(error: Exception) -> str:
    """The reason why PyTorch's exporter failed, in one line."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    reason = cause if isinstance(cause, Exception) else error
    return f"cannot express this model in ONNX (opset {OPSET}): {shorten(reason)}; try `to='torch'`"


@contextmanager
def silence_exporter() -> Iterator[None]:
    """Without the exporter's warnings, which concern its own internals."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
