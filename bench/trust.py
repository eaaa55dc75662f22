"""The numbers of docs/trust.md that no command of the product prints.

`python -m bench.trust coverage MODEL DATA`: coverage and error that were promised and reached.
`python -m bench.trust load`: what verification adds to the time of loading a B/16.
"""

import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TypeAlias

import numpy as np
import tyro
from numpy.typing import NDArray

Positional: TypeAlias = Annotated[str, tyro.conf.Positional]

PROMISES = ((0.8, 0.2), (0.9, 0.1), (0.95, 0.05), (0.99, 0.02))  # coverage, error of answers
DIVISIONS = 5
ROUNDS = 15  # of loading with and without verification, in turn


def coverage(model: Positional, data: Positional) -> None:
    """Prints promised and measured coverage, as the mean over random divisions of the images.

    Args:
        model: run folder or weight file
        data: the data it was trained on; its validation and test images are divided anew
    """
    import vitrail
    from vitrail.errors import UserError
    from vitrail.inference.evaluate import compute_split_outputs
    from vitrail.inference.labelled_data import open_with_classes

    classifier = vitrail.load(model, device="cpu")
    source, _ = open_with_classes(classifier.predictor, data, None)
    parts = [
        compute_split_outputs(classifier.predictor, source, split, 256, False, lambda count: None)
        for split in ("val", "test")
    ]
    logits = np.concatenate([part[0].numpy()[:, : len(classifier.classes)] for part in parts])
    labels = np.concatenate([part[1].numpy() for part in parts])
    validation = len(parts[0][1])
    print(f"{validation:,} of {len(labels):,} images calibrate, the others are judged")
    print("promised coverage, measured, mean size; promised error, measured, answered")
    for wanted, error in PROMISES:
        rows = []
        for seed in range(DIVISIONS):
            order = np.random.default_rng(seed).permutation(len(labels))
            chosen, others = order[:validation], order[validation:]
            try:
                rows.append(
                    judge(classifier.classes, logits, labels, chosen, others, wanted, error)
                )
            except UserError as refusal:
                print(f"division {seed}: {refusal}")
        if rows:
            found = np.mean(rows, axis=0)
            print(
                f"{wanted:.0%}  {found[0]:.1%}  {found[1]:.2f}   {error:.0%}  {found[2]:.1%}  "
                f"{found[3]:.0%}"
            )


def judge(
    classes: tuple[str, ...],
    logits: NDArray[Any],
    labels: NDArray[Any],
    chosen: NDArray[Any],
    others: NDArray[Any],
    coverage: float,
    abstain: float,
) -> tuple[float, float, float, float]:
    """Calibrates on the chosen images; coverage, mean size, error and answers of the others."""
    import torch

    from vitrail.evaluation.calibration import fit_calibration, measure_trust
    from vitrail.evaluation.metrics import fit_temperature

    temperature = fit_temperature(
        torch.from_numpy(logits[chosen]), torch.from_numpy(labels[chosen])
    )
    fitted, truth = logits[chosen], labels[chosen]
    calibration = fit_calibration(fitted, truth, temperature, "", None, fitted)
    trust = measure_trust(
        calibration, logits[others], labels[others], temperature, classes, coverage, abstain
    )
    assert trust.sets is not None and trust.abstention is not None
    return (
        trust.sets.coverage,
        trust.sets.mean_size,
        trust.abstention.error,
        trust.abstention.answered,
    )


def load() -> None:
    """Prints the time of loading a B/16 with and without checksums, in turn."""
    import json

    from safetensors.torch import save_file

    import vitrail
    from vitrail.zoo.file import METADATA_KEY, load_model, save_model

    with tempfile.TemporaryDirectory() as folder:
        signed, plain = Path(folder) / "signed.safetensors", Path(folder) / "plain.safetensors"
        classes = [str(number) for number in range(1000)]
        model = vitrail.ViT(vitrail.preset("B/16"))
        save_model(signed, model, {"classes": classes, "preprocess": {"size": 224}})
        document = dict(load_model(signed)[1].document)
        assert document.pop("checksums")
        save_file(model.state_dict(), plain, {METADATA_KEY: json.dumps(document)})
        seconds: dict[Path, list[float]] = {signed: [], plain: []}
        for _ in range(ROUNDS + 1):
            for path, times in seconds.items():
                start = time.perf_counter()
                vitrail.load(path, device="cpu")
                times.append(time.perf_counter() - start)
    for name, summary in (("median", median), ("fastest", min)):  # the first round warms up
        checked, unchecked = (summary(times[1:]) for times in seconds.values())
        print(
            f"{name}: with checksums {checked:.3f} s, without {unchecked:.3f} s: "
            f"{checked / unchecked:.2f} x"
        )


if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict({"coverage": coverage, "load": load})
