"""Checks what no linter does: nothing is left to be done, and the words are the glossary's."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_FOLDERS = ("multinode", "scripts", "benchmarks", "tests", "docs", "configs", "hostfiles", ".ci")
_SUFFIXES = {".py", ".md", ".yaml", ".json", ".txt", ".toml", ""}
_UNFINISHED = re.compile(r"\b(?:TO[D]O|FIX[M]E|X{3}|NotImplemented[E]rror)\b")
# Said otherwise here; docs/glossary.md says how.
_WORDS = {
    re.compile(r"\bslaves?\b", re.IGNORECASE): "node",
    re.compile(r"\b(?:master|head|worker) nodes?\b", re.IGNORECASE): "node 0, or node",
    re.compile(r"\btps\b", re.IGNORECASE): "TGS, samples/s",
}
# These two name what they forbid.
_EXEMPT = {
    "scripts/check_tree.py",
    "tests/test_docs.py",
    # What others write.
    "multinode/predict/published_words.toml",
    "tests/tables/cases/cases.json",
}


def main() -> int:
    """Print what is wrong, one line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parent.parent)
    root: Path = parser.parse_args().root
    problems = [problem for path in _files(root) for problem in check_file(path, path.relative_to(root).as_posix())]
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def check_file(path: Path, name: str) -> Iterator[str]:
    """What is wrong in one file."""
    lines = path.read_text().splitlines()
    if name in _EXEMPT:
        return
    for number, line in enumerate(lines, start=1):
        if (found := _UNFINISHED.search(line)) is not None:
            yield f"{name}:{number}: {found[0]}: do it, or leave it out"
        for word, instead in _WORDS.items():
            if (found := word.search(line)) is not None and not _defines(name):
                yield f"{name}:{number}: {found[0]!r}: we say {instead} (docs/glossary.md)"
        if path.suffix == ".py" and not line.isascii():
            yield f"{name}:{number}: a character that is not ASCII"


def _defines(name: str) -> bool:
    return name == "docs/glossary.md"


def _files(root: Path) -> Iterator[Path]:
    for folder in _FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and path.suffix in _SUFFIXES and "__pycache__" not in path.parts:
                yield path
    yield from sorted(root.glob("*.md"))


if __name__ == "__main__":
    sys.exit(main())
