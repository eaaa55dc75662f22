"""How a command is called, and one small run that all tests share."""

import pytest

from vitrail.cli.main import main

FLAGS = [
    *("--vit.width", "32", "--vit.depth", "1", "--vit.heads", "1", "--train.batch", "64"),
    *("--train.steps", "120", "--data.workers", "0"),
]


def call(capsys, *arguments):
    """Exit code, stdout and stderr of one command."""
    code = 0
    try:
        main([*map(str, arguments)])
    except SystemExit as ended:
        code = ended.code
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """One run, which no test changes."""
    path = tmp_path_factory.mktemp("runs") / "digits"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitrail.run.plan.TRIAL", 0.0)
        patch.setattr("vitrail.run.finish.make_report", lambda *rest: None)
        main(["train", "digits", *FLAGS, "--out", str(path), "--json"])
    return path
