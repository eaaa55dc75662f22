"""Text for people is short, safe and has its units."""

import pytest

from vitrail.display.text import (
    format_accuracy,
    format_bytes,
    format_count,
    format_duration,
    format_parameters,
    format_percent,
    printable,
    truncate,
)


def test_control_characters_are_escaped():
    assert printable("a\x1b[31m\u202eb\udcff") == "a\\x1b[31m\\u202eb\\udcff"
    assert printable("naïve 猫") == "naïve 猫"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_count(1, "image"), "1 image"),
        (format_count(1797, "image"), "1,797 images"),
        (format_count(2, "class"), "2 classes"),
        (format_percent(0.913), "91.3 %"),
        (format_percent(0.9998), "99.98 %"),
        (format_percent(1.0), "100.0 %"),
        (format_accuracy(0.913, [0.901, 0.924]), "91.3 % (90.1 to 92.4)"),
        (format_duration(1), "1 second"),
        (format_duration(45), "45 seconds"),
        (format_duration(720), "12 minutes"),
        (format_duration(5400), "1.5 hours"),
        (format_parameters(810_000), "810 k"),
        (format_parameters(5_700_000), "5.7 M"),
        (format_bytes(24_000), "24.0 kB"),
        (truncate("abcdef", 4), "abc…"),
        (truncate("abcd", 4), "abcd"),
    ],
)
def test_numbers_have_units(text, expected):
    assert text == expected
