"""Hostile files: read or refused in words, within memory and time, and nothing else is written."""

from functools import partial

import pytest

from tests.faults import fuzz, harm
from tests.faults.lab import digest

BATCH = 100  # files that one child reads


def went_wrong(lab, kind, count, broken=()):
    """The seeds that did, and how; a child that dies of one is followed by another."""
    now, seeds, wrong = lab.fresh(), list(range(count)), []
    fence = partial(harm.fenced, lab.folder)
    harms = [partial(harm.memory_limited, fuzz.MEMORY), fence, *broken]
    before = digest(lab.photos)
    while seeds and len(wrong) < 20:
        place, batch = lab.fresh(), seeds[:BATCH]
        place.mkdir()
        try:
            wrong += lab.nursery.ask(fuzz.tried, kind, place, lab.whole, batch, now, harms=harms)
            last = batch[-1]
        except AssertionError as error:
            last = int(now.read_text())
            wrong.append([last, f"ended the process: {str(error)[-300:]}"])
        seeds = seeds[seeds.index(last) + 1 :]
    assert digest(lab.photos) == before
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_a_mutated_file_is_read_or_refused(kind, lab, tries, tell):
    count = tries(50, 1667)
    wrong = went_wrong(lab, kind, count)
    tell(f"hostile {kind}", count, count - len(wrong))
    assert not wrong, f"`python -m tests.faults.fuzz '{kind}' SEED` shows one of {wrong}"
