"""`vitrail datasets` as a user and as a script see it."""

import json
import subprocess
import sys

import pytest

from vitrail.cli.main import main


@pytest.fixture(autouse=True)
def empty(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRAIL_DATA", str(tmp_path))


def test_json_has_the_promised_keys(capsys):
    main(["datasets", "--json"])
    rows = json.loads(capsys.readouterr().out)
    keys = ["name", "classes", "train", "test", "image", "channels", "present", "verified"]
    assert [list(row) for row in rows] == [keys] * 7
    assert rows[0] == {
        "name": "digits",
        "classes": 10,
        "train": 1596,
        "test": 201,
        "image": 8,
        "channels": 1,
        "present": True,
        "verified": True,
    }


def test_a_data_set_is_present_if_its_files_exist(tmp_path, capsys):
    (tmp_path / "cifar100").mkdir()
    (tmp_path / "cifar100" / "cifar-100-binary.tar.gz").touch()
    main(["datasets", "--json"])
    found = {row["name"]: row["present"] for row in json.loads(capsys.readouterr().out)}
    assert found.pop("digits") and found.pop("cifar100")
    assert not any(found.values())


def test_the_table_lists_every_data_set_and_the_folder(tmp_path, capsys):
    main(["datasets"])
    printed = capsys.readouterr().out
    for name in ("digits", "fashion-mnist", "cifar100", "imagenette", "imagenet10", str(tmp_path)):
        assert name in printed


def test_the_list_imports_neither_torch_nor_numpy():
    code = (
        "import sys; from vitrail.cli.main import run; run(['datasets', '--json']); "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0
