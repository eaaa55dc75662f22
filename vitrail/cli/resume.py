"""`vitrail resume`: continues an interrupted run, bit for bit."""

from typing import Annotated, Literal, TypeAlias

import vitrail
from vitrail.cli.flags import Device, RunFolder, SkipBroken, Switch, Timeout, unset
from vitrail.cli.pretrain import print_quality
from vitrail.cli.train import print_results

Sharding: TypeAlias = Annotated[
    Literal["auto", "off", "full"] | None,
    unset(help="full: divide weights and optimizer among the processes (default: as before)"),
]


def resume(
    run: RunFolder,
    *,
    device: Device = "auto",
    timeout: Timeout = 1800,
    skip_broken: SkipBroken = False,
    shard: Sharding = None,
    json: Switch = False,
) -> None:
    """Resume an interrupted run.

    The result equals that of a run without interruption, bit for bit.

    Args:
        json: print the results as one JSON document
    """
    resumed = vitrail.resume(
        run, device=device, timeout=timeout, skip_broken=skip_broken, shard=shard
    )
    if resumed.is_leader:
        show = print_quality if "method" in resumed.metrics else print_results
        show(resumed.metrics, json)
