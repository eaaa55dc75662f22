"""Hostile requests to a running server: no crash, no 500, and no request of others harmed."""

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.hostile_requests import VALID, attack
from tests.server.conftest import launch, model_file

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
