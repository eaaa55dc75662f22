"""The command `vitrail`: finds the verb, and tells mistakes in one line."""

import atexit
import io
import logging
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from types import FrameType
from typing import Any

import vitrail
from vitrail import files
from vitrail.errors import UserError

STARTED = time.monotonic()  # `--minutes` count from here

# In the order of `--help`; each is a function of that name in `vitrail.cli.<verb>`.
VERBS = (
    "demo",
    "check",
    "train",
    "resume",
    "evaluate",
    "predict",
    "explain",
    "head",
    "search",
    "report",
    "compare",
    "convert",
    "models",
    "datasets",
)
LONG = ("demo", "train", "resume", "search")


def main(arguments: list[str] | None = None) -> None:
    """What the shell calls; ends the process with the exit code that was promised."""
    arguments = sys.argv[1:] if arguments is None else arguments
    signal.signal(signal.SIGTERM, terminated)
    for stream in (sys.stdin, sys.stdout):  # names of files are bytes, and not always text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="surrogateescape")
    rank = os.environ.get("RANK", "0")  # set by torchrun: the first of its processes speaks for all
    logging.basicConfig(format="%(message)s", level="WARNING" if rank == "0" else "ERROR")
    if rank == "0":  # what other libraries only mention is not for the user
        logging.getLogger("vitrail").setLevel("INFO")
    if arguments and arguments[0] in LONG and machine_is_shared():
        # threads that wait for each other sleep instead of spinning; read when torch is imported
        os.environ.setdefault("GOMP_SPINCOUNT", "0")
    try:
        run(arguments)
    except UserError as error:
        # torchrun ends all processes when one ended; who is ending already does so in silence
        atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)
        where = "" if rank == "0" else f" at rank {rank}"
        sys.exit(f"error{where}: {' '.join(str(error).split())}")
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        if not any(unread(number) for number in (1, 2)):
            raise
        for number in (1, 2):  # nothing is left that Python could not write when it ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        sys.exit(128 + signal.SIGPIPE)
    except (MemoryError, RuntimeError) as error:  # torch has no kind of its own for it on a CPU
        if isinstance(error, RuntimeError) and not re.search("allocate mem|out of mem", str(error)):
            raise
        sys.exit(
            "error: no memory is left; close other programs, or lower train.batch or vit.width"
        )
    except OSError as error:
        if error.errno not in files.ADVICE:
            raise
        where = f" with {error.filename}" if error.filename else ""
        sys.exit(f"error: cannot go on{where}: {files.refusal(error)}")


def run(arguments: list[str]) -> None:
    """Carries out one command line, to the last byte of what it prints."""
    try:
        carry_out(arguments)
    finally:
        if sys.stdout is not None:  # closed by who called
            sys.stdout.flush()


def unread(number: int) -> bool:
    """Whether this stream is a pipe that nobody reads any more, as in `vitrail models | head`."""
    watch = select.poll()
    watch.register(number, select.POLLOUT)
    gone = select.POLLERR | select.POLLHUP  # systems differ in what they call it
    return any(event & gone for _, event in watch.poll(0))


def carry_out(arguments: list[str]) -> None:
    import tyro

    if arguments[:1] == ["--version"]:
        print(f"vitrail {vitrail.__version__}")
        return
    wanted = [verb for verb in VERBS if verb in arguments[:1]] or VERBS  # one verb's imports only
    tyro.extras.subcommand_cli_from_dict(
        {verb: verb_function(verb) for verb in wanted},
        prog="vitrail",
        description=vitrail.__doc__,
        args=arguments or ["--help"],
    )


def machine_is_shared(seconds: float = 0.1) -> bool:
    """Whether other programs keep more than half a core busy now.

    Among them spinning threads are 2 to 40 times slower than sleeping ones; alone 1.6 times faster.
    """
    try:
        before = cpu_times()
        time.sleep(seconds)
        spent = [after - then for after, then in zip(cpu_times(), before, strict=True)]
    except OSError:  # no /proc: not Linux
        return False
    idle = spent[3] + spent[4]  # idle, and waiting for a disk
    return (sum(spent) - idle) * (os.cpu_count() or 1) > 0.5 * sum(spent)


def cpu_times() -> list[int]:
    """Ticks of all cores together: user, nice, system, idle, iowait, irq, softirq, steal."""
    with open("/proc/stat") as file:
        return [int(ticks) for ticks in file.readline().split()[1:9]]


def verb_function(verb: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module(f"vitrail.cli.{verb}"), verb)
    return function


def terminated(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)
