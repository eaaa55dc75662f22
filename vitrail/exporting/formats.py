"""The formats that a model is exported to."""

from dataclasses import dataclass
from typing import Literal

FormatName = Literal["onnx", "openvino", "torch", "triton"]


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """What one format writes, and which packages it needs."""

    suffix: str  # of the main file; empty for a folder
    description: str
    packages: tuple[str, ...]  # imported to write and to prove it


FORMATS = {
    "onnx": ExportFormat(
        suffix=".onnx",
        description="one ONNX file, for onnxruntime and most other runtimes",
        packages=("onnx", "onnxscript", "onnxruntime"),
    ),
    "openvino": ExportFormat(
        suffix=".xml",
        description="OpenVINO's .xml and .bin files",
        packages=("onnx", "onnxscript", "openvino"),
    ),
    "torch": ExportFormat(
        suffix=".pt2",
        description="a torch.export program, which runs without Vitrail",
        packages=(),
    ),
    "triton": ExportFormat(
        suffix="",
        description="a model repository for Triton and KServe: a folder with config and ONNX file",
        packages=("onnx", "onnxscript", "onnxruntime"),
    ),
}
