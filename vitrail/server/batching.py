"""Batches without a timer: a free model thread takes all images that wait, up to a limit.

Decoding runs in threads of its own. An idle server computes an image as soon as it is decoded, with
all cores. Under load, two model threads ("lanes") compute a batch each with half of the cores: no
core then waits for another one at the end of every layer, while it decodes or sends answers.
"""

import asyncio
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from vitrail.server.metrics import Metrics
from vitrail.server.model import WHOLE, Array, ImageOptions, ServedModel

SMOOTHING = (
    0.98  # weight of the past, per image, in the average time of an image; lanes finish in pairs
)
OUTLIER = 4.0  # times the average: one huge image does not make the server refuse others
READING_SECONDS = 1.0  # a request whose body takes longer no longer counts as queued
MAX_RETRY = 60  # seconds


class Refusal(Exception):
    """The request would wait too long."""

    def __init__(self, wait: float):
        self.retry_after = min(MAX_RETRY, max(1, math.ceil(wait)))
        super().__init__(f"the server is busy; retry in {self.retry_after} s")


@dataclass(eq=False)
class Job:
    """One image on its way through decoding and the model."""

    model: ServedModel
    body: bytes = field(repr=False)
    options: ImageOptions
    future: "asyncio.Future[tuple[Array, Array]]"  # the model's input and its logits
    first: bool = False  # before all others: the readiness probe
    x: Array = field(init=False, repr=False)


class Batcher:
    """Images in, logits out; predicts how long a new image would wait."""

    def __init__(self, *, limit: int, max_wait: float, threads: int, lanes: int, metrics: Metrics):
        self.limit, self.max_wait, self.metrics = limit, max_wait, metrics
        self.threads, self.lanes = threads, lanes
        self.loop = asyncio.get_running_loop()
        self.waiting: deque[Job] = deque()
        self.condition = threading.Condition()
        self.stopped = False
        self.computing = 0  # lanes with a batch
        self.images = 0  # accepted and not yet answered
        self.reading: dict[object, float] = {}  # bodies that are arriving: since when
        self.seconds = 0.0  # average time of an image while there is work
        self.busy_since = 0.0
        self.last_done = 0.0
        # each decoding thread is one of `threads`: torch must not start more inside it
        self.decoders = ThreadPoolExecutor(
            threads, "decode", initializer=limit_torch_threads, initargs=(1,)
        )
        for _ in range(lanes):
            threading.Thread(target=self._run, name="model", daemon=True).start()

    def stop(self) -> None:
        """Ends the threads; nothing may be waiting."""
        with self.condition:
            self.stopped = True
            self.condition.notify_all()
        self.decoders.shutdown(wait=False, cancel_futures=True)

    # --- admission, on the event loop -------------------------------------------------------------

    def predict_wait(self, images: int = 1) -> float:
        """Seconds until these images would be answered."""
        recent = time.monotonic() - READING_SECONDS
        arriving = sum(since > recent for since in self.reading.values())
        return (self.images + arriving + images) * self.seconds

    def admit(self, images: int = 1) -> None:
        """Raises `Refusal` if these images would wait too long; an idle server accepts any."""
        wait = self.predict_wait(images)
        if wait > self.max_wait and (self.images or self.reading):
            raise Refusal(wait - self.max_wait)

    @contextmanager
    def count_reading(self) -> Iterator[None]:
        """Counts a request while its body arrives."""
        key = object()
        self.reading[key] = time.monotonic()
        try:
            yield
        finally:
            del self.reading[key]

    # --- the way of an image ----------------------------------------------------------------------

    async def compute(
        self, model: ServedModel, body: bytes, options: ImageOptions = WHOLE, first: bool = False
    ) -> tuple[Array, Array]:
        """The model's input and logits for one image; a cancelled caller leaves the queue."""
        job = Job(model, body, options, self.loop.create_future(), first)
        if self.images == 0:
            self.busy_since = time.monotonic()
        self.images += 1
        try:
            self.decoders.submit(self._decode, job)
            return await job.future
        finally:
            self.images -= 1

    def _decode(self, job: Job) -> None:
        if job.future.cancelled():
            return
        start = time.monotonic()
        try:
            job.x = job.model.decode(job.body, job.options)
        except Exception as error:  # delivered to the caller, who knows what to answer
            self._deliver([(job, error)])
            return
        finally:
            job.body = b""
            self.metrics.observe_decoding(time.monotonic() - start)
        with self.condition:
            (self.waiting.appendleft if job.first else self.waiting.append)(job)
            self.condition.notify()

    def _run(self) -> None:
        while batch := self._take():
            alone = self.computing == 1 and not self.waiting
            limit_torch_threads(self.threads if alone else max(1, self.threads // self.lanes))
            start = time.monotonic()
            results: list[tuple[Job, Any]]
            try:
                rows = batch[0].model.logits([job.x for job in batch], alone)
                results = [(job, (job.x, row)) for job, row in zip(batch, rows, strict=True)]
            except Exception as error:  # delivered to the callers, who know what to answer
                results = [(job, error) for job in batch]
            self._measure(len(batch), start, alone and self.lanes > 1)
            self._deliver(results)

    def _take(self) -> list[Job]:
        """The images of one model that wait, up to the limit; none at the end."""
        with self.condition:
            while True:
                batch: list[Job] = []
                while self.waiting and len(batch) < self.limit:
                    if self.waiting[0].future.cancelled():
                        self.waiting.popleft()
                    elif batch and self.waiting[0].model is not batch[0].model:
                        break
                    else:
                        batch.append(self.waiting.popleft())
                if batch or self.stopped:
                    self.computing += 1
                    return batch
                self.condition.wait()

    def _measure(self, images: int, start: float, alone: bool = False) -> None:
        """Updates the average time of an image by the time since the batch before it.

        A batch that had all threads to itself says little about those that share them.
        """
        with self.condition:
            self.computing -= 1
            now = time.monotonic()
            self.metrics.observe_batch(images, now - start)
            seconds = (now - max(self.last_done, self.busy_since)) / images
            self.last_done = now
            if alone and self.seconds:
                return
            past = SMOOTHING**images if self.seconds else 0.0
            limit = OUTLIER * self.seconds or math.inf
            self.seconds = past * self.seconds + (1 - past) * min(seconds, limit)

    def _deliver(self, results: Sequence[tuple[Job, Any]]) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(set_results, results)


def set_results(results: Sequence[tuple[Job, Any]]) -> None:
    for job, result in results:
        if job.future.done():
            continue
        if isinstance(result, Exception):
            job.future.set_exception(result)
        else:
            job.future.set_result(result)


def limit_torch_threads(count: int) -> None:
    """Sets how many threads torch uses when this thread calls it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.get_num_threads()  # the first call in a thread would undo the next line
        torch.set_num_threads(count)
