"""The lower bound has exactly the model's matrix multiplications."""

import pytest

from bench.matmuls import backward_matmuls, forward_matmuls
from vitrail.model.cost import count_macs
from vitrail.zoo.presets import preset


@pytest.mark.parametrize("name", ["Ti/16", "B/32", "Mini/4"])
def test_matmuls_have_as_many_multiplications_as_the_model(name):
    config = preset(name)
    macs = sum(count * m * k * n for count, m, k, n in forward_matmuls(config, 3))
    assert macs == 3 * count_macs(config)


def test_the_backward_pass_costs_twice_the_forward_pass():
    assert [a * b * c * d for a, b, c, d in backward_matmuls((2, 3, 5, 7))] == [210, 210]
