"""`vitrail report`: writes the report of a run again."""

import json as as_json

import vitrail
from vitrail.cli.flags import RunFolder, Switch


def report(run: RunFolder, *, open: Switch = False, json: Switch = False) -> None:
    """Rebuild the report of a run.

    Writes report.html and the figures again, whether or not the run has finished.

    Args:
        open: open the report in the browser
        json: print one JSON document
    """
    import webbrowser

    written = vitrail.report(run)
    if json:
        print(as_json.dumps(written.to_dict(), indent=1))
    else:
        if written.missing:
            print(f"without images: {written.missing}")
        print(f"report {written.path}")
    if open:
        webbrowser.open(written.path.resolve().as_uri())
