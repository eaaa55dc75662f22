"""`vitrail doctor`: checks machines before a day is spent on them."""

import os
import sys
from pathlib import Path
from typing import Annotated

import tyro

import vitrail
from vitrail.cli.flags import OptionalInt, Switch, unset
from vitrail.cli.output import print_result


def doctor(
    folder: Annotated[
        Path,
        tyro.conf.Positional,
        unset(metavar="[FOLDER]", help="where runs will be written (default: this folder)"),
    ] = Path("."),
    *,
    processes: OptionalInt = None,
    offline: Switch = False,
    json: Switch = False,
) -> None:
    """Check machines before a day is spent on them.

    One line each for versions, device, memory, shared memory, open files, disk, cache, weights,
    and processes that exchange tensors: ok, warning or problem, and what to do. The exit code is 1
    if there is a problem. Started by torchrun, it checks all machines and their connection.

    Args:
        processes: processes to start on this machine (default: one per GPU, at least 2; 0: none)
        offline: do not ask the Hugging Face hub
        json: print one JSON document
    """
    result = vitrail.doctor(folder, processes=processes, hub=not offline)
    if os.environ.get("RANK", "0") == "0":
        print_result(result, json)
    if not result.passed:
        sys.exit(1)
