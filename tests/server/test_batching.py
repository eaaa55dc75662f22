"""The queue: batches of what waits, refusals by predicted wait, callers who hang up."""

import base64
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from inspect import signature

import pytest
import torch

import vitrail
from tests.server.conftest import picture
from tests.server.test_limits import post
from vitrail.server.config import ServeConfig
from vitrail.server.model import ServedModel
from vitrail.server.service import CPU_BATCH

JPEG = picture()


@pytest.fixture
def slow(monkeypatch):
    """Forward passes that take as long as the test says; their batch sizes."""
    real, sizes, gate = ServedModel.logits, [], threading.Event()

    def logits(self, batch, alone):
        sizes.append(len(batch))
        gate.wait(10)
        return real(self, batch, alone)

    monkeypatch.setattr(ServedModel, "logits", logits)
    return sizes, gate


@pytest.fixture(scope="module")
def crowd(start):
    return start(batch=4, max_wait=1000.0)


def wait_until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_what_waits_is_taken_together_up_to_the_limit(crowd, slow):
    sizes, gate = slow
    batcher = crowd.server.service.batcher
    with ThreadPoolExecutor(10) as pool:
        first = pool.submit(crowd.call, "/predict", JPEG)
        wait_until(lambda: sizes == [1])
        others = [pool.submit(crowd.call, "/predict", JPEG) for _ in range(9)]
        wait_until(lambda: len(batcher.waiting) == 9)
        gate.set()
        assert {one.result().status for one in (first, *others)} == {200}
    assert sizes == [1, 4, 4, 1]


def test_two_lanes_compute_at_the_same_time_with_half_of_the_threads_each(start, monkeypatch):
    for module in ("model", "service"):
        monkeypatch.setattr(f"vitrail.server.{module}.thread_count", lambda: 2)
    server = start(batch=4, max_wait=1000.0)
    real, calls, gate = ServedModel.logits, [], threading.Event()

    def logits(self, batch, alone):
        calls.append((len(batch), alone, torch.get_num_threads()))
        gate.wait(10)
        return real(self, batch, alone)

    monkeypatch.setattr(ServedModel, "logits", logits)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(server.call, "/predict", JPEG)
        wait_until(lambda: len(calls) == 1)
        second = pool.submit(server.call, "/predict", JPEG)
        wait_until(lambda: len(calls) == 2)
        third = pool.submit(server.call, "/predict", JPEG)
        wait_until(lambda: len(server.server.service.batcher.waiting) == 1)
        gate.set()
        assert first.result().json == second.result().json == third.result().json
    assert calls[:2] == [(1, True, 2), (1, False, 1)]


def test_the_default_batch_is_small_on_a_cpu(start):
    assert start().server.service.batcher.limit == CPU_BATCH
    assert signature(vitrail.serve).parameters["batch"].default is ServeConfig().batch is None


def test_a_caller_who_hangs_up_leaves_the_queue(crowd, slow):
    sizes, gate = slow
    batcher = crowd.server.service.batcher
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(crowd.call, "/predict", JPEG)
        wait_until(lambda: sizes == [1])
        with crowd.connect() as link:
            link.sendall(post(JPEG))
            wait_until(lambda: len(batcher.waiting) == 1)
        wait_until(lambda: batcher.admission.images == 1)
        gate.set()
        assert first.result().status == 200
    time.sleep(0.05)
    assert sizes == [1]  # nothing was computed for the caller who left


def test_live_answers_and_ready_comes_first_while_the_model_is_busy(crowd, slow):
    sizes, gate = slow
    batcher = crowd.server.service.batcher
    with ThreadPoolExecutor(8) as pool:
        pool.submit(crowd.call, "/predict", JPEG)
        wait_until(lambda: sizes == [1])
        waiting = [pool.submit(crowd.call, "/predict", JPEG) for _ in range(2)]
        wait_until(lambda: len(batcher.waiting) == 2)
        crowd.server.service.probe_task = None
        ready = pool.submit(crowd.call, "/ready")
        wait_until(lambda: len(batcher.waiting) == 3)
        assert batcher.waiting[0].first
        assert crowd.call("/live", timeout=1).status == 200
        gate.set()
        assert ready.result().status == 200 and waiting[0].result().status == 200


def test_overload_is_refused_before_the_body_is_read(start, slow):
    _, gate = slow
    gate.set()
    server = start(max_wait=0.5)
    gate.clear()
    admission = server.server.service.admission
    admission.seconds = 0.3
    with ThreadPoolExecutor(4) as pool:
        accepted = []
        for images in (1, 2):
            accepted.append(pool.submit(server.call, "/predict", JPEG))
            wait_until(lambda images=images: admission.images == images)
        with server.connect() as link:
            link.sendall(post(b"", length=10**6))  # the body itself is never sent
            head = link.recv(4096)
        assert b" 429 " in head[:20] and b"\r\nretry-after: 1\r\n" in head
        admission.seconds = 2.0
        answer = server.call("/predict", JPEG)
        assert answer.status == 429 and answer.headers["retry-after"] == "4"  # 2 x 2 s - 0.5 s
        assert "retry in 4 s" in answer.json["error"]
        gate.set()
        assert [one.result().status for one in accepted] == [200, 200]
    assert server.call("/predict", JPEG).status == 200  # an idle server takes any request


def test_a_refused_connection_stays_open_and_is_counted(crowd, monkeypatch):
    """Refusals are written without a task: pipelined ones too, and their bodies are discarded."""
    monkeypatch.setattr(crowd.server.service.admission, "images", 10**9)
    before = count_refusals(crowd)
    with crowd.connect() as link:
        link.sendall(2 * post(JPEG) + b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answers = b""
        while b" 200 OK" not in answers:
            answers += link.recv(4096)
    assert answers.count(b" 429 ") == 2 and answers.count(b"content-security-policy") == 3
    assert b"connection: close" not in answers
    assert count_refusals(crowd) == before + 2
    with crowd.connect() as link:
        link.sendall(post(JPEG).replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        answer = b"".join(iter(lambda: link.recv(4096), b""))  # until the server closes it
    assert b" 429 " in answer[:20] and b"connection: close" in answer


def count_refusals(server) -> float:
    requests = server.server.service.metrics.requests
    return requests.labels("/predict", "429")._value.get()


def test_a_list_that_arrives_too_late_is_refused(crowd):
    """The queue may fill while a body arrives: it is checked again."""
    admission = crowd.server.service.admission
    body = b'["' + base64.b64encode(JPEG) + b'"]'
    with crowd.connect() as link:
        link.sendall(post(body)[:-10])
        wait_until(lambda: len(admission.reading) == 1)
        admission.images += 10**9
        try:
            link.sendall(body[-10:])
            assert b" 429 " in link.recv(4096)[:20]
        finally:
            admission.images -= 10**9


def test_explanations_have_a_lane_of_their_own(crowd, monkeypatch):
    explainer, gate = crowd.server.service.explainer, threading.Event()
    monkeypatch.setattr(explainer, "features", lambda *_: gate.wait(10) and {"features": []})
    with ThreadPoolExecutor(10) as pool:
        running = [pool.submit(crowd.call, "/features", JPEG) for _ in range(8)]
        wait_until(lambda: explainer.waiting == 8)
        assert crowd.call("/predict", JPEG).status == 200
        refused = crowd.call("/features", JPEG)
        assert refused.status == 429 and int(refused.headers["retry-after"]) >= 1
        gate.set()
        assert {one.result().status for one in running} == {200}


def test_explanations_and_predictions_do_not_mix(crowd):
    """Explanations hook into modules; predictions at the same time must not be recorded."""
    expected = crowd.call("/explain", JPEG).json
    with ThreadPoolExecutor(4) as pool:
        busy = [pool.submit(crowd.call, "/predict", JPEG) for _ in range(40)]
        found = [pool.submit(crowd.call, "/explain", JPEG) for _ in range(3)]
        assert {one.result().status for one in busy} == {200}
        assert all(one.result().json == expected for one in found)
