"""Triton: the model repository that Triton Inference Server and KServe read."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from vitrail.data.config import Preprocess
from vitrail.errors import UserError
from vitrail.exporting.engine import ODD_FEATURES
from vitrail.exporting.graph import ExportGraph

MAX_BATCH = 64  # images in one batch of the server
MAX_DELAY = 2000  # microseconds that a request waits for others to share its batch
LABELS = "labels.txt"
MODEL_FILE = "1/model.onnx"  # version 1
TYPES = {"float32": "TYPE_FP32", "uint8": "TYPE_UINT8"}


def write_repository(
    folder: Path, name: str, graph: ExportGraph, preprocess: Preprocess, classes: Sequence[str]
) -> Path:
    """Writes config and labels of a model into `folder`; returns where its ONNX file belongs."""
    model_file = folder / MODEL_FILE
    model_file.parent.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(render_config(name, graph, preprocess))
    # one line for each class: a name with a line break would shift all others
    lines = (" ".join(label.split()) for label in classes)
    (folder / LABELS).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return model_file


def check_model_name(name: str) -> None:
    """Raises if a server could not use the name in its URLs."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise UserError(
            f"{name!r} is not a model name that Triton accepts; "
            f"use letters, digits, '_', '-' and '.' in `name`"
        )


def render_config(name: str, graph: ExportGraph, preprocess: Preprocess) -> str:
    """config.pbtxt: protobuf text format of inference.ModelConfig."""
    options, config = graph.options, graph.model.config
    tokens = -1 if options.any_size else config.tokens
    size = [-1, -1] if options.any_size else [preprocess.height, preprocess.width]
    shapes = {
        "logits": [config.classes],
        "features": [config.feature_width],
        ODD_FEATURES: [2 * config.width],
        "attention": [config.depth, config.heads, tokens, tokens],
    }
    inputs = render_tensor("pixels", TYPES[options.pixels], [config.channels, *size])
    outputs = [
        render_tensor(output, "TYPE_FP32", shapes[output], LABELS if output == "logits" else None)
        for output in graph.outputs
    ]
    return "\n".join(
        [
            f"name: {json.dumps(name)}",
            'backend: "onnxruntime"',
            f"max_batch_size: {MAX_BATCH}",
            f"input [\n{inputs}\n]",
            "output [\n" + ",\n".join(outputs) + "\n]",
            f"dynamic_batching {{\n  max_queue_delay_microseconds: {MAX_DELAY}\n}}",
            "",
        ]
    )


def render_tensor(name: str, kind: str, shape: Sequence[int], labels: str | None = None) -> str:
    """One input or output without its batch dimension."""
    lines = [f'    name: "{name}"', f"    data_type: {kind}", f"    dims: {list(shape)}"]
    if labels is not None:
        lines.append(f'    label_filename: "{labels}"')
    return "\n".join(["  {", *lines, "  }"])
