"""Mutants of multinode/: single places of the code, each with another text that is wrong in most cases."""

from __future__ import annotations

import ast
import dataclasses
import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "multinode"

# Another operator for each: the token as written, and what stands in its place.
_COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.BitOr: ("|", "&"),
    ast.BitAnd: ("&", "|"),
}
_LARGE = 10
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# How many of the texts that are drawn are taken, and of those with a blank in them: other words are seldom a mistake.
_TAKEN = {"text": 0.5, "wording": 0.15}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change."""

    path: str  # of the module, below the checkout's root
    line: int  # the first changed line, counted from 1
    column: int  # where in it the change begins; with `kind` it tells the mutants of a line apart
    kind: str  # what was done
    before: str  # the changed lines as they were
    after: str  # the same lines as they are in the mutant

    @property
    def key(self) -> str:
        """The name of the mutant."""
        return f"{self.path}:{self.line}:{self.column}:{self.kind}"

    @property
    def package(self) -> str:
        """The package directly below multinode/ that it lies in."""
        return _package(self.path)

    def diff(self) -> str:
        """Both texts as a person reads them."""
        return "\n".join(
            sign + line for sign, text in (("-", self.before), ("+", self.after)) for line in text.splitlines()
        )

    def found_in(self, text: str) -> Mutant | None:
        """The same mutant in another version of the module: where the same lines stand, as near as possible."""
        count = len(self.before.splitlines())
        lines = text.splitlines()
        places = [at + 1 for at in range(len(lines)) if "\n".join(lines[at : at + count]) == self.before]
        if not places:
            return None
        return dataclasses.replace(self, line=min(places, key=lambda line: abs(line - self.line)))

    def apply(self, text: str) -> str:
        """The module with the change in it."""
        lines = text.split("\n")
        lines[self.line - 1 : self.line - 1 + len(self.before.split("\n"))] = self.after.split("\n")
        return "\n".join(lines)


def draw(root: Path, count: int, seed: int) -> list[Mutant]:
    """As many mutants, each in another line; each package has its share by lines of code."""
    sizes: dict[str, int] = {}
    lines: dict[str, list[list[Mutant]]] = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        name, text = path.relative_to(root).as_posix(), path.read_text()
        package = _package(name)
        sizes[package] = sizes.get(package, 0) + sum(bool(line.strip()) for line in text.splitlines())
        by_line: dict[int, list[Mutant]] = {}
        for mutant in _mutants_of(name, text):
            by_line.setdefault(mutant.line, []).append(mutant)
        lines.setdefault(package, []).extend(by_line.values())
    chance = random.Random(seed)  # noqa: S311 - a sample, no secret
    drawn: list[Mutant] = []
    for package, share in _shares(sizes, count).items():
        chance.shuffle(lines[package])
        one_each = (chance.choice(mutants) for mutants in lines[package])
        taken = (mutant for mutant in one_each if chance.random() < _TAKEN.get(mutant.kind, 1.0))
        sound = (mutant for mutant in taken if _is_sound(mutant, (root / mutant.path).read_text()))
        drawn += itertools.islice(sound, share)
    return drawn


def _mutants_of(path: str, text: str) -> Iterator[Mutant]:
    source = text.split("\n")
    tree = ast.parse(text)
    for node in _mutable(tree):
        for kind, start, end, new in _changes(node, source):
            first, last = source[start[0] - 1], source[end[0] - 1]
            before = "\n".join(source[start[0] - 1 : end[0]])
            after = first[: start[1]] + new + last[end[1] :]
            yield Mutant(path, start[0], start[1], kind, before, after)


def _package(path: str) -> str:
    parts = path.split("/")
    return parts[1] if len(parts) > len((PACKAGE, "module")) else "(top)"


def _shares(sizes: dict[str, int], count: int) -> dict[str, int]:
    exact = {package: count * size / sum(sizes.values()) for package, size in sizes.items()}
    shares = {package: int(share) for package, share in exact.items()}
    by_rest = sorted(exact, key=lambda package: shares[package] - exact[package])
    for package in by_rest[: count - sum(shares.values())]:
        shares[package] += 1
    return shares


def _is_sound(mutant: Mutant, text: str) -> bool:
    # The places in a syntax tree count bytes.
    try:
        return mutant.before.isascii() and ast.dump(ast.parse(mutant.apply(text))) != ast.dump(ast.parse(text))
    except SyntaxError:
        return False


def _mutable(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes below, but no docstrings, annotations, a class's own settings, and what type checkers alone read."""
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "type_params"} or (isinstance(node, ast.ClassDef) and name == "keywords"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_left_alone(child):
                yield child
                yield from _mutable(child)


def _is_left_alone(node: ast.AST) -> bool:
    match node:
        # Python 3.11 does not know the places inside a formatted string.
        case ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.Expr(value=ast.Constant()):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__" | "__slots__")]):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
    return False


_Placed = ast.expr | ast.stmt
_Place = tuple[int, int]
_Swap = tuple[str, str]
_Change = tuple[str, _Place, _Place, str]


def _changes(node: ast.AST, source: list[str]) -> Iterator[_Change]:  # noqa: C901 - one case for each kind of mutant
    match node:
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            yield from _between("compare", left, right, _COMPARISONS[type(operator)], source)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _ARITHMETIC:
            yield from _between("arithmetic", left, right, _ARITHMETIC[type(operation)], source)
        case ast.BoolOp(op=ast.And(), values=[left, right, *_]):
            yield from _between("boolean", left, right, ("and", "or"), source)
        case ast.BoolOp(values=[left, right, *_]):
            yield from _between("boolean", left, right, ("or", "and"), source)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not", _start(node), _end(node), _segment(source, operand)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.Constant):
            yield "condition", _start(test), _end(test), f"not ({_segment(source, test)})"
        case ast.Constant(value=bool() as value):
            yield "constant", _start(node), _end(node), repr(not value)
        case ast.Constant(value=int() | float() as value):
            # One more than a million is the same to most.
            yield "constant", _start(node), _end(node), repr(value + 1 if value < _LARGE else value * 2)
        case ast.Constant(value=str() as value):
            yield "wording" if " " in value else "text", _start(node), _end(node), repr("XX" + value)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "return", _start(value), _end(value), "None"
        case ast.Expr(value=ast.Call()):
            yield "deletion", _start(node), _end(node), "pass"


def _between(kind: str, left: ast.expr, right: ast.expr, change: _Swap, source: list[str]) -> Iterator[_Change]:
    """The operator, which has no place of its own, where both sides stand on one line."""
    (line, start), (same, end) = _end(left), _start(right)
    if line != same:
        return
    found = re.search(re.escape(change[0]).replace(r"\ ", r"\s+"), source[line - 1][start:end])
    if found:
        yield kind, (line, start + found.start()), (line, start + found.end()), change[1]


def _segment(source: list[str], node: ast.expr) -> str:
    (first, start), (last, end) = _start(node), _end(node)
    if first == last:
        return source[first - 1][start:end]
    return "\n".join([source[first - 1][start:], *source[first : last - 1], source[last - 1][:end]])


def _start(node: _Placed) -> _Place:
    return node.lineno, node.col_offset


def _end(node: _Placed) -> _Place:
    return node.end_lineno or node.lineno, node.end_col_offset or node.col_offset


def reaching_lines(text: str, line: int) -> tuple[set[int], bool]:
    """Where a test passes that could see a change in this line, and whether that is inside a function.

    Of a statement inside a function, its own lines; of a function's head, those of its body. What stands outside runs
    once, on import, whoever needs it: the lines that name what it binds count for it.
    """
    tree = ast.parse(text)
    chain = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and line in _extent(node)]
    inner = chain[-1] if chain else None
    if inner is None:
        return set(), False
    if any(isinstance(node, _FUNCTIONS) for node in chain):
        body = isinstance(inner, _FUNCTIONS)
        first = inner.body[0].lineno if isinstance(inner, _FUNCTIONS) else inner.lineno
        return set(range(first, (inner.end_lineno or first) + 1)) if body else _head(inner), True
    bound = {node.id for node in ast.walk(inner) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return {
        node.lineno
        for node in ast.walk(tree)
        if (isinstance(node, ast.Name) and node.id in bound) or (isinstance(node, ast.Attribute) and node.attr in bound)
    } - set(_extent(inner)), False


def _head(statement: ast.stmt) -> set[int]:
    body = getattr(statement, "body", None)
    if isinstance(body, list) and body:
        return set(range(statement.lineno, max(body[0].lineno, statement.lineno + 1)))
    return set(_extent(statement))


def _extent(statement: ast.stmt) -> range:
    return range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
