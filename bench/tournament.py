"""`python -m bench.tournament IDEA...`: judges ideas for the default recipe in paired trainings.

An idea and the default train on the same images with the same seed, on one core each. Ideas that
change the cost of a step get as many steps as cost the same processor time.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from bench.ideas import IDEAS
from bench.pairs import Job, format_difference, paired_difference, run_jobs
from bench.process import report_errors
from bench.trial import Trial, expected_steps
from vitrail.data.open import open_data
from vitrail.errors import UserError

DEFAULT = "default"
COST_STEPS = 60  # of the training that measures the cost of a step


@dataclass(frozen=True, kw_only=True)
class TournamentSettings:
    ideas: Annotated[tuple[str, ...], tyro.conf.Positional]  # names of ideas in bench/ideas.py
    data: str = "cifar10"  # data set
    seeds: int = 5  # pairs of trainings
    minutes: float = 2  # of one quiet core, by which the number of steps is computed
    steps: int = 0  # instead of minutes
    recipe: float = 5  # minutes of two cores for which `train` chooses the recipe
    plain: bool = False  # the plain ViT Nano/4 instead of the model that `train` chooses
    jobs: int = 1  # trainings at the same time, one core each
    work: Path = Path("runs/tournament")  # folder of finished trainings, which are not repeated

    def __post_init__(self) -> None:
        if unknown := [name for name in self.ideas if name not in IDEAS or name == DEFAULT]:
            known = ", ".join(name for name in IDEAS if name != DEFAULT)
            raise UserError(f"unknown idea {unknown[0]!r}; choose from {known}")
        if self.seeds < 2 or not self.minutes > 0 or self.steps < 0:
            raise UserError(
                f"{self.seeds} seeds, {self.minutes:g} minutes, {self.steps} steps; "
                f"give at least 2 seeds, and minutes or steps above 0"
            )


def run(settings: TournamentSettings) -> str:
    """Trains what has not been trained yet; returns the table."""
    source = open_data(settings.data, progress=False)
    steps = settings.steps or expected_steps(
        source, settings.recipe, settings.minutes, settings.plain
    )
    first = Trial(
        data=settings.data,
        idea=DEFAULT,
        seed=0,
        steps=steps,
        recipe=settings.recipe,
        plain=settings.plain,
    )
    costs = measure_costs(first, settings)
    trials = [
        replace(first, idea=idea, seed=seed, steps=equal_work(steps, costs, idea))
        for seed in range(settings.seeds)  # all ideas of a seed first: an early end leaves pairs
        for idea in (DEFAULT, *settings.ideas)
    ]
    results = run_trials(trials, settings)
    lines = [
        f"| {settings.data}, {settings.seeds} pairs | steps | validation accuracy | "
        "difference in points | verdict |",
        "|---|---:|---:|---:|---|",
    ]
    scores = {
        idea: [r for r in results if r["idea"] == idea] for idea in (DEFAULT, *settings.ideas)
    }
    default = [result["accuracy"] for result in scores[DEFAULT]]
    for idea, found in scores.items():
        accuracies = [result["accuracy"] for result in found]
        difference = paired_difference(default, accuracies)
        cells = [idea, f"{found[0]['steps']}", f"{sum(accuracies) / len(accuracies):.1%}"]
        cells += ["", ""] if idea == DEFAULT else format_difference(*difference)
        lines.append(f"| {' | '.join(cells)} |")
    commits = list(dict.fromkeys(result["commit"] for result in results))
    return "\n".join([*lines, "", f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}"])


def measure_costs(first: Trial, settings: TournamentSettings) -> dict[str, float]:
    """Processor seconds of a step, of the default and of the ideas that change it."""
    changed = [idea for idea in settings.ideas if IDEAS[idea].cost]
    if not changed:
        return {}
    trials = [replace(first, idea=idea, steps=COST_STEPS) for idea in (DEFAULT, *changed)]
    found = run_trials(trials, replace(settings, jobs=1))
    return {result["idea"]: result["step_seconds"] for result in found}


def equal_work(steps: int, costs: dict[str, float], idea: str) -> int:
    """The steps of an idea that cost as much as `steps` of the default."""
    return max(1, round(steps * costs[DEFAULT] / costs[idea])) if idea in costs else steps


def run_trials(trials: list[Trial], settings: TournamentSettings) -> list[dict[str, Any]]:
    work = settings.work.absolute()
    jobs = [
        Job(
            path=work / trial.file,
            log=(work / trial.file).with_suffix(".log"),
            command=("bench.trial", json.dumps(asdict(trial)), str(work / trial.file)),
        )
        for trial in trials
    ]
    return run_jobs(jobs, settings.jobs)


if __name__ == "__main__":
    with report_errors():
        print(run(tyro.cli(TournamentSettings, prog="python -m bench.tournament")))
