"""The bench of teachers: which trainings belong together, and the table of both sides."""

import json

import pytest

from bench import teacher
from bench.teacher import TeacherSettings
from vitrail.errors import UserError


def test_both_sides_of_a_seed_are_compared(tmp_path, monkeypatch):
    jobs = []

    def run_jobs(some, count):
        jobs.extend(some)
        sides = [json.loads(job.command[1]) for job in some]
        return [
            {
                "teacher": 0.9 if side["first"] else None,
                "accuracy": 0.8 + 0.1 * side["seed"] + (0.02 if side["first"] else 0.0),
            }
            for side in sides
        ]

    monkeypatch.setattr(teacher, "run_jobs", run_jobs)
    table = teacher.run(TeacherSettings(seeds=2, minutes=10, work=tmp_path))
    assert len({job.path for job in jobs}) == 4
    assert "10 minutes, 2 pairs" in table
    assert table.endswith("| test accuracy | 85.0% | 87.0% | 90.0% | +2.00 ± 0.00 | better |")


def test_a_teacher_needs_less_than_the_whole_time():
    with pytest.raises(UserError, match="fewer `first` than `minutes`"):
        TeacherSettings(minutes=5, first=5)
