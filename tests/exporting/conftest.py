"""Equal models are traced once."""

from tests.exporting.traces import trace_once

__all__ = ["trace_once"]
