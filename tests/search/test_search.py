"""A search on digits: trials are runs, test images wait, kills lose nothing."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace

import optuna
import pytest
from safetensors import SafetensorError

from tests.data.samples import write
from vitrail.data.loader import Loader
from vitrail.errors import Refused, UserError
from vitrail.run import run
from vitrail.search import page
from vitrail.search import search as searching
from vitrail.search import study as shared
from vitrail.training import checkpoint
from vitrail.training.loop import Diverged

SMALL = {
    "vit": {"width": 16, "depth": 1, "heads": 1},
    "train": {"steps": 44, "batch": 64, "ema": 0.0},
    "data": {"workers": 0},
}
TIMED = {**SMALL, "train": {"batch": 64, "ema": 0.0}}  # minutes say how long
MAKE = page.make
SPACE = '"train.lr" = {low = 1e-4, high = 1e-1, log = true}\naugment = ["none", "gentle digits"]\n'


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No timing before a run, no pictures after it."""
    monkeypatch.setattr("vitrail.run.plan.TRIAL", 0.0)
    monkeypatch.setattr(run, "told", lambda done, *rest: done)
    monkeypatch.setattr(page, "make", lambda folder, *rest: folder / page.PAGE)


@pytest.fixture
def start(tmp_path):
    """The same search as `look`'s in a process of its own: `start("trials=2")`."""
    (tmp_path / "space.toml").write_text(SPACE)
    children = []

    def go(wishes, before="", changes=SMALL):
        code = (
            "import json, sys, time; from pathlib import Path\n"
            "from vitrail.run import plan, run; plan.TRIAL = 0.0\n"
            "run.told = lambda done, *rest: done\n"
            "from vitrail.search import page, search as searching, study as shared\n"
            "page.make = lambda folder, *rest: folder / page.PAGE\n"
            f"here = Path({str(tmp_path)!r})\n"
            "out, space = here / 'out', here / 'space.toml'\n"
            f"{before}\n"
            "if __name__ == '__main__':\n"
            "    found = searching.search('digits', out=out, space=space, quiet=True,\n"
            f"        changes={changes!r}, {wishes})\n"
            "    print(json.dumps(found.facts))\n"
        )
        path = tmp_path / f"child-{len(children)}.py"
        path.write_text(code)
        children.append(
            subprocess.Popen(
                [sys.executable, path],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # its signals are not ours
            )
        )
        return children[-1]

    yield go
    for child in children:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # with those that it started
        child.communicate()


def wait_until(there, child):
    while not there():
        time.sleep(0.02)
        assert child.poll() is None, child.communicate()


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
    look(trials=5)
    text = (tmp_path / "out" / "search.html").read_text()
    assert "A search of 5 trials" in text and "tested once" in text
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org", "")
    names = {file.stem for file in (tmp_path / "out" / "figures").glob("*.png")}
    assert {"history", "time", "slices", "importance"} == names
    assert "Importance: " in text and "Too few finished trials" not in text


@pytest.mark.slow
def test_a_grid_tries_every_point(look, tmp_path):
    (tmp_path / "space.toml").write_text('"train.lr" = [1e-3, 1e-2]\naugment = ["none", "digits"]')
    facts = look(grid=True, trials=None).facts
    assert facts["trials"] == 4
    study = shared.open_study(tmp_path / "out", grid=True)
    tried = {tuple(one.params.values()) for one in study.trials}
    assert len(tried) == 4


def test_a_trial_that_was_killed_before_it_began_is_begun_again(look, tmp_path):
    look(trials=1)
    for place in ("trials/001", "final-001"):
        (tmp_path / "out" / place).mkdir()
        (tmp_path / "out" / place / ".lock").write_text("1 on a machine")
    assert look(trials=2).facts["failed"] == 0


def test_a_search_is_not_written_into_the_data(tmp_path, monkeypatch):
    for label in ("a", "b"):
        for number in range(6):
            write(tmp_path / label / f"{number}.png", number)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"lies in the data, .* give --out elsewhere"):
        searching.search(".", trials=1, changes=SMALL, quiet=True)
    assert not (tmp_path / "runs").exists()


def test_a_grid_has_no_more_trials_than_points(look, tmp_path):
    (tmp_path / "space.toml").write_text('"train.lr" = [1e-3, 1e-2]')
    facts = look(grid=True, trials=9, minutes=None).facts
    assert facts["trials"] == 2
    assert len(shared.open_study(tmp_path / "out", grid=True).trials) == 2


def test_the_minutes_of_a_grid_are_shared_among_its_points(look, tmp_path, monkeypatch):
    (tmp_path / "space.toml").write_text('"train.lr" = [1e-3, 1e-2]')
    plans = []
    monkeypatch.setattr(searching, "work", lambda *rest, **more: None)
    monkeypatch.setattr(
        searching, "conclude", lambda study, folder, plan, *rest: plans.append(plan)
    )
    look(grid=True, trials=9, minutes=6, changes=TIMED)
    assert plans[0].minutes == 2


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


def test_a_search_takes_every_seed_that_a_run_takes(tmp_path):
    trial = shared.next_trial(shared.open_study(tmp_path), tmp_path, "me", 1, 2**63 - 1)
    assert 0 <= trial.suggest_float("train.lr", 0, 1) <= 1


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
    assert (folder / "log.jsonl").is_file() and not (folder / "metrics.json").exists()


def test_a_run_that_diverges_is_no_failure_of_the_search(look, tmp_path, monkeypatch):
    def diverging(trial, *rest):
        if trial.number == 1:
            raise Diverged("the learning rate is likely too high")
        return train(trial, *rest)

    train = searching.train
    monkeypatch.setattr(searching, "train", diverging)
    facts = look().facts
    assert (facts["trials"], facts["pruned"], facts["failed"]) == (3, 1, 0)


@pytest.mark.parametrize("heads", [[1, 3], [3, 1]])
def test_a_setting_that_cannot_be_is_a_failed_trial_and_the_search_goes_on(
    look, tmp_path, monkeypatch, heads
):
    monkeypatch.setattr(page, "make", MAKE)
    (tmp_path / "space.toml").write_text(f'"vit.heads" = {heads}')
    facts = look(grid=True, trials=None).facts
    assert facts["trials"] == 2 and facts["failed"] == 1
    assert "heads" in (tmp_path / "out" / "search.html").read_text()


def test_a_search_without_a_trial_that_can_be_says_why_and_can_be_mended(look, tmp_path):
    (tmp_path / "space.toml").write_text('"vit.heads" = [3, 5]')
    with pytest.raises(UserError, match=r"the search found nothing: .*heads"):
        look(grid=True, trials=None)
    (tmp_path / "space.toml").write_text('"vit.heads" = [1, 2]')
    facts = look(grid=True, trials=None).facts
    assert (facts["trials"], facts["failed"]) == (2, 0)


def test_trials_that_fail_alike_end_the_search_which_can_be_started_again(look, monkeypatch):
    def failing(*rest):
        raise UserError("the weather is bad")

    train = searching.train
    monkeypatch.setattr(searching, "train", failing)
    with pytest.raises(UserError, match="the first 3 trials failed alike: the weather is bad"):
        look(trials=9)
    monkeypatch.setattr(searching, "train", train)
    facts = look(trials=2).facts
    assert (facts["trials"], facts["failed"]) == (2, 0)


def test_trials_that_fail_for_their_own_reasons_do_not_end_the_search(look, monkeypatch):
    def failing(trial, *rest):
        if trial.number < 4:
            raise UserError(f"number {trial.number} cannot be")
        return train(trial, *rest)

    train = searching.train
    monkeypatch.setattr(searching, "train", failing)
    facts = look(trials=5).facts
    assert (facts["trials"], facts["failed"]) == (5, 4)


def test_minutes_that_were_too_few_are_told_and_more_of_them_mend_it(look, monkeypatch):
    def short(trial, params, plan, folder):
        if plan.minutes < 1:
            raise UserError(f"{plan.minutes:g} minutes are over")
        return train(trial, params, replace(plan, minutes=None, table=SMALL), folder)

    train = searching.train
    monkeypatch.setattr(searching, "train", short)
    monkeypatch.setattr(
        searching,
        "tested",
        lambda folder, *rest: run.Run(folder=folder, metrics={"val": None, "test": None}),
    )
    told = r"failed alike: 0\.5 minutes are over \(each trial had 0\.5 of the minutes\)"
    with pytest.raises(UserError, match=told):
        look(trials=3, minutes=2, changes=TIMED)
    facts = look(trials=2, minutes=30, changes=TIMED).facts
    assert (facts["trials"], facts["failed"]) == (2, 0)


def test_minutes_and_steps_are_refused_before_a_trial(look, tmp_path):
    with pytest.raises(UserError, match=r"minutes and train\.steps both say how long"):
        look(minutes=2)
    assert not (tmp_path / "out").exists()


def test_minutes_and_a_space_of_lengths_are_refused_before_a_trial(look, tmp_path):
    (tmp_path / "space.toml").write_text('"train.epochs" = [1, 2]')
    with pytest.raises(UserError, match=r"the space has train\.epochs; leave out --minutes"):
        look(minutes=2, changes=TIMED, space=tmp_path / "space.toml")
    assert not (tmp_path / "out").exists()


def test_minutes_that_are_over_before_the_first_trial_are_told(look):
    with pytest.raises(UserError, match="no trial was finished; give more --minutes"):
        look(trials=3, minutes=1, changes=TIMED, began=time.monotonic() - 60)
    assert look(trials=1).facts["trials"] == 1


@pytest.mark.parametrize(
    "cause",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        SafetensorError("Error while serializing: I/O error: no space (os error 28)"),
        Refused("cannot be read: no space left on device"),
    ],
    ids=lambda cause: type(cause).__name__,
)
def test_what_the_system_refuses_ends_the_search_and_no_trial(look, tmp_path, monkeypatch, cause):
    def full(*rest, **settings):
        if str(settings["out"]).endswith("001"):
            with checkpoint.disk_told("cannot save step 7", "older states are untouched"):
                raise cause
        return train(*rest, **settings)

    train = run.train
    monkeypatch.setattr(run, "train", full)
    with pytest.raises(UserError, match=r"(?i)no space left on device"):
        look(trials=2)
    left = shared.open_study(tmp_path / "out").trials[1]
    assert left.state == optuna.trial.TrialState.RUNNING
    monkeypatch.setattr(run, "train", train)
    facts = look(trials=2).facts
    assert (facts["trials"], facts["failed"]) == (2, 0)


@pytest.mark.slow
def test_what_the_system_refuses_a_second_process_is_told_in_one_line(look, tmp_path, capfd):
    look(trials=1)
    (tmp_path / "out" / "trials").rename(tmp_path / "aside")
    (tmp_path / "out" / "trials").write_text("no folder")
    with pytest.raises(UserError, match="Not a directory"):
        look(trials=3, jobs=2)
    assert "Traceback" not in capfd.readouterr().err
    (tmp_path / "out" / "trials").unlink()
    (tmp_path / "aside").rename(tmp_path / "out" / "trials")
    facts = look(trials=3).facts
    assert (facts["trials"], facts["failed"]) == (3, 0)


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


def test_a_study_that_lost_lines_is_told_and_no_run_is_lost(look, tmp_path, monkeypatch):
    first, journal = look(trials=2).facts, tmp_path / "out" / "study.journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    monkeypatch.setattr(run, "train", None)
    for count in (0, 1, len(lines) // 2):
        journal.write_bytes(b"".join(lines[:count]))
        with pytest.raises(UserError, match=r"knows nothing of .*00\d\); .* another --out"):
            look(trials=2)
    journal.write_bytes(b"".join(lines))
    assert look(trials=2).facts == first


def test_a_tested_run_that_the_study_lost_is_not_another_trials(look, tmp_path):
    look(trials=1)
    (tmp_path / "out" / "study.journal").write_bytes(b"")
    (tmp_path / "out" / "trials").rename(tmp_path / "aside")
    with pytest.raises(UserError, match="knows nothing of final-000"):
        look(trials=1)


def test_a_tested_run_of_other_settings_is_not_the_winners(look, tmp_path):
    look(trials=1)
    recipe = tmp_path / "out" / "final-000" / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("\nseed = ", "\nseed = 1"))
    with pytest.raises(UserError, match=r"final-000 has other settings than the winner"):
        look(trials=1)


def test_a_last_line_that_a_kill_tore_is_dropped(look, tmp_path):
    look(trials=1)
    path = tmp_path / "out" / "study.journal"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"op_code": 4, "worker')
    assert look(trials=2).facts["trials"] == 2
    assert path.read_bytes().startswith(whole)


def test_a_line_that_a_full_disk_tore_is_dropped_before_the_next(tmp_path):
    study, other = shared.open_study(tmp_path), shared.open_study(tmp_path)
    study.ask()
    with (tmp_path / "study.journal").open("ab") as file:
        file.write(b'{"op_code": 4, "worker')
    other.ask()
    assert len(study.trials) == len(shared.open_study(tmp_path).trials) == 2


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
def test_killed_and_started_again_it_goes_on(look, start, tmp_path):
    child = start("trials=4")
    wait_until((tmp_path / "out" / "trials" / "001" / "recipe.toml").exists, child)
    child.send_signal(signal.SIGKILL)
    child.wait()
    facts = look(trials=4).facts
    assert facts["trials"] == 4 and facts["failed"] == 0


SLOW = """
train = searching.train
def slow(*rest):
    (here / 'began').touch()
    time.sleep(3)
    return train(*rest)
searching.train = slow
"""


@pytest.mark.slow
def test_two_commands_on_one_folder_end_with_the_same_winner(look, start, tmp_path):
    began = tmp_path / "began"
    child = start("trials=2", SLOW)
    wait_until(began.exists, child)
    mine = look(trials=2).facts
    out, err = child.communicate()
    assert child.returncode == 0, err
    assert json.loads(out) == mine and mine["trials"] == 2
    assert len(list((tmp_path / "out").glob("final-*"))) == 1


@pytest.mark.slow
def test_a_trial_whose_process_dies_is_taken_over_by_who_waits_for_it(look, start, tmp_path):
    began = tmp_path / "began"
    dying = SLOW.replace("return train(*rest)", "import os; os._exit(1)")
    child = start("trials=2", dying)
    wait_until(began.exists, child)
    facts = look(trials=2).facts
    assert (facts["trials"], facts["failed"]) == (2, 0)


LATE = """
import signal
searching.GRACE = 60  # on a busy machine a step takes long
def late(number, frame):
    time.sleep(0.3)  # the others have heard it by now
    raise SystemExit(128 + number)
signal.signal(signal.SIGTERM, late)
"""
LARGE = {
    "vit": {"width": 96, "depth": 6, "heads": 1},
    "train": {"steps": 100_000, "batch": 256, "save_every": 10**9, "log_every": 1},
    "data": {"workers": 0},
}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_lets_each_save_its_run(start, tmp_path, number):
    child = start("trials=2, jobs=2", LATE, LARGE)
    journals = [tmp_path / "out" / "trials" / f"00{n}" / "log.jsonl" for n in (0, 1)]
    wait_until(lambda: all(one.exists() and one.stat().st_size for one in journals), child)
    os.killpg(child.pid, number)
    _, err = child.communicate(timeout=120)
    assert child.returncode != 0 and err.count(b"Traceback") == (number == signal.SIGINT)
    for journal in journals:
        assert list((journal.parent / "checkpoints").glob("step-*"))
    assert list((tmp_path / "out" / "owners").iterdir()) == []


@pytest.mark.slow
def test_processes_end_when_the_one_that_started_them_is_killed(start, tmp_path):
    child = start("trials=2, jobs=2", SLOW.replace("sleep(3)", "sleep(600)"))
    began, owners = tmp_path / "began", tmp_path / "out" / "owners"
    wait_until(lambda: began.exists() and len(list(owners.iterdir())) == 3, child)
    child.kill()
    child.wait()
    deadline = time.monotonic() + 60
    while len(left := list(owners.iterdir())) > 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [f"-{child.pid}-" in one.name for one in left] == [True]


@pytest.mark.slow
def test_a_process_that_is_ended_before_its_run_leaves_the_trial_to_others(look, start, tmp_path):
    began = tmp_path / "began"
    waiting = SLOW.replace("sleep(3)", "sleep(60)")
    alone = "searching.search = lambda *rest, **more: searching.join(out, 2, None, 1, None)"
    look(trials=1)
    child = start("", f"{waiting}\n{alone}")
    wait_until(began.exists, child)
    child.send_signal(signal.SIGTERM)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 143 and err == b""
    assert list((tmp_path / "out" / "owners").iterdir()) == []
    facts = look(trials=2).facts
    assert (facts["trials"], facts["failed"]) == (2, 0)
