"""Picks the device to compute on: CUDA, Apple's MPS or the CPU."""

import torch

from vitrail.errors import UserError


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of this name; "auto" picks CUDA, else Apple's MPS, else the CPU.

    On a machine with several GPUs, "auto" gives each process the one of its local rank.
    """
    if name == "auto":
        gpus = torch.cuda.device_count()
        if gpus and local_rank >= gpus:
            raise UserError(
                f"process {local_rank} has no GPU: this machine has {gpus}; start {gpus} processes"
            )
        if gpus:
            return torch.device("cuda", local_rank)
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).cpu()  # fails on "meta", which has shapes but no values
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"cannot use device {name}: {reason}; try `device='cpu'`") from error
    return device


def has_bfloat16_units() -> bool:
    """Whether the CPU computes in bfloat16; without such units it is 50 times slower."""
    units = torch.cpu.get_capabilities()
    return bool(units.get("avx512_bf16", False) or units.get("amx_bf16", False))
