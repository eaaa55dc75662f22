"""The command `vitrail`: runs a verb, and reports mistakes in one line."""

import atexit
import codecs
import io
import logging
import os
import re
import select
import signal
import stat
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import vitrail
from vitrail import files
from vitrail.cli.messages import flags_of, translate  # here: an error may leave no file handle
from vitrail.errors import UserError
from vitrail.signals import exit_on_signal, handle_ending_signals

STARTED = time.monotonic()  # `--minutes` count from here

# In the order of `--help`; each is a function of that name in `vitrail.cli.<verb>`.
VERBS = (
    "demo",
    "check",
    "shard",
    "plan",
    "train",
    "pretrain",
    "resume",
    "evaluate",
    "predict",
    "features",
    "similar",
    "explain",
    "serve",
    "head",
    "search",
    "report",
    "compare",
    "convert",
    "export",
    "verify",
    "calibrate",
    "monitor",
    "models",
    "datasets",
    "doctor",
)
TRAINING_VERBS = ("demo", "train", "pretrain", "resume", "search")
BUSY_CORES = 0.5  # other programs that use more than this share the machine
OUTPUT_ERRORS = "vitrail-output"  # the name of an error handler of codecs
EXIT_SIGPIPE = 128 + 13  # as shells report SIGPIPE; Windows does not define the signal
USAGE = "`vitrail VERB --help` lists the options of a verb, `vitrail --version` the version."


def main(arguments: list[str] | None = None) -> None:
    """The entry point of the shell command; its exit codes are listed in the documentation."""
    arguments = sys.argv[1:] if arguments is None else arguments
    interrupt = signal.getsignal(signal.SIGINT)  # Ctrl-C stays a KeyboardInterrupt
    handle_ending_signals(exit_on_signal)
    signal.signal(signal.SIGINT, interrupt)
    if sys.stderr is None:  # the caller closed it; libraries write to it without asking
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    codecs.register_error(OUTPUT_ERRORS, escape_for_output)
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, OUTPUT_ERRORS)):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    rank = os.environ.get("RANK", "0")  # set by torchrun; only rank 0 logs
    configure_logging(arguments, leader=rank == "0")
    if arguments and arguments[0] in TRAINING_VERBS and machine_is_shared():
        # waiting threads sleep instead of spinning; torch reads this when it is imported
        os.environ.setdefault("GOMP_SPINCOUNT", "0")
    try:
        run(arguments)
    except UserError as error:
        # torchrun sends SIGTERM to all processes when one ends; don't report that a second time
        atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)
        sys.exit(error_line(str(error), arguments, rank))
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        if not any(is_closed_pipe(number) for number in (1, 2)):
            raise
        for number in (1, 2):  # Python flushes both streams at exit, which must not fail
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
        sys.exit(EXIT_SIGPIPE)
    except (MemoryError, RuntimeError) as error:  # torch on a CPU raises a plain RuntimeError
        if isinstance(error, RuntimeError) and not re.search("allocate mem|out of mem", str(error)):
            raise
        sys.exit(error_line(describe_out_of_memory(arguments), arguments, rank))
    except OSError as error:
        if error.errno not in files.ADVICE:
            raise
        where = f"{error.filename}: " if error.filename else ""
        sys.exit(error_line(f"{where}{files.describe_os_error(error)}", arguments, rank))


def escape_for_output(error: UnicodeError) -> tuple[str | bytes, int]:
    """Prints the bytes of file names unchanged, and "\\u017c" for what the encoding lacks.

    File names are bytes, not always valid text; on Windows, few pipes use UTF-8.
    """
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.backslashreplace_errors(error)


def configure_logging(arguments: list[str], *, leader: bool) -> None:
    """Shows what Vitrail reports and what other libraries warn of, on the leader only."""
    handler = logging.StreamHandler()
    handler.setFormatter(FlagFormatter(arguments))
    logging.basicConfig(handlers=[handler], level="WARNING" if leader else "ERROR")
    if leader:
        logging.getLogger("vitrail").setLevel("INFO")


class FlagFormatter(logging.Formatter):
    """Writes settings and arguments as flags, as `error_line` does."""

    def __init__(self, arguments: list[str]):
        super().__init__("%(message)s")
        self.arguments = arguments

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return with_flags(text, self.arguments) if record.name.startswith("vitrail") else text


def error_line(message: str, arguments: list[str], rank: str = "0") -> str:
    """One line for stderr, with the flags of the verb for the names that Python callers use."""
    where = "" if rank == "0" else f" on rank {rank}"
    return f"error{where}: {' '.join(with_flags(message, arguments).split())}"


def with_flags(message: str, arguments: list[str]) -> str:
    """The message with settings and arguments written as flags of the verb."""
    return translate(message, verb_flags(arguments))


def verb_flags(arguments: list[str]) -> dict[str, str]:
    """What each argument and setting of the verb is called on the command line."""
    verb = next((verb for verb in VERBS if verb in arguments[:1]), None)
    return flags_of(verb_function(verb)) if verb else {}


def describe_out_of_memory(arguments: list[str]) -> str:
    flags = verb_flags(arguments)
    if "train.batch" in flags:
        return "out of memory; close other programs, or lower `train.batch` or `vit.width`"
    if "batch" in flags:
        return "out of memory; close other programs, or lower `batch`"
    return "out of memory; close other programs"


def run(arguments: list[str]) -> None:
    """Runs one command line and flushes what it printed."""
    try:
        run_verb(arguments)
    finally:
        if sys.stdout is not None:  # None if the caller closed it
            sys.stdout.flush()


def is_closed_pipe(number: int) -> bool:
    """Whether this stream is a pipe whose reader has ended, as in `vitrail models | head`."""
    if not hasattr(select, "poll"):  # Windows: a broken pipe was raised, so any pipe will do
        return stat.S_ISFIFO(os.fstat(number).st_mode)
    poll = select.poll()
    poll.register(number, select.POLLOUT)
    closed = select.POLLERR | select.POLLHUP  # which of the two depends on the system
    return any(event & closed for _, event in poll.poll(0))


def run_verb(arguments: list[str]) -> None:
    import tyro

    if arguments[:1] == ["--version"]:
        print(f"vitrail {vitrail.__version__}")
        return
    chosen = [verb for verb in VERBS if verb in arguments[:1]]
    verbs = {verb: verb_function(verb) for verb in chosen} or {
        verb: summary_of(verb) for verb in VERBS
    }
    tyro.extras.subcommand_cli_from_dict(
        verbs,
        prog="vitrail",
        description=f"{vitrail.__doc__}\n\n{USAGE}",
        args=arguments or ["--help"],
        config=(tyro.conf.DisallowNone,),  # None means "not set", which nobody types
    )


def verb_function(verb: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(import_module(f"vitrail.cli.{verb}"), verb)
    return function


def summary_of(verb: str) -> Callable[[], None]:
    """Stands for a verb in the list of all verbs, with the first line of its help."""

    def summary() -> None: ...

    summary.__doc__ = (verb_function(verb).__doc__ or "").partition("\n")[0]
    return summary


def machine_is_shared(seconds: float = 0.1) -> bool:
    """Whether other programs use more than half a core now.

    Beside them, spinning threads are 2 to 40 times slower than sleeping ones; alone, 1.6 times
    faster. Programs of lower priority do not count, as they give way.
    """
    try:
        before = cpu_times()
        time.sleep(seconds)
        spent = [now - then for now, then in zip(cpu_times(), before, strict=True)]
    except OSError:  # only Linux has /proc/stat
        return False
    idle = spent[3] + spent[4]  # idle and iowait
    if os.nice(0) <= 0:
        idle += spent[1]  # nice
    return (sum(spent) - idle) * (os.cpu_count() or 1) > BUSY_CORES * sum(spent)


def cpu_times() -> list[int]:
    """Ticks summed over all cores: user, nice, system, idle, iowait, irq, softirq, steal."""
    with open("/proc/stat", encoding="utf-8") as file:
        return [int(ticks) for ticks in file.readline().split()[1:9]]
