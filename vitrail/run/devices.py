"""Devices to plan a training on: their peaks, memory and links, and what ViTs reach on them."""

import os
import re
from dataclasses import dataclass
from difflib import get_close_matches

from vitrail.data.reading.memory import available_memory
from vitrail.errors import UserError

CPU = "cpu"
MAX_DEVICES = 100_000
LOOPBACK = 1e9  # bytes per second of an all-reduce by gloo between processes of one machine


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device, with the share of its machine that it has."""

    name: str
    peak: float  # FLOP per second of matrix products in 16 bit, dense; of a CPU 0: it is measured
    peak32: float  # the same in float32
    memory: float  # bytes
    link: float  # bytes per second, each way, to the other devices of its machine
    network: float  # bytes per second, each way, of a whole machine
    cores: int  # CPU threads of the machine, for each device
    mfu: float  # model FLOPs utilisation: the fraction of the peak that training reaches
    reason: str  # for the utilisation
    bfloat16: bool = True
    per_machine: int = 8


# Peaks, memory and links are from NVIDIA's data sheets: dense, with float32 accumulation. Networks
# and CPU threads are those of usual cloud machines (AWS: g4dn, p3dn, p4d, g6, g6e, p5, p6-b200).
V100_RUNS = "DeiT-B on 8 V100 reached 0.21, fine-tuning MAE on 32 and 64 V100 0.13 to 0.19"
A100_RUNS = "DINOv2 reached 0.30 to 0.38"
ASSUMED = "assumed: no published training of a ViT is known"
NEWER = f"{ASSUMED}; less than on the A100, as the peak grew faster than the memory bandwidth"
DEVICES = {
    # TFLOP/s in 16 bit, in float32, memory GB, link GB/s, network Gbit/s, cores, MFU, its reason
    "T4": (65, 8.1, 16, 16, 25, 8, 0.25, ASSUMED),
    "V100": (125, 15.7, 32, 150, 100, 12, 0.18, V100_RUNS),
    "A100": (312, 19.5, 80, 300, 400, 12, 0.34, A100_RUNS),
    "A100-40GB": (312, 19.5, 40, 300, 400, 12, 0.34, A100_RUNS),
    "L4": (121, 30.3, 24, 32, 100, 24, 0.30, ASSUMED),
    "L40S": (362, 91.6, 48, 32, 100, 24, 0.30, ASSUMED),
    "H100": (989, 67, 80, 450, 3200, 24, 0.30, NEWER),
    "H200": (989, 67, 141, 450, 3200, 24, 0.30, NEWER),
    "B200": (2250, 75, 180, 900, 3200, 24, 0.25, NEWER),
    "RTX-4090": (165, 82.6, 24, 32, 10, 16, 0.35, ASSUMED),
}
WITHOUT_BFLOAT16 = ("T4", "V100")


def parse_devices(text: str) -> tuple[int, Device]:
    """The number and kind of devices in a text such as "64xH100" or "2xcpu"."""
    match = re.fullmatch(r"(?:(\d{1,9}) *[xX*] *)?(.+)", text.strip())
    if match is None:
        raise UserError("`devices` is empty; give a number and a kind, such as 8xA100")
    count, name = int(match[1] or 1), match[2].lower().replace("_", "-").replace(" ", "-")
    if not 1 <= count <= MAX_DEVICES:
        raise UserError(f"`devices` {text}: give from 1 to {MAX_DEVICES:,} devices")
    if name == CPU:
        return count, this_cpu(count)
    names = {known.lower(): known for known in DEVICES}
    if name not in names:
        near = get_close_matches(name, [*names, CPU], n=1)
        hint = f"; perhaps you meant {names.get(near[0], CPU)}" if near else ""
        raise UserError(
            f"`devices` {text}: unknown kind{hint}; known: {', '.join([CPU, *DEVICES])}"
        )
    return count, known_device(names[name])


def known_device(name: str) -> Device:
    """A device of the table."""
    peak, peak32, memory, link, network, cores, mfu, reason = DEVICES[name]
    return Device(
        name=name,
        peak=peak * 1e12,
        peak32=peak32 * 1e12,
        memory=memory * 1e9,
        link=link * 1e9,
        network=network * 1e9 / 8,
        cores=cores,
        mfu=mfu,
        reason=reason,
        bfloat16=name not in WITHOUT_BFLOAT16,
    )


def this_cpu(processes: int) -> Device:
    """One of several training processes on the CPU of this machine."""
    cores = os.cpu_count() or 1
    local = min(processes, cores)
    return Device(
        name=CPU,
        peak=0.0,
        peak32=0.0,
        memory=available_memory() / local,
        link=LOOPBACK,
        network=LOOPBACK,
        cores=max(1, cores // local),
        mfu=0.0,
        reason="measured here",
        per_machine=local,
    )
