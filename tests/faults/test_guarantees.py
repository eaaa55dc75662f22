"""Whatever happens to a run: one line that says so, nothing lost, and the same bits in the end."""

import pytest

from tests.faults.guarantees import CASES


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_run_survives(name, lab, tries, tell):
    case, survived, left = CASES[name], 0, 1
    try:
        for count in case.check(lab, tries(case.short, case.full)):
            survived += count
        left = 0
    finally:
        tell(name, survived + left, survived)
