"""Our model outside torch: exported to ONNX, answered by onnxruntime. No eager peer, a runtime."""

import os
from collections.abc import Callable
from functools import cache
from typing import Any

NAME = "onnxruntime"


@cache
def exported(name: str) -> bytes:
    """The ONNX file of the model that papers call `name`, for any number of images."""
    import torch

    from vitrail.model.vit import ViT
    from vitrail.zoo.presets import preset

    torch.manual_seed(0)
    config = preset(name)
    images = torch.randn(2, config.channels, *config.size)
    program = torch.onnx.export(
        ViT(config).eval(),
        (images,),
        dynamo=True,
        dynamic_shapes={"x": {0: torch.export.Dim("batch", min=1)}},
        verbose=False,
    )
    assert program is not None
    file: bytes = program.model_proto.SerializeToString()
    return file


def session(file: bytes | str, threads: int) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def prepare(name: str, batch: int) -> Callable[[], object]:
    """A call that answers a batch, with as many threads as torch has."""
    import torch

    from vitrail.zoo.presets import preset

    return call(exported(name), batch, preset(name), torch.get_num_threads())


def first_answer(file: str, name: str, batch: int) -> Callable[[], object]:
    """The same from a file, in a process that never imports torch."""
    from vitrail.zoo.presets import preset

    threads = int(os.environ.get("OMP_NUM_THREADS", 0)) or len(os.sched_getaffinity(0))
    return call(file, batch, preset(name), threads)


def call(file: bytes | str, batch: int, config: Any, threads: int) -> Callable[[], object]:
    import numpy as np

    ready = session(file, threads)
    shape = (batch, config.channels, *config.size)
    images = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    feed = {ready.get_inputs()[0].name: images}
    return lambda: ready.run(None, feed)
