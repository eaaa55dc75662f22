"""`vitrail search`: searches hyper-parameters."""

import json as as_json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

import vitrail
from vitrail.cli.flags import (
    NO_VIT,
    Architecture,
    Data,
    Device,
    OptionalFloat,
    OptionalInt,
    OptionalPath,
    RecipeFile,
    Switch,
    Vit,
    Weights,
    given_sections,
    unset,
)
from vitrail.cli.train import (
    NO_DATA,
    NO_PREPROCESS,
    NO_TRAIN,
    DataSettings,
    PreprocessSettings,
    TrainSettings,
    describe_accuracies,
)

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

SPACE_HELP = (
    "TOML file with the search space: a range or a list of choices for any setting below, such as "
    '"train.lr" = {low = 1e-4, high = 1e-2, log = true}, and for size (Pico, Nano, ...), '
    "augment (none, light, ...) and strength (default: learning rate, weight decay, drop path, "
    "augmentation, size and patch)"
)


def search(
    source: Data,
    *,
    space: Annotated[Path | None, unset(metavar="FILE", help=SPACE_HELP)] = None,
    grid: Switch = False,
    trials: OptionalInt = None,
    minutes: OptionalFloat = None,
    jobs: Annotated[int, tyro.conf.arg(metavar="INT")] = 1,
    model: Architecture = None,
    weights: Weights = "auto",
    epochs: OptionalInt = None,
    recipe: RecipeFile = None,
    seed: OptionalInt = None,
    out: OptionalPath = None,
    storage: Annotated[str | None, unset(metavar="URL")] = None,
    device: Device = "auto",
    json: Switch = False,
    vit: Vit = NO_VIT,
    train: TrainSettings = NO_TRAIN,
    data: DataSettings = NO_DATA,
    preprocess: PreprocessSettings = NO_PREPROCESS,
) -> None:
    """Search hyper-parameters, by Bayesian optimisation or on a grid.

    Trials start from the recipe that `vitrail train` would choose, and are compared on the
    validation split; the best one is trained again and tested once. Resumes a search in --out.

    Args:
        grid: try every combination instead of Bayesian optimisation
        trials: number of trials (default: 20, or the whole grid)
        minutes: total time for all trials and the final training
        jobs: trials that run in parallel; they share the CPU threads
        epochs: epochs per trial, instead of --minutes
        seed: random seed of the search and of every trial (default: 0)
        out: folder of the search (default: runs/search-DATA)
        storage: postgresql://, mysql://, sqlite:///FILE or a journal file on a shared disk, through
            which machines share the search that has the name of --out
        json: print one JSON document
    """
    from vitrail.cli.main import STARTED

    with TrialProgress() as progress:
        result = vitrail.search(
            source,
            space=space,
            grid=grid,
            trials=trials,
            minutes=minutes,
            jobs=jobs,
            model=model,
            weights=weights,
            epochs=epochs,
            recipe=recipe,
            settings=given_sections(vit=vit, train=train, data=data, preprocess=preprocess),
            seed=seed,
            out=out,
            storage=storage,
            device=device,
            started=STARTED,
            on_trial=progress.update,
        )
    if json:
        print(as_json.dumps(result.to_dict(), indent=1))
    else:
        print_search(result.to_dict())


class TrialProgress:
    """The best trial so far: a progress bar on a terminal, a line per trial elsewhere."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self.bar = Progress(
            TextColumn("trials"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            console=self.console,
        )
        self.task = self.bar.add_task("")
        self.reported: set[int] = set()

    def __enter__(self) -> "TrialProgress":
        if self.console.is_terminal:
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def update(self, study: "Study", trials: int) -> None:
        """Shows the state of the search; `trials` is their total number."""
        from vitrail.tuning.study import best_trial, finished_trials

        done, best = finished_trials(study), best_trial(study)
        text = f"best {best.value:.1%} (trial {best.number})" if best else "no finished trial"
        self.bar.update(self.task, total=trials, completed=len(done), description=text)
        if self.console.is_terminal:
            return
        for trial in done:
            if trial.number not in self.reported:
                self.reported.add(trial.number)
                self.console.print(f"{summarise_trial(trial)}; {text}", markup=False)


def summarise_trial(trial: "FrozenTrial") -> str:
    from vitrail.tuning.page import STATES, last_accuracy

    accuracy, state = last_accuracy(trial), STATES[trial.state.name]
    value = "" if accuracy is None else f" at {accuracy:.1%}"
    return f"trial {trial.number} {state}{value}, {trial.user_attrs.get('seconds', 0):.0f} s"


def print_search(document: dict[str, Any]) -> None:
    """The document that `--json` prints, as text."""
    best = document["best"]
    print(
        f"{document['trials']} trials ({document['pruned']} pruned, {document['failed']} failed); "
        f"best: trial {best['trial']}, validation accuracy {best['value']:.1%}"
    )
    for name, value in best["settings"].items():
        print(f"  {name} = {value:.4g}" if isinstance(value, float) else f"  {name} = {value}")
    for score in describe_accuracies(document):
        print(f"trained again: {score}")
    print(f"recipe {document['recipe']}; run {document['run']}; page {document['page']}")
