"""Optional packages: imports one, or says what to install."""

import importlib
from typing import Any

from vitrail.errors import UserError

EXTRAS = {  # package: the extra of Vitrail that installs it
    "onnx": "onnx",
    "onnxruntime": "onnx",
    "onnxscript": "onnx",
    "openvino": "openvino",
}


def import_package(name: str) -> Any:
    """The imported package; if it is not installed, the error names the extra that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"{name} is not installed; install it with: pip install 'vitrail[{EXTRAS[name]}]'"
        ) from error
