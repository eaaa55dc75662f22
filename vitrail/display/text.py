"""Text that is safe to show: names from files and folders, spelled out where they could mislead."""

import unicodedata

ODD_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")  # control, invisible, not a character


def printable(text: str) -> str:
    """One line that misleads neither a terminal nor a page.

    Control characters, invisible characters and undecodable bytes are escaped.
    """
    return "".join(
        ascii(letter)[1:-1] if unicodedata.category(letter) in ODD_CATEGORIES else letter
        for letter in text
    )
