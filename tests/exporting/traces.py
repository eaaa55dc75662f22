"""Traces an exported graph once: tracing takes seconds, and many tests export equal models."""

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from vitrail.exporting import writers
from vitrail.exporting.graph import ExportGraph
from vitrail.exporting.onnx_file import build_onnx

TRACED: dict[tuple[Any, ...], Any] = {}


@pytest.fixture(scope="module", autouse=True)
def trace_once() -> Iterator[None]:
    """Exports of equal weights with the same options share one trace."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writers, "build_onnx", build_once)
        yield


def build_once(graph: ExportGraph, example: Tensor) -> Any:
    content = hashlib.sha256()
    for name, tensor in graph.state_dict().items():
        content.update(name.encode() + tensor.numpy(force=True).tobytes())
    settings = graph.model.config, graph.options, graph.preprocess
    key = (*settings, example.shape, content.digest())
    if key not in TRACED:
        TRACED[key] = build_onnx(graph, example)
    return TRACED[key]
