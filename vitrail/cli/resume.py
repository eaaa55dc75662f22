"""`vitrail resume`: a stopped run goes on, bit for bit."""

from pathlib import Path
from typing import Annotated

import tyro

from vitrail.cli.flags import SkipBroken
from vitrail.cli.train import tell


def resume(
    run: Annotated[Path, tyro.conf.Positional],
    *,
    device: str = "auto",
    timeout: float = 1800,
    skip_broken: SkipBroken = False,
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """Go on with a run where it stopped.

    Args:
        run: run folder
        device: cpu, cuda, cuda:1 ...; auto takes a GPU if there is one
        timeout: seconds that processes started by torchrun wait for each other
        skip_broken: from here on go on without images that cannot be read
        json: print the final numbers as one JSON document
    """
    from vitrail.run.run import resume

    done = resume(run, device=device, timeout=timeout, skip_broken=skip_broken)
    if done.first:
        tell(done.metrics, json)
