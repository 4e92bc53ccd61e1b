"""Counts the words of hand-written pages and of decisions, and the lines of the README, against their limits.

Generated pages, translations and blocks of code do not count.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

HAND_WRITTEN, DECISIONS, README_LINES = 28_300, 10_000, 100
_GENERATED = {
    "api",
    "bandwidth",
    "checks",
    "cli",
    "figures",
    "imported-columns",
    "json",
    "troubleshooting",
}


def main() -> int:
    """Print the counts beside their limits; 1 where one is above."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=Path(__file__).parent.parent)
    root: Path = parser.parse_args().root
    counts = [
        ("words by hand", count_words(_hand_written(root)), HAND_WRITTEN),
        ("words of ADRs", count_words((root / "docs" / "adr").glob("*.md")), DECISIONS),
        ("lines of README", len((root / "README.md").read_text().splitlines()), README_LINES),
    ]
    print(", ".join(f"{count:,} of {limit:,} {what}" for what, count, limit in counts))
    return 1 if any(count > limit for _, count, limit in counts) else 0


def count_words(pages: Iterable[Path]) -> int:
    """Words outside of blocks of code; what has no letter or digit, such as the lines of a table, is no word."""
    texts = [text for page in pages for text in page.read_text().split("\n```")[::2]]
    return sum(any(map(str.isalnum, word)) for text in texts for word in text.split())


def _hand_written(root: Path) -> list[Path]:
    pages = [root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").rglob("*.md")]
    return [
        page
        for page in pages
        if page.is_file()
        and "adr" not in page.parts
        and not page.stem.endswith(".zh-CN")
        and not (page.parent.name == "reference" and page.stem in _GENERATED)
    ]


if __name__ == "__main__":
    sys.exit(main())
