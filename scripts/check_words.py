"""Looks for phrases that we do not use, which docs/words.txt lists with the field's words for them.

In code, comments, texts and documents alike; history (decisions, the change log) stays as it was written.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

_WORDS = "docs/words.txt"
_HISTORY = ("docs/adr/", "CHANGELOG.md")
_ENDINGS = {"", ".md", ".py", ".sh", ".toml", ".txt", ".yaml", ".html"}
# Between two words of a sentence: white space, and at the end of a line what ends and begins a string or a comment.
_BETWEEN = r"""(?:[ \t]*["']?[ \t]*\n[ \t]*(?:[#>*]+[ \t]*)?f?["']?[ \t]*|[ \t]+)"""


def main() -> int:
    """Print what is found, one line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parent.parent)
    root: Path = parser.parse_args().root
    phrases = read_words((root / _WORDS).read_text())
    pattern, instead = make_pattern(phrases), tuple(phrases.values())
    problems = [
        f"{name}:{problem}"
        for name in _tracked(root)
        if name != _WORDS and not name.startswith(_HISTORY) and Path(name).suffix in _ENDINGS
        for problem in check_text((root / name).read_text(errors="replace"), pattern, instead)
    ]
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def read_words(text: str) -> dict[str, str]:
    """What to write instead, by the expression of a phrase.

    Raises:
        ValueError: a line is none.
    """
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            phrase, arrow, instead = line.partition(" -> ")
            if not arrow:
                raise ValueError(f"{_WORDS}: {line!r} has no ` -> `")
            found[phrase] = instead
    return found


def make_pattern(phrases: Iterable[str]) -> re.Pattern[str]:
    """One expression of all of them, with a group for each."""
    whole = (re.sub(r"\((?!\?)", "(?:", phrase).replace(" ", _BETWEEN) for phrase in phrases)
    return re.compile(rf"\b(?:{'|'.join(f'({one})' for one in whole)})\b", re.IGNORECASE)


def check_text(text: str, pattern: re.Pattern[str], instead: Sequence[str]) -> Iterator[str]:
    """What of it is found: line, phrase, and what to write instead."""
    for match in pattern.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield f"{line}: {' '.join(match[0].split())!r}: write {instead[(match.lastindex or 1) - 1]}"


def _tracked(root: Path) -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if (root / name).is_file()]


if __name__ == "__main__":
    sys.exit(main())
