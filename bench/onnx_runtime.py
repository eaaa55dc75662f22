"""Vitrail's model exported to ONNX and run by onnxruntime, beside the eager PyTorch models."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path

from vitrail.zoo.presets import preset

NAME = "onnxruntime"


def export_onnx(name: str, folder: str) -> None:
    """Exports a preset with random weights and a dynamic batch size."""
    import torch

    from vitrail.model.vit import ViT

    torch.manual_seed(0)
    config = preset(name)
    images = torch.randn(2, config.channels, *config.size)
    with warnings.catch_warnings(action="ignore"):  # the exporter warns about torch itself
        program = torch.onnx.export(
            ViT(config).eval(),
            (images,),
            dynamo=True,
            dynamic_shapes={"x": {0: torch.export.Dim("batch", min=1)}},
            verbose=False,
        )
    assert program is not None
    onnx_path(name, folder).write_bytes(program.model_proto.SerializeToString())


def onnx_path(name: str, folder: str) -> Path:
    return Path(folder) / f"{name.replace('/', '-')}.onnx"


def prepare_session(name: str, batch: int, folder: str) -> Callable[[], object]:
    """Returns a task that runs one batch without importing torch, with torch's thread count."""
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    threads = int(os.environ.get("OMP_NUM_THREADS", 0)) or len(os.sched_getaffinity(0))
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(
        onnx_path(name, folder), options, providers=["CPUExecutionProvider"]
    )
    config = preset(name)
    shape = (batch, config.channels, *config.size)
    images = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    feed = {session.get_inputs()[0].name: images}
    return lambda: session.run(None, feed)
