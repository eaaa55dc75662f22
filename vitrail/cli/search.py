"""`vitrail search`: the settings that suit a data set, found by trying."""

import json as as_json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from vitrail.cli.flags import Vit, sections
from vitrail.cli.train import Data, Train, View, accuracies

if TYPE_CHECKING:
    from optuna import Study


def search(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")],
    *,
    space: Path | None = None,
    grid: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    trials: int | None = None,
    minutes: float | None = None,
    jobs: int = 1,
    model: str | None = None,
    weights: Annotated[str | None, tyro.conf.arg(name="from")] = None,
    epochs: int | None = None,
    recipe: Path | None = None,
    seed: int | None = None,
    out: Path | None = None,
    device: str = "auto",
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    vit: Vit = Vit(),  # noqa: B008
    train: Train = Train(),  # noqa: B008
    data: Data = Data(),  # noqa: B008
    view: View = View(),  # noqa: B008
) -> None:
    """Search for better settings; stopped and started again, it goes on.

    Starts from the recipe that `vitrail train` would choose, with the changes asked for below.
    Trials are judged on validation images; the winner is trained once more and tested once.

    Args:
        source: folder of class folders, table of paths and labels, tar shards, or a built-in name
        space: TOML file: "train.lr" = {low = 1e-4, high = 1e-2, log = true}, or lists of choices,
            of any setting below, and of size (Pico, Nano ...), augment (none, light ...), strength;
            by default learning rate, weight decay, drop path, augmentation, size and patch
        grid: every combination instead of a guided search; of a range so many `points`, or 3
        trials: runs in all, by default 20, in a grid all of it
        minutes: time for everything, shared out among the trials and the winner
        jobs: processes that work at once; they share the threads
        model: architecture by name, such as Nano/4 or S/16 (see `vitrail models`)
        weights: run, weight file or folder to fine-tune from
        epochs: passes over the training images in each trial, instead of minutes
        recipe: TOML file with any of the settings below
        seed: of the search, and of each run's weights, order, augmentation and dropout
        out: folder of the search, by default runs/search-DATA; one that is there is gone on with
        device: cpu, cuda, cuda:1 ...; auto takes a GPU if there is one
        json: print one JSON document
        vit: the model
        train: the training
        data: reading and augmentation
        view: preprocessing
    """
    from vitrail.cli.main import STARTED
    from vitrail.search.search import search

    with Bar() as bar:
        found = search(
            source,
            out=out,
            space=space,
            grid=grid,
            trials=trials,
            minutes=minutes,
            jobs=jobs,
            recipe=recipe,
            changes=sections(vit=vit, train=train, data=data, view=view),
            began=STARTED,
            watch=bar.watch,
            model=model,
            weights=weights,
            epochs=epochs,
            seed=seed,
            device=device,
        )
    if json:
        print(as_json.dumps(found.facts, indent=1))
    else:
        show(found.facts)


class Bar:
    """The best so far: a bar on a terminal, a line for each trial elsewhere."""

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
        self.told: set[int] = set()

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def watch(self, most: int) -> Callable[["Study"], None]:
        task = self.bar.add_task("", total=most)
        if self.console.is_terminal:
            self.bar.start()

        def show(study: "Study") -> None:
            from vitrail.search.study import finished, winner

            done, best = finished(study), winner(study)
            words = f"best {best.value:.1%} (trial {best.number})" if best else "none finished yet"
            self.bar.update(task, completed=len(done), description=words)
            if not self.console.is_terminal:
                for one in done:
                    if one.number not in self.told:
                        self.told.add(one.number)
                        self.console.print(f"{line(one)}; {words}", markup=False)

        return show


def line(trial: Any) -> str:
    from vitrail.search.page import STATES, reach

    reached, state = reach(trial), STATES[trial.state.name]
    value = "" if reached is None else f" at {reached:.1%}"
    return f"trial {trial.number} {state}{value}, {trial.user_attrs.get('seconds', 0):.0f} s"


def show(facts: dict[str, Any]) -> None:
    best = facts["best"]
    print(
        f"{facts['trials']} trials ({facts['pruned']} pruned, {facts['failed']} failed); "
        f"trial {best['trial']} is the best, validation accuracy {best['value']:.1%}"
    )
    for name, value in best["settings"].items():
        print(f"  {name} = {value:.4g}" if isinstance(value, float) else f"  {name} = {value}")
    for score in accuracies(facts):
        print(f"trained once more: {score}")
    print(f"recipe {facts['recipe']}; run {facts['run']}; page {facts['page']}")
