"""Loading a B/16 from a file: seconds and peak memory, against timm's own load of the same file."""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

REPEATS = 5
LAYOUTS = ("timm", "huggingface", "torchvision", "google")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="B/16")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, "-m", "bench.load", "make", asked.model, folder], check=True
        )
        runs = [("vitrail", layout) for layout in LAYOUTS] + [("timm", "timm")]
        found: dict[tuple[str, str], list[dict[str, float]]] = {run: [] for run in runs}
        for _ in range(asked.repeats):
            for who, layout in runs:
                command = [sys.executable, "-W", "ignore", "-m", "bench.load", who, layout, folder]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                found[who, layout].append(json.loads(done.stdout.splitlines()[-1]))
    rows = [summary(who, layout, answers) for (who, layout), answers in found.items()]
    if asked.json:
        print(json.dumps(rows, indent=1))
        return
    titles = ("who", "layout", "file MB", "load s", "first answer s", "memory / file")
    print("{:<10}{:<14}{:>9}{:>9}{:>16}{:>15}".format(*titles))
    for row in rows:
        print(
            f"{row['who']:<10}{row['layout']:<14}{row['megabytes']:>9.0f}{row['seconds']:>9.3f}"
            f"{row['answered']:>16.3f}{row['memory']:>15.2f}"
        )


def summary(who: str, layout: str, answers: list[dict[str, float]]) -> dict[str, object]:
    middle = {key: median(one[key] for one in answers) for key in answers[0]}
    return {"who": who, "layout": layout, **middle}


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


def measure(who: str, layout: str, folder: Path) -> None:
    """One load in a fresh process; memory counts above the process after `import torch`."""
    import torch

    from bench.alone import resident

    path = folder / layout
    path = path if path.is_dir() else next(folder.glob(f"{layout}.*"))
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = resident("VmRSS")
    if who == "timm":
        from bench.peers import mend_torchvision

        mend_torchvision()
        import timm

        start = time.perf_counter()
        model = timm.create_model(f"local-dir:{path}", pretrained=True)
    else:
        from vitrail.zoo.load import load

        start = time.perf_counter()
        model = load(path).model
    loaded = time.perf_counter()
    peak = resident("VmHWM") - before
    with torch.inference_mode():
        model(torch.zeros(1, 3, 224, 224))
    file = path / "model.safetensors" if path.is_dir() else path
    size = file.stat().st_size / 2**20
    answer = {
        "seconds": loaded - start,
        "answered": time.perf_counter() - start,
        "megabytes": size,
        "memory": peak / size,
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] == "make":
        make(sys.argv[2], Path(sys.argv[3]))
    elif len(sys.argv) == 4 and sys.argv[1] in ("vitrail", "timm"):
        measure(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    else:
        main()
