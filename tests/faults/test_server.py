"""A running server under attack, reloads and load: nothing crashes, is lost or piles up."""

import re
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults.hostile_requests import VALID, attack
from tests.server.conftest import launch, model_file, write_model
from tests.server.test_lifecycle import run_load

__all__ = ["launch", "model_file"]


@pytest.mark.slow
def test_hostile_requests_harm_nobody(launch, tries, tell):
    count = tries(150, 10_000)
    server = launch("--max-wait", 30, "--max-mb", 1)
    expected = server.call("/predict", VALID[1]).json
    stop, others = threading.Event(), Counter()

    def ask():
        while not stop.is_set():
            answer = server.call("/predict", VALID[1])
            same = answer.status == 200 and answer.json["label"] == expected["label"]
            others["right" if same else f"{answer.status}"] += 1
            time.sleep(0.02)

    honest = threading.Thread(target=ask)
    honest.start()
    with ThreadPoolExecutor(16) as pool:
        statuses = Counter(pool.map(lambda seed: attack(server.port, seed), range(count)))
    stop.set()
    honest.join()
    assert server.process.poll() is None and server.call("/ready").status == 200
    assert set(others) == {"right"} and others["right"] > 2
    assert not [status for status in statuses if status >= 500], statuses
    assert all(statuses[one] for one in (400, 415, 422)), statuses
    assert "Traceback" not in server.log()
    tell("hostile requests", count, count)


@pytest.mark.slow
def test_no_request_is_lost_across_reloads_and_a_drain(launch, tmp_path, tries, tell):
    requests, reloads = tries(100, 1000), tries(2, 10)
    path = write_model(tmp_path / "birds.safetensors", seed=0)
    server = launch("--max-wait", 100, path=path)
    load = run_load(server.port, 4, 1_000_000, seconds=300)
    models = set()
    for number in range(1, reloads + 1):
        wanted = requests * number / (reloads + 1)
        wait_until(lambda wanted=wanted: answered(load) >= wanted)
        models.add(server.call("/model").json["sha256"])
        write_model(path, seed=number)
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: server.call("/model").json["sha256"] not in models)
    wait_until(lambda: answered(load) >= requests)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(30) == 143
    for one in load:
        one.join(20)
    assert not [error for one in load for error in one.lost]
    assert {status for one in load for status in one.statuses} == {200}
    assert len(set().union(*(one.models for one in load))) == reloads + 1
    tell("requests across reloads", answered(load), answered(load))


@pytest.mark.slow
def test_memory_does_not_grow_with_requests(launch, tries, tell):
    server, warm_up, requests = launch("--max-wait", 100), tries(100, 1000), tries(300, 20_000)
    ask(server, warm_up)
    before = resident_kilobytes(server.process.pid)
    ask(server, requests)
    after = resident_kilobytes(server.process.pid)
    assert after < 1.05 * before, (before, after)
    tell(f"requests, memory +{100 * (after / before - 1):.1f} %", requests, requests)


def answered(load):
    return sum(len(one.statuses) for one in load)


def ask(server, requests):
    """Sends requests over four connections, and waits for their answers."""
    load = run_load(server.port, 4, requests // 4, seconds=600)
    for one in load:
        one.join(600)
    assert answered(load) == requests and not any(one.lost for one in load)


def resident_kilobytes(pid):
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[1])


def wait_until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
