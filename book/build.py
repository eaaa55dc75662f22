"""Fills the chapters' code from the source: `python -m book.build`, or `--check` to only compare.

A chapter asks for code with a line such as `<!-- include: vitrail/model/block.py Block.forward -->`
right before a fenced Python block.
"""

import argparse
import ast
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from vitrail import files
from vitrail.errors import UserError

ROOT = Path(__file__).parent.parent
EXAMPLE = re.compile(r'\n\n +>>> .*?(?:(?<=\n)|\n) *(""")', re.DOTALL)  # at the end of a docstring
INCLUDE = re.compile(r"(<!-- include: (\S+) (\S+) -->\n```python\n)(.*?)(```\n)", re.DOTALL)


def chapters() -> list[Path]:
    return sorted((ROOT / "book").glob("*.md"))


def filled(text: str) -> str:
    """The chapter with every included block as the source has it now."""
    asked, found = text.count("<!-- include:"), len(INCLUDE.findall(text))
    if asked != found:
        raise UserError(
            f"{asked} includes, but {found} have a Python block right below; "
            "write `<!-- include: FILE NAME -->`, then ```python on the next line"
        )
    return INCLUDE.sub(lambda match: match[1] + code(match[2], match[3]) + match[5], text)


def code(path: str, name: str) -> str:
    """A class, function or method (`Block.forward`) of a file, without indent and doctests."""
    source = (ROOT / path).read_text()
    if name not in (found := definitions(ast.parse(source))):
        raise UserError(f"{path} has no {name}; correct the include")
    node = found[name]
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = source.splitlines(keepends=True)[first - 1 : node.end_lineno]
    return EXAMPLE.sub(r"\1", textwrap.dedent("".join(lines)))


def definitions(tree: ast.AST, prefix: str = "") -> dict[str, ast.ClassDef | ast.FunctionDef]:
    """All classes, functions and methods by name, such as "Block" and "Block.forward"."""
    found: dict[str, ast.ClassDef | ast.FunctionDef] = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[prefix + node.name] = node
            found |= definitions(node, f"{prefix}{node.name}.")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, fail on old code")
    check = parser.parse_args(arguments).check
    old = [path for path in chapters() if filled(path.read_text()) != path.read_text()]
    for path in old:
        print(f"{path.name}: {'its code is old' if check else 'filled'}")
        if not check:
            files.write_file(path, filled(path.read_text()))
    sys.exit(bool(old) and check)


if __name__ == "__main__":
    main()
