"""`vitrail check` as a user and as a script see it."""

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.bad import HOSTILE, bad_folder, put
from tests.data.fakes import encoded, photo
from tests.data.samples import class_folders, tar
from tests.data.samples import encoded as tiny
from vitrail.cli.main import main

KEYS = ["images", "split", "classes", "broken", "duplicates", "leaks", "near_duplicates", "plan"]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("VITRAIL_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def fine(tmp_path):
    """Pictures of a size that a recipe fits."""
    for label in "ab":
        for number in range(15):
            image = encoded(photo(number + 100 * ord(label)))
            put(tmp_path / "fine" / label / f"{number}.jpg", image)
    return tmp_path / "fine"


def check(*arguments):
    """The exit code, or the words that `sys.exit` prints before it ends with 1."""
    try:
        main(["check", *map(str, arguments), "--workers", "0"])
    except SystemExit as ended:
        return ended.code
    return 0


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def listing(folder):
    """Every file and link below, with its content and dates."""
    found = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(root, name)
            status = path.lstat()
            content = path.read_bytes() if path.is_file() else None
            found[path] = status.st_mtime_ns, status.st_size, content
    return found


def test_json_has_the_promised_keys(fine, capsys):
    assert check(fine, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert set(KEYS) <= set(document)
    assert document["images"] == 30 == sum(document["split"].values())
    assert list(document["split"]) == ["train", "val", "test"]
    assert document["classes"] == {"a": 15, "b": 15}
    assert set(document["plan"]) == {"settings", "reasons"} and document["plan"]["reasons"]


def test_every_problem_of_a_bad_folder_is_reported_and_the_exit_code_is_one(tmp_path, capsys):
    folder = bad_folder(tmp_path / "bad")
    assert check(folder, "--json") == (
        "error: training on bad would fail: 5 images cannot be read; "
        "repair or remove them, or skip them with --data.skip-broken"
    )
    document = json.loads(capsys.readouterr().out)
    assert {"path": "train/cat/half.jpg", "why": "truncated"} in document["broken"]
    assert document["leaks"] == [["test/cat/leak of 1.jpg", "train/cat/1.jpg"]]
    assert document["conflicts"] == [[f"train/{HOSTILE}/conflict with 2.jpg", "train/cat/2.jpg"]]
    assert document["near_leaks"] == [["test/cat/small 4.png", "train/cat/4.jpg"]]
    assert len(document["near_duplicates"]) == 2
    assert document["misnamed"] == [{"path": "train/cat/gif.jpg", "kind": "GIF"}]


def test_broken_images_may_be_skipped(tmp_path, capsys):
    folder = bad_folder(tmp_path / "bad")
    assert check(folder, "--data.skip-broken") == 0
    assert "Broken images: 5 images cannot be read" in capsys.readouterr().out


def test_the_summary_lists_the_findings(tmp_path, capsys):
    check(bad_folder(tmp_path / "bad"))
    printed = capsys.readouterr().out
    for words in (
        "train/cat/half.jpg: truncated",
        "test/cat/leak of 1.jpg (test) = train/cat/1.jpg (train)",
        "train/cat/gif.jpg: is GIF",
        "what `vitrail train` would do",
        HOSTILE,
    ):
        assert words in printed


def test_names_are_escaped_before_they_reach_the_terminal(tmp_path, capsys):
    folder = class_folders(tmp_path / "x", {"a": 9, "[red]b[/red]": 9} | {"\x1b[31mc": 9})
    put(folder / "a" / "\x1b[2J\udcff[bold].png", b"")
    check(folder)
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert r"a/\x1b[2J\udcff[bold].png: empty file" in printed


def test_long_lists_are_truncated_and_counted(fine, capsys):
    for number in range(25):
        put(fine / "a" / f"broken {number}.jpg", f"no image {number}".encode())
    check(fine)
    printed = capsys.readouterr().out
    assert printed.count("not an image") == 10
    assert "and 15 more" in printed


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda root: root.mkdir(), "no images in"),
        (lambda root: class_folders(root, {"only": 5}), "has only one class"),
        (lambda root: class_folders(root, {"a": 5, "b": 2}), "class 'b' has 2 different images"),
    ],
    ids=["empty", "one class", "two images"],
)
def test_data_that_cannot_be_opened_is_one_line_and_exit_code_one(tmp_path, capsys, make, words):
    make(tmp_path / "x")
    ended = check(tmp_path / "x", "--json")
    assert ended.startswith("error: ") and words in ended and "\n" not in ended
    assert capsys.readouterr().out == ""


def test_data_without_a_possible_recipe_exits_with_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("vitrail.run.build.MIN_PATCHES", 1000)
    class_folders(tmp_path / "x", {"a": 20, "b": 20})
    ended = check(tmp_path / "x", "--json")
    document = json.loads(capsys.readouterr().out)
    assert document["plan"]["error"] in ended and "would fail" in ended


def test_nothing_in_the_data_is_written(tmp_path, capsys):
    folder = bad_folder(tmp_path / "bad")
    before = listing(folder)
    check(folder, "--out", tmp_path / "page.html", "--augmented", tmp_path / "sheet.png")
    assert listing(folder) == before


@pytest.mark.parametrize("flag", ["--out", "--augmented"])
def test_outputs_inside_the_data_are_refused(fine, capsys, flag):
    before = listing(fine)
    assert "never changes" in check(fine, flag, fine / "a" / "new.png")
    assert listing(fine) == before


def test_an_image_of_a_table_is_not_overwritten(fine, capsys):
    rows = [f"{label}/{number}.jpg,{label}" for label in "ab" for number in range(15)]
    (fine / "images.csv").write_text("path,label\n" + "\n".join(rows))
    before = listing(fine)
    assert "never changes" in check(fine / "images.csv", "--out", fine / "a" / "3.jpg")
    assert "never changes" in check(fine / "images.csv", "--out", fine / "images.csv")
    assert listing(fine) == before
    assert check(fine / "images.csv", "--out", fine / "page.html") == 0


def test_the_page_is_one_file(fine, tmp_path, capsys):
    assert check(fine, "--out", tmp_path / "deep" / "page.html") == 0
    html = (tmp_path / "deep" / "page.html").read_text()
    assert html.rstrip().endswith("</html>")
    assert "Training would work." in html and "Augmented training images" in html
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["page.html"]


def test_the_sheet_is_a_png_of_eight_columns(fine, tmp_path, capsys):
    assert check(fine, "--augmented", tmp_path / "sheet.png") == 0
    image = Image.open(io.BytesIO((tmp_path / "sheet.png").read_bytes()))
    assert image.format == "PNG" and image.width > 8 * 64 and image.height > 8 * 64


def test_a_sheet_that_is_not_named_png_is_refused(fine, tmp_path):
    assert "that ends in .png" in check(fine, "--augmented", tmp_path / "sheet.jpg")


def test_a_negative_number_of_workers_is_refused(fine):
    with pytest.raises(SystemExit, match="workers is -1"):
        main(["check", str(fine), "--workers", "-1"])


def test_one_image_with_four_channels_does_not_change_the_model(fine, tmp_path, capsys):
    for split in ("train", "val"):
        shutil.copytree(fine, tmp_path / "x" / split)
    put(tmp_path / "x" / "train" / "a" / "odd.npy", npy(np.zeros((90, 120, 4), np.uint8)))
    flags = ("--data.skip-broken", "--json", "--out", tmp_path / "page.html")
    assert check(tmp_path / "x", *flags) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["broken"] == [{"path": "train/a/odd.npy", "why": "4 channels; expected 3"}]
    assert document["plan"]["settings"]["vit"]["channels"] == 3


def test_a_folder_whose_path_is_not_utf8_exits_with_one_as_in_training(fine, tmp_path, capsys):
    folder = fine.rename(tmp_path / "\udcff")
    assert "is not valid UTF-8; rename it" in check(folder, "--json")
    assert "is not valid UTF-8" in json.loads(capsys.readouterr().out)["plan"]["error"]


def test_tar_shards_are_examined(tmp_path, capsys):
    members = {}
    for number in range(40):
        members[f"{number:03}.png"] = tiny(number % 38, side=8)  # two of them twice
        members[f"{number:03}.cls"] = str(number % 2).encode()
    tar(tmp_path / "shards" / "data-000.tar", members)
    check(tmp_path / "shards", "--json")
    document = json.loads(capsys.readouterr().out)
    assert (document["images"], document["broken"]) == (40, [])
    assert document["duplicates"] == [
        ["data-000.tar:000", "data-000.tar:038"],
        ["data-000.tar:001", "data-000.tar:039"],
    ]


def test_a_built_in_data_set_is_examined(capsys):
    assert check("digits", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["images"], document["channels"], document["kinds"]) == (
        1797,
        {"1": 1797},
        {"pixels": 1797},
    )


def test_help_does_not_import_torch():
    code = (
        "import sys\nfrom vitrail.cli.main import run\n"
        "try:\n    run(['check', '--help'])\nexcept SystemExit:\n    pass\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.slow
def test_json_goes_to_stdout_and_nothing_to_stderr(fine):
    done = subprocess.run(
        [sys.executable, "-m", "vitrail", "check", str(fine), "--json"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stderr == ""
    assert json.loads(done.stdout)["images"] == 30
