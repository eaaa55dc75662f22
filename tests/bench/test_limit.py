"""The limit is made of the model's own matrix products."""

import pytest

from bench.limit import backward, products
from vitrail.model.cost import count_macs
from vitrail.zoo.presets import preset


@pytest.mark.parametrize("name", ["Ti/16", "B/32", "Mini/4"])
def test_limit_multiplies_what_the_model_multiplies(name):
    config = preset(name)
    done = sum(count * m * k * n for count, m, k, n in products(config, 3))
    assert done == 3 * count_macs(config)


def test_backward_costs_twice_the_product():
    assert [a * b * c * d for a, b, c, d in backward((2, 3, 5, 7))] == [210, 210]
