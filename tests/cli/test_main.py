"""The command line from outside: exit codes, streams, and what a mistake looks like."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import call
from vitrail.cli import main

ROOT = Path(__file__).resolve().parents[2]


def vitrail(*arguments, module=True, **options):
    command = [sys.executable, "-m", "vitrail"] if module else ["vitrail"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, **options)


def test_help_names_the_verbs():
    done = vitrail("--help")
    assert done.returncode == 0
    assert "models" in done.stdout and "demo" in done.stdout


def test_version_is_the_packages():
    import vitrail as package

    assert vitrail("--version").stdout == f"vitrail {package.__version__}\n"


def test_quick_answers_do_not_import_torch():
    code = """if True:
        import sys
        from vitrail.cli.main import run
        for arguments in (["--help"], ["--version"], ["models"], ["models", "--help"]):
            try:
                run(arguments)
            except SystemExit:
                pass
            assert not {"torch", "matplotlib"} & set(sys.modules), arguments
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_models_as_json_has_the_promised_keys(capsys):
    rows = json.loads(call(capsys, "models", "--json")[1])
    assert all(
        list(row) == ["name", "parameters", "gmacs", "tokens", "image", "patch"] for row in rows
    )
    tiny = next(row for row in rows if row["name"] == "Ti/16")
    assert tiny["parameters"] == 5_717_416
    assert (tiny["tokens"], tiny["image"], tiny["patch"]) == (197, 224, 16)
    assert round(tiny["gmacs"], 1) == 1.3


def test_models_as_a_table_has_the_papers_digits(capsys):
    lines = call(capsys, "models")[1].splitlines()
    assert ["Ti/16", "5,717,416", "1.3", "197", "224", "16"] in [line.split() for line in lines]


def test_other_libraries_log_only_warnings():
    code = """if True:
        import logging
        from vitrail.cli.main import main
        try:
            main(["--version"])
        except SystemExit:
            pass
        logging.getLogger("vitrail.run").info("ours")
        logging.getLogger("matplotlib").info("theirs")
        logging.getLogger("matplotlib").warning("their warning")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.split("\n") == ["ours", "their warning", ""]


def test_a_wrong_flag_exits_with_two():
    done = vitrail("models", "--jsn")
    assert done.returncode == 2
    assert "--json" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_a_wrong_verb_exits_with_two(capsys):
    assert call(capsys, "trian")[0] == 2


def test_a_user_error_is_one_line_and_exits_with_one(monkeypatch, capsys):
    from vitrail.cli import main
    from vitrail.errors import UserError

    def fail(arguments):
        raise UserError("this came;\nwanted that; do so")

    monkeypatch.setattr(main, "run", fail)
    with pytest.raises(SystemExit) as ended:
        main.main([])
    assert (
        ended.value.code == "error: this came; wanted that; do so"
    )  # sys.exit prints it, with code 1


def test_a_closed_pipe_ends_the_command_silently_with_the_shells_code():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "vitrail", "models", "--json"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize("kind", [BrokenPipeError, RuntimeError, FileNotFoundError])
def test_a_bug_keeps_its_traceback(monkeypatch, kind):
    def fail(arguments):
        raise kind("a bug")

    monkeypatch.setattr(main, "run", fail)
    with pytest.raises(kind):
        main.main([])


TORCH = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 12000000000000 bytes."


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError(TORCH)])
def test_running_out_of_memory_is_reported_in_one_line(monkeypatch, error):
    def fail(arguments):
        raise error

    monkeypatch.setattr(main, "run", fail)
    monkeypatch.setattr(main, "machine_is_shared", lambda: False)
    for arguments, advice in (
        ([], "close other programs"),
        (["evaluate"], "close other programs, or lower --batch"),
        (["train"], "close other programs, or lower --train.batch or --vit.width"),
    ):
        with pytest.raises(SystemExit, match=f"^error: out of memory; {advice}$"):
            main.main(arguments)


@pytest.mark.slow
def test_the_wheel_runs_outside_the_checkout(tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [
        *pip,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("vitrail-*.whl")
    target = tmp_path / "site"
    subprocess.run([*pip, "install", "--no-deps", "--target", str(target), str(wheel)], check=True)
    assert (target / "vitrail" / "py.typed").is_file()
    environment = {**os.environ, "PYTHONPATH": str(target)}
    code = "import vitrail; print(vitrail.__file__); vitrail.ViT(vitrail.preset('Pico/2'))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stdout.startswith(str(target)), done.stderr
    script = subprocess.run(
        [sys.executable, str(target / "bin" / "vitrail"), "models", "--json"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert json.loads(script.stdout), script.stderr


@pytest.mark.parametrize("busy, shared", [(0, False), (6, False), (15, True), (40, True)])
def test_a_machine_with_more_than_half_a_core_busy_is_shared(monkeypatch, busy, shared):
    readings = iter([[0] * 8, [busy, 0, 0, 40 - busy, 0, 0, 0, 0]])  # ticks of two cores
    monkeypatch.setattr(main.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(main, "cpu_times", lambda: next(readings))
    assert main.machine_is_shared(seconds=0) is shared


@pytest.mark.parametrize("own", [-5, 0, 5])
def test_programs_of_lower_priority_do_not_share_a_machine(monkeypatch, own):
    readings = iter([[0] * 8, [0, 40, 0, 0, 0, 0, 0, 0]])
    monkeypatch.setattr(main.os, "nice", lambda increment: own)
    monkeypatch.setattr(main, "cpu_times", lambda: next(readings))
    assert main.machine_is_shared(seconds=0) is (own > 0)


def test_a_machine_without_proc_counts_as_not_shared(monkeypatch):
    def missing():
        raise FileNotFoundError

    monkeypatch.setattr(main, "cpu_times", missing)
    assert not main.machine_is_shared(seconds=0)


def test_a_closed_pipe_is_recognised_without_poll(monkeypatch):
    """As on Windows, which has neither `select.poll` nor SIGPIPE."""
    reader, writer = os.pipe()
    monkeypatch.delattr(main.select, "poll")
    assert main.is_closed_pipe(writer)
    with open(os.devnull, "w") as file:
        assert not main.is_closed_pipe(file.fileno())
    os.close(reader)
    os.close(writer)


def test_the_command_runs_without_poll_sigpipe_and_proc():
    """Hidden as on Windows and macOS; the reader of the pipe has ended."""
    code = """if True:
        import builtins, select, signal, sys
        del select.poll, signal.SIGPIPE
        opened = builtins.open
        def hide_proc(path, *rest, **options):
            if str(path).startswith("/proc"):
                raise FileNotFoundError(path)
            return opened(path, *rest, **options)
        builtins.open = hide_proc
        from vitrail.cli import main
        assert not main.machine_is_shared()
        main.main(["models", "--json"])
    """
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (main.EXIT_SIGPIPE, b"")
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == 0 and json.loads(done.stdout)


@pytest.mark.parametrize("verb", main.VERBS)
def test_help_shows_no_python_values(capsys, verb):
    code, printed, _ = call(capsys, verb, "--help")
    assert code == 0 and verb in printed
    assert not {"None", "False", "True"} & set(re.findall(r"\w+", printed))


def test_the_list_of_verbs_shows_one_line_for_each():
    printed = vitrail("--help", env={**os.environ, "COLUMNS": "120"}).stdout
    lines = [line for line in printed.splitlines() if "•" in line]
    assert [line.split()[2] for line in lines] == list(main.VERBS)
    assert all(line.rstrip(" │").endswith(".") for line in lines)
