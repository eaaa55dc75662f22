"""Writes are atomic and flushed to the disk."""

import ast
import errno
import os
from pathlib import Path

import pytest

import vitrail
from vitrail import files
from vitrail.errors import UserError
from vitrail.files import atomic_write, describe_os_error, remove_temporary, write_file

PACKAGE = Path(vitrail.__file__).parent
WRITE_METHODS = {"write_text", "write_bytes", "touch", "tofile", "save_file"}


def test_written_content_is_there(tmp_path):
    write_file(tmp_path / "deep" / "a.txt", "éa")
    assert (tmp_path / "deep" / "a.txt").read_text() == "éa"


def test_a_failure_leaves_the_old_file_and_no_temporary(tmp_path):
    target = tmp_path / "a.txt"
    write_file(target, b"old")
    with pytest.raises(RuntimeError), atomic_write(target) as temporary:
        temporary.write_bytes(b"half")
        raise RuntimeError
    assert target.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_pipe_or_device_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="not a regular file"):
        write_file(tmp_path / "pipe", b"page")
    assert (tmp_path / "pipe").is_fifo() and os.listdir(tmp_path) == ["pipe"]


def test_a_folder_appears_only_when_it_is_complete(tmp_path):
    with atomic_write(tmp_path / "folder") as temporary:
        temporary.mkdir()
        (temporary / "one").write_bytes(b"1")
        assert not (tmp_path / "folder").exists()
    assert (tmp_path / "folder" / "one").read_bytes() == b"1"


def test_the_longest_possible_name_can_be_written(tmp_path):
    name = 85 * "\u4e2d"  # 255 bytes of UTF-8
    write_file(tmp_path / name, "x")
    assert os.listdir(tmp_path) == [name]


def test_an_unwritable_path_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*file/a.txt"):
        write_file(tmp_path / "file" / "a.txt", "x")


def test_every_file_is_flushed_before_the_rename(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (events.append("sync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda *names: (events.append("rename"), replace(*names)))
    write_file(tmp_path / "a", "x")
    assert events == ["sync", "rename", "sync"]


def test_windows_flushes_files_but_not_folders(tmp_path, monkeypatch):
    """Windows refuses to open a folder."""
    (tmp_path / "a").write_text("x")
    events, system_open = [], os.open

    def windows_open(path, flags):
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return system_open(path, flags)

    monkeypatch.setattr(os, "fsync", lambda handle: events.append("sync"))
    monkeypatch.setattr(os, "open", windows_open)
    files.fsync(tmp_path / "a")
    files.fsync(tmp_path)
    monkeypatch.undo()
    assert events == ["sync"]


def test_an_error_of_the_system_comes_with_advice():
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert describe_os_error(full) == "No space left on device, free some space"
    assert describe_os_error(OSError(errno.EIO, os.strerror(errno.EIO))) == "Input/output error"
    assert describe_os_error(OSError("message alone")) == "message alone"


def test_leftovers_of_a_killed_write_are_removed_and_nothing_else(tmp_path):
    for name in (".a.txt.x1.tmp", ".b.txt.x2.tmp", "a.txt", ".a.txt"):
        (tmp_path / name).mkdir()
    remove_temporary(tmp_path, "a.txt")
    assert sorted(os.listdir(tmp_path)) == [".a.txt", ".b.txt.x2.tmp", "a.txt"]


def direct_writes(path):
    """The calls in a module that write to a path without `vitrail.files`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func).split(".")[-1]
        modes = [*node.args, *(key.value for key in node.keywords if key.arg == "mode")]
        texts = [one.value for one in modes if isinstance(one, ast.Constant)]
        writes = any(isinstance(text, str) and set(text) & set("wax+") for text in texts)
        if name in WRITE_METHODS or (name == "open" and writes and len(texts[-1]) <= 3):
            yield name


def test_only_files_that_grow_or_change_in_place_are_written_directly():
    """Modules that write inside `atomic_write`, and those that the docstring of `files` names."""
    inside_atomic_write = {
        "cli/explain.py",
        "data/reading/cache.py",
        "data/sharding.py",
        "data/sources/hub_dataset.py",
        "data/sources/parquet.py",
        "exporting/export.py",
        "exporting/onnx_file.py",
        "exporting/torch_file.py",
        "exporting/triton.py",
        "training/checkpoint.py",
        "zoo/convert.py",
    }
    exceptions = {
        "run/storage/journal.py",  # the log of a run
        "cli/main.py",  # the null device in place of a closed stderr
        "tuning/locks.py",  # the log of a search, repaired after a crash
        "data/sources/download.py",  # a partial download
        "run/storage/lock.py",  # lock files
        "run/estimators.py",  # a temporary file, to pickle a model
        "data/sources/store_cache.py",  # blocks of a cache
        "data/sources/store.py",  # the time of the last report
    }
    for phrase in (
        "logs of a run and of a search",
        "partial download",
        "lock files",
        "a cache",
        "temporary",
    ):
        assert phrase in files.__doc__.replace("\n", " ")
    modules = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py")}
    writing = {name for name in modules if any(direct_writes(PACKAGE / name))} - {"files.py"}
    assert writing <= inside_atomic_write | exceptions
