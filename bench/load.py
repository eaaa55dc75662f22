"""Loading a B/16 from a file, ours and by the library whose layout it is: seconds, peak memory."""

import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from bench.alone import ROOT, forget_peak, resident
from bench.measure import Budget, Case, Tick, Times, measure

MODEL = "B/16"
ROUNDS = 2  # processes of each contender in a repeat; they take turns
OWNERS = {  # of a layout: who loads it beside us
    "timm": ["timm"],
    "huggingface": ["transformers"],
    "torchvision": ["torchvision"],
    "google": [],
}

Answers = dict[str, dict[str, list[dict[str, float]]]]  # by layout and contender, all rounds


def run(budget: Budget, tick: Tick) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        tick(0.0, f"{MODEL} in every layout")
        ask("make", MODEL, folder)
        answers: Answers = {}
        cases = []
        for layout in OWNERS:
            words = f"{MODEL}, {layout} layout"
            cases += [
                Case(
                    label=f"{words}, loaded",
                    unit="s",
                    measure=partial(ask_all, layout, folder, answers),
                ),
                Case(
                    label=f"{words}, first answer",
                    unit="s",
                    measure=partial(told, layout, "answered", answers),
                ),
                Case(
                    label=f"{words}, peak over file",
                    unit="x",
                    measure=partial(told, layout, "memory", answers),
                ),
            ]
        return {"cases": measure(cases, budget, tick)}


def ask_all(layout: str, folder: str, answers: Answers, budget: Budget) -> Times:
    """Seconds until each contender has loaded; all that they told goes into `answers`."""
    contenders = ["vitrail", *OWNERS[layout]]
    found: dict[str, list[dict[str, float]]] = {who: [] for who in contenders}
    for _ in range(min(ROUNDS, budget.rounds)):
        for who in contenders:
            found[who].append(ask(who, layout, folder))
    answers[layout] = found
    return told(layout, "seconds", answers, budget)


def ask(*words: str) -> dict[str, float]:
    """What a process of this bench answers in its last line."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "bench.load", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"bench.load {' '.join(words)} failed:\n{done.stderr}")
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def told(layout: str, what: str, answers: Answers, budget: Budget) -> Times:
    return {who: [one[what] for one in all_of] for who, all_of in answers[layout].items()}


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
    loaded = time.perf_counter() - start
    with torch.inference_mode():
        model(torch.zeros(1, 3, 224, 224))
    answered = time.perf_counter() - start
    peak = resident("VmHWM") - before  # by now also of files that are read when they are needed
    size = (path / "model.safetensors" if path.is_dir() else path).stat().st_size / 2**20
    print(json.dumps({"seconds": loaded, "answered": answered, "memory": peak / size}))


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(sys.argv[2], Path(sys.argv[3]))
        print("{}")
    else:
        measure_one(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
