"""The chapters: included code is current, examples run, figures can be drawn."""

import ast
import builtins
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
import torch
from PIL import Image

from book import build, figures
from docs.build import NAVIGATION
from vitrail.errors import UserError

BLOCK = re.compile(r"(<!-- include: .*? -->\n)?```python\n(.*?)```\n(?:```text\n(.*?)```\n)?", re.S)
CHAPTER = build.ROOT / "book" / "how-it-works.md"
OLD = "<!-- include: vitrail/model/block.py DropPath.__init__ -->\n```python\nold\n```\n"
WEIGHTS = "weights/vit_tiny_patch16_224.augreg_in21k_ft_in1k"


def run(chapter: Path) -> dict[str, Any]:
    """Runs the chapter from top to bottom; each block must print the output stated with it."""
    printed: list[str] = []

    def record(*values: object) -> None:
        printed.append(" ".join(str(value) for value in values))

    names: dict[str, Any] = {"__builtins__": {**vars(builtins), "print": record}}
    for include, code, output in BLOCK.findall(chapter.read_text()):
        if include:
            continue
        printed.clear()
        exec(compile(code, chapter.name, "exec"), names)
        beside = re.findall(r"^ *print\(.*\)  # (.+)$", code, re.M)
        stated = beside or output.splitlines()
        assert printed == stated, f"printed {printed}, stated {stated}\n{code}"
    return names


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The namespace after the first chapter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("reader"))
        return run(CHAPTER)


@pytest.mark.parametrize("chapter", build.chapters(), ids=lambda path: path.name)
def test_included_code_is_the_source(chapter: Path) -> None:
    assert build.fill_includes(chapter.read_text()) == chapter.read_text(), (
        "run `python -m book.build`"
    )


def test_every_block_of_the_chapter_prints_the_stated_output(names: dict[str, Any]) -> None:
    assert names["logits"].shape == (1, 1000)


@pytest.mark.parametrize(
    "name",
    [
        "before-you-start",
        "sixty-lines",
        "how-it-learns",
        "learning-without-labels",
        "how-sure",
        "into-the-world",
        "paper-figures",
        "teaching",
        "what-can-happen",
    ],
)
def test_every_block_of_another_chapter_prints_the_stated_output(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run(build.ROOT / "book" / f"{name}.md")


@pytest.mark.parametrize("chapter", build.chapters(), ids=lambda path: path.name)
def test_every_exercise_has_a_solution(chapter: Path) -> None:
    text = chapter.read_text().partition("## Exercises\n")[2]
    exercises = re.split(r"^\*\*\d\.\*\* ", text, flags=re.M)[1:]
    assert not [one for one in exercises if "<summary>Solution</summary>" not in one]
    if chapter.stem not in ("index", "teaching", "what-can-happen"):
        assert len(exercises) >= 3


def test_the_small_vit_has_sixty_lines() -> None:
    lines = (build.ROOT / "book" / "small_vit.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 60


def test_a_typed_copy_of_the_small_vit_runs() -> None:
    text = (build.ROOT / "book" / "sixty-lines.md").read_text()
    typed = "\n\n".join(code for include, code, _ in BLOCK.findall(text) if include)
    names: dict[str, Any] = {}
    exec(compile(typed, "typed.py", "exec"), names)
    model = names["SmallViT"](image=8, patch=2, channels=1, classes=3, width=8, depth=1, heads=2)
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 3)


def test_a_wrong_number_beside_a_print_is_found(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.md"
    wrong.write_text("```python\nprint(1 + 1)  # 3\n```\n")
    with pytest.raises(AssertionError, match="printed"):
        run(wrong)


def test_the_worked_example_is_the_one_in_the_figure(names: dict[str, Any]) -> None:
    drawn = (figures.QUERIES, figures.KEYS, figures.VALUES)
    assert [names[name].tolist() for name in "qkv"] == list(drawn)


def test_the_photo_is_the_one_in_the_figure(names: dict[str, Any]) -> None:
    assert torch.equal(names["x"], figures.to_tensor(figures.load_photo()))


@pytest.mark.parametrize(("chapter", "following"), list(pairwise(NAVIGATION["Book"])))
def test_every_chapter_ends_with_a_link_to_the_next(chapter: str, following: str) -> None:
    last = (build.ROOT / "book" / f"{chapter}.md").read_text().splitlines()[-1]
    assert re.match(rf"Next: \[[^]]+\]\({following}\.md\)", last)


@pytest.mark.parametrize("chapter", build.chapters(), ids=lambda path: path.name)
def test_links_point_to_existing_files(chapter: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)", chapter.read_text())
    assert links and not [link for link in links if not (chapter.parent / link).exists()]


def test_methods_named_in_the_chapters_exist() -> None:
    text = "".join(chapter.read_text() for chapter in build.chapters())
    named = set(re.findall(r"`([A-Z]\w+\.\w+)`", text))
    files = (build.ROOT / "vitrail").rglob("*.py")
    known = {name for file in files for name in build.find_definitions(ast.parse(file.read_text()))}
    assert not named - known


@pytest.mark.parametrize("check", [True, False])
def test_outdated_code_is_found_by_check_and_updated_without(
    check: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chapter = tmp_path / "chapter.md"
    chapter.write_text(OLD)
    monkeypatch.setattr(build, "chapters", lambda: [chapter])
    with pytest.raises(SystemExit) as end:
        build.main(["--check"] if check else [])
    assert end.value.code == check and (chapter.read_text() == OLD) == check


def test_an_include_is_filled_and_dedented() -> None:
    first = build.fill_includes(OLD).splitlines()[2]
    assert first == "def __init__(self, rate: float):"


def test_an_include_has_its_decorators() -> None:
    assert build.extract_code("vitrail/model/vit.py", "init_weights").startswith(
        "@torch.no_grad()\n"
    )


def test_an_include_of_an_unknown_name_is_an_error() -> None:
    with pytest.raises(UserError, match=r"block\.py has no Block\.backward; correct the include"):
        build.extract_code("vitrail/model/block.py", "Block.backward")


def test_an_include_without_a_block_is_an_error() -> None:
    with pytest.raises(UserError, match="1 includes, but 0 have a Python block"):
        build.fill_includes("<!-- include: vitrail/model/block.py Block -->\n\nwords\n")


@pytest.mark.full
def test_figures_are_drawn_from_a_model_without_weights(tmp_path: Path) -> None:
    for path in figures.draw_figures(tmp_path):
        drawn, stored = (
            matplotlib.image.imread(file) for file in (path, figures.FIGURES / path.name)
        )
        assert drawn.shape == stored.shape and drawn.std() > 0.1


def test_stored_figures_are_small_files_of_full_width() -> None:
    for path in figures.FIGURES.iterdir():
        picture = np.asarray(Image.open(path).convert("RGB")) / 255
        assert path.stat().st_size < 400_000 and picture.shape[1] == 1800
        assert np.allclose(picture[[0, -1]], 1, atol=0.02), f"{path.name} is not white at its edges"


def test_the_trained_model_has_the_stated_numbers(shared: Path) -> None:
    model, labels = figures.build_model(shared / WEIGHTS)
    with torch.no_grad():
        z = model.encode(figures.to_tensor(figures.load_photo()))
        y = model.pool(z)
        label = labels[int(model.head(y).argmax())]
    text = CHAPTER.read_text()
    assert f"largest logit of our photo is *{label}*" in text
    assert f"last block is {z.abs().max():.0f}; after the norm it is {y.abs().max():.0f}." in text
