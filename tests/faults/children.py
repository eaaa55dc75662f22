"""Processes that may die: each is forked from one that has imported everything already."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from json import dumps, loads
from pathlib import Path
from typing import Any

from vitrail.cli.main import main

PRELOAD = [  # all that a run imports on its way
    *("pytest", "typeguard", "vitrail.cli.resume", "vitrail.cli.train"),
    *("vitrail.data.sources.builtin", "vitrail.data.sources.folder", "tests.faults.fuzz"),
]
PATIENCE = 120  # seconds after which a child counts as hung

Harm = Callable[[], None]  # something that goes wrong in a child; module level, to be sent there


@dataclass(frozen=True)
class Done:
    code: int  # as a shell sees it, and minus the number of the signal that ended it
    told: str  # on stderr
    printed: str  # on stdout

    @property
    def line(self) -> str:
        return (self.told.strip().splitlines() or [""])[-1]


class Child:
    def __init__(self, process: Any, said: tuple[Path, Path]):
        self.process, self.said = process, said
        process.start()

    def done(self) -> Done:
        """Waits for its end."""
        self.process.join(PATIENCE)
        hung = self.process.exitcode is None
        if hung:
            self.process.kill()
            self.process.join()
        code = self.process.exitcode
        self.process.close()
        printed, told = (path.read_text(errors="replace") for path in self.said)
        assert not hung, f"hung for {PATIENCE} seconds after saying: {told[-2000:]}"
        return Done(code, told, printed)


class Nursery:
    """Starts children; what they say and answer lies in `folder`."""

    def __init__(self, folder: Path, method: str = "forkserver"):
        self.folder, self.count = folder, 0
        self.context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            self.context.set_forkserver_preload(PRELOAD)

    def start(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        cwd: Path | None = None,
        harms: Sequence[Harm] = (),
    ) -> Child:
        self.count += 1
        name = f"{os.getpid()}-{self.count}"
        said = self.folder / f"{name}.out", self.folder / f"{name}.err"
        for path in said:
            path.touch()
        task = (function, arguments, tuple(harms), cwd or self.folder, said, self.folder / "cache")
        return Child(self.context.Process(target=live, args=task), said)

    def vitrail(self, *arguments: Any, cwd: Path | None = None, harms: Sequence[Harm] = ()) -> Done:
        """A command line, as the shell would run it."""
        words = [str(argument) for argument in arguments]
        return self.start(main, words, cwd=cwd, harms=harms).done()

    def ask(self, function: Callable[..., Any], *arguments: Any, harms: Sequence[Harm] = ()) -> Any:
        """What a function returns in a child, as JSON; its failure is an AssertionError here."""
        answer = self.folder / f"{os.getpid()}-{self.count + 1}.json"
        done = self.start(into, answer, function, arguments, harms=harms).done()
        assert done.code == 0, done.told[-4000:]
        return loads(answer.read_text())


def into(answer: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    answer.write_text(dumps(function(*arguments)))


def live(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    harms: tuple[Harm, ...],
    cwd: Path,
    said: tuple[Path, Path],
    cache: Path,
) -> None:
    """The life of a child."""
    for number, path in enumerate(said, 1):
        handle = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(handle, number)
        os.close(handle)
    os.chdir(cwd)
    os.environ["VITRAIL_CACHE"] = str(cache)
    for harm in harms:
        harm()
    function(*arguments)
