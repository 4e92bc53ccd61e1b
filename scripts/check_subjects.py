"""Compares the imports between subjects with the table of docs/explanation/architecture.md."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

_TABLE = "docs/explanation/architecture.md"
_ROW = re.compile(r"\| (\w+) \| [^|]+ \| ([\w -]+) \|")


def main() -> int:
    """Print what is wrong, one line each."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent.parent)
    problems = list(check_subjects(root))
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def check_subjects(root: Path) -> Iterator[str]:
    """Imports that the table does not allow, entries that nothing uses, and folders and rows without each other."""
    rows = _ROW.findall((root / _TABLE).read_text())
    allowed = {subject: set(others.split()) - {"-"} for subject, others in rows if subject != "subject"}
    used: defaultdict[str, set[str]] = defaultdict(set)
    for path in sorted((root / "multinode").glob("*/*/**/*.py")):
        layer, subject = path.relative_to(root / "multinode").parts[:2]
        if subject not in allowed:
            if layer in {"core", "analyse", "report"} and path.name == "__init__.py":
                yield f"{path.relative_to(root)}: {_TABLE} has no subject {subject!r}"
            continue
        for imported, line in _subjects_imported(path, allowed):
            used[subject].add(imported)
            if imported not in allowed[subject] | {subject}:
                yield f"{path.relative_to(root)}:{line}: {subject} may not import {imported} ({_TABLE})"
    for subject, others in allowed.items():
        for other in sorted(others - used[subject]):
            yield f"{_TABLE}: {subject} may import {other}, and does not"


def _subjects_imported(path: Path, subjects: dict[str, set[str]]) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("multinode."):
            parts = node.module.split(".")
            if len(parts) > 3 and parts[2] in subjects:  # noqa: PLR2004 - multinode, layer, subject, module
                yield parts[2], node.lineno


if __name__ == "__main__":
    sys.exit(main())
