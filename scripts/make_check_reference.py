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

`multinode check` collects facts from each node once, tests whether the nodes can connect to each other, and then
applies the rules on this page. In a message, multinode replaces the words in braces with values. The words "it" and
"here" in a message refer to the node that multinode prints before the message.

- An *error* means that the training would hang or fail.
- A *warning* means that the training may hang, fail or be slow.
- A *note* is informational.

The exit code is 0 if there are no errors, and 1 if there are errors. It is 3 if multinode could not reach a node; it
still checks the other nodes.

Commands that start a run, such as `launch`, `nccl-test` and `contrast`, first run {launch} of the {count} checks: those
whose errors would make a run hang or fail. If such a check finds an error, the run does not start. `--no-check` skips
these checks.
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
        head = "| problem | severity | message | hint |\n|---|---|---|---|\n"
        parts += [f"\n## `{name}`\n\n", head, *map(_row, rules)]
    return "".join(parts)


def _row(rule: CheckRule) -> str:
    hint = rule.hint.replace("!s}", "}")
    return f"| {_cell(rule.about)} | {rule.severity} | {_cell(rule.message)} | {_cell(hint)} |\n"


def _cell(text: str) -> str:
    # Braces and angle brackets stay text; a bar would end the cell.
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(main())
