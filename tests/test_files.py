"""Writing: whole or not at all."""

import errno
import os

import pytest

from vitrail.errors import UserError
from vitrail.files import refusal, replacing, sweep, write


def test_what_is_written_is_there(tmp_path):
    write(tmp_path / "deep" / "a.txt", "éa")
    assert (tmp_path / "deep" / "a.txt").read_text() == "éa"


def test_a_failure_leaves_the_old_file_and_no_rest(tmp_path):
    target = tmp_path / "a.txt"
    write(target, b"old")
    with pytest.raises(RuntimeError), replacing(target) as temporary:
        temporary.write_bytes(b"half")
        raise RuntimeError
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_nothing_is_seen_before_all_is_there(tmp_path):
    with replacing(tmp_path / "folder") as temporary:
        temporary.mkdir()
        (temporary / "one").write_bytes(b"1")
        assert not (tmp_path / "folder").exists()
    assert (tmp_path / "folder" / "one").read_bytes() == b"1"


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*file/a.txt"):
        write(tmp_path / "file" / "a.txt", "x")


def test_every_file_is_synced_before_the_rename(tmp_path, monkeypatch):
    events = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append("sync"), fsync(handle)))
    monkeypatch.setattr(os, "rename", lambda *names: (events.append("rename"), rename(*names)))
    write(tmp_path / "a", "x")
    assert events == ["sync", "rename", "sync"]


def test_a_refusal_comes_with_advice_where_there_is_one():
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert refusal(full) == "No space left on device, free some space"
    assert refusal(OSError(errno.EIO, os.strerror(errno.EIO))) == "Input/output error"
    assert refusal(OSError("words alone")) == "words alone"


def test_what_a_killed_writing_left_is_swept_and_nothing_else(tmp_path):
    for name in (".a.txt.x1.tmp", ".b.txt.x2.tmp", "a.txt", ".a.txt"):
        (tmp_path / name).mkdir()
    sweep(tmp_path, "a.txt")
    assert sorted(os.listdir(tmp_path)) == [".a.txt", ".b.txt.x2.tmp", "a.txt"]
