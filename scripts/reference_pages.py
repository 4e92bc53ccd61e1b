"""Pages that are made from the code: written, or with --check compared with what the code says now."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["field_comments", "write_or_check"]

_FIELD = re.compile(r" {4}(?P<name>\w+): [^#]*(?:# (?P<text>.*))?$")
_ALONE = re.compile(r" {4}# (?P<text>.*)$")


def write_or_check(files: Mapping[Path, str], about: str | None) -> int:
    """Do what the command line of the script says; the exit code is 1 where a page is not current.

    Args:
        files: the text of each page, by its path.
        about: what the script does, for its help.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page is not current")
    check = parser.parse_args().check
    changed = {path: text for path, text in files.items() if not path.is_file() or path.read_text() != text}
    for path, text in changed.items():
        if check:
            print(f"{path.name} is not current; write it anew: .venv/bin/python scripts/{Path(sys.argv[0]).name}")
        else:
            path.write_text(text)
    return 1 if check and changed else 0


def field_comments(source: str) -> dict[str, str]:
    """What the comments on or above the fields of a struct say, by field."""
    comments: dict[str, str] = {}
    above: list[str] = []
    for line in source.splitlines():
        if found := _FIELD.match(line):
            text = " ".join([*above, found["text"] or ""]).strip()
            comments.update({found["name"]: text} if text else {})
        above = [*above, found["text"]] if (found := _ALONE.match(line)) else []
    return comments
