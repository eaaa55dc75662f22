"""A bar on stderr for long waits; nothing is drawn unless a terminal watches."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

PATIENCE = 1.0  # seconds before a bar appears


@contextmanager
def bar(
    words: str, total: int | None, *, show: bool = True, sizes: bool = False
) -> Iterator[Callable[[int], None]]:
    """Yields what to call with each number of items, or of bytes with `sizes`, that is done."""
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

    counted = DownloadColumn() if sizes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), counted, TimeRemainingColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    task, start = progress.add_task(words, total=total), time.monotonic()

    def advance(count: int) -> None:
        progress.advance(task, count)
        if not progress.live.is_started and time.monotonic() - start > PATIENCE:
            progress.start()

    try:
        yield advance
    finally:
        progress.stop()
