"""`vitrail resume`: a stopped run goes on, bit for bit."""

from pathlib import Path
from typing import Annotated

import tyro

from vitrail.cli.train import tell


def resume(
    run: Annotated[Path, tyro.conf.Positional],
    *,
    device: str = "auto",
    timeout: float = 1800,
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """Go on with a run where it stopped.

    Args:
        run: run folder
        device: cpu, cuda, cuda:1 ...; auto takes a GPU if there is one
        timeout: seconds that processes started by torchrun wait for each other
        json: print the final numbers as one JSON document
    """
    from vitrail.run.run import resume

    done = resume(run, device=device, timeout=timeout)
    if done.first:
        tell(done.metrics, json)
