"""`vitrail report`: the page of a run, made again."""

import json as as_json
from pathlib import Path
from typing import Annotated

import tyro


def report(
    run: Annotated[Path, tyro.conf.Positional],
    *,
    open: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> None:
    """Make report.html and the figures of a run again, finished or not.

    Args:
        run: run folder
        open: show the page in the browser
        json: print one JSON document
    """
    import webbrowser

    from vitrail.run.report.make import make

    made = make(run)
    if json:
        told = {
            "run": str(run),
            "report": str(made.path),
            "figures": [str(path) for path in made.figures],
            "pictures": made.pictures,
        }
        print(as_json.dumps(told, indent=1))
    else:
        if made.why:
            print(f"without pictures: {made.why}")
        print(f"report {made.path}")
    if open:
        webbrowser.open(made.path.resolve().as_uri())
