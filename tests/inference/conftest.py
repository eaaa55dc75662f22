"""The fixtures of runs serve here too."""

from tests.run.conftest import photos

__all__ = ["photos"]
