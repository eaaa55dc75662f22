"""`vitrail.doctor`: what is wrong is found, and said in one line."""

import json
import os
import resource
import sys
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import vitrail
from tests.training.ranks import ranks
from vitrail.cli.main import main
from vitrail.errors import UserError
from vitrail.run import doctor, machine_checks
from vitrail.run.machine_checks import check_disk, check_hub, check_machine

Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def small_disk(monkeypatch, tmp_path):
    monkeypatch.setattr(machine_checks, "DISK_BYTES", 1 << 20)
    monkeypatch.setattr(machine_checks, "LOW_SPEED", 0)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))


def find(checks, name):
    return next(check for check in checks if check.name == name)


def alone(world):
    """The world seen from a machine with one process."""
    return replace(world, local_rank=0)


def test_a_sound_machine_has_one_line_for_each_check(tmp_path):
    found = vitrail.doctor(tmp_path, processes=0, hub=False)
    names = ["versions", "device", "memory", "shared memory", "open files", "disk", "cache"]
    assert [check.name for check in found.checks] == names
    assert found.passed and len(repr(found).splitlines()) == len(names)
    assert list(tmp_path.iterdir()) == []


def test_two_processes_exchange_tensors_and_reports(tmp_path):
    def work(world):
        checks = doctor.check_all_machines(alone(world), tmp_path, False)
        return [(check.name, check.status, check.found) for check in checks]

    leader, other = ranks(2, work)
    assert [name for name, *_ in other] == ["processes", "clock"]
    assert {status for _, status, _ in leader} == {"ok"}
    assert "2 processes by gloo" in leader[-2][2]
    hosts = {name.partition(" on ")[2] for name, *_ in leader[:-2]}
    assert len(hosts) == 2


def test_different_versions_and_clocks_are_found(tmp_path, monkeypatch):
    real = machine_checks.time.time

    def work(world):
        monkeypatch.setattr(machine_checks, "version", lambda name: f"1.{world.rank}")
        monkeypatch.setattr(doctor.time, "time", lambda: real() + 9 * world.rank)
        return [str(check) for check in doctor.check_all_machines(alone(world), tmp_path, False)]

    found = "\n".join(ranks(2, work)[0])
    assert "problem  versions: the machines have different versions; install the same" in found
    assert "warning  clock: 9 seconds" in found and "NTP" in found


def test_a_wrong_sum_is_found(tmp_path, monkeypatch):
    def work(world):
        monkeypatch.setattr(doctor.dist, "all_reduce", lambda tensor: tensor.fill_(0.5))
        monkeypatch.setattr(type(world), "all_reduce", lambda self, *numbers: list(numbers))
        return str(doctor.check_processes(world)[0])

    assert "problem  processes: 2 processes by gloo compute a wrong sum" in ranks(2, work)[0]


@pytest.mark.full
def test_local_processes_find_each_other(tmp_path):
    checks = vitrail.doctor(tmp_path, processes=2, hub=False).checks
    assert [find(checks, name).status for name in ("processes", "clock")] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import time; time.sleep(60)", "did not find each other"),
        ("import sys; sys.exit('error: no route')", "failed: error: no route"),
    ],
)
def test_processes_that_fail_are_a_problem(tmp_path, monkeypatch, code, words):
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{code}"\n')
    program.chmod(0o755)
    monkeypatch.setattr(doctor.sys, "executable", str(program))
    monkeypatch.setattr(doctor, "TIMEOUT", 1.0)
    (check,) = doctor.check_local_processes(2)
    assert check.status == "problem" and words in check.found and "firewall" in check.advice


def test_low_resources_are_warnings(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_checks, "available_memory", lambda: 10**8)
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda path: Usage(0, 0, 64 << 20))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 256))
    checks = list(check_machine(tmp_path, False))
    for name, advice in (
        ("memory", "close"),
        ("shared memory", "shm-size"),
        ("open files", "ulimit -n"),
        ("disk", "free some space"),
    ):
        assert find(checks, name).status == "warning" and advice in find(checks, name).advice


def test_a_gpu_that_torch_cannot_use_is_a_problem(monkeypatch):
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([Path("/dev/nvidia0")]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    check = machine_checks.check_device()
    assert check.status == "problem" and "CUDA" in check.advice


def test_a_folder_that_cannot_be_written_is_a_problem(tmp_path):
    (tmp_path / "file").write_text("")
    check = check_disk("disk", tmp_path / "file")
    assert check.status == "problem" and "cannot be written" in check.found


def test_a_disk_that_returns_other_bytes_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda number: os.pwrite(number, b"flipped", 99))
    assert "other bytes" in check_disk("disk", tmp_path).found


def test_unreachable_weights_are_a_warning_and_missing_ones_a_problem(tmp_path, monkeypatch):
    def fail(name):
        raise UserError(f"hf:{name} cannot be downloaded: no network; try again later")

    monkeypatch.setattr(machine_checks, "inspect_hub_file", fail)
    assert check_hub().status == "warning" and "VITRAIL_WEIGHTS" in check_hub().advice
    monkeypatch.setenv("VITRAIL_WEIGHTS", str(tmp_path / "none"))
    assert check_hub().status == "problem"
    monkeypatch.setenv("VITRAIL_WEIGHTS", str(tmp_path))
    assert check_hub().status == "ok"


def test_the_exit_code_says_whether_there_is_a_problem(tmp_path, capsys):
    main(["doctor", str(tmp_path), "--processes", "0", "--offline", "--json"])
    assert json.loads(capsys.readouterr().out)["passed"] is True
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as end:
        main(["doctor", str(tmp_path / "file"), "--processes", "0", "--offline"])
    assert end.value.code == 1 and "problem  disk" in capsys.readouterr().out


def test_a_negative_number_of_processes_is_refused():
    with pytest.raises(UserError, match="at least 0"):
        vitrail.doctor(processes=-1)
