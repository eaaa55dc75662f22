import subprocess
import sys

import pytest

from vitrail.errors import UserError
from vitrail.training.config import TrainConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 0),
        ("epochs", 2.5),
        ("steps", -1),
        ("batch", True),
        ("accumulate", 0),
        ("optimizer", "adam"),
        ("lr", 0),
        ("lr", float("nan")),
        ("lr", "1e-3"),
        ("weight_decay", -0.1),
        ("warmup", 1.5),
        ("schedule", "step"),
        ("final_lr", 2),
        ("clip", -1),
        ("smoothing", 1.0),
        ("ema", 1.0),
        ("layer_decay", 0),
        ("drop_patches", 1.0),
        ("drop_until", 1.1),
        ("class_weights", "yes"),
        ("patience", -1),
        ("precision", "float64"),
        ("compile", 1),
        ("save_every", 0),
        ("log_every", 0),
        ("seed", -1),
    ],
)
def test_a_setting_that_cannot_work_is_named(field, value):
    with pytest.raises(UserError, match=field):
        TrainConfig(**{field: value})


def test_whole_numbers_serve_as_fractions():
    assert TrainConfig(clip=1, ema=0, lr=1).clip == 1


def test_a_batch_has_no_more_parts_than_images():
    with pytest.raises(UserError, match=r"lower `train.accumulate`"):
        TrainConfig(batch=4, accumulate=5)


def test_the_settings_need_no_torch():
    told = "import sys, vitrail.training.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", told]).returncode == 0
