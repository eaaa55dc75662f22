"""Finds the first block of an ONNX model whose output differs from PyTorch's."""

import ast
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail.exporting.engine import INPUT
from vitrail.exporting.graph import ExportGraph
from vitrail.exporting.onnx_file import SCOPES
from vitrail.exporting.packages import import_package

BLOCK_PREFIX = "model.blocks."
# Between blocks values are larger than the logits, and rounding errors with them.
RELATIVE = 1e-4


def locate_difference(model: Any, graph: ExportGraph, pixels: NDArray[Any]) -> str:
    """ "; the first difference is in blocks.7", or "" if no block differs."""
    expected = block_outputs(graph, pixels)
    found = onnx_block_outputs(model, pixels)
    for name in (block for block in expected if block in found):
        scale = max(1.0, float(np.abs(expected[name]).max()))
        if float(np.abs(expected[name] - found[name]).max()) > RELATIVE * scale:
            return f"; the first block that differs is {name}"
    return ""


def block_outputs(graph: ExportGraph, pixels: NDArray[Any]) -> dict[str, NDArray[np.float32]]:
    """PyTorch's output of each block, by the block's name."""
    outputs: dict[str, NDArray[np.float32]] = {}
    with ExitStack() as hooks, torch.inference_mode():
        for index, block in enumerate(graph.model.blocks):

            def record(
                module: Any, inputs: Any, output: Any, name: str = f"blocks.{index}"
            ) -> None:
                outputs[name] = output.numpy()

            hooks.callback(block.register_forward_hook(record).remove)
        graph(torch.from_numpy(pixels))
    return outputs


def onnx_block_outputs(model: Any, pixels: NDArray[Any]) -> dict[str, NDArray[np.float32]]:
    """onnxruntime's output of each block, which is the last value computed in it."""
    onnx, onnxruntime = import_package("onnx"), import_package("onnxruntime")
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    values: dict[str, str] = {}
    for node in copy.graph.node:
        for entry in node.metadata_props:
            if entry.key == SCOPES:
                block = next(
                    (s for s in ast.literal_eval(entry.value) if s.startswith(BLOCK_PREFIX)), ""
                )
                values[block.removeprefix("model.")] = node.output[0]
    values.pop("", None)
    copy.graph.output.extend(onnx.ValueInfoProto(name=value) for value in values.values())
    session = onnxruntime.InferenceSession(
        copy.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    return dict(zip(values, session.run(list(values.values()), {INPUT: pixels}), strict=True))
