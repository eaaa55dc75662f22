"""int8: quantises an ONNX model, and leaves the layers that it would harm in float."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from vitrail.exporting.calibrate import (
    WEIGHT_LIMIT,
    Range,
    calibrate_ranges,
    measure_sensitivity,
)
from vitrail.exporting.onnx_file import node_module
from vitrail.exporting.packages import import_package
from vitrail.model.vit import ViT

CALIBRATION_IMAGES = 64
# Relative squared error of the logits that quantised activations may cause together. Measured on
# the ViT-Ti of AugReg: all 48 layers 0.083, without the worst one 0.0071, without two 0.0058.
TARGET_ERROR = 0.006
FULL_LIMIT = 127  # of int8 weights that are multiplied in float32: nothing can saturate
PREFIX = "model."  # of the ViT's modules in an exported graph


@dataclass(frozen=True, eq=False)
class Calibration:
    """What calibration images say about the linear layers of all blocks."""

    ranges: Mapping[str, Range]  # of each layer's input
    sensitivity: Mapping[str, float]  # error of the logits if only this layer is quantised
    errors: Mapping[str, Tensor]  # mean error of each output of a quantised layer

    @property
    def ranking(self) -> list[str]:
        """The layers, the most sensitive first."""
        return sorted(self.sensitivity, key=lambda name: -self.sensitivity[name])

    def float_layers(self) -> Iterator[tuple[str, ...]]:
        """Layers whose activations stay in float: as few as the target allows, then more."""
        ranking, total = self.ranking, sum(self.sensitivity.values())
        count = 0
        while count < len(ranking) and total > TARGET_ERROR:
            total -= self.sensitivity[ranking[count]]
            count += 1
        yield tuple(ranking[:count])
        for share in (6, 4, 2, 1):  # a sixth, a quarter, half, all of them
            if len(ranking) // share > count:
                yield tuple(ranking[: len(ranking) // share])


def measure_calibration(model: ViT, images: Tensor) -> Calibration:
    """Measures ranges and sensitivities on normalised images."""
    ranges = calibrate_ranges(model, images)
    return Calibration(ranges, *measure_sensitivity(model, images, ranges))


def split_calibration(count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of images to calibrate on, spread evenly, and of all others, which judge."""
    few = max(1, min(CALIBRATION_IMAGES, count // 3))
    chosen = np.unique(np.linspace(0, count - 1, few).astype(np.int64))
    others = np.setdiff1d(np.arange(count), chosen)
    return chosen, others if len(others) else chosen


def quantize_onnx(model: Any, calibration: Calibration, float_layers: Collection[str]) -> Any:
    """A copy whose weights are int8, and whose calibrated linear layers compute in int8.

    QuantizeLinear and DequantizeLinear around an operation mean that a runtime computes it in
    integers. Where only the weight is int8, Cast and Mul restore it, which runtimes do once; after
    DequantizeLinear, onnxruntime would quantise the activations by itself.
    """
    ranges = calibration.ranges
    onnx = import_package("onnx")
    result = onnx.ModelProto()
    result.CopyFrom(model)
    graph = result.graph
    weights = {entry.name: entry for entry in graph.initializer}
    nodes: list[Any] = []
    quantised: dict[str, list[Any]] = {}  # weight: its int8 values and scales
    for node in graph.node:
        weight = weights.get(node.input[1]) if is_weighted(node) else None
        layer = node_module(node).removeprefix(PREFIX)
        if weight is not None:
            in_int8 = layer in ranges and layer not in float_layers
            if weight.name not in quantised:
                limit = WEIGHT_LIMIT if in_int8 else FULL_LIMIT
                values, scales = quantize_weight(
                    onnx.numpy_helper.to_array(weight), output_axis(node), limit
                )
                if in_int8:
                    nodes.append(dequantize_weight(weight.name, output_axis(node)))
                else:
                    nodes += restore_weight(weight.name)
                    scales = expand_scales(scales, values.ndim, output_axis(node))
                quantised[weight.name] = store_weight(weight.name, values, scales)
            if in_int8:
                nodes += quantize_input(node, layer)
                graph.initializer.extend(store_range(layer, ranges[layer]))
        if node.op_type == "Add" and layer in ranges and layer not in float_layers:
            graph.initializer.extend(correct_bias(node, layer, weights, calibration.errors[layer]))
        nodes.append(node)
    kept = [entry for entry in graph.initializer if entry.name not in quantised]
    kept += [entry for entries in quantised.values() for entry in entries]
    replace_entries(graph.initializer, kept)
    replace_entries(graph.node, nodes)
    del graph.value_info[:]
    onnx.checker.check_model(result)
    return result


def is_weighted(node: Any) -> bool:
    return node.op_type in ("MatMul", "Gemm", "Conv")


def output_axis(node: Any) -> int:
    """The axis of a weight that counts the outputs: each output has its own scale."""
    transposed = any(entry.name == "transB" and entry.i for entry in node.attribute)
    return 0 if node.op_type == "Conv" or transposed else 1


def quantize_weight(
    weight: NDArray[np.float32], axis: int, limit: int
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """int8 values from -limit to limit, and one scale for each output."""
    others = tuple(n for n in range(weight.ndim) if n != axis)
    scales = np.maximum(np.abs(weight).max(axis=others, keepdims=True) / limit, 1e-12)
    return np.rint(weight / scales).astype(np.int8), scales.astype(np.float32).ravel()


def store_weight(name: str, values: NDArray[np.int8], scales: NDArray[np.float32]) -> list[Any]:
    onnx = import_package("onnx")
    return [
        onnx.numpy_helper.from_array(values, f"{name}.int8"),
        onnx.numpy_helper.from_array(scales, f"{name}.scale"),
    ]


def dequantize_weight(name: str, axis: int) -> Any:
    onnx = import_package("onnx")
    inputs = [f"{name}.int8", f"{name}.scale"]
    return onnx.helper.make_node("DequantizeLinear", inputs, [name], axis=axis)


def restore_weight(name: str) -> list[Any]:
    """The nodes that compute a float weight from its int8 values and their scales."""
    onnx = import_package("onnx")
    to = onnx.TensorProto.FLOAT
    return [
        onnx.helper.make_node("Cast", [f"{name}.int8"], [f"{name}.levels"], to=to),
        onnx.helper.make_node("Mul", [f"{name}.levels", f"{name}.scale"], [name]),
    ]


def expand_scales(scales: NDArray[np.float32], dimensions: int, axis: int) -> NDArray[np.float32]:
    """Scales in the shape that multiplies a weight."""
    return scales.reshape([-1 if n == axis else 1 for n in range(dimensions)])


def correct_bias(node: Any, layer: str, weights: Mapping[str, Any], error: Tensor) -> list[Any]:
    """A bias less the mean error of a quantised layer; the node is connected to it."""
    onnx = import_package("onnx")
    for index, name in enumerate(node.input):
        if name in weights:
            bias = onnx.numpy_helper.to_array(weights[name]) - error.numpy()
            node.input[index] = f"{layer}.corrected_bias"
            return [onnx.numpy_helper.from_array(bias.astype(np.float32), node.input[index])]
    return []


def store_range(layer: str, range_: Range) -> list[Any]:
    onnx = import_package("onnx")
    return [
        onnx.numpy_helper.from_array(np.float32(range_.scale), f"{layer}.input_scale"),
        onnx.numpy_helper.from_array(np.uint8(range_.zero), f"{layer}.input_zero"),
    ]


def quantize_input(node: Any, layer: str) -> list[Any]:
    """The nodes that quantise the input of a node; the node is connected to them."""
    onnx = import_package("onnx")
    scale = [f"{layer}.input_scale", f"{layer}.input_zero"]
    levels, values = f"{layer}.input_uint8", f"{layer}.input_quantized"
    nodes = [
        onnx.helper.make_node("QuantizeLinear", [node.input[0], *scale], [levels]),
        onnx.helper.make_node("DequantizeLinear", [levels, *scale], [values]),
    ]
    node.input[0] = values
    return nodes


def replace_entries(field: Any, entries: list[Any]) -> None:
    """Replaces all entries of a repeated protobuf field."""
    copies = list(entries)
    del field[:]
    field.extend(copies)
