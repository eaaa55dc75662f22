"""`vitrail resume`: a stopped run goes on, bit for bit."""

from pathlib import Path
from typing import Annotated

import tyro

from vitrail.cli.train import tell


def resume(
    run: Annotated[Path, tyro.conf.Positional],
    *,
    device: str = "auto",
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """Go on with a run where it stopped.

    Args:
        run: run folder
        device: cpu, cuda, cuda:1 ...; auto takes a GPU if there is one
        json: print the final numbers as one JSON document
    """
    from vitrail.run.run import resume

    tell(resume(run, device=device).metrics, json)
