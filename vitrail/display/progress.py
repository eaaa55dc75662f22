"""A progress bar on stderr for slow operations, drawn only on a terminal."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

DELAY = 1.0  # seconds before a bar appears, so that fast operations draw none


@contextmanager
def progress_bar(
    description: str, total: int | None, *, show: bool = True, in_bytes: bool = False
) -> Iterator[Callable[[int], None]]:
    """Yields a function that takes the number of items (or bytes) completed since the last call."""
    if not (show and sys.stderr.isatty()):
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    counter = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), counter, TimeRemainingColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    task, start = progress.add_task(description, total=total), time.monotonic()

    def advance(count: int) -> None:
        progress.advance(task, count)
        if not progress.live.is_started and time.monotonic() - start > DELAY:
            progress.start()

    try:
        yield advance
    finally:
        progress.stop()
