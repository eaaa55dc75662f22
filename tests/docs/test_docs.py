"""Every `sh` and `python` block of docs/ runs as it is written, only with fewer training steps.

A `toml` block is read as a search space; a `text` block is an output or a listing. Any other
block, and one that cannot run here, has a comment in front of it: `<!-- not run: reason -->`.
"""

import configparser
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tests.docs.material import HUB, HUB_DATASET, PREPARE, SERVED, make_common, run_server
from tests.local_hub import DatasetHub, run_hub, use_hub
from vitrail.cli.main import main
from vitrail.tuning.space import parse_space

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
CHAPTERS = sorted((ROOT / "book").glob("*.md"))
BLOCK = re.compile(
    r"(?:<!-- not run: (?P<reason>[^>]+?) -->\n+)?^```(?P<language>\S*)\n(?P<code>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
TESTED = ("sh", "python", "toml", "text")  # any other block says why it is not run
REPORTED = ("quick-start",)  # pages whose runs make their report, which takes seconds
ADDRESS = "localhost:8000"  # of a server, on the pages that need one
# A run of minutes becomes one of a few steps.
SHORTER = [
    (r"--(minutes|epochs)[ =]\S+", "--train.steps 4"),
    (r"\bminutes=[\d.]+", "epochs=1"),
    (r"--trials \d+", "--trials 2"),
    (r"(vitrail pretrain [^\n#]+)", r"\1 --pretrain.comparison 0"),
]


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("vitrail.run.plan.TRIAL", 0.0)
        make_common(folder)
    return folder


def shorten(code: str) -> str:
    for pattern, replacement in SHORTER:
        code = re.sub(pattern, replacement, code)
    return code


def shell_lines(code: str) -> list[str]:
    """The commands of a block: continuation lines joined, comments removed."""
    lines = code.replace("\\\n", " ").splitlines()
    lines = [re.sub(r"(^|\s)#\s.*", "", line).strip() for line in lines]
    return [line for line in lines if line]


def run_shell(line: str) -> None:
    """Runs a command in bash, where `vitrail` is the one of this environment."""
    function = f'vitrail() {{ "{sys.executable}" -m vitrail "$@"; }}\n'
    done = subprocess.run(
        ["bash", "-ec", function + line], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{line}\n{done.stderr}"


def run_command(line: str) -> None:
    """Runs a plain `vitrail` command in this process, which saves an import of torch for each."""
    if line.startswith("vitrail ") and not set("|<>&;$*`'\"") & set(line):
        try:
            main(line.split()[1:])
        except SystemExit as end:
            assert not end.code, f"{line}: {end.code}"
    else:
        run_shell(line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_of_a_page_runs(page, common, tmp_path, monkeypatch):
    folder = tmp_path / "place"
    shutil.copytree(common, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("vitrail.run.plan.TRIAL", 0.0)
    if page.stem not in REPORTED:
        monkeypatch.setattr("vitrail.run.finish.make_report", lambda *_: None)
    if prepare := PREPARE.get(page.stem):
        prepare(folder)
    if page.stem in HUB:
        with run_hub(DatasetHub, folder / "remote", HUB_DATASET) as server:
            use_hub(monkeypatch, server, tmp_path / "hub")
            run_blocks(page, ADDRESS)
        return
    if page.stem not in SERVED:
        run_blocks(page, ADDRESS)
        return
    monkeypatch.setenv("CURL_HOME", str(folder))
    (folder / ".curlrc").write_text("fail\nsilent\n")  # a status of 400 or more is a failure
    with run_server(folder) as address:
        run_blocks(page, address)


def run_blocks(page: Path, address: str) -> None:
    """Runs all blocks of a page in order, with `address` where it says localhost:8000."""
    names: dict[str, object] = {}
    for block in BLOCK.finditer(page.read_text()):
        if block["reason"] or block["language"] not in ("sh", "python"):
            continue
        code = shorten(block["code"]).replace(ADDRESS, address)
        if block["language"] == "python":
            exec(compile(code, page.name, "exec"), names)
        else:
            for line in shell_lines(code):
                run_command(line)


def find_unexplained(text: str) -> list[str]:
    """The blocks that neither run nor say why, each by its first lines."""
    return [
        block[0][:80]
        for block in BLOCK.finditer(text)
        if len((block["reason"] or "").split()) < 3
        and (block["reason"] or block["language"] not in TESTED)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_that_do_not_run_say_why(page):
    text = page.read_text()
    assert not find_unexplained(text)
    assert 2 * len(BLOCK.findall(text)) == len(re.findall(r"^\s*(```|~~~)", text, re.MULTILINE))


def test_commands_of_the_book_say_why_they_do_not_run():
    blocks = [block for page in CHAPTERS for block in BLOCK.finditer(page.read_text())]
    commands = [block for block in blocks if block["language"] == "sh"]
    assert commands and not [block[0] for block in commands if not block["reason"]]


def test_a_block_without_a_reason_would_be_seen():
    assert find_unexplained("```nginx\nx\n```\n") and find_unexplained("```\nx\n```\n")
    assert find_unexplained("<!-- not run: no -->\n```sh\nx\n```\n")
    assert not find_unexplained("<!-- not run: needs a proxy -->\n```nginx\nx\n```\n")


def blocks_in(language: str) -> list[str]:
    blocks = [block for page in PAGES for block in BLOCK.finditer(page.read_text())]
    return [block["code"] for block in blocks if block["language"] == language]


def test_configuration_files_parse():
    assert all(parse_space(tomllib.loads(code)) for code in blocks_in("toml"))
    documents = [yaml.safe_load(code) for code in blocks_in("yaml")]
    assert len(documents) == 3 and all(isinstance(one, dict) for one in documents)
    for code in blocks_in("ini"):
        unit = configparser.ConfigParser(interpolation=None)
        unit.read_string(code)
        assert "vitrail serve" in unit["Service"]["ExecStart"]


def test_extras_are_those_of_the_checkout():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for page in PAGES:
        text = page.read_text()
        assert "vitrail[" not in text, f"{page.name}: the package is installed as '.[...]'"
        for names in re.findall(r"'\.\[([\w,]+)\]'", text):
            assert set(names.split(",")) <= set(extras["optional-dependencies"]), page.name


def test_a_failing_command_fails_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match="does not exist"):
        run_command("vitrail predict missing.safetensors missing.jpg")
    with pytest.raises(AssertionError, match="false"):
        run_command("false | cat; false")
