"""Puts the tests' golden screens into docs/reading-the-output.md and its translation; with --check, compares them.

A screen belongs below each line `<!-- screen: NAME -->`: what the golden file NAME.txt shows at 80 columns.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from reference_pages import write_or_check

_ROOT = Path(__file__).parent.parent
_PAGES = [_ROOT / "docs" / name for name in ("reading-the-output.md", "reading-the-output.zh-CN.md")]
_GOLDEN = {path.stem: path for path in (_ROOT / "tests").glob("*/golden/*.txt")}
_SCREEN = re.compile(r"(<!-- screen: (?P<name>[\w-]+) -->\n)(?:\n```\n.*?\n```\n)?", re.DOTALL)
_WIDTH = re.compile(r"^=== \d+ columns\n", re.MULTILINE)


def main() -> int:
    """Write what is not current, or name it."""
    return write_or_check({page: with_screens(page.read_text(), _GOLDEN) for page in _PAGES}, __doc__)


def with_screens(text: str, golden: Mapping[str, Path]) -> str:
    """The page with the screens as they are now."""

    def screen(match: re.Match[str]) -> str:
        shown = _WIDTH.split(golden[match["name"]].read_text())[1].strip("\n")
        return f"{match[1]}\n```\n{shown}\n```\n"

    return _SCREEN.sub(screen, text)


if __name__ == "__main__":
    sys.exit(main())
