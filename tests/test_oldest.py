"""The oldest versions that `make test-oldest` installs."""

import tomllib
from pathlib import Path

from tests.oldest import DEVELOPMENT, oldest_versions

ROOT = Path(__file__).resolve().parents[1]


def test_every_lower_bound_is_installed(monkeypatch):
    monkeypatch.chdir(ROOT)
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    groups = [project["dependencies"], *(extras[name] for name in extras.keys() - DEVELOPMENT)]
    bounds = [one for group in groups for one in group if not one.startswith("vitrail[")]
    found = oldest_versions()
    assert len(found) == len(bounds)
    assert "ray==2.60" in found  # the extra in "ray[data]>=2.60" is skipped
