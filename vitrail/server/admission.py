"""Admission by predicted wait: how many images are ahead of a new one, and how fast they leave."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SMOOTHING = 0.98  # weight of the past, per image, in the average time: lanes finish in pairs
OUTLIER = 4.0  # times the average: one huge image does not make the server refuse others
READING_SECONDS = 1.0  # a request whose body takes longer no longer counts as queued
MAX_RETRY = 60  # seconds


class Refusal(Exception):
    """The request would wait too long."""

    def __init__(self, wait: float):
        self.retry_after = min(MAX_RETRY, max(1, math.ceil(wait)))
        super().__init__(f"the server is busy; retry in {self.retry_after} s")


class Admission:
    """Who may enter the queue of a model that computes `lanes` batches at the same time."""

    def __init__(self, max_wait: float, lanes: int, clock: Callable[[], float] = time.monotonic):
        self.max_wait, self.lanes, self.clock = max_wait, lanes, clock
        self.images = 0  # accepted and not yet answered
        self.reading: dict[object, float] = {}  # bodies that are arriving: since when
        self.seconds = 0.0  # average time of an image while there is work
        self.busy_since = 0.0
        self.last_done = 0.0

    def count_ahead(self) -> int:
        """Images before a new one: accepted, or in requests that are arriving."""
        recent = self.clock() - READING_SECONDS
        return self.images + sum(since > recent for since in self.reading.values())

    def admit(self) -> None:
        """Raises `Refusal` if a new request would wait too long; a free lane accepts any."""
        ahead = self.count_ahead()
        wait = ahead * self.seconds
        if ahead >= self.lanes and wait > self.max_wait:
            raise Refusal(wait - self.max_wait)

    @contextmanager
    def count_reading(self) -> Iterator[None]:
        """Counts a request while its body arrives."""
        key = object()
        self.reading[key] = self.clock()
        try:
            yield
        finally:
            del self.reading[key]

    @contextmanager
    def count_image(self) -> Iterator[None]:
        """Counts an image until it is answered."""
        if self.images == 0:
            self.busy_since = self.clock()
        self.images += 1
        try:
            yield
        finally:
            self.images -= 1

    def measure(self, images: int, alone: bool = False) -> None:
        """Updates the average time of an image when a batch is done, by the time since the last.

        A batch that had all threads to itself says little about those that share them.
        """
        now = self.clock()
        seconds = (now - max(self.last_done, self.busy_since)) / images
        self.last_done = now
        if not alone:
            past = SMOOTHING**images
            self.seconds = past * self.seconds + (1 - past) * min(seconds, OUTLIER * self.seconds)
