"""The fixtures of runs and of exports serve here too."""

from tests.exporting.traces import trace_once
from tests.run.conftest import photos

__all__ = ["photos", "trace_once"]
