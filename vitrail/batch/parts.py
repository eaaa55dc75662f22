"""Computes one part of a job and stores it: the same in this process and in a worker of Ray."""

import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from vitrail.batch.folder import PartFolder
from vitrail.batch.manifest import Manifest, part_name
from vitrail.batch.rows import Array, RowMaker
from vitrail.data.source import Source
from vitrail.errors import OutOfResources, UserError

BATCH = 32  # images in a forward pass
BATCHES_AHEAD = 2  # that are decoded while the model computes

Task = TypeVar("Task")
Result = TypeVar("Result")


class PartWriter:
    """A model and a data set: writes any part of a job."""

    def __init__(
        self, manifest: Manifest, folder: PartFolder, source: Source, maker: RowMaker, threads: int
    ):
        self.manifest, self.folder, self.source = manifest, folder, source
        self.maker, self.threads = maker, threads

    def write(self, number: int) -> int:
        """Computes and stores a part, unless it exists; returns how many images have no result.

        It may exist because another process of the same job wrote it, or because a worker died
        after it was written.
        """
        name = part_name(number)
        if self.folder.exists(name):
            return count_errors(self.folder, name)
        items = self.manifest.rows(number)
        loaded = map_ahead(self.load, items, self.threads, BATCHES_AHEAD * BATCH)
        results: list[Any] = []
        while batch := list(islice(loaded, BATCH)):
            results += self.compute(batch)
        ids = [self.source.ids[item].encode(errors="backslashreplace").decode() for item in items]
        table = self.maker.make_table(ids, results)
        self.folder.write(name, encode_table(table))
        return sum(isinstance(one, UserError) for one in results)

    def load(self, item: int) -> Array | UserError:
        try:
            return self.maker.load(self.source[item].content)
        except OutOfResources:  # the image may be intact, so it gets no row
            raise
        except UserError as error:
            return error

    def compute(self, batch: list[Array | UserError]) -> list[Any]:
        """A result for each image, or the error that prevented it."""
        readable = [x for x in batch if not isinstance(x, UserError)]
        results = iter(self.maker.compute(np.stack(readable)) if readable else ())
        return [x if isinstance(x, UserError) else next(results) for x in batch]


def map_ahead(
    function: Callable[[Task], Result], tasks: Iterable[Task], threads: int, ahead: int
) -> Iterator[Result]:
    """The results in order, computed by threads up to `ahead` of what was taken."""
    if threads < 2:
        yield from map(function, tasks)
        return
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[Future[Result]] = deque()
        try:
            for task in tasks:
                waiting.append(pool.submit(function, task))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def encode_table(table: Any) -> bytes:
    """A Parquet file; features are stored plain, as neither codecs nor dictionaries shrink them."""
    import pyarrow.parquet

    stream = io.BytesIO()
    plain = "features" in table.column_names
    pyarrow.parquet.write_table(
        table,
        stream,
        compression="none" if plain else "zstd",
        use_dictionary=[] if plain else True,
    )
    return stream.getvalue()


def count_errors(folder: PartFolder, name: str) -> int:
    """The rows of a stored part that have an error, from its footer."""
    import pyarrow

    try:
        with open_part(folder, name) as part:
            groups = [part.metadata.row_group(n) for n in range(part.metadata.num_row_groups)]
            errors = [one.column(one.num_columns - 1) for one in groups]  # the last column
            nulls = [column.statistics.null_count for column in errors]
            return int(part.metadata.num_rows - sum(nulls))
    except UserError:  # of a store that fails: the part may be intact
        raise
    except (pyarrow.ArrowException, OSError, ValueError, AttributeError) as error:
        raise UserError(f"{folder}/{name} is damaged: {error!s:.100}; delete it") from error


def open_part(folder: PartFolder, name: str) -> Any:
    """A stored part; its columns are read when they are needed."""
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(folder.open(name), memory_map=True)
