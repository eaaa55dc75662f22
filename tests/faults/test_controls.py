"""With its mechanism taken out, every guarantee fails: so its test would notice."""

from functools import partial

import pytest

from tests.faults import breaks
from tests.faults.guarantees import CASES
from tests.faults.test_fuzz import went_wrong

CONTROLS = {  # what is taken out: the case that must fail then, and how often it is tried
    "the rename": ("killed at a call of a save", breaks.written_in_place, 12),
    "the rename, by strace": ("killed at a system call of a save", breaks.written_in_place, 10),
    "the rename, in a write": ("killed inside a write of a save", breaks.written_in_place, 4),
    "setting aside": ("killed at a call of a save", breaks.old_checkpoint_deleted_first, 120),
    "the sync": ("bytes on the disk before the name", breaks.not_synced, 1),
    "the clean-up": ("killed at a call of a run, resumed", breaks.not_swept, 4),
    "the position": ("killed at a call of a run, resumed", breaks.position_forgotten, 2),
    "the average": ("Ctrl-C and SIGTERM", partial(breaks.part_forgotten, "average/"), 1),
    "the moments": ("Ctrl-C and SIGTERM", partial(breaks.part_forgotten, "optimizer/"), 1),
    "the last save": ("Ctrl-C and SIGTERM", breaks.signal_without_save, 1),
    "the checksums": ("a bit of a checkpoint flipped", breaks.no_checksums, 20),
    "the older checkpoint": (
        "a file of a checkpoint missing or truncated",
        breaks.newest_checkpoint_only,
        9,
    ),
    "the check of the model": ("the best model missing or truncated", breaks.any_model_trusted, 1),
    "the check of the recipe": ("the recipe missing or truncated", breaks.recipe_invented, 1),
    "the check of the metrics": ("the metrics truncated", breaks.results_trusted, 1),
    "the message for a full disk": ("disk full", breaks.disk_errors_not_reported, 1),
    "the message for the log": ("file size limit", breaks.journal_errors_not_reported, 1),
    "the message for a read-only disk": ("folder read-only", breaks.disk_errors_not_reported, 1),
    "the message for file handles": (
        "no file handles at a save",
        breaks.disk_errors_not_reported,
        1,
    ),
    "the kind of error": ("no file handles for the data", breaks.refused_is_broken, 1),
    "the lock": ("two processes in one run folder", breaks.no_lock, 1),
    "the check of the folder": ("run folder moved", breaks.gone_overlooked, 1),
    "the check of the folder, deleted": ("run folder deleted", breaks.gone_overlooked, 1),
    "the sizes": ("an image gone or changed", breaks.sizes_trusted, 1),
    "the fingerprint": ("an image gone or changed", breaks.any_data_taken, 1),
    "the check of workers": ("a data worker dead", breaks.death_overlooked, 1),
    "the check of numbers": (
        "NaN in images, loss, gradient, weights",
        breaks.nan_taken,
        1,
    ),
    "the check of weights": ("NaN in images, loss, gradient, weights", breaks.nan_saved, 1),
    "the check of float images": ("NaN in a file", breaks.any_float_taken, 1),
    "the steady clock": ("the clock jumps", breaks.clock_on_the_wall, 1),
    "the message for memory": ("no memory for the batch", breaks.out_of_memory_not_reported, 1),
    "the limit of pixels": ("an image that claims 144 megapixels", breaks.pixels_not_counted, 1),
    "read-only data": ("data unchanged, nothing written elsewhere", breaks.images_mended, 1),
    "the fence": ("data unchanged, nothing written elsewhere", breaks.notes_elsewhere, 1),
}

COSTLY = {  # more than a second each: by `make faults` alone
    *("setting aside", "the clean-up", "the moments", "the sizes", "the check of weights"),
    *("the check of the recipe", "the limit of pixels", "the check of float images"),
}
REPEATED = {  # the same mechanism is taken out for another case: by `make faults` alone
    *("the rename, by strace", "the rename, in a write", "the message for a read-only disk"),
    *("the message for file handles", "the check of the folder, deleted"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTROLS)
def test_a_run_without_it_does_not_survive(name, lab, tries):
    if name in COSTLY | REPEATED and not tries(0, 1):
        pytest.skip("costly or a repetition: make faults does it")
    case, broken, count = CONTROLS[name]
    with pytest.raises(AssertionError):
        for _ in CASES[case].check(lab, count, [broken]):
            pass


@pytest.mark.slow
def test_a_reader_that_lets_errors_through_is_found(lab):
    assert went_wrong(lab, "images", 20, [breaks.anything_raised])


def test_every_case_has_its_control():
    without = set(CASES) - {case for case, _, _ in CONTROLS.values()}
    same = {
        "all checkpoints damaged",
        "killed from outside twice, resumed",
        "the data gone before a resume",
    }
    assert without == same  # held by the mechanisms of other cases
