"""One exported model in several engines, in float32 and int8, against the eager models.

The models have random weights, which compute as fast as trained ones. Exports are kept in the cache
folder, so that a second run only measures.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import Budget, OnProgress
from bench.process import measure_models
from vitrail import __version__
from vitrail.data.sources.places import cache_folder
from vitrail.zoo.presets import preset

CASES = [(name, batch) for name in ("Ti/16", "S/16", "B/16", "Mini/4") for batch in (1, 16)]
EAGER = ("vitrail", "timm")
FILES = {  # contender: the suffix of its file; int8 or not
    "onnxruntime": (".onnx", False),
    "openvino": (".xml", False),
    "onnxruntime int8": (".onnx", True),
    "openvino int8": (".xml", True),
}
IMAGES = 32  # random ones, on which exports are proved and calibrated
NOTE = (
    "`onnxruntime` and `openvino` run Vitrail's model, exported by `vitrail export`; the first two "
    "columns are eager PyTorch."
)


def run(budget: Budget, progress: OnProgress) -> dict[str, Any]:
    folder = export_folder()
    for name in dict.fromkeys(name for name, _ in CASES):
        for suffix, int8 in FILES.values():
            path = export_path(folder, name, suffix, int8)
            if not path.is_file():
                progress(0.0, f"exporting {name} to {path.name}")
                export_preset(name, path, int8)
    contenders = [*EAGER, *FILES]
    cases = measure_models("engines", contenders, CASES, budget, progress, str(folder))
    return {"cases": cases, "note": NOTE}


def prepare(contender: str, folder: str, name: str, batch: int) -> Callable[[], object]:
    if contender in EAGER:
        from bench.inference import prepare as prepare_eager

        return prepare_eager(contender, name, batch)
    from vitrail.exporting.engine import open_engine

    engine = open_engine(export_path(Path(folder), name, *FILES[contender]))
    config = preset(name)
    shape = (batch, config.channels, *config.size)
    images = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return lambda: engine.run(images)


def export_preset(name: str, path: Path, int8: bool) -> None:
    """Exports a preset with random weights; int8 is calibrated on random images."""
    import torch

    from vitrail.data.config import Preprocess
    from vitrail.exporting.export import export_model
    from vitrail.model.vit import ViT

    torch.manual_seed(0)
    config = preset(name)
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (IMAGES, config.channels, *config.size)).astype(np.uint8)
    export_model(
        ViT(config).eval(),
        path,
        classes=[str(number) for number in range(config.classes)],
        preprocess=Preprocess(size=config.size, channels=config.channels),
        to="onnx" if path.suffix == ".onnx" else "openvino",
        images=images,
        labels=np.zeros(IMAGES, np.int64),
        int8=int8,
        force=int8,  # random weights have no accuracy to lose
        overwrite=True,
    )


def export_folder() -> Path:
    """Below the cache; another version of the exporter has another folder."""
    from vitrail import exporting

    checksum = hashlib.sha256(__version__.encode())
    for file in sorted(Path(exporting.__path__[0]).glob("*.py")):
        checksum.update(file.read_bytes())
    return cache_folder() / "bench-engines" / checksum.hexdigest()[:16]


def export_path(folder: Path, name: str, suffix: str, int8: bool) -> Path:
    return folder / f"{name.replace('/', '-')}{'-int8' if int8 else ''}{suffix}"
