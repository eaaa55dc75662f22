"""A search on digits: trials are runs, the best one is tested once, and kills lose nothing."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import optuna
import pytest

from tests.data.samples import write
from vitrail.data.loader import Loader
from vitrail.errors import OutOfResources, UserError
from vitrail.run.result import Run
from vitrail.run.train import train
from vitrail.training import checkpoint
from vitrail.training.loop import Diverged
from vitrail.tuning import optimize, page, trials
from vitrail.tuning import study as studies

SMALL = {
    "vit": {"width": 16, "depth": 1, "heads": 1},
    "train": {"steps": 14, "batch": 192, "ema": 0.0},  # two epochs
    "data": {"workers": 0},
}
TIMED = {**SMALL, "train": {"batch": 64, "ema": 0.0}}  # `minutes` set the length
WRITE_PAGE = page.write_search_page
SPACE = '"train.lr" = {low = 1e-4, high = 1e-1, log = true}\naugment = ["none", "gentle digits"]\n'


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No timing before a run, no report after it."""
    monkeypatch.setattr("vitrail.run.plan.TRIAL", 0.0)
    monkeypatch.setattr("vitrail.run.finish.make_report", lambda *rest: None)
    monkeypatch.setattr(page, "write_search_page", lambda *rest: None)


@pytest.fixture
def start(tmp_path):
    """The search of `run_search` in another process: `start("trials=2")`."""
    (tmp_path / "space.toml").write_text(SPACE)
    children = []

    def go(arguments, before="", settings=SMALL):
        code = (
            "import json, sys, time; from pathlib import Path\n"
            "from vitrail.run import finish, plan; plan.TRIAL = 0.0\n"
            "finish.make_report = lambda *rest: None\n"
            "from vitrail.tuning import optimize, page, trials, workers\n"
            "page.write_search_page = lambda *rest: None\n"
            f"here = Path({str(tmp_path)!r})\n"
            "out, space = here / 'out', here / 'space.toml'\n"
            f"{before}\n"
            "if __name__ == '__main__':\n"
            "    result = optimize.search('digits', out=out, space=space, quiet=True,\n"
            f"        settings={settings!r}, {arguments})\n"
            "    print(json.dumps(result.to_dict()))\n"
        )
        path = tmp_path / f"child-{len(children)}.py"
        path.write_text(code)
        children.append(
            subprocess.Popen(
                [sys.executable, path],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # signals to its group do not reach the tests
            )
        )
        return children[-1]

    yield go
    for child in children:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # with its workers
        child.communicate()


def wait_until(condition, child):
    while not condition():
        time.sleep(0.02)
        assert child.poll() is None, child.communicate()


@pytest.fixture
def run_search(tmp_path):
    """Searches on digits: `run_search(trials=3)`."""
    (tmp_path / "space.toml").write_text(SPACE)

    def go(**arguments):
        defaults = {"trials": 3, "space": tmp_path / "space.toml", "settings": SMALL}
        defaults |= {"out": tmp_path / "out", "quiet": True}
        return optimize.search("digits", **defaults | arguments).to_dict()

    return go


@pytest.mark.slow
def test_trials_are_runs_and_the_best_settings_are_tested_once(run_search, tmp_path, monkeypatch):
    splits, evaluation = [], Loader.evaluation

    def record(self, split, *rest, **more):
        splits.append(split)
        return evaluation(self, split, *rest, **more)

    monkeypatch.setattr(Loader, "evaluation", record)
    result = run_search()
    folders = sorted((tmp_path / "out" / "trials").iterdir())
    assert [folder.name for folder in folders] == ["000", "001", "002"]
    scores = [json.loads((folder / "metrics.json").read_text()) for folder in folders]
    assert all(score["test"] is None for score in scores)
    assert splits.count("test") == 1
    assert result["trials"] == 3 and result["test"]["accuracy"] > 0.1
    assert result["best"]["value"] == max(score["val"]["accuracy"] for score in scores)
    assert {"train.lr", "augment"} == set(result["best"]["settings"])


def test_the_best_recipe_repeats_the_best_trial(run_search, tmp_path):
    result = run_search()
    recipe = tmp_path / "out" / "best.toml"
    again = train(recipe=recipe, out=tmp_path / "again", quiet=True, report=False)
    assert again.metrics["val"]["accuracy"] == result["best"]["value"]


def test_a_finished_search_trains_nothing_again(run_search, monkeypatch):
    first = run_search()
    monkeypatch.setattr(trials, "train", None)
    monkeypatch.setattr(optimize, "train", None)
    assert run_search() == first


def test_a_finished_search_can_be_extended(run_search):
    first = run_search(trials=2)
    result = run_search(trials=3)
    assert result["trials"] == 3
    assert result["tests"] == (1 if result["best"]["trial"] == first["best"]["trial"] else 2)


@pytest.mark.slow
def test_the_page_states_the_number_of_trials(run_search, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "write_search_page", WRITE_PAGE)
    run_search(trials=5)
    text = (tmp_path / "out" / "search.html").read_text()
    assert "Hyper-parameter search: 5 trials" in text and "tested once" in text
    assert "http" not in text.replace("http-equiv", "").replace("http://www.w3.org", "")
    names = {file.stem for file in (tmp_path / "out" / "figures").glob("*.png")}
    assert {"history", "time", "slices", "importance"} == names
    assert "Importance: " in text and "Too few finished trials" not in text


@pytest.mark.slow
def test_a_grid_tries_every_point(run_search, tmp_path):
    (tmp_path / "space.toml").write_text('"train.lr" = [1e-3, 1e-2]\naugment = ["none", "digits"]')
    result = run_search(grid=True, trials=None)
    assert result["trials"] == 4
    study = studies.open_study(tmp_path / "out", grid=True)
    tried = {tuple(one.params.values()) for one in study.trials}
    assert len(tried) == 4


def test_a_trial_killed_before_training_is_started_again(run_search, tmp_path):
    run_search(trials=1)
    for place in ("trials/001", "final-001"):
        (tmp_path / "out" / place).mkdir()
        (tmp_path / "out" / place / ".lock").write_text("1 on a machine")
    assert run_search(trials=2)["failed"] == 0


def test_a_search_does_not_write_into_the_data(tmp_path, monkeypatch):
    for label in ("a", "b"):
        for number in range(6):
            write(tmp_path / label / f"{number}.png", number)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"is part of the data, .* choose another `out`"):
        optimize.search(".", trials=1, settings=SMALL, quiet=True)
    assert not (tmp_path / "runs").exists()


def test_a_grid_has_no_more_trials_than_points(run_search, tmp_path):
    (tmp_path / "space.toml").write_text('"train.lr" = [1e-3, 1e-2]')
    result = run_search(grid=True, trials=9, minutes=None)
    assert result["trials"] == 2
    assert len(studies.open_study(tmp_path / "out", grid=True).trials) == 2


def test_the_minutes_of_a_grid_are_divided_among_its_points(run_search, tmp_path, monkeypatch):
    (tmp_path / "space.toml").write_text('"train.lr" = [1e-3, 1e-2]')
    plans = []

    def finish(study, folder, plan, *rest):
        plans.append(plan)
        return SimpleNamespace(to_dict=dict)

    monkeypatch.setattr(optimize, "run_trials", lambda *rest, **more: None)
    monkeypatch.setattr(optimize, "finish_search", finish)
    run_search(grid=True, trials=9, minutes=6, settings=TIMED)
    assert plans[0].minutes == 2


class Dead(BaseException):
    """Simulates a kill."""


@pytest.mark.slow
def test_a_trial_of_a_dead_process_is_resumed(run_search, tmp_path, monkeypatch):

    def dying(*rest, **settings):
        def on_epoch(line):
            settings["on_epoch_"](line)
            raise Dead

        if str(settings["out"]).endswith("001"):
            settings["on_epoch_"] = settings.pop("on_epoch")
            inner = {key: value for key, value in settings.items() if key != "on_epoch_"}
            return train(*rest, on_epoch=on_epoch, **inner)
        return train(*rest, **settings)

    monkeypatch.setattr(trials, "train", dying)
    with pytest.raises(Dead):
        run_search()
    monkeypatch.setattr(trials, "train", train)
    result = run_search()
    study = studies.open_study(tmp_path / "out")
    assert result["trials"] == len(study.trials) == 3
    assert all(one.state == optuna.trial.TrialState.COMPLETE for one in study.trials)


def test_a_search_accepts_every_seed_that_a_run_accepts(tmp_path):
    trial = studies.ask_trial(studies.open_study(tmp_path), tmp_path, "me", 1, 2**63 - 1)
    assert 0 <= trial.suggest_float("train.lr", 0, 1) <= 1


def test_a_trial_below_the_median_is_pruned(tmp_path):
    study = studies.open_study(tmp_path)
    for value in (0.7, 0.8, 0.9, 0.9, 0.9):
        trial = study.ask()
        studies.report_to_study(trial)({"val_accuracy": value, "step": 50, "steps": 100})
        study.tell(trial, value)
    good, bad = study.ask(), study.ask()
    studies.report_to_study(good)({"val_accuracy": 0.95, "step": 50, "steps": 100})
    with pytest.raises(optuna.TrialPruned):
        studies.report_to_study(bad)({"val_accuracy": 0.5, "step": 50, "steps": 100})


def test_the_run_of_a_pruned_trial_is_kept(run_search, tmp_path, monkeypatch):
    monkeypatch.setattr(optuna.Trial, "should_prune", lambda trial: trial.number == 1)
    result = run_search()
    assert result["trials"] == 3 and result["pruned"] == 1
    folder = tmp_path / "out" / "trials" / "001"
    assert (folder / "log.jsonl").is_file() and not (folder / "metrics.json").exists()


def test_a_diverged_run_is_a_pruned_trial(run_search, tmp_path, monkeypatch):
    def diverging(trial, *rest):
        if trial.number == 1:
            raise Diverged("the learning rate is likely too high")
        return train_trial(trial, *rest)

    train_trial = trials.train_trial
    monkeypatch.setattr(trials, "train_trial", diverging)
    result = run_search()
    assert (result["trials"], result["pruned"], result["failed"]) == (3, 1, 0)


@pytest.mark.parametrize("heads", [[1, 3], [3, 1]])
def test_invalid_settings_are_a_failed_trial_and_the_search_continues(
    run_search, tmp_path, monkeypatch, heads
):
    monkeypatch.setattr(page, "write_search_page", WRITE_PAGE)
    (tmp_path / "space.toml").write_text(f'"vit.heads" = {heads}')
    result = run_search(grid=True, trials=None)
    assert result["trials"] == 2 and result["failed"] == 1
    assert "heads" in (tmp_path / "out" / "search.html").read_text()


def test_a_search_of_invalid_settings_says_why_and_can_be_corrected(run_search, tmp_path):
    (tmp_path / "space.toml").write_text('"vit.heads" = [3, 5]')
    with pytest.raises(UserError, match=r"the search has no result: .*heads"):
        run_search(grid=True, trials=None)
    (tmp_path / "space.toml").write_text('"vit.heads" = [1, 2]')
    result = run_search(grid=True, trials=None)
    assert (result["trials"], result["failed"]) == (2, 0)


def test_trials_with_the_same_error_end_the_search_which_can_be_restarted(run_search, monkeypatch):
    def failing(*rest):
        raise UserError("the network is down")

    train_trial = trials.train_trial
    monkeypatch.setattr(trials, "train_trial", failing)
    with pytest.raises(
        UserError, match="the first 3 trials failed with the same error: the network is down"
    ):
        run_search(trials=9)
    monkeypatch.setattr(trials, "train_trial", train_trial)
    result = run_search(trials=2)
    assert (result["trials"], result["failed"]) == (2, 0)


def test_trials_with_different_errors_do_not_end_the_search(run_search, monkeypatch):
    def failing(trial, *rest):
        if trial.number < 4:
            raise UserError(f"number {trial.number} cannot be")
        return train_trial(trial, *rest)

    train_trial = trials.train_trial
    monkeypatch.setattr(trials, "train_trial", failing)
    result = run_search(trials=5)
    assert (result["trials"], result["failed"]) == (5, 4)


def test_too_few_minutes_are_an_error_and_can_be_raised(run_search, monkeypatch):
    def short(trial, params, plan, folder):
        if plan.minutes < 1:
            raise UserError(f"{plan.minutes:g} minutes are over")
        return train_trial(trial, params, replace(plan, minutes=None, settings=SMALL), folder)

    train_trial = trials.train_trial
    monkeypatch.setattr(trials, "train_trial", short)
    monkeypatch.setattr(
        optimize,
        "train_final",
        lambda folder, *rest: Run(folder=folder, metrics={"val": None, "test": None}),
    )
    message = r"failed with the same error: 0\.5 minutes are over \(each trial had 0\.5 minutes\)"
    with pytest.raises(UserError, match=message):
        run_search(trials=3, minutes=2, settings=TIMED)
    result = run_search(trials=2, minutes=30, settings=TIMED)
    assert (result["trials"], result["failed"]) == (2, 0)


def test_minutes_and_steps_together_are_an_error(run_search, tmp_path):
    with pytest.raises(UserError, match=r"`minutes` and `train\.steps` both set the length"):
        run_search(minutes=2)
    assert not (tmp_path / "out").exists()


def test_minutes_and_a_space_of_epochs_together_are_an_error(run_search, tmp_path):
    (tmp_path / "space.toml").write_text('"train.epochs" = [1, 2]')
    with pytest.raises(UserError, match=r"the space contains train\.epochs, .* omit `minutes`"):
        run_search(minutes=2, settings=TIMED, space=tmp_path / "space.toml")
    assert not (tmp_path / "out").exists()


def test_minutes_that_end_before_the_first_trial_are_an_error(run_search):
    with pytest.raises(UserError, match="no trial finished; raise `minutes`"):
        run_search(trials=3, minutes=1, settings=TIMED, started=time.monotonic() - 60)
    assert run_search(trials=1)["trials"] == 1


@pytest.mark.parametrize(
    "cause",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OutOfResources("cannot be read: no space left on device"),
    ],
    ids=lambda cause: type(cause).__name__,
)
def test_a_system_error_ends_the_search_but_not_the_trial(run_search, tmp_path, monkeypatch, cause):
    def full(*rest, **settings):
        if str(settings["out"]).endswith("001"):
            with checkpoint.report_disk_errors(
                "cannot save step 7", "older checkpoints are unchanged"
            ):
                raise cause
        return train(*rest, **settings)

    monkeypatch.setattr(trials, "train", full)
    with pytest.raises(UserError, match=r"(?i)no space left on device"):
        run_search(trials=2)
    left = studies.open_study(tmp_path / "out").trials[1]
    assert left.state == optuna.trial.TrialState.RUNNING
    monkeypatch.setattr(trials, "train", train)
    result = run_search(trials=2)
    assert (result["trials"], result["failed"]) == (2, 0)


@pytest.mark.slow
def test_a_system_error_in_a_worker_is_one_line(run_search, tmp_path, capfd):
    run_search(trials=1)
    (tmp_path / "out" / "trials").rename(tmp_path / "aside")
    (tmp_path / "out" / "trials").write_text("no folder")
    with pytest.raises(UserError, match="Not a directory"):
        run_search(trials=3, jobs=2)
    assert "Traceback" not in capfd.readouterr().err
    (tmp_path / "out" / "trials").unlink()
    (tmp_path / "aside").rename(tmp_path / "out" / "trials")
    result = run_search(trials=3)
    assert (result["trials"], result["failed"]) == (3, 0)


def test_another_space_in_the_same_folder_is_an_error(run_search, tmp_path):
    run_search(trials=1)
    (tmp_path / "space.toml").write_text('"train.lr" = [1e-3, 1e-2]')
    with pytest.raises(UserError, match="contains a search with different space"):
        run_search(trials=1)


def test_a_damaged_journal_is_an_error_and_stays_unchanged(run_search, tmp_path):
    run_search(trials=1)
    path = tmp_path / "out" / "study.journal"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = b"\x00garbage\n"
    path.write_bytes(b"".join(lines))
    with pytest.raises(UserError, match=r"study\.journal is damaged \(line 3\)"):
        run_search(trials=1)
    assert path.read_bytes() == b"".join(lines)


def test_a_journal_that_lost_lines_is_an_error_and_no_run_is_lost(
    run_search, tmp_path, monkeypatch
):
    first, journal = run_search(trials=2), tmp_path / "out" / "study.journal"
    lines = journal.read_bytes().splitlines(keepends=True)
    monkeypatch.setattr(trials, "train", None)
    monkeypatch.setattr(optimize, "train", None)
    for count in (0, 1, len(lines) // 2):
        journal.write_bytes(b"".join(lines[:count]))
        with pytest.raises(UserError, match=r"has no trial for .*00\d\), .* another `out`"):
            run_search(trials=2)
    journal.write_bytes(b"".join(lines))
    assert run_search(trials=2) == first


def test_a_final_run_without_its_trial_is_an_error(run_search, tmp_path):
    run_search(trials=1)
    (tmp_path / "out" / "study.journal").write_bytes(b"")
    (tmp_path / "out" / "trials").rename(tmp_path / "aside")
    with pytest.raises(UserError, match="has no trial for final-000"):
        run_search(trials=1)


def test_a_final_run_with_other_settings_is_an_error(run_search, tmp_path):
    run_search(trials=1)
    recipe = tmp_path / "out" / "final-000" / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("\nseed = ", "\nseed = 1"))
    with pytest.raises(UserError, match=r"final-000 has different settings from the best trial"):
        run_search(trials=1)


def test_a_partial_last_line_is_dropped(run_search, tmp_path):
    run_search(trials=1)
    path = tmp_path / "out" / "study.journal"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"op_code": 4, "worker')
    assert run_search(trials=2)["trials"] == 2
    assert path.read_bytes().startswith(whole)


def test_a_partial_line_is_dropped_before_the_next_is_appended(tmp_path):
    study, other = studies.open_study(tmp_path), studies.open_study(tmp_path)
    study.ask()
    with (tmp_path / "study.journal").open("ab") as file:
        file.write(b'{"op_code": 4, "worker')
    other.ask()
    assert len(study.trials) == len(studies.open_study(tmp_path).trials) == 2


def test_a_damaged_plan_is_an_error(run_search, tmp_path):
    run_search(trials=1)
    (tmp_path / "out" / "search.json").write_text('{"data": ')
    with pytest.raises(UserError, match=r"search\.json is damaged"):
        run_search(trials=1)


@pytest.mark.slow
def test_two_processes_share_one_study(run_search, tmp_path):
    result = run_search(trials=6, jobs=2)
    study = studies.open_study(tmp_path / "out")
    assert result["trials"] == len(study.trials) == 6
    assert len({one.user_attrs["worker"] for one in study.trials}) == 2
    assert len({one.params["train.lr"] for one in study.trials}) == 6


@pytest.mark.slow
def test_a_killed_search_is_resumed(run_search, start, tmp_path):
    child = start("trials=4")
    wait_until((tmp_path / "out" / "trials" / "001" / "recipe.toml").exists, child)
    child.send_signal(signal.SIGKILL)
    child.wait()
    result = run_search(trials=4)
    assert result["trials"] == 4 and result["failed"] == 0


SLOW = """
train_trial = trials.train_trial
def slow(*rest):
    (here / 'started').touch()
    time.sleep(3)
    return train_trial(*rest)
trials.train_trial = slow
"""


@pytest.mark.full
def test_two_commands_on_one_folder_have_the_same_result(run_search, start, tmp_path):
    started_file = tmp_path / "started"
    child = start("trials=2", SLOW)
    wait_until(started_file.exists, child)
    mine = run_search(trials=2)
    out, err = child.communicate()
    assert child.returncode == 0, err
    assert json.loads(out) == mine and mine["trials"] == 2
    assert len(list((tmp_path / "out").glob("final-*"))) == 1


@pytest.mark.full
def test_a_waiting_process_takes_over_the_trial_of_a_dead_one(run_search, start, tmp_path):
    started_file = tmp_path / "started"
    dying = SLOW.replace("return train_trial(*rest)", "import os; os._exit(1)")
    child = start("trials=2", dying)
    wait_until(started_file.exists, child)
    result = run_search(trials=2)
    assert (result["trials"], result["failed"]) == (2, 0)


LATE = """
import signal
workers.GRACE_SECONDS = 60  # on a busy machine a step takes long
def late(number, frame):
    time.sleep(0.3)  # the workers have received it by now
    raise SystemExit(128 + number)
signal.signal(signal.SIGTERM, late)
"""
LONG = {
    **SMALL,
    "train": {"steps": 100_000, "batch": 64, "save_every": 10**9, "log_every": 1},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)]
)
def test_a_signal_to_all_processes_lets_each_save_its_run(start, tmp_path, number):
    child = start("trials=2, jobs=2", LATE, LONG)
    journals = [tmp_path / "out" / "trials" / f"00{n}" / "log.jsonl" for n in (0, 1)]
    wait_until(lambda: all(one.exists() and one.stat().st_size for one in journals), child)
    os.killpg(child.pid, number)
    _, err = child.communicate(timeout=120)
    assert child.returncode != 0 and err.count(b"Traceback") == (number == signal.SIGINT)
    for journal in journals:
        assert list((journal.parent / "checkpoints").glob("step-*"))
    assert list((tmp_path / "out" / "workers").iterdir()) == []


@pytest.mark.slow
def test_workers_exit_when_their_parent_is_killed(start, tmp_path):
    child = start("trials=2, jobs=2", SLOW.replace("sleep(3)", "sleep(600)"))
    started_file, workers = tmp_path / "started", tmp_path / "out" / "workers"
    wait_until(lambda: started_file.exists() and len(list(workers.iterdir())) == 3, child)
    child.kill()
    child.wait()
    deadline = time.monotonic() + 60
    while len(left := list(workers.iterdir())) > 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [f"-{child.pid}-" in one.name for one in left] == [True]


@pytest.mark.slow
def test_a_worker_terminated_before_its_run_leaves_the_trial_to_others(run_search, start, tmp_path):
    started_file = tmp_path / "started"
    waiting = SLOW.replace("sleep(3)", "sleep(60)")
    alone = (
        "import multiprocessing\n"
        "reader, writer = multiprocessing.Pipe(duplex=False)\n"
        "def search(*rest, **more):\n"
        "    workers.worker_main(out, 2, None, 1, None, reader)\n"
        "optimize.search = search"
    )
    run_search(trials=1)
    child = start("", f"{waiting}\n{alone}")
    wait_until(started_file.exists, child)
    child.send_signal(signal.SIGTERM)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 143 and err == b""
    assert list((tmp_path / "out" / "workers").iterdir()) == []
    result = run_search(trials=2)
    assert (result["trials"], result["failed"]) == (2, 0)
