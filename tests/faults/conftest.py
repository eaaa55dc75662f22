"""The fault campaign: how often each fault is tried, and a table of what was survived."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.lab import Lab

FULL = os.environ.get("VITRAIL_FAULTS") == "full"  # `make faults`
TABLE = os.environ.get("VITRAIL_FAULTS_TABLE")  # a file for the table, as JSON


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture
def tries() -> Callable[[int, int], int]:
    """The first number in `make test`, the second in `make faults`."""
    return lambda short, full: full if FULL else short


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[str, int, int], None]:
    """Puts a row into the table: case, tries, survived."""

    def row(case: str, tried: int, survived: int) -> None:
        request.node.user_properties.append(("fault", [case, tried, survived]))

    return row


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [one for kind in ("passed", "failed") for one in terminalreporter.stats.get(kind, [])]
    rows = [
        value
        for report in reports
        if report.when == "call"
        for name, value in report.user_properties
        if name == "fault"
    ]
    if not rows:
        return
    terminalreporter.section("what happened to runs")
    wide = max(len(case) for case, _, _ in rows)
    for case, tried, survived in [("case", "tries", "survived"), *rows]:
        terminalreporter.write_line(f"{case:<{wide}}  {tried:>6}  {survived:>8}")
    tried, survived = (sum(row[column] for row in rows) for column in (1, 2))
    terminalreporter.write_line(f"{'all':<{wide}}  {tried:>6}  {survived:>8}")
    if TABLE:
        keys = ("case", "tries", "survived")
        table = [dict(zip(keys, row, strict=True)) for row in rows]
        Path(TABLE).write_text(json.dumps(table, indent=1) + "\n")
