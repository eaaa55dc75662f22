"""`vitrail resume`: continues an interrupted run, bit for bit."""

from typing import Literal

import vitrail
from vitrail.cli.flags import Device, RunFolder, SkipBroken, Switch, Timeout
from vitrail.cli.pretrain import print_quality
from vitrail.cli.train import print_results


def resume(
    run: RunFolder,
    *,
    device: Device = "auto",
    timeout: Timeout = 1800,
    skip_broken: SkipBroken = False,
    shard: Literal["auto", "off", "full"] | None = None,
    json: Switch = False,
) -> None:
    """Resume an interrupted run.

    The result equals that of a run without interruption, bit for bit.

    Args:
        shard: full: weights and optimizer divided among the processes (FSDP); by default as before
        json: print the results as one JSON document
    """
    resumed = vitrail.resume(
        run, device=device, timeout=timeout, skip_broken=skip_broken, shard=shard
    )
    if resumed.is_leader:
        show = print_quality if "method" in resumed.metrics else print_results
        show(resumed.metrics, json)
