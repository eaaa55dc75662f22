import pytest

from vitrail.training.config import TrainConfig
from vitrail.training.schedule import ema_decay, learning_rate, patches_to_keep


def rates(total=100, **changes):
    config = TrainConfig(lr=2.0, **{"warmup": 0.1, **changes})
    return [learning_rate(step, total, config) for step in range(total + 1)]


def test_warm_up_rises_in_a_line_and_never_starts_at_zero():
    assert rates()[:10] == pytest.approx([0.2 * n for n in range(1, 11)])


def test_the_peak_comes_right_after_the_warm_up():
    assert rates()[10] == max(rates()) == 2


@pytest.mark.parametrize(("schedule", "quarter"), [("linear", 1.5), ("cosine", 1.7071068)])
def test_the_fall_by_hand(schedule, quarter):
    found = rates(schedule=schedule, warmup=0)
    assert (found[0], found[50], found[100]) == pytest.approx((2, 1, 0))
    assert found[25] == pytest.approx(quarter)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_fall_ends_at_the_final_rate(schedule):
    assert rates(schedule=schedule, final_lr=0.1)[100] == pytest.approx(0.2)


def test_a_constant_rate_is_a_fall_that_ends_where_it_starts():
    assert set(rates(warmup=0, final_lr=1)) == {2.0}


def test_nothing_but_warm_up_is_allowed():
    assert rates(total=3, warmup=1)[2] == 2


def test_patches_are_left_out_only_in_the_first_part():
    config = TrainConfig(drop_patches=0.5, drop_until=0.7)
    kept = [patches_to_keep(step, 10, 64, config) for step in range(10)]
    assert kept == [32] * 7 + [64] * 3


def test_at_least_one_patch_stays():
    assert patches_to_keep(0, 10, 4, TrainConfig(drop_patches=0.95)) == 1


def test_no_patch_is_left_out_by_default():
    assert patches_to_keep(0, 10, 64, TrainConfig()) == 64
    assert patches_to_keep(0, 10, 0, TrainConfig()) == 0


def test_averaging_starts_short_and_ends_at_its_decay():
    assert [ema_decay(step, 0.9) for step in (0, 8, 1000)] == [0.1, 0.5, 0.9]
