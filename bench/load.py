"""Time and peak memory of loading a B/16 from a file: Vitrail and the library of its layout."""

import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from bench.measure import Budget, Case, OnProgress, Times, measure
from bench.process import ROOT, reset_peak_memory, resident_memory

MODEL = "B/16"
ROUNDS = 2  # processes of each contender per repeat, interleaved
OWNERS = {  # the libraries that load each layout, besides Vitrail
    "timm": ["timm"],
    "huggingface": ["transformers"],
    "torchvision": ["torchvision"],
    "google": [],
}

Measurements = dict[str, dict[str, list[dict[str, float]]]]  # by layout, contender and round


def run(budget: Budget, progress: OnProgress) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        progress(0.0, f"writing {MODEL} in every layout")
        run_process("write", MODEL, folder)
        measurements: Measurements = {}
        cases = []
        for layout in OWNERS:
            label = f"{MODEL}, {layout} layout"
            cases += [
                Case(
                    label=f"{label}, load",
                    unit="s",
                    measure=partial(measure_layout, layout, folder, measurements),
                ),
                Case(
                    label=f"{label}, load and first prediction",
                    unit="s",
                    measure=partial(select_metric, layout, "predicted", measurements),
                ),
                Case(
                    label=f"{label}, peak memory / file size",
                    unit="x",
                    measure=partial(select_metric, layout, "memory", measurements),
                ),
            ]
        return {"cases": measure(cases, budget, progress)}


def measure_layout(layout: str, folder: str, measurements: Measurements, budget: Budget) -> Times:
    """Seconds that each contender takes to load; all measurements go into `measurements`."""
    contenders = ["vitrail", *OWNERS[layout]]
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for _ in range(min(ROUNDS, budget.rounds)):
        for name in contenders:
            rounds[name].append(run_process(name, layout, folder))
    measurements[layout] = rounds
    return select_metric(layout, "seconds", measurements, budget)


def run_process(*arguments: str) -> dict[str, float]:
    """The JSON that a process of this benchmark prints in its last line."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "bench.load", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"bench.load {' '.join(arguments)} failed:\n{done.stderr}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def select_metric(layout: str, metric: str, measurements: Measurements, budget: Budget) -> Times:
    return {name: [one[metric] for one in rounds] for name, rounds in measurements[layout].items()}


def write_layouts(model: str, folder: Path) -> None:
    """Writes the same random weights in every layout."""
    import numpy as np
    import torch

    from tests.zoo.arrays import google_arrays
    from vitrail.model.vit import ViT
    from vitrail.zoo.convert import convert
    from vitrail.zoo.file import save_model
    from vitrail.zoo.presets import preset

    torch.manual_seed(0)
    vit = ViT(preset(model)).eval()
    save_model(folder / "own.safetensors", vit, {})
    for to in ("timm", "huggingface"):
        convert(folder / "own.safetensors", to, folder / to)
    convert(folder / "own.safetensors", "torchvision", folder / "torchvision.pth")
    np.savez(folder / "google.npz", **google_arrays(vit, "original"))


def load_with(library: str, path: Path) -> tuple[float, Any]:
    """The time when loading started, after all imports, and the model."""
    if library == "vitrail":
        from vitrail.zoo.load import load_weights

        return time.perf_counter(), load_weights(path).model
    from bench.peers import patch_torchvision

    patch_torchvision()
    if library == "timm":
        import timm

        return time.perf_counter(), timm.create_model(f"local-dir:{path}", pretrained=True)
    if library == "transformers":
        from transformers import ViTForImageClassification

        return time.perf_counter(), ViTForImageClassification.from_pretrained(path)
    import torch
    from torchvision.models import vit_b_16

    start, model = time.perf_counter(), vit_b_16()
    model.load_state_dict(torch.load(path, weights_only=True))
    return start, model


def measure_load(library: str, layout: str, folder: Path) -> None:
    """One load in a fresh process; memory counts from after `import torch`."""
    import torch

    path = folder / layout
    path = path if path.is_dir() else next(folder.glob(f"{layout}.*"))
    before = reset_peak_memory()
    start, model = load_with(library, path)
    loaded = time.perf_counter() - start
    with torch.inference_mode():
        model(torch.zeros(1, 3, 224, 224))
    predicted = time.perf_counter() - start
    peak = (
        resident_memory("VmHWM") - before
    )  # after a forward, which also reads memory-mapped files
    size = (path / "model.safetensors" if path.is_dir() else path).stat().st_size / 2**20
    print(json.dumps({"seconds": loaded, "predicted": predicted, "memory": peak / size}))


if __name__ == "__main__":
    if sys.argv[1] == "write":
        write_layouts(sys.argv[2], Path(sys.argv[3]))
        print("{}")
    else:
        measure_load(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
