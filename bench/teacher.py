"""`python -m bench.teacher`: does a ConvNet as teacher pay off within the same minutes?

With a teacher, a ResNet-9 trains first, and `vitrail train --teacher` in the minutes that are left;
without, `vitrail train` gets all of them. One core for each training.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro

import vitrail
from bench.pairs import Job, format_difference, paired_difference, run_jobs
from bench.process import report_errors
from bench.recipes import CONVNET, RECIPES
from bench.report import describe_code
from bench.train_peer import PeerJob, train_peer
from vitrail.display.text import format_count
from vitrail.errors import UserError
from vitrail.files import write_file

SIDES = ("without", "with")


@dataclass(frozen=True, kw_only=True)
class TeacherSettings:
    data: str = "cifar10"  # data set
    minutes: float = 30  # of each side in all
    first: float = 5  # minutes in which the teacher trains
    seeds: int = 3  # pairs of trainings
    jobs: int = 1  # trainings at the same time, one core each
    work: Path = Path("runs/teacher")  # folder of finished trainings, which are not repeated

    def __post_init__(self) -> None:
        if self.seeds < 1 or not 0 < self.first < self.minutes:
            raise UserError(
                f"{self.seeds} seeds, the first {self.first:g} of {self.minutes:g} minutes; give "
                f"at least 1 seed, and fewer `first` than `minutes`"
            )


@dataclass(frozen=True, kw_only=True)
class Side:
    data: str
    minutes: float
    first: float  # minutes of the teacher's training; 0: no teacher
    seed: int

    @property
    def name(self) -> str:
        taught = f"_{self.first:g}-of-teacher" if self.first else ""
        return f"{Path(self.data).name}_{self.minutes:g}-min{taught}_seed-{self.seed}"


def train_side(side: Side, folder: Path) -> dict[str, Any]:
    """The test accuracies of the teacher, if there is one, and of `vitrail train`."""
    start, code, teacher, scores = time.monotonic(), describe_code(), None, {}
    if side.first:
        lr = RECIPES[CONVNET].lr
        job = PeerJob(data=side.data, peer=CONVNET, minutes=side.first, lr=lr, seed=side.seed)
        model, preprocess, scores = train_peer(job)
        classes = vitrail.open_data(side.data, progress=False).classes
        teacher = vitrail.Teacher(model=model, preprocess=preprocess, classes=classes)
    left = side.minutes - (time.monotonic() - start) / 60
    run = vitrail.train(side.data, minutes=left, teacher=teacher, seed=side.seed, out=folder)
    return {
        "teacher": scores.get("test"),
        "accuracy": run.metrics["test"]["accuracy"],
        "steps": run.metrics["steps"],
        "minutes": (time.monotonic() - start) / 60,
        **code,
    }


def run(settings: TeacherSettings) -> str:
    """Trains what has not been trained yet; returns the table of test accuracies."""
    work = settings.work.absolute()
    sides = [
        Side(data=settings.data, minutes=settings.minutes, first=first, seed=seed)
        for seed in range(settings.seeds)
        for first in (0, settings.first)
    ]
    jobs = [
        Job(
            path=work / f"{side.name}.json",
            log=work / f"{side.name}.log",
            command=("bench.teacher", json.dumps(asdict(side)), str(work / side.name)),
        )
        for side in sides
    ]
    results, pairs = run_jobs(jobs, settings.jobs), format_count(settings.seeds, "pair")
    scores = {
        name: [result["accuracy"] for result in results[number :: len(SIDES)]]
        for number, name in enumerate(SIDES)
    }
    cells = [f"{sum(one) / len(one):.1%}" for one in scores.values()]
    teachers = [result["teacher"] for result in results if result["teacher"] is not None]
    cells.append(f"{sum(teachers) / len(teachers):.1%}")
    cells += format_difference(*paired_difference(scores["without"], scores["with"]))
    return "\n".join(
        [
            f"| {settings.data}, {settings.minutes:g} minutes, {pairs} | without "
            "teacher | with teacher | the teacher | difference in points | verdict |",
            "|---|---:|---:|---:|---:|---|",
            f"| test accuracy | {' | '.join(cells)} |",
        ]
    )


def main(side: str, folder: str) -> None:
    """The process of one side: takes it as JSON, and writes the result beside its run."""
    result = train_side(Side(**json.loads(side)), Path(folder))
    write_file(Path(f"{folder}.json"), json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    with report_errors():
        if len(sys.argv) > 1 and sys.argv[1].startswith("{"):
            main(*sys.argv[1:])
        else:
            print(run(tyro.cli(TeacherSettings, prog="python -m bench.teacher")))
