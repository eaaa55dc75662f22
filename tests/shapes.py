"""Executes shape comments: a tracer compares each `# (B, N, D)` with the shape of the tensor.

After a function's signature, the comment is the shape of its first argument that has one.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

COMMENT = re.compile(r"#\s*(?:each )?\(([^()]*)\)$")
Claims = dict[tuple[str, int], tuple[ast.stmt, list[str]]]  # (file, line) -> statement, dimensions


def claims(path: Path) -> Claims:
    """Every statement of a file that ends in a shape comment."""
    source = path.read_text()
    statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
    found: Claims = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        match = COMMENT.match(token.string) if token.type == tokenize.COMMENT else None
        if match:
            line = token.start[0]
            inside = [node for node in statements if last_line(node) == line]
            owner = max(inside, key=lambda node: node.lineno)
            found[str(path), line] = owner, [part.strip() for part in match[1].split(",")]
    return found


def last_line(node: ast.stmt) -> int:
    """Where a statement ends; for a function, where its signature ends."""
    if isinstance(node, ast.FunctionDef):
        return max(node.lineno, *(a.end_lineno or 0 for a in [*node.args.args, node.returns] if a))
    return node.end_lineno or node.lineno


class Tracer:
    """Checks claims while functions run: `reached` were executed, `wrong` were false."""

    def __init__(self, claims: Claims):
        self.claims, self.legend = claims, dict[str, int]()
        self.files = {file for file, _ in claims}
        self.starts = {
            (file, stmt.lineno): (file, line) for (file, line), (stmt, _) in claims.items()
        }
        self.reached: set[tuple[str, int]] = set()
        self.wrong: set[str] = set()

    def run(self, action: Callable[[], object], **legend: int) -> None:
        assert len(set(legend.values())) == len(legend), "two sizes are equal: a mistake could hide"
        self.legend = legend
        sys.settrace(self.enter)
        try:
            action()
        finally:
            sys.settrace(None)

    def enter(self, frame: FrameType, event: str, arg: object) -> Any:
        file = frame.f_code.co_filename
        if file not in self.files or frame.f_code.co_name.startswith("<"):  # a generator expression
            return None
        pending: list[tuple[str, int]] = []
        header = self.starts.get((file, frame.f_code.co_firstlineno))
        if header and isinstance(self.claims[header][0], ast.FunctionDef):
            names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
            values = [frame.f_locals[name] for name in names]
            self.check(header, next(value for value in values if hasattr(value, "shape")))

        def step(frame: FrameType, event: str, arg: object) -> Any:
            if event == "return" or (event == "line" and not self.is_inside(pending, frame)):
                while pending:
                    self.check_result(pending.pop(), frame, arg)
            here = self.starts.get((file, frame.f_lineno))
            if event == "line" and here and not isinstance(self.claims[here][0], ast.FunctionDef):
                pending[:] = [here]
            return step

        return step

    def is_inside(self, pending: list[tuple[str, int]], frame: FrameType) -> bool:
        """Whether the next line still belongs to the statement that has begun."""
        statements = [self.claims[claim][0] for claim in pending]
        return any(
            statement.lineno <= frame.f_lineno <= (statement.end_lineno or 0)
            for statement in statements
        )

    def check_result(self, claim: tuple[str, int], frame: FrameType, result: object) -> None:
        statement = self.claims[claim][0]
        if isinstance(statement, ast.Return):
            self.check(claim, result)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for name in (node for node in ast.walk(targets[0]) if isinstance(node, ast.Name)):
                self.check(claim, frame.f_locals[name.id])

    def check(self, claim: tuple[str, int], value: Any) -> None:
        """Compares the shape with the claim; words that are not in the legend match any size."""
        self.reached.add(claim)
        dimensions = self.claims[claim][1]
        known = [
            dimension
            for dimension in dimensions
            if set(re.findall("[A-Za-z]+", dimension)) <= {*self.legend}
        ]
        sizes = {dimension: eval(dimension, {}, dict(self.legend)) for dimension in known}
        matches = len(dimensions) == len(value.shape) and all(
            sizes.get(dimension, size) == size
            for dimension, size in zip(dimensions, value.shape, strict=True)
        )
        if not matches:
            file, line = claim
            self.wrong.add(
                f"{Path(file).name}:{line} says ({', '.join(dimensions)}), got {tuple(value.shape)}"
            )
