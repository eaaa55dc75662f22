"""Writes every chapter as a notebook: `python -m book.notebooks [--execute] [CHAPTER ...]`.

The notebooks in build/notebooks come from the same Markdown as the site. With --execute, every
cell runs, and a cell that fails is an error. One chapter uses published weights, which are not part
of the repository: it is executed if `--weights FOLDER` gives them.
"""

import argparse
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

from book.build import ROOT, chapters

OUT = ROOT / "build" / "notebooks"
INCLUDED = re.compile(r"^<!-- include: .*? -->\n```python$", re.MULTILINE)
NEEDS_WEIGHTS = "what-it-sees"  # the chapter that loads the folder of this name:
WEIGHTS = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"


def make_notebook(text: str) -> Any:
    """A chapter as a notebook: its examples are cells, included source code stays text."""
    text = INCLUDED.sub("```py", text).replace("```sh\n", "```console\n")
    text = re.sub(r"</?details>\n?", "", text)
    text = re.sub(r"<summary>(.*?)</summary>", r"**\1**", text)
    text = re.sub(r"\]\(([\w-]+)\.md\b", r"](\1.ipynb", text)
    notebook = jupytext.reads(text, fmt="md")
    notebook.metadata["kernelspec"] = {
        **{"name": "python3", "display_name": "Python 3", "language": "python"}
    }
    solution = False
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            solution = cell.source.rstrip().rpartition("**Solution**")[1] != "" and not re.search(
                r"^\*\*\d\.\*\*", cell.source.rpartition("**Solution**")[2], re.MULTILINE
            )
        elif solution:
            cell.metadata["jupyter"] = {"source_hidden": True}
    return notebook


def write_notebooks(
    folder: Path, names: Sequence[str] = (), execute: bool = False, weights: Path | None = None
) -> list[Path]:
    """Writes the named chapters, or all, with their figures; `weights` are those of `WEIGHTS`."""
    written = []
    shutil.copytree(ROOT / "book" / "figures", folder / "figures", dirs_exist_ok=True)
    for chapter in chapters():
        if names and chapter.stem not in names:
            continue
        notebook = make_notebook(chapter.read_text())
        if execute and any(cell.cell_type == "code" for cell in notebook.cells):
            with TemporaryDirectory() as place:  # a chapter may write files, every time the same
                if weights is not None:
                    (Path(place) / WEIGHTS).symlink_to(weights.absolute(), target_is_directory=True)
                resources = {"metadata": {"path": place}}
                client = NotebookClient(notebook, timeout=600, resources=resources)
                client.execute(env={**os.environ, "PYTHONPATH": str(ROOT)})
        path = folder / f"{chapter.stem}.ipynb"
        nbformat.write(notebook, path)
        written.append(path)
    return written


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chapters", nargs="*", help="names of chapters; by default all")
    parser.add_argument("--execute", action="store_true", help="run all cells")
    parser.add_argument("--weights", type=Path, help=f"folder of {WEIGHTS}", metavar="FOLDER")
    options = parser.parse_args(arguments)
    excluded = options.execute and options.weights is None
    names = options.chapters or [
        path.stem for path in chapters() if not (excluded and path.stem == NEEDS_WEIGHTS)
    ]
    for path in write_notebooks(OUT, names, options.execute, options.weights):
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
