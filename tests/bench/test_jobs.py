"""The benches of jobs on Ray and of the forecast, on the smallest case."""

import pytest

from bench import batch, plan
from bench.measure import Budget

ONCE = Budget(rounds=1, seconds=0.1)


def test_the_first_parts_of_a_job_are_not_counted():
    assert batch.seconds_per_part([9.0, 10.0, 2.0, 8.0], skipped=2) == 1.0


@pytest.mark.full
def test_batch_measures_one_process_and_ray(monkeypatch):
    monkeypatch.setattr(batch, "IMAGES", 64)
    found = batch.run(ONCE, lambda *_: None)
    assert set(found["cases"][0]["rows"]) == {"vitrail", "vitrail on ray"}
    assert found["throughput"] > 0


@pytest.mark.full
def test_plan_compares_the_forecast_with_one_and_two_processes(monkeypatch):
    monkeypatch.setattr(plan, "MODEL", "Pico/4")
    found = plan.run(ONCE, lambda *_: None)
    assert [case["unit"] for case in found["cases"]] == ["images/s", "MB"] * 2
    for case in found["cases"]:
        assert case["rows"]["forecast"]["median"] > 0 and case["rows"]["vitrail"]["median"] > 0
