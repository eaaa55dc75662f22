"""A search that several machines share, through a file or a real PostgreSQL."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.training.ranks import free_port
from tests.tuning.test_optimize import SMALL, SPACE
from vitrail.errors import UserError
from vitrail.tuning import optimize, page
from vitrail.tuning import study as studies
from vitrail.tuning.locks import is_alive, register_worker
from vitrail.tuning.storage import (
    Database,
    find_locks,
    hide_password,
    name_driver,
    open_storage,
    report_storage_errors,
)

PATIENCE = 300  # seconds
SHORT = {**SMALL, "train": {"steps": 12, "batch": 64, "ema": 0.0}}
LONG = {**SMALL, "train": {"steps": 300, "batch": 64, "ema": 0.0}}


@pytest.fixture
def search(tmp_path, monkeypatch):
    """A search on the machine of this name, which has its own disk: `search("a", storage=...)`."""
    monkeypatch.setattr("vitrail.run.plan.TRIAL", 0.0)
    monkeypatch.setattr("vitrail.run.finish.make_report", lambda *rest: None)
    monkeypatch.setattr(page, "write_search_page", lambda *rest: None)
    (tmp_path / "space.toml").write_text(SPACE)

    def run(machine, **arguments):
        defaults = {"trials": 1, "space": tmp_path / "space.toml", "settings": SHORT, "quiet": True}
        out = tmp_path / machine / "digits"
        return optimize.search("digits", out=out, **defaults | arguments)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["sqlite:///{}/shared.db", pytest.param("{}/shared.journal", marks=pytest.mark.full)]
)
def test_machines_share_trials_and_the_final_run(search, tmp_path, kind):
    storage = kind.format(tmp_path)
    first = search("a", storage=storage)
    second = search("b", storage=storage)
    assert not (tmp_path / "b" / "digits" / "trials").exists()  # all trials were done
    assert second.run == first.run and second.test == first.test  # and the final run
    recipe = (tmp_path / "b" / "digits" / "best.toml").read_text()
    assert recipe == (tmp_path / "a" / "digits" / "best.toml").read_text()


@pytest.mark.full
def test_another_machine_continues_a_search_but_not_with_other_settings(search, tmp_path):
    storage = f"sqlite:///{tmp_path}/shared.db"
    search("a", storage=storage)
    more = search("b", storage=storage, trials=2)
    assert more.trials == 2 and (tmp_path / "b" / "digits" / "trials" / "001").is_dir()
    with pytest.raises(UserError, match="a search with different settings"):
        search("c", storage=storage, settings=SMALL)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nonsense://x", "is unknown; give postgresql://"),
        ("oracle://x", "is not supported|needs a driver|is unknown"),
        ("mysql://u:secret@h/d", r"u:\*\*\*@h/d needs a driver.*vitrail\[mysql\]"),
        ("sqlite:////proc/none/x.db", "cannot be written|cannot be used"),
        ("/proc/none/x.journal", "cannot be written"),
    ],
)
def test_a_storage_that_cannot_be_used_is_one_line(tmp_path, url, words):
    url = name_driver(url)
    with pytest.raises(UserError, match=words) as found, report_storage_errors(url):
        find_locks(tmp_path, url)
        open_storage(tmp_path, url)
    assert "secret" not in str(found.value) and "\n" not in str(found.value)


def test_a_folder_is_not_a_journal(tmp_path):
    with pytest.raises(UserError, match="is a folder"):
        open_storage(tmp_path, str(tmp_path))


def test_drivers_are_those_of_the_extras():
    assert name_driver("postgresql://h/d") == "postgresql+psycopg://h/d"
    assert name_driver("postgresql+psycopg2://h/d") == "postgresql+psycopg2://h/d"
    assert name_driver("/shared/x.journal") == "/shared/x.journal"
    assert hide_password("postgresql://u:secret@h/d") == "postgresql://u:***@h/d"


@pytest.fixture(scope="module")
def postgres():
    """The URL of a real server on this machine, without its database; it refuses to run as root."""
    pytest.importorskip("psycopg")
    if shutil.which("initdb") is None or shutil.which("pg_ctl") is None:
        pytest.skip("needs PostgreSQL")
    root, port = Path(tempfile.mkdtemp(prefix="vitrail-postgres-")), free_port()
    user = {"user": "nobody"} if os.getuid() == 0 else {}
    if user:
        shutil.chown(root, "nobody")
    options = {"check": True, "stdout": subprocess.DEVNULL, "cwd": "/", **user}
    control = ["pg_ctl", "-D", root / "data", "-w"]
    server = f"-p {port} -k {root} -c listen_addresses=127.0.0.1 -c fsync=off"
    subprocess.run(["initdb", "-D", root / "data", "-U", "vitrail", "-A", "trust"], **options)
    subprocess.run([*control, "-o", server, "-l", root / "log", "start"], **options)
    try:
        yield f"postgresql+psycopg://vitrail@127.0.0.1:{port}"
    finally:
        subprocess.run([*control, "-m", "immediate", "stop"], **options)
        shutil.rmtree(root)


def start(folder, machine, url, trials):
    """A search in a process of its own."""
    code = (
        "import sys; from vitrail.run import finish, plan; plan.TRIAL = 0.0\n"
        "finish.make_report = lambda *rest: None\n"
        "from vitrail.tuning import optimize\n"
        f"found = optimize.search('digits', trials={trials}, quiet=True, storage={url!r},\n"
        f"    space={str(folder / 'space.toml')!r}, out={str(folder / machine / 'digits')!r},\n"
        f"    settings={LONG!r})\n"
        "import json; print(json.dumps(found.to_dict()))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.full
def test_a_worker_of_a_database_is_alive_until_its_connection_ends(postgres):
    here, elsewhere = (Database(f"{postgres}/postgres", "digits") for _ in range(2))
    with register_worker(here) as me:
        assert is_alive(elsewhere, me)
    assert not is_alive(elsewhere, me) and not is_alive(elsewhere, "")


@pytest.mark.full
def test_two_machines_search_through_postgresql_and_one_is_killed(postgres, tmp_path):
    url, trials = f"{postgres}/postgres", 5
    (tmp_path / "space.toml").write_text(SPACE)
    victim = start(tmp_path, "a", url, trials)
    end = time.monotonic() + PATIENCE
    while not list(tmp_path.glob("a/digits/trials/*/log.jsonl")):  # it trains
        assert victim.poll() is None and time.monotonic() < end, victim.communicate()
        time.sleep(0.05)
    others = [start(tmp_path, machine, url, trials) for machine in ("b", "c")]
    time.sleep(1)
    os.kill(victim.pid, signal.SIGKILL)
    victim.communicate()
    found = []
    for process in others:
        out, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, err[-3000:]
        found.append(json.loads(out))
    assert [result["trials"] for result in found] == [trials, trials]
    assert found[0]["best"] == found[1]["best"] and found[0]["run"] == found[1]["run"]
    study = studies.open_study(tmp_path / "digits", url=url)
    assert [trial.state.name for trial in study.trials if trial.state.name == "RUNNING"] == []
    assert len(study.trials) == trials


@pytest.mark.full
def test_what_a_database_refuses_is_one_line(postgres, search):
    with pytest.raises(UserError, match=r"cannot be used: .*does not exist"):
        search("x", storage=f"{postgres}/none")
    refused = postgres.rpartition(":")[0] + f":{free_port()}/postgres"
    with pytest.raises(UserError, match=r"cannot be used: .*refused"):
        search("x", storage=refused)
