"""Batches without a timer: a free model thread takes all images that wait, up to a limit.

Decoding runs in threads of its own. An idle server computes an image as soon as it is decoded, with
all cores. Under load, two model threads ("lanes") compute a batch each with half of the cores: no
core then waits for another one at the end of every layer, while it decodes or sends answers.
"""

import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from vitrail.server.admission import Admission
from vitrail.server.metrics import Metrics
from vitrail.server.model import WHOLE, Array, ImageOptions, ServedModel


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
    """Images in, logits out."""

    def __init__(self, *, limit: int, threads: int, admission: Admission, metrics: Metrics):
        self.limit, self.threads, self.metrics = limit, threads, metrics
        self.admission, self.lanes = admission, admission.lanes
        self.loop = asyncio.get_running_loop()
        self.waiting: deque[Job] = deque()
        self.condition = threading.Condition()
        self.stopped = False
        self.computing = 0  # lanes with a batch
        # each decoding thread is one of `threads`: torch must not start more inside it
        self.decoders = ThreadPoolExecutor(
            threads, "decode", initializer=limit_torch_threads, initargs=(1,)
        )
        for _ in range(self.lanes):
            threading.Thread(target=self._run, name="model", daemon=True).start()

    def stop(self) -> None:
        """Ends the threads; nothing may be waiting."""
        with self.condition:
            self.stopped = True
            self.condition.notify_all()
        self.decoders.shutdown(wait=False, cancel_futures=True)

    async def compute(
        self, model: ServedModel, body: bytes, options: ImageOptions = WHOLE, first: bool = False
    ) -> tuple[Array, Array]:
        """The model's input and logits for one image; a cancelled caller leaves the queue."""
        job = Job(model, body, options, self.loop.create_future(), first)
        with self.admission.count_image():
            self.decoders.submit(self._decode, job)
            return await job.future

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
            with self.condition:
                self.computing -= 1
                self.metrics.observe_batch(len(batch), time.monotonic() - start)
                self.admission.measure(len(batch), alone and self.lanes > 1)
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
