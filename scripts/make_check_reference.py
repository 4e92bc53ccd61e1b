"""Writes docs/reference/checks.md from the rules of the checks; with --check, says whether the file is current."""

from __future__ import annotations

import sys
from pathlib import Path

from reference_pages import write_or_check

from multinode.check.check import CHECK_NAMES, CHECKS, list_rules
from multinode.check.rule import SEVERITIES, CheckRule

REFERENCE = Path(__file__).parent.parent / "docs" / "reference" / "checks.md"

_HEADER = """\
# The checks

<!-- Written by scripts/make_check_reference.py. -->

`multinode check` reads facts from each node once, lets the nodes connect to each other's ports, and then applies these
rules. multinode replaces words in braces with values. With an *error*, the training would hang or fail; with a
*warning*, it may do so. A *note* is informational. The exit code is 0 without errors, 1 with errors, and 3 if a node
could not be reached; the other nodes are still checked.

`launch`, `nccl-test` and `contrast` first run the {launch} (of {count}) checks whose errors would make a run hang or
fail, and stop on errors. `--no-check` skips these checks.
"""


def main() -> int:
    """Write what is not current, or name it."""
    return write_or_check({REFERENCE: render_reference()}, __doc__)


def render_reference() -> str:
    """The whole document."""
    count = sum(check.before_launch for check in CHECKS)
    parts = [_HEADER.format(launch=count, count=len(CHECKS))]
    for name in CHECK_NAMES:
        rules = sorted(
            (one for one in list_rules() if one.code == name), key=lambda one: SEVERITIES.index(one.severity)
        )
        parts += [f"\n## `{name}`\n\n", "| catches | | message | hint |\n|---|---|---|---|\n", *map(_row, rules)]
    return "".join(parts)


def _row(rule: CheckRule) -> str:
    hint = rule.hint.replace("!s}", "}")
    return f"| {_cell(rule.about)} | {rule.severity} | {_cell(rule.message)} | {_cell(hint)} |\n"


def _cell(text: str) -> str:
    # Braces and angle brackets stay text; a bar would end the cell.
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(main())
