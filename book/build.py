"""Updates the code included in the chapters: `python -m book.build`, or only compares: `--check`.

A chapter includes code with a line such as `<!-- include: vitrail/model/block.py Block.forward -->`
right before a fenced Python block; the name `import` stands for the imports of the file.
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


def fill_includes(text: str) -> str:
    """The chapter with the current source in every included block."""
    includes, blocks = text.count("<!-- include:"), len(INCLUDE.findall(text))
    if includes != blocks:
        raise UserError(
            f"{includes} includes, but {blocks} have a Python block right below; "
            "write `<!-- include: FILE NAME -->`, then ```python on the next line"
        )
    return INCLUDE.sub(lambda match: match[1] + extract_code(match[2], match[3]) + match[5], text)


def extract_code(path: str, name: str) -> str:
    """A class, function or method (`Block.forward`) of a file, without indent and doctests."""
    source = (ROOT / path).read_text()
    tree = ast.parse(source)
    if name == "import":
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        return "".join(f"{ast.get_source_segment(source, node)}\n" for node in imports)
    if name not in (found := find_definitions(tree)):
        raise UserError(f"{path} has no {name}; correct the include")
    node = found[name]
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    lines = source.splitlines(keepends=True)[first - 1 : node.end_lineno]
    return EXAMPLE.sub(r"\1", textwrap.dedent("".join(lines)))


def find_definitions(tree: ast.AST, prefix: str = "") -> dict[str, ast.ClassDef | ast.FunctionDef]:
    """All classes, functions and methods by name, such as "Block" and "Block.forward"."""
    found: dict[str, ast.ClassDef | ast.FunctionDef] = {}
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[prefix + node.name] = node
            found |= find_definitions(node, f"{prefix}{node.name}.")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if code is out of date"
    )
    check = parser.parse_args(arguments).check
    outdated = [path for path in chapters() if fill_includes(path.read_text()) != path.read_text()]
    for path in outdated:
        print(f"{path.name}: {'out of date' if check else 'updated'}")
        if not check:
            files.write_file(path, fill_includes(path.read_text()))
    sys.exit(bool(outdated) and check)


if __name__ == "__main__":
    main()
