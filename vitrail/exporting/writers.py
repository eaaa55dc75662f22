"""How each format is written and opened again, behind one interface."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray
from torch import Tensor

from vitrail.exporting.engine import Engine, open_onnx, open_openvino
from vitrail.exporting.graph import ExportGraph
from vitrail.exporting.locate import locate_difference
from vitrail.exporting.onnx_file import OPSET, build_onnx, write_onnx
from vitrail.exporting.openvino_file import write_openvino
from vitrail.exporting.torch_file import export_program, open_program, write_program


class Writer(Protocol):
    """An exported graph that is ready to be written."""

    @property
    def details(self) -> Mapping[str, Any]: ...
    def write(self, path: Path, metadata: Mapping[str, Any]) -> None: ...
    def open(self, path: Path) -> Engine: ...
    def locate(self, pixels: NDArray[Any]) -> str: ...


@dataclass(frozen=True, eq=False)
class OnnxWriter:
    """One ONNX file."""

    model: Any
    graph: ExportGraph
    details: Mapping[str, Any] = field(default_factory=lambda: {"opset": OPSET})

    def write(self, path: Path, metadata: Mapping[str, Any]) -> None:
        write_onnx(self.model, path, metadata)

    def open(self, path: Path) -> Engine:
        return open_onnx(path)

    def locate(self, pixels: NDArray[Any]) -> str:
        return locate_difference(self.model, self.graph, pixels)


@dataclass(frozen=True, eq=False)
class OpenVinoWriter:
    """An .xml and a .bin file, converted from an ONNX file."""

    model: Any
    graph: ExportGraph
    details: Mapping[str, Any] = field(default_factory=lambda: {"opset": OPSET})

    def write(self, path: Path, metadata: Mapping[str, Any]) -> None:
        onnx_file = path.with_suffix(".onnx")
        write_onnx(self.model, onnx_file, {})
        write_openvino(onnx_file, path, metadata)
        onnx_file.unlink()

    def open(self, path: Path) -> Engine:
        return open_openvino(path)

    def locate(self, pixels: NDArray[Any]) -> str:
        return ""


@dataclass(frozen=True, eq=False)
class TorchWriter:
    """A torch.export program."""

    program: Any
    graph: ExportGraph
    details: Mapping[str, Any] = field(default_factory=dict)

    def write(self, path: Path, metadata: Mapping[str, Any]) -> None:
        write_program(self.program, path, metadata)

    def open(self, path: Path) -> Engine:
        return open_program(path, self.graph)

    def locate(self, pixels: NDArray[Any]) -> str:
        return ""


def build_writer(to: str, graph: ExportGraph, example: Tensor) -> Writer:
    """Traces the graph for a format; `example` is a batch of at least two images."""
    if to == "torch":
        return TorchWriter(export_program(graph, example), graph)
    model = build_onnx(graph, example)
    return OpenVinoWriter(model, graph) if to == "openvino" else OnnxWriter(model, graph)
