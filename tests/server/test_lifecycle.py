"""Processes and signals: nothing accepted is lost on reload and drain; workers share a port."""

import http.client
import os
import signal
import socket
import sys
import threading
import time

import pytest

from tests.server.conftest import picture, write_model
from tests.server.test_limits import post
from vitrail.server.drain import refuse_handshakes

JPEG = picture()


class Load(threading.Thread):
    """Requests in a loop, bounded in count and time, until the server refuses connections."""

    def __init__(self, port, requests, seconds=60):
        super().__init__(daemon=True)
        self.port, self.requests, self.seconds = port, requests, seconds
        self.statuses, self.models, self.lost, self.ended = [], set(), [], False

    def run(self):
        end, link = time.monotonic() + self.seconds, None
        while len(self.statuses) < self.requests and time.monotonic() < end and not self.ended:
            link = link or http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
            try:
                link.connect() if link.sock is None else None
            except ConnectionRefusedError:  # the server has ended: this request was never accepted
                self.ended = True
                return
            try:
                link.request("POST", "/predict", JPEG)
                answer = link.getresponse()
                answer.read()
                self.statuses.append(answer.status)
                self.models.add(answer.getheader("vitrail-model"))
                link = None if answer.will_close else link
            except (OSError, http.client.HTTPException) as error:
                self.lost.append(repr(error))
                link = None
        if link is not None:
            link.close()


def run_load(port, threads, requests, seconds=60):
    load = [Load(port, requests, seconds) for _ in range(threads)]
    for one in load:
        one.start()
    return load


@pytest.mark.slow
def test_nothing_is_lost_across_reloads_and_a_drain(launch, tmp_path):
    path = write_model(tmp_path / "birds.safetensors", seed=0)
    server = launch("--max-wait", 100, path=path)
    load = run_load(server.port, 4, 10_000)
    shas = [server.call("/model").json["sha256"]]
    write_model(path, seed=1)
    server.process.send_signal(signal.SIGHUP)
    end = time.monotonic() + 30
    while server.call("/model").json["sha256"] == shas[-1]:
        assert time.monotonic() < end
        time.sleep(0.05)
    shas.append(server.call("/model").json["sha256"])
    path.write_bytes(b"broken")
    server.process.send_signal(signal.SIGHUP)
    end = time.monotonic() + 30
    while "reload failed" not in server.log():
        assert time.monotonic() < end
        time.sleep(0.05)
    assert server.call("/model").json["sha256"] == shas[-1]
    with server.connect() as link:
        request = post(JPEG)
        link.sendall(request[:-100])
        time.sleep(0.1)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert server.call("/ready").status == 503
        time.sleep(1.0)
        link.sendall(request[-100:])  # it was accepted before the signal
        assert b" 200 " in link.recv(4096)[:20]
    assert server.process.wait(20) == 143
    for one in load:
        one.join(20)
    assert not [error for one in load for error in one.lost]
    assert {status for one in load for status in one.statuses} == {200}
    assert sum(len(one.statuses) for one in load) > 50
    assert set(shas) <= set().union(*(one.models for one in load))
    assert "reload failed" in server.log() and "Traceback" not in server.log()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux filters handshakes")
def test_queued_connections_are_accepted_and_new_ones_are_not():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address):
            refuse_handshakes(listener)
            with pytest.raises(TimeoutError):
                socket.create_connection(address, timeout=0.2)
            listener.settimeout(5)
            listener.accept()[0].close()


@pytest.mark.slow
def test_workers_share_the_port_and_are_restarted(launch):
    server = launch("--workers", 2)
    before = children(server.process.pid)
    assert len(before) == 2 and server.call("/predict", JPEG).status == 200
    for _ in range(10):
        server.call("/predict", JPEG)
    text = server.call("/metrics").body.decode()
    assert 'vitrail_requests_total{endpoint="/predict",status="200"} 11.0' in text
    os.kill(before[0], signal.SIGKILL)
    end = time.monotonic() + 30
    while len(set(children(server.process.pid)) - set(before)) < 1:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert server.call("/predict", JPEG).status == 200
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(20) == 130
    assert "Traceback" not in server.log()


def children(pid):
    """The worker processes, without multiprocessing's resource tracker."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as stat, open(f"/proc/{name}/cmdline") as line:
                parent = int(stat.read().rpartition(")")[2].split()[1])
                if parent == pid and "spawn_main" in line.read():
                    found.append(int(name))
        except OSError:
            continue
    return found
