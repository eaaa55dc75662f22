"""torch.export: a .pt2 program that runs wherever PyTorch does, without Vitrail."""

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitrail.errors import UserError
from vitrail.exporting.engine import METADATA_KEY, Arrays, PixelKind, shorten
from vitrail.exporting.graph import ExportGraph
from vitrail.exporting.onnx_file import dynamic_dimensions, silence_exporter


def export_program(graph: ExportGraph, example: Tensor) -> Any:
    """The torch.export program of a graph; `example` is a batch of at least two images."""
    try:
        with silence_exporter(), torch.no_grad():
            return torch.export.export(
                graph, (example,), dynamic_shapes=(dynamic_dimensions(graph),)
            )
    except torch._dynamo.exc.UserError as error:  # torch.export has no public class for it
        raise UserError(f"torch.export cannot trace this model: {shorten(error)}") from error


def write_program(program: Any, path: Path, metadata: Mapping[str, Any]) -> None:
    buffer = io.BytesIO()  # torch hides a full disk behind an error of its own
    with silence_exporter():
        torch.export.save(program, buffer, extra_files={METADATA_KEY: json.dumps(metadata)})
    path.write_bytes(buffer.getvalue())


@dataclass(frozen=True, eq=False)
class TorchEngine:
    """An exported program, run by PyTorch itself."""

    module: nn.Module
    pixels: PixelKind
    outputs: tuple[str, ...]
    classes: int | None  # logits; None without a head
    metadata: dict[str, Any] = field(default_factory=dict)
    name: str = "torch"
    version: str = str(torch.__version__)

    def run(self, pixels: NDArray[Any]) -> Arrays:
        """The outputs of a batch (B, C, H, W) by name."""
        with torch.inference_mode():
            tensors = self.module(torch.from_numpy(pixels))
        return {name: x.numpy() for name, x in zip(self.outputs, tensors, strict=True)}

    def split(self, parts: int) -> "TorchEngine":
        """The same engine: its threads are a setting of PyTorch."""
        return self


def open_program(path: Path, graph: ExportGraph) -> TorchEngine:
    """Reads a program that `write_program` has just written, to prove it.

    Only for our own files: torch.export.load does not promise to be safe for those of others.
    """
    with silence_exporter():
        module = torch.export.load(path).module()
    return TorchEngine(module, graph.options.pixels, graph.outputs, graph.classes)
