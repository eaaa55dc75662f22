"""Text for people to read: names without control characters, numbers with their units."""

import unicodedata
from collections.abc import Sequence

ESCAPED_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")  # control, invisible, unassigned
ROUNDING = 0.0005  # a fraction nearer than this to 0 or 1 rounds to "0.0 %" or "100.0 %"


def printable(text: str) -> str:
    """Text that is safe to show on one line of a terminal or a page.

    Escapes control characters, invisible characters and undecodable bytes.
    """
    return "".join(
        ascii(char)[1:-1] if unicodedata.category(char) in ESCAPED_CATEGORIES else char
        for char in text
    )


def truncate(text: str, length: int) -> str:
    """At most `length` characters; an ellipsis marks what was cut."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def format_count(count: int, noun: str) -> str:
    """ "1 image", "1,797 images", "2 classes"."""
    plural = f"{noun}es" if noun.endswith(("s", "tch")) else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def format_percent(fraction: float) -> str:
    """ "91.3 %"; two decimals where one would round to 0 or 100: "99.98 %"."""
    digits = 2 if 0 < min(fraction, 1 - fraction) < ROUNDING else 1
    return f"{100 * fraction:.{digits}f} %"


def format_accuracy(accuracy: float, interval: Sequence[float] | None) -> str:
    """An accuracy with its confidence interval, if it has one: "91.3 % (90.1 to 92.4)"."""
    if interval is None:
        return f"{100 * accuracy:.1f} %"
    return f"{100 * accuracy:.1f} % ({format_interval(interval)})"


def format_interval(interval: Sequence[float]) -> str:
    """ "90.1 to 92.4", in percent."""
    low, high = interval
    return f"{100 * low:.1f} to {100 * high:.1f}"


def format_duration(seconds: float) -> str:
    """ "45 seconds", "12 minutes", "1.5 hours"."""
    if seconds < 90:
        return f"{seconds:.0f} second{'s' * (round(seconds) != 1)}"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def format_parameters(count: int) -> str:
    """The number of parameters of a model: "810 k", "5.7 M"."""
    return f"{count / 1000:.0f} k" if count < 1_000_000 else f"{count / 1e6:.1f} M"


def format_bytes(count: int) -> str:
    """ "24.0 kB", "5.7 MB"."""
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"
