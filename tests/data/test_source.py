"""One way to open any data, and a checksum that notices when it changed."""

import os

import numpy as np
import pytest

from tests.data.samples import class_folders, write
from vitrail.data.open import open_data, resolve_data
from vitrail.data.source import fingerprint, split_indices
from vitrail.display.progress import progress_bar
from vitrail.errors import UserError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def pets(tmp_path):
    return class_folders(tmp_path / "pets", {"cat": 20, "dog": 20})


def why(data) -> str:
    with pytest.raises(UserError) as error:
        open_data(data)
    return str(error.value)


def test_what_is_nowhere_names_the_nearest_set(tmp_path):
    assert "'cifa10' does not exist" in why("cifa10")
    assert "did you mean cifar10?" in why("cifa10")
    assert "does not exist" in why(tmp_path / "nothing")


def test_what_is_no_data_set_says_what_was_wanted(tmp_path):
    path = write(tmp_path / "one.png", 1)
    assert "is not a data set; wanted a folder of class folders" in why(path)
    os.mkfifo(tmp_path / "table.csv")
    assert "is not a data set" in why(tmp_path / "table.csv")


def test_names_that_no_disk_can_hold_are_errors():
    assert "'' does not exist" in why("")
    assert "name is too long" in why("x" * 5000)
    assert "NUL character" in why("nul\0")


def test_a_home_folder_may_be_written_with_a_tilde(pets, monkeypatch):
    monkeypatch.setenv("HOME", str(pets.parent))
    assert len(open_data("~/pets")) == 40


def test_a_tilde_before_no_user_is_a_letter_like_others(pets, monkeypatch):
    assert "'~nobody-of-this-name/pets' does not exist" in why("~nobody-of-this-name/pets")
    rows = "".join(
        f"{name}/{number}.png,{name}\n" for name in ("cat", "dog") for number in range(9)
    )
    (pets / "~backup.csv").write_text(f"path,label\n{rows}")
    monkeypatch.chdir(pets)
    assert len(open_data("~backup.csv")) == 18
    assert resolve_data("~backup.csv") == str(pets / "~backup.csv")


def test_indices_are_the_positions_of_a_split(pets):
    source = open_data(pets)
    parts = [split_indices(source, split) for split in ("train", "val", "test")]
    assert sorted(np.concatenate(parts).tolist()) == list(range(40))
    assert split_indices(source, "all").tolist() == list(range(40))
    assert set(source.splits[parts[1]]) == {"val"}


def test_the_same_data_has_the_same_fingerprint_anywhere(pets, tmp_path):
    before = fingerprint(open_data(pets))
    copy = class_folders(tmp_path / "elsewhere" / "pets", {"cat": 20, "dog": 20})
    os.utime(copy / "cat" / "3.png", (1, 1))
    assert fingerprint(open_data(copy)) == before


def added(pets):
    write(pets / "cat" / "new.png", 99)


def removed(pets):
    (pets / "cat" / "7.png").unlink()


def renamed(pets):
    (pets / "cat" / "7.png").rename(pets / "cat" / "x.png")


def relabelled(pets):
    (pets / "cat").rename(pets / "cats")


def resized(pets):
    with open(pets / "cat" / "7.png", "ab") as file:
        file.write(b"x")


def split(pets):
    (pets / "train").mkdir()
    for name in ("cat", "dog"):
        (pets / name).rename(pets / "train" / name)


@pytest.mark.parametrize("change", [added, removed, renamed, relabelled, resized, split])
def test_changed_data_have_another_fingerprint(pets, change):
    before = fingerprint(open_data(pets))
    change(pets)
    assert fingerprint(open_data(pets)) != before


def test_an_edit_of_the_same_size_shows_in_the_dates(pets):
    before = open_data(pets)
    content = bytearray((pets / "cat" / "7.png").read_bytes())
    content[-20] ^= 1
    (pets / "cat" / "7.png").write_bytes(bytes(content))
    os.utime(pets / "cat" / "7.png", ns=(5, 5))
    after = open_data(pets)
    assert fingerprint(before, mtimes=True) != fingerprint(after, mtimes=True)


def test_a_bar_is_drawn_only_where_a_terminal_watches(capsys):
    with progress_bar("working", 3) as advance:
        advance(3)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("sizes", [True, False])
def test_a_bar_appears_when_it_takes_long(monkeypatch, capsys, sizes):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr("vitrail.display.progress.DELAY", -1.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar("working", 3, in_bytes=sizes) as advance:
        advance(1)
    printed = capsys.readouterr()
    assert "working" in printed.err
    assert printed.out == ""
