"""Runs command lines of `vitrail` in one process, and reports the exit code of each as JSON.

Usage: run_commands.py RESULT, with a JSON list of command lines on stdin.
"""

import json
import multiprocessing
import os
import re
import select
import sys
import time
from functools import partial
from importlib import import_module
from unittest.mock import patch

import vitrail
from vitrail.cli import main as command

TRAINING = ("train", "resume")  # functions that write a report


def list_available() -> list[str]:
    """What this process can use of what Windows or macOS lack."""
    found = [name for name in ("fork", "getuid", "sched_getaffinity", "pread") if hasattr(os, name)]
    found += ["poll"] if hasattr(select, "poll") else []
    for name in ("fcntl", "resource", "pwd"):
        try:
            import_module(name)
            found.append(name)
        except ImportError:
            pass
    for path in ("/proc/meminfo", "/sys/fs", "/dev/shm"):
        try:
            os.close(os.open(path, os.O_RDONLY))
            found.append(path)
        except FileNotFoundError:
            assert not os.path.exists(path)
    return [*found, f"default {multiprocessing.get_context().get_start_method()}"]


def run(arguments: list[str]) -> int | str:
    """The exit code of a command line, or its error.

    "remove FILE" removes a file, and "without-report COMMAND ..." saves a few seconds.
    """
    if arguments[0] == "without-report":
        functions = {name: partial(getattr(vitrail, name), report=False) for name in TRAINING}
        with patch.multiple(vitrail, **functions):
            return run(arguments[1:])
    if arguments[0] == "remove":
        os.remove(arguments[1])
        return 0
    command.STARTED = time.monotonic()  # `--minutes` count from here
    try:
        command.main(arguments)
    except SystemExit as end:
        longer = re.search(r"too short .* try --minutes ([\d.]+)", str(end.code))
        if longer and arguments[0] == "demo":  # on a busy machine
            return run(["demo", "--minutes", longer[1], *arguments[3:]])
        return end.code if isinstance(end.code, int) else str(end.code)
    return 0


if __name__ == "__main__":
    available = list_available()
    codes = [run(arguments) for arguments in json.load(sys.stdin)]
    with open(sys.argv[1], "w", encoding="ascii") as file:
        json.dump({"available": available, "codes": codes}, file)
