import json
import math
import os
import resource
import shutil

import pytest
import torch

from vitrail import files
from vitrail.errors import UserError
from vitrail.training import checkpoint
from vitrail.training.checkpoint import load_checkpoint, save_checkpoint


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def put(folder, *steps):
    for step in steps:
        save_checkpoint(folder, step, {"weight": torch.full((3, 2), float(step))}, {"step": step})


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def flip(path, position, bit=0):
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def test_what_was_saved_is_loaded(folder):
    torch.manual_seed(0)
    tensors = {
        "float": torch.randn(3, 4),
        "half": torch.randn(5).bfloat16(),
        "count": torch.tensor(7.0),
        "flags": torch.tensor([True, False]),
        "strided": torch.randn(4, 6).mT,
        "empty": torch.zeros(0, 3),
    }
    save_checkpoint(folder, 12, tensors, {"epoch": 3, "names": ["a", "ü"], "none": None})
    found = load_checkpoint(folder)
    assert (found.step, found.progress) == (12, {"epoch": 3, "names": ["a", "ü"], "none": None})
    assert found.warnings == ()
    assert found.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor), name


def test_numbers_in_the_progress_are_restored_to_the_last_bit(folder):
    numbers = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, math.pi, 2**60 + 1]
    numbers += torch.randn(50, generator=torch.Generator().manual_seed(0)).tolist()
    save_checkpoint(folder, 1, {"x": torch.zeros(1)}, {"numbers": numbers})
    assert [float(n).hex() for n in load_checkpoint(folder).progress["numbers"]] == [
        float(n).hex() for n in numbers
    ]


def test_without_checkpoints_there_is_none(folder):
    assert load_checkpoint(folder) is None
    folder.mkdir()
    assert load_checkpoint(folder) is None


def test_the_newest_checkpoint_wins(folder):
    put(folder, 9, 10)
    assert load_checkpoint(folder).step == 10


def test_two_checkpoints_are_kept(folder):
    put(folder, 1, 2, 3, 4)
    assert names(folder) == ["step-00000003", "step-00000004"]


def test_names_sort_by_number_whatever_their_length(folder):
    put(folder, 99_999_999, 100_000_000)
    assert load_checkpoint(folder).step == 100_000_000


@pytest.mark.parametrize("name", ["progress.json", "tensors.safetensors", "manifest.json"])
def test_any_flipped_bit_is_found_and_the_checkpoint_before_is_used(folder, name):
    put(folder, 1, 2)
    path = folder / "step-00000002" / name
    whole = path.read_bytes()
    for position in range(len(whole)):
        flip(path, position, bit=position % 8)
        found = load_checkpoint(folder)
        assert found.step == 1, position
        assert "step-00000002 " in found.warnings[0]
        path.write_bytes(whole)
    assert load_checkpoint(folder).step == 2


def test_even_another_kind_of_space_in_the_manifest_is_found(folder):
    put(folder, 1, 2)
    path = folder / "step-00000002" / "manifest.json"
    whole = path.read_bytes()
    for position, byte in enumerate(whole):
        if byte in b" \n":
            path.write_bytes(whole[:position] + b"\r" + whole[position + 1 :])
            assert load_checkpoint(folder).step == 1, position


def test_a_warning_says_what_is_damaged_and_which_step_is_used(folder):
    put(folder, 1, 2)
    flip(folder / "step-00000002" / "tensors.safetensors", -1)
    (told,) = load_checkpoint(folder).warnings
    assert told.startswith(
        "step-00000002 is damaged: tensors.safetensors differs from what was saved"
    )
    assert told.endswith("; falling back to step 1")


@pytest.mark.parametrize("name", ["progress.json", "tensors.safetensors", "manifest.json"])
@pytest.mark.parametrize("length", [0, 1, 100])
def test_a_truncated_file_is_found(folder, name, length):
    put(folder, 1, 2)
    os.truncate(folder / "step-00000002" / name, length)
    assert load_checkpoint(folder).step == 1


@pytest.mark.parametrize("name", ["progress.json", "tensors.safetensors", "manifest.json"])
def test_a_missing_file_is_named(folder, name):
    put(folder, 1, 2)
    (folder / "step-00000002" / name).unlink()
    assert f"is incomplete: {name} is missing" in load_checkpoint(folder).warnings[0]


def test_a_file_that_grew_is_found(folder):
    put(folder, 1, 2)
    with (folder / "step-00000002" / "tensors.safetensors").open("ab") as file:
        file.write(b"\0")
    assert load_checkpoint(folder).step == 1


def test_a_checkpoint_under_another_number_is_found(folder):
    put(folder, 1, 2)
    (folder / "step-00000002").rename(folder / "step-00000007")
    found = load_checkpoint(folder)
    assert found.step == 1
    assert "step-00000007 is damaged: step differs" in found.warnings[0]


def test_other_files_are_ignored(folder):
    put(folder, 1)
    (folder / "step-00000009").mkdir()
    (folder / "step-nine").mkdir()
    (folder / "step-00000010").write_text("a file")
    (folder / "notes.txt").write_text("mine")
    os.mkfifo(folder / "step-00000009" / "progress.json")
    found = load_checkpoint(folder)
    assert found.step == 1
    assert found.warnings == (
        "step-00000009 is incomplete: progress.json is missing; falling back to step 1",
    )


def test_when_all_checkpoints_are_damaged_each_is_named(folder):
    put(folder, 1, 2)
    for step in (1, 2):
        flip(folder / f"step-0000000{step}" / "progress.json", 3)
    with pytest.raises(
        UserError, match=r"all checkpoints .*step-00000002 is .*step-00000001 is .*; start"
    ):
        load_checkpoint(folder)


def test_a_checkpoint_of_another_format_says_so(folder, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 2)
    put(folder, 1)
    monkeypatch.undo()
    with pytest.raises(UserError, match="not of format 1; resume with the version that wrote it"):
        load_checkpoint(folder)


def test_checkpoints_past_a_resumed_step_are_removed(folder):
    put(folder, 10, 20)
    flip(folder / "step-00000020" / "progress.json", 3)
    put(folder, load_checkpoint(folder).step + 5)
    assert names(folder) == ["step-00000010", "step-00000015"]


def test_a_step_is_saved_again_with_other_progress(folder):
    put(folder, 1, 2)
    save_checkpoint(folder, 2, {"weight": torch.ones(1)}, {"best": 0.5})
    assert load_checkpoint(folder).progress == {"best": 0.5}
    assert names(folder) == ["step-00000001", "step-00000002"]


def test_the_first_of_two_saves_of_a_step_loads_until_the_second_is_there(folder, monkeypatch):
    put(folder, 2)

    def killed(path):
        raise KeyboardInterrupt

    monkeypatch.setattr(files, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(folder, 2, {"weight": torch.ones(1)}, {"best": 0.5})
    monkeypatch.undo()
    assert load_checkpoint(folder).progress == {"step": 2}
    put(folder, 3)
    assert names(folder) == ["step-00000003"]


def test_leftovers_of_a_killed_save_are_ignored_and_removed(folder):
    put(folder, 1)
    shutil.copytree(folder / "step-00000001", folder / ".step-00000002.x.tmp" / "step-00000002")
    assert load_checkpoint(folder).step == 1
    put(folder, 3)
    assert names(folder) == ["step-00000001", "step-00000003"]


def test_a_failed_write_leaves_the_checkpoint_before(folder):
    put(folder, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(UserError, match=r"cannot save step 2 .*older checkpoints are intact"):
            save_checkpoint(folder, 2, {"weight": torch.zeros(1000)}, {})
        with pytest.raises(UserError, match=r"cannot save step 2 .*File too large"):
            save_checkpoint(folder, 2, {"weight": torch.zeros(1)}, {"long": "x" * 2000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(folder) == ["step-00000001"]
    assert load_checkpoint(folder).step == 1


def test_a_missing_run_folder_is_not_created_again(tmp_path):
    with pytest.raises(UserError, match=r"gone was moved or deleted, and step 3 was not saved"):
        put(tmp_path / "gone" / "checkpoints", 3)
    assert not (tmp_path / "gone").exists()


def test_a_checkpoint_folder_that_is_a_file_is_an_error(folder):
    folder.write_text("")
    with pytest.raises(UserError, match="cannot save step 1"):
        put(folder, 1)


def test_the_manifest_is_readable_json(folder):
    put(folder, 5)
    told = json.loads((folder / "step-00000005" / "manifest.json").read_text())
    assert (told["format"], told["step"]) == (1, 5)
    size = (folder / "step-00000005" / "tensors.safetensors").stat().st_size
    assert told["tensors.safetensors"].startswith(f"{size} bytes, sha256 ")


def test_other_threads_and_versions_are_reported(folder, monkeypatch):
    put(folder, 5)
    now = {**checkpoint.describe_machine(), "threads": 64, "torch": "9.9"}
    monkeypatch.setattr(checkpoint, "describe_machine", lambda: now)
    told = load_checkpoint(folder).warnings
    assert len(told) == 2
    assert f"threads {torch.get_num_threads()}, resumed with 64" in told[1]


@pytest.mark.parametrize("name", ["vitrail", "numpy", "pillow", "simplejpeg"])
def test_another_version_of_a_library_is_reported(folder, monkeypatch, name):
    put(folder, 5)
    now = {**checkpoint.describe_machine(), name: "9.9"}
    monkeypatch.setattr(checkpoint, "describe_machine", lambda: now)
    (told,) = load_checkpoint(folder).warnings
    assert told.startswith(f"saved with {name} ") and "resumed with 9.9" in told


def test_a_checkpoint_without_a_version_gets_no_warning(folder, monkeypatch):
    with monkeypatch.context() as patch:
        few = {name: checkpoint.describe_machine()[name] for name in ("torch", "threads")}
        patch.setattr(checkpoint, "describe_machine", lambda: few)
        put(folder, 5)
    assert load_checkpoint(folder).warnings == ()
