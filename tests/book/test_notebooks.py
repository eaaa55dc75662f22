"""The chapters as notebooks: the examples are cells, and they run."""

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

from book import notebooks
from tests.book.test_book import WEIGHTS


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of Jupyter's own packages
def test_a_chapter_runs_as_a_notebook(tmp_path):
    (path,) = notebooks.write_notebooks(tmp_path, ["before-you-start"], execute=True)
    cells = nbformat.read(path, 4).cells
    printed = [one.text for cell in cells for one in cell.get("outputs", ())]
    assert "5.0 5.0\n1.0\n" in printed
    assert (tmp_path / "figures" / "overview.png").exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_chapter_about_published_weights_runs_if_they_are_given(shared, tmp_path):
    chapter = notebooks.NEEDS_WEIGHTS
    (path,) = notebooks.write_notebooks(tmp_path, [chapter], True, weights=shared / WEIGHTS)
    cells = nbformat.read(path, 4).cells
    printed = [one.text for cell in cells for one in cell.get("outputs", ())]
    assert "military_uniform\n" in printed and "[0, 13, 182, 195]" in "".join(printed)


@pytest.mark.parametrize(("arguments", "written"), [([], False), (["--weights", "x"], True)])
def test_the_chapter_about_published_weights_is_left_out_without_them(
    arguments, written, monkeypatch
):
    given = []
    monkeypatch.setattr(
        notebooks, "write_notebooks", lambda folder, names, *rest: given.extend(names) or []
    )
    notebooks.main(["--execute", *arguments])
    assert (notebooks.NEEDS_WEIGHTS in given) == written


def test_included_code_is_not_a_cell_and_solutions_are_hidden():
    text = (notebooks.ROOT / "book" / "sixty-lines.md").read_text()
    cells = notebooks.make_notebook(text).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert not [cell for cell in code if "class SmallViT" in cell.source]
    hidden = [cell.metadata.get("jupyter", {}).get("source_hidden", False) for cell in code]
    assert hidden == [False, True, True, True]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_failing_cell_is_an_error(tmp_path, monkeypatch):
    chapter = tmp_path / "wrong.md"
    chapter.write_text("# Wrong\n\n```python\n1 / 0\n```\n")
    monkeypatch.setattr(notebooks, "chapters", lambda: [chapter])
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        notebooks.write_notebooks(tmp_path, execute=True)
