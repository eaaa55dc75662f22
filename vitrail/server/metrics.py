"""Counters and histograms of a server, for Prometheus."""

import os

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector

SHARED_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # in which several workers add up their numbers
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
IMAGES = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """All that `/metrics` shows."""

    def __init__(self) -> None:
        own = self.registry = CollectorRegistry()
        self.requests = Counter(
            "vitrail_requests", "Answered requests", ["endpoint", "status"], registry=own
        )
        self.request_seconds = Histogram(
            "vitrail_request_seconds",
            "Time of a request, from its headers to its answer",
            ["endpoint"],
            buckets=SECONDS,
            registry=own,
        )
        self.batch_images = Histogram(
            "vitrail_batch_images", "Images in a forward pass", buckets=IMAGES, registry=own
        )
        self.batch_seconds = Histogram(
            "vitrail_batch_seconds", "Time of a forward pass", buckets=SECONDS, registry=own
        )
        self.decoding_seconds = Histogram(
            "vitrail_decoding_seconds",
            "Time to decode and preprocess an image",
            buckets=SECONDS,
            registry=own,
        )
        self.queued = Gauge(
            "vitrail_queued_images",
            "Images accepted and not yet answered",
            registry=own,
            multiprocess_mode="livesum",
        )
        self.reloads = Counter("vitrail_reloads", "Reloads of the model", ["result"], registry=own)

    def observe_batch(self, images: int, seconds: float) -> None:
        self.batch_images.observe(images)
        self.batch_seconds.observe(seconds)

    def observe_decoding(self, seconds: float) -> None:
        self.decoding_seconds.observe(seconds)

    def observe_request(self, endpoint: str, status: int, seconds: float) -> None:
        self.requests.labels(endpoint, str(status)).inc()
        self.request_seconds.labels(endpoint).observe(seconds)

    def render(self) -> bytes:
        """The numbers of this process, or of all workers, in Prometheus' text format."""
        registry = self.registry
        if SHARED_FOLDER in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        system = CollectorRegistry()
        ProcessCollector(registry=system)
        PlatformCollector(registry=system)
        return generate_latest(registry) + generate_latest(system)
