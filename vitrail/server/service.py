"""What all requests share: the current model, its queue, and whether the server is draining."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from vitrail.errors import UserError
from vitrail.exporting.engine import thread_count
from vitrail.server.admission import Admission
from vitrail.server.batching import Batcher
from vitrail.server.config import ServeConfig
from vitrail.server.examples import read_examples
from vitrail.server.explaining import Explainer
from vitrail.server.metrics import Metrics
from vitrail.server.model import LANES, ServedModel

log = logging.getLogger(__name__)

CPU_BATCH, GPU_BATCH = 4, 32  # on a CPU, larger batches only add latency
PROBE_SECONDS = 5.0  # for the readiness probe to be answered
PROBE_VALID = 1.0  # seconds that the result of a probe serves other probes


class Service:
    """The state of one server process; all methods run on its event loop."""

    def __init__(self, config: ServeConfig, model: ServedModel, load: Callable[[], ServedModel]):
        self.config, self.model, self.load = config, model, load
        self.metrics = Metrics()
        self.draining = False
        self.probed_at, self.probe_task = 0.0, None  # type: float, asyncio.Task[float] | None
        self.reloading = asyncio.Lock()
        self.tasks: set[asyncio.Task[None]] = set()
        self.examples: list[dict[str, Any]] = []
        threads = thread_count()
        self.admission = Admission(config.max_wait, model.lanes)
        self.batcher = Batcher(
            limit=config.batch or (CPU_BATCH if model.on_cpu else GPU_BATCH),
            threads=threads,
            admission=self.admission,
            metrics=self.metrics,
        )
        self.explainer = Explainer(threads=max(1, threads // 2))
        self.metrics.queued.set_function(lambda: self.admission.images)

    async def warm_up(self) -> None:
        """Computes images in all lanes, first for their slow first pass, then to time the next."""
        for images in (LANES, 2 * LANES):
            start = time.monotonic()
            await asyncio.gather(
                *(self.batcher.compute(self.model, self.model.probe) for _ in range(images))
            )
            self.admission.seconds = (time.monotonic() - start) / images

    def start_examples(self) -> None:
        """Reads examples in the background: a large data set takes seconds to open."""

        async def read() -> None:
            loop = asyncio.get_running_loop()
            self.examples = await loop.run_in_executor(
                None, read_examples, self.model, self.config.examples
            )

        self.run_in_background(read())

    async def probe(self) -> float:
        """Seconds in which the stored image went through decoding, queue and model."""
        if self.probe_task is None or (
            self.probe_task.done() and time.monotonic() - self.probed_at > PROBE_VALID
        ):
            self.probe_task = asyncio.create_task(self._probe())
        return await asyncio.shield(self.probe_task)

    async def _probe(self) -> float:
        start = time.monotonic()
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                _, row = await self.batcher.compute(self.model, self.model.probe, first=True)
            self.model.answer(row, top=1)
        finally:
            self.probed_at = time.monotonic()
        return self.probed_at - start

    def start_reload(self) -> None:
        """Reloads in the background."""
        self.run_in_background(self.reload())

    def run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)  # the loop itself keeps only weak references
        task.add_done_callback(self.tasks.discard)

    async def reload(self) -> None:
        """Replaces the model by what its path holds now; keeps it if that does not work."""
        async with self.reloading:
            before = self.model.sha256
            try:
                model = await asyncio.get_running_loop().run_in_executor(None, self.load)
            except Exception as error:  # the server goes on with the model that works
                reason = str(error) if isinstance(error, UserError) else repr(error)
                self.metrics.reloads.labels("failed").inc()
                log.error(f"reload failed, {before[:12]} stays in use: {reason}")
                return
            self.model = model
            self.explainer.forget()
            self.metrics.reloads.labels("done").inc()
            same = " (the same file)" if model.sha256 == before else f" instead of {before[:12]}"
            log.info(f"reloaded {model.path}: serving {model.sha256[:12]}{same}")

    def stop(self) -> None:
        self.batcher.stop()
        self.explainer.stop()

    def describe(self) -> dict[str, Any]:
        """The model's card, and the limits of the server."""
        limits = {
            "bytes": self.config.max_bytes,
            "pixels": self.config.max_pixels,
            "wait_seconds": self.config.max_wait,
        }
        return {**self.model.describe(), "limits": limits}
