"""Loading a B/16 from a file, ours and by the library whose layout it is: seconds, peak memory."""

import json
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from bench.alone import ask, forget_peak, resident
from bench.measure import Budget, Case, Tick, Times, measure

MODEL = "B/16"
ROUNDS = 3  # processes of each contender in a repeat; they take turns
OWNERS = {  # of a layout: who loads it beside us
    "timm": ["timm"],
    "huggingface": ["transformers"],
    "torchvision": ["torchvision"],
    "google": [],
}


def run(budget: Budget, tick: Tick) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        tick(0.0, f"{MODEL} in every layout")
        ask("bench.load", "make", MODEL, folder)
        answers: dict[str, dict[str, list[float]]] = {}
        cases = []
        for layout in OWNERS:
            words = f"{MODEL}, {layout} layout"
            times = partial(seconds, layout, folder, answers)
            cases.append(Case(label=f"{words}, load", unit="s", measure=times))
            peaks = partial(answers_of, layout, answers)
            cases.append(Case(label=f"{words}, peak over file", unit="x", measure=peaks))
        return {"cases": measure(cases, budget, tick)}


def seconds(
    layout: str, folder: str, answers: dict[str, dict[str, list[float]]], budget: Budget
) -> Times:
    """Seconds of each contender; the memory they took on the way goes into `answers`."""
    contenders = ["vitrail", *OWNERS[layout]]
    found: dict[str, list[float]] = {who: [] for who in contenders}
    memory: dict[str, list[float]] = {who: [] for who in contenders}
    for _ in range(min(ROUNDS, budget.rounds)):
        for who in contenders:
            answer = ask("bench.load", who, layout, folder)
            found[who].append(answer["seconds"])
            memory[who].append(answer["memory"])
    answers[layout] = memory
    return found


def answers_of(layout: str, answers: dict[str, dict[str, list[float]]], budget: Budget) -> Times:
    return answers[layout]


def make(model: str, folder: Path) -> None:
    """The same random weights in every layout."""
    import numpy as np
    import torch

    from tests.zoo.arrays import google_arrays
    from vitrail.model.vit import ViT
    from vitrail.zoo.convert import convert
    from vitrail.zoo.file import save_model
    from vitrail.zoo.presets import preset

    torch.manual_seed(0)
    made = ViT(preset(model)).eval()
    save_model(folder / "own.safetensors", made, {})
    for to in ("timm", "huggingface"):
        convert(folder / "own.safetensors", to, folder / to)
    convert(folder / "own.safetensors", "torchvision", folder / "torchvision.pth")
    np.savez(folder / "google.npz", **google_arrays(made, "original"))


def load(who: str, path: Path) -> tuple[float, Any]:
    """When the loading began, imports not counted, and the model."""
    if who == "vitrail":
        from vitrail.zoo.load import load as ours

        return time.perf_counter(), ours(path).model
    from bench.peers import mend_torchvision

    mend_torchvision()
    if who == "timm":
        import timm

        return time.perf_counter(), timm.create_model(f"local-dir:{path}", pretrained=True)
    if who == "transformers":
        from transformers import ViTForImageClassification

        return time.perf_counter(), ViTForImageClassification.from_pretrained(path)
    import torch
    from torchvision.models import vit_b_16

    start, model = time.perf_counter(), vit_b_16()
    model.load_state_dict(torch.load(path, weights_only=True))
    return start, model


def measure_one(who: str, layout: str, folder: Path) -> None:
    """One load in a fresh process; memory counts above the process after `import torch`."""
    import torch

    path = folder / layout
    path = path if path.is_dir() else next(folder.glob(f"{layout}.*"))
    before = forget_peak()
    start, model = load(who, path)
    loaded = time.perf_counter()
    peak = resident("VmHWM") - before
    with torch.inference_mode():
        model(torch.zeros(1, 3, 224, 224))
    size = (path / "model.safetensors" if path.is_dir() else path).stat().st_size / 2**20
    print(json.dumps({"seconds": loaded - start, "memory": peak / size}))


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(sys.argv[2], Path(sys.argv[3]))
        print("{}")
    else:
        measure_one(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
