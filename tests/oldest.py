"""Prints the oldest versions that pyproject.toml allows, as a constraints file for pip.

`make test-oldest` installs them and runs the quick tests.
"""

import re
import tomllib
from pathlib import Path

DEVELOPMENT = {"dev"}  # tools, whose versions do not matter to users
LOWER_BOUND = re.compile(r"([\w.-]+)(?:\[[\w,.-]+\])?>=([\w.]+)")  # also of "ray[data]>=2.60"


def oldest_versions() -> list[str]:
    """Each dependency and extra with its lower bound, such as "numpy==2"."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    kept = [needs for extra, needs in extras.items() if extra not in DEVELOPMENT]
    needs = [one for group in [project["dependencies"], *kept] for one in group]
    pairs = [LOWER_BOUND.match(one) for one in needs]
    return [f"{pair[1]}=={pair[2]}" for pair in pairs if pair]


if __name__ == "__main__":
    print(*oldest_versions(), sep="\n")
