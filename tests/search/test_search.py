"""A search on digits: trials are runs, test images wait, kills lose nothing."""

import json
import signal
import subprocess
import sys
import time

import optuna
import pytest

from vitrail.data.loader import Loader
from vitrail.errors import UserError
from vitrail.run import run
from vitrail.search import page
from vitrail.search import search as searching
from vitrail.search import study as shared
from vitrail.training.loop import Diverged

SMALL = {
    "vit": {"width": 16, "depth": 1, "heads": 1},
    "train": {"steps": 44, "batch": 64, "ema": 0.0},
    "data": {"workers": 0},
}
MAKE = page.make
SPACE = '"train.lr" = {low = 1e-4, high = 1e-1, log = true}\naugment = ["none", "gentle digits"]\n'


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No timing before a run, no pictures after it."""
    monkeypatch.setattr("vitrail.run.plan.TRIAL", 0.0)
    monkeypatch.setattr(run, "told", lambda done, *rest: done)
    monkeypatch.setattr(page, "make", lambda folder, *rest: folder / page.PAGE)


@pytest.fixture
def look(tmp_path):
    """Searches on digits: `look(trials=3)`."""
    (tmp_path / "space.toml").write_text(SPACE)

    def go(**settings):
        wanted = {"trials": 3, "space": tmp_path / "space.toml", "changes": SMALL}
        wanted |= {"out": tmp_path / "out", "quiet": True, **settings}
        return searching.search("digits", **wanted)

    return go


@pytest.mark.slow
def test_trials_are_runs_and_the_winner_is_tested_once(look, tmp_path, monkeypatch):
    looks, evaluation = [], Loader.evaluation

    def noting(self, split, *rest, **more):
        looks.append(split)
        return evaluation(self, split, *rest, **more)

    monkeypatch.setattr(Loader, "evaluation", noting)
    facts = look().facts
    folders = sorted((tmp_path / "out" / "trials").iterdir())
    assert [folder.name for folder in folders] == ["000", "001", "002"]
    scores = [json.loads((folder / "metrics.json").read_text()) for folder in folders]
    assert all(score["test"] is None for score in scores)
    assert looks.count("test") == 1
    assert facts["trials"] == 3 and facts["test"]["accuracy"] > 0.1
    assert facts["best"]["value"] == max(score["val"]["accuracy"] for score in scores)
    assert {"train.lr", "augment"} == set(facts["best"]["settings"])


def test_the_best_recipe_repeats_the_winning_trial(look, tmp_path):
    facts = look().facts
    recipe = tmp_path / "out" / "best.toml"
    again = run.train(recipe=recipe, out=tmp_path / "again", quiet=True, report=False)
    assert again.metrics["val"]["accuracy"] == facts["best"]["value"]


def test_a_finished_search_trains_nothing_again(look, monkeypatch):
    first = look().facts
    monkeypatch.setattr(run, "train", None)
    assert look().facts == first


def test_more_trials_can_be_asked_for_later(look):
    first = look(trials=2).facts
    facts = look(trials=3).facts
    assert facts["trials"] == 3
    assert facts["tests"] == (1 if facts["best"]["trial"] == first["best"]["trial"] else 2)


@pytest.mark.slow
def test_the_page_tells_how_many_trials_were_looked_at(look, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "make", MAKE)
    look()
    text = (tmp_path / "out" / "search.html").read_text()
    assert "A search of 3 trials" in text and "tested once" in text
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org", "")
    names = {file.stem for file in (tmp_path / "out" / "figures").glob("*.png")}
    assert {"history", "time", "slices"} <= names


@pytest.mark.slow
def test_a_grid_tries_every_point(look, tmp_path):
    (tmp_path / "space.toml").write_text('"train.lr" = [1e-3, 1e-2]\naugment = ["none", "digits"]')
    facts = look(grid=True, trials=None).facts
    assert facts["trials"] == 4
    study = shared.open_study(tmp_path / "out", grid=True)
    tried = {tuple(one.params.values()) for one in study.trials}
    assert len(tried) == 4


class Dead(BaseException):
    """What a kill looks like from inside."""


@pytest.mark.slow
def test_a_trial_that_a_dead_process_left_is_gone_on_with(look, tmp_path, monkeypatch):
    train = run.train

    def dying(*rest, **settings):
        def on_epoch(line):
            settings["on_epoch_"](line)
            raise Dead

        if str(settings["out"]).endswith("001"):
            settings["on_epoch_"] = settings.pop("on_epoch")
            inner = {key: value for key, value in settings.items() if key != "on_epoch_"}
            return train(*rest, on_epoch=on_epoch, **inner)
        return train(*rest, **settings)

    monkeypatch.setattr(run, "train", dying)
    with pytest.raises(Dead):
        look()
    monkeypatch.setattr(run, "train", train)
    facts = look().facts
    study = shared.open_study(tmp_path / "out")
    assert facts["trials"] == len(study.trials) == 3
    assert all(one.state == optuna.trial.TrialState.COMPLETE for one in study.trials)


def test_a_trial_worse_than_most_is_ended(tmp_path):
    study = shared.open_study(tmp_path)
    for value in (0.7, 0.8, 0.9, 0.9, 0.9):
        trial = study.ask()
        shared.reporting(trial)({"val_accuracy": value, "step": 50, "steps": 100})
        study.tell(trial, value)
    good, bad = study.ask(), study.ask()
    shared.reporting(good)({"val_accuracy": 0.95, "step": 50, "steps": 100})
    with pytest.raises(optuna.TrialPruned):
        shared.reporting(bad)({"val_accuracy": 0.5, "step": 50, "steps": 100})


def test_of_a_pruned_trial_the_run_stays(look, tmp_path, monkeypatch):
    monkeypatch.setattr(optuna.Trial, "should_prune", lambda trial: trial.number == 1)
    facts = look().facts
    assert facts["trials"] == 3 and facts["pruned"] == 1
    folder = tmp_path / "out" / "trials" / "001"
    assert (folder / "journal.jsonl").is_file() and not (folder / "metrics.json").exists()


def test_a_run_that_diverges_is_no_failure_of_the_search(look, tmp_path, monkeypatch):
    def diverging(trial, *rest):
        if trial.number == 1:
            raise Diverged("the learning rate is likely too high")
        return train(trial, *rest)

    train = searching.train
    monkeypatch.setattr(searching, "train", diverging)
    facts = look().facts
    assert (facts["trials"], facts["pruned"], facts["failed"]) == (3, 1, 0)


def test_a_setting_that_cannot_be_is_a_failed_trial_and_the_search_goes_on(
    look, tmp_path, monkeypatch
):
    monkeypatch.setattr(page, "make", MAKE)
    (tmp_path / "space.toml").write_text('"vit.heads" = [1, 3]')
    facts = look(grid=True, trials=None).facts
    assert facts["trials"] == 2 and facts["failed"] == 1
    assert "heads" in (tmp_path / "out" / "search.html").read_text()


def test_a_search_whose_first_trial_cannot_be_says_why(look, tmp_path):
    (tmp_path / "space.toml").write_text('"vit.heads" = [3, 5]')
    with pytest.raises(UserError, match=r"the search found nothing: .*heads"):
        look(grid=True, trials=None)


def test_another_space_in_the_same_folder_is_refused(look, tmp_path):
    look(trials=1)
    (tmp_path / "space.toml").write_text('"train.lr" = [1e-3, 1e-2]')
    with pytest.raises(UserError, match="holds a search with other space"):
        look(trials=1)


def test_a_damaged_study_is_told_and_kept(look, tmp_path):
    look(trials=1)
    path = tmp_path / "out" / "study.journal"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = b"\x00garbage\n"
    path.write_bytes(b"".join(lines))
    with pytest.raises(UserError, match=r"study\.journal is damaged \(line 3\)"):
        look(trials=1)
    assert path.read_bytes() == b"".join(lines)


def test_a_last_line_that_a_kill_tore_is_dropped(look, tmp_path):
    look(trials=1)
    path = tmp_path / "out" / "study.journal"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"op_code": 4, "worker')
    assert look(trials=2).facts["trials"] == 2
    assert path.read_bytes().startswith(whole)


def test_a_damaged_plan_is_told(look, tmp_path):
    look(trials=1)
    (tmp_path / "out" / "search.json").write_text('{"data": ')
    with pytest.raises(UserError, match=r"search\.json is damaged"):
        look(trials=1)


@pytest.mark.slow
def test_two_processes_share_one_study(look, tmp_path):
    facts = look(trials=6, jobs=2).facts
    study = shared.open_study(tmp_path / "out")
    assert facts["trials"] == len(study.trials) == 6
    assert len({one.user_attrs["owner"] for one in study.trials}) == 2
    assert len({one.params["train.lr"] for one in study.trials}) == 6


@pytest.mark.slow
def test_killed_and_started_again_it_goes_on(look, tmp_path):
    code = (
        "import sys; from pathlib import Path; from vitrail.search.search import search\n"
        "from vitrail.run import plan; plan.TRIAL = 0.0\n"
        f"search('digits', out=Path(sys.argv[1]), space=Path(sys.argv[2]), trials=4, quiet=True, "
        f"changes={SMALL!r})"
    )
    out = tmp_path / "out"
    (tmp_path / "space.toml").write_text(SPACE)
    child = subprocess.Popen([sys.executable, "-c", code, out, tmp_path / "space.toml"])
    while not (out / "trials" / "001" / "recipe.toml").exists():
        time.sleep(0.02)
        assert child.poll() is None
    child.send_signal(signal.SIGKILL)
    child.wait()
    facts = look(trials=4).facts
    assert facts["trials"] == 4 and facts["failed"] == 0
