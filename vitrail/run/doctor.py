"""Checks this machine, and those of a torchrun, before a day is spent on them: `vitrail.doctor`."""

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from vitrail import files
from vitrail.arguments import check_arguments
from vitrail.display.text import printable
from vitrail.errors import UserError
from vitrail.run.machine_checks import Check, check_machine, judge
from vitrail.training.distributed import PeerLost, World, join_world

REDUCED_BYTES = 16 << 20  # of the all-reduce that measures the bandwidth
ROUND_TRIPS = 20
MAX_SKEW = 1.0  # seconds between the clocks of two machines
TIMEOUT = 60.0  # seconds for local processes to find each other


@dataclass(frozen=True, kw_only=True, repr=False)
class Diagnosis:
    """Whether this machine can train, and what to do if it cannot.

    >>> [check.name for check in vitrail.doctor(processes=0, hub=False).checks][:2]
    ['versions', 'device']
    """

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether all checks are ok or warnings.

        >>> vitrail.doctor(processes=0, hub=False).passed
        True
        """
        return all(check.status != "problem" for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """The document that `vitrail doctor --json` prints.

        >>> vitrail.doctor(processes=0, hub=False).to_dict()["passed"]
        True
        """
        return {"passed": self.passed, "checks": [asdict(check) for check in self.checks]}

    def __repr__(self) -> str:
        return "\n".join(map(str, self.checks))

    def _repr_html_(self) -> str:
        return "<br>".join(escape(str(check)) for check in self.checks)


@check_arguments
def doctor(
    folder: str | Path = ".", *, processes: int | None = None, hub: bool = True
) -> Diagnosis:
    """Checks versions, devices, processes, clocks, disk, memory and the hub.

    Started by torchrun, it checks every machine, and the connection of all processes.

    Args:
        folder: where runs will be written, whose disk is measured
        processes: processes to start on this machine, which then exchange tensors; by default one
            per GPU, at least two; 0 or 1 for none
        hub: whether to ask the Hugging Face hub for weights

    >>> print(vitrail.doctor(processes=0, hub=False).checks[1].status)
    ok
    """
    place = files.expand_user(folder)
    if processes is not None and processes < 0:
        raise UserError(f"`processes` is {processes}; give a number of at least 0")
    with join_world() as world:
        if world.size > 1:
            return Diagnosis(checks=tuple(check_all_machines(world, place, hub)))
    checks = list(check_machine(place, hub))
    number = max(2, torch.cuda.device_count()) if processes is None else processes
    if number > 1:
        checks += check_local_processes(number)
    return Diagnosis(checks=tuple(checks))


def check_local_processes(number: int) -> list[Check]:
    """Starts processes on this machine, which find each other as those of torchrun do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(number):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": number, "MASTER_PORT": port}
        environment = os.environ | {name: str(value) for name, value in names.items()}
        environment |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "vitrail.run.doctor"]
        started.append(
            subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=TIMEOUT) for process in started]
        return [Check(**check) for check in json.loads(outputs[0][0])]
    except subprocess.TimeoutExpired:
        why = f"{number} processes did not find each other within {TIMEOUT:g} seconds"
    except ValueError:  # the leader printed no JSON
        lines = [line for _, errors in outputs for line in errors.splitlines() if "rror:" in line]
        why = f"{number} processes failed: {printable((lines or ['without a message'])[0])}"
    finally:
        for process in started:
            process.kill()
            process.communicate()
    advice = "check the firewall of the loopback device, and /etc/hosts for the name of this host"
    return [judge("processes", why, advice, "problem")]


def check_all_machines(world: World, folder: Path, hub: bool) -> list[Check]:
    """On the leader, the checks of the first process of every machine, then those of all."""
    assert world.store is not None
    local = list(check_machine(folder, hub)) if world.local_rank == 0 else []
    host = f"{socket.gethostname()} (rank {world.rank})"
    report = {"host": host, "checks": [asdict(check) for check in local]}
    together = check_processes(world)
    world.store.set(f"doctor/{world.rank}", json.dumps(report))
    world.all_reduce(0.0)  # until all reports are stored
    found = list(read_reports(world)) if world.is_leader else []
    world.all_reduce(0.0)  # the store ends with its process
    if len({check.found for check in found if check.name.startswith("versions")}) > 1:
        why = "the machines have different versions"
        found.append(judge("versions", why, "install the same ones on all", "problem"))
    return [*found, *together]


def read_reports(world: World) -> Iterator[Check]:
    """The checks that the ranks have stored, each with the name of its machine."""
    assert world.store is not None
    for rank in range(world.size):
        report = json.loads(world.store.get(f"doctor/{rank}"))
        for check in report["checks"]:
            yield Check(**{**check, "name": f"{check['name']} on {report['host']}"})


def check_processes(world: World) -> list[Check]:
    """Exchanges tensors and times between all processes."""
    gpu = torch.cuda.is_available() and dist.is_nccl_available()
    device = torch.device("cuda", world.local_rank) if gpu else torch.device("cpu")
    small, large = (
        torch.full((size,), float(world.rank), device=device) for size in (1, REDUCED_BYTES // 4)
    )
    times = [time_all_reduce(small.clone(), world) for _ in range(ROUND_TRIPS)]
    time_all_reduce(large.clone(), world)
    speed = REDUCED_BYTES / time_all_reduce(large, world)
    expected = world.size * (world.size - 1) / 2
    backend = "NCCL" if gpu else "gloo"
    found = (
        f"{world.size} processes by {backend}, an all-reduce takes "
        f"{1000 * statistics.median(times):.2g} ms and carries {speed / 1e9:.2g} GB/s"
    )
    checks = [judge("processes", found)]
    if not bool((large == expected).all()):
        why = f"{world.size} processes by {backend} compute a wrong sum"
        advice = "test the network and the GPUs with nccl-tests"
        checks = [judge("processes", why, advice, "problem")]
    clocks = [0.0] * world.size
    world.all_reduce(0.0)  # so that all read their clocks at the same time
    clocks[world.rank] = time.time()
    clocks = world.all_reduce(*clocks)
    skew = max(clocks) - min(clocks)
    found = f"{skew:.2g} seconds between the clocks of {world.size} processes"
    advice = "synchronise them by NTP, so that logs can be compared" if skew > MAX_SKEW else ""
    return [*checks, judge("clock", found, advice)]


def time_all_reduce(tensor: torch.Tensor, world: World) -> float:
    start = time.perf_counter()
    with world.report_lost_peers():
        dist.all_reduce(tensor)
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter() - start


def check_as_rank() -> None:
    """One of the processes that `check_local_processes` starts; the leader prints JSON."""
    try:
        with join_world(TIMEOUT) as world:
            checks = check_processes(world)
    except PeerLost as error:
        sys.exit(f"error: {error}")
    if world.is_leader:
        print(json.dumps([asdict(check) for check in checks]))


if __name__ == "__main__":
    check_as_rank()
