"""The settings of a pretraining: values that cannot work are refused."""

import math

import pytest

from vitrail.errors import UserError
from vitrail.pretraining.config import PretrainConfig, TeacherConfig


@pytest.mark.parametrize(
    "setting",
    [{"views": 100}, {"local_views": 33}, {"decoder_depth": 65}, {"decoder_width": 100_000}],
)
def test_numbers_of_a_method_that_no_machine_can_compute_are_refused(setting):
    ((name, number),) = setting.items()
    with pytest.raises(UserError, match=f"pretrain.{name} is {number}; give a whole number from"):
        PretrainConfig(**setting)


@pytest.mark.parametrize("temperature", [0.0, math.inf, math.nan])
def test_the_temperature_of_a_teacher_is_finite(temperature):
    with pytest.raises(UserError, match=r"teacher.temperature is .*; give a number above 0"):
        TeacherConfig(temperature=temperature)
