"""OpenVINO: converts an ONNX file to the .xml and .bin files that OpenVINO reads."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitrail.errors import UserError
from vitrail.exporting.engine import METADATA_KEY, shorten
from vitrail.exporting.packages import import_package


def write_openvino(onnx_file: Path, path: Path, metadata: Mapping[str, Any]) -> None:
    """Writes `path` (.xml) and the .bin file beside it, with metadata in OpenVINO's rt_info."""
    openvino = import_package("openvino")
    try:
        model = openvino.convert_model(onnx_file)
    except Exception as error:  # OpenVINO has one class per stage, without a public base
        raise UserError(f"OpenVINO cannot express this model: {shorten(error)}") from error
    model.set_rt_info(json.dumps(metadata), [METADATA_KEY])
    # not compressed: float16 weights would not be equal to PyTorch's
    openvino.save_model(model, path, compress_to_fp16=False)
