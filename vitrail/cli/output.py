"""Prints the result of a verb: as text, or as the document of `--json`."""

import json as as_json
from typing import Any, Protocol


class Result(Protocol):
    def to_dict(self) -> dict[str, Any]: ...


def print_result(result: Result, json: bool) -> None:
    print(as_json.dumps(result.to_dict(), indent=1) if json else result)
