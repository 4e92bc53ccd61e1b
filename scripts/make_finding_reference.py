"""Writes docs/reference/findings.md from the rules below `multinode`, but those of checks, which have a page.

With --check, says whether the page is current. A rule is declared once: two of one code in a group are an error.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from reference_pages import write_or_check

import multinode
from multinode.check.rule import CheckRules
from multinode.findings.rule import Rule, RuleGroup

# How a value is written, within its braces.
_FORM = re.compile(r"(?<=\w)[!:][^{}]*\}")
REFERENCE = Path(__file__).parent.parent / "docs" / "reference" / "findings.md"

_HEADER = """\
# Findings

<!-- Written by scripts/make_finding_reference.py. -->

This page lists the findings that multinode derives from measurements. A finding has a code and a message, and often a
hint and figures. With `--json`, multinode prints all of these. Names in braces stand for values.

For the findings of `multinode check`, see [the checks](checks.md). For error messages from training runs, see
[troubleshooting](troubleshooting.md).
"""


def main() -> int:
    """Write the page if it is not current, or name it."""
    groups = rule_groups()
    twice = [*twice_declared(groups)]
    for words in twice:
        print(words)
    return 1 if twice else write_or_check({REFERENCE: render_reference(groups)}, __doc__)


def rule_groups() -> Sequence[RuleGroup]:
    """All groups of rules that modules of the package hold, by title."""
    found: dict[int, RuleGroup] = {}
    for module in pkgutil.walk_packages(multinode.__path__, "multinode."):
        # What ships to nodes judges nothing, and imports what only nodes have.
        if module.name.startswith(("multinode.node", "multinode.worker")) or module.name.endswith("__main__"):
            continue
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, RuleGroup) and not isinstance(value, CheckRules):
                found[id(value)] = value
    return sorted(found.values(), key=lambda group: group.title)


def twice_declared(groups: Sequence[RuleGroup]) -> Iterator[str]:
    """Codes that stand for two findings, and titles of two groups."""
    for title, count in Counter(group.title for group in groups).items():
        if count > 1:
            yield f"{count} groups of rules have the title {title!r}"
    for group in groups:
        for code, count in Counter(rule.code for rule in group.rules).items():
            if count > 1:
                yield f"{group.title}: {count} rules have the code {code}"


def render_reference(groups: Sequence[RuleGroup]) -> str:
    """The whole document."""
    parts = [_HEADER]
    for group in groups:
        parts += [f"\n## {group.title}\n\n", "| code | about | message | hint | figures |\n|---|---|---|---|---|\n"]
        parts += map(_row, group.rules)
    return "".join(parts)


def _row(rule: Rule) -> str:
    figures = ", ".join(f"`{name}`" for name in rule.figures)
    message, hint = (_FORM.sub("}", words) for words in (rule.message, rule.hint))
    return f"| {' | '.join(map(_cell, (f'`{rule.code}`', rule.about, message, hint, figures)))} |\n"


def _cell(text: str) -> str:
    # Braces and angle brackets stay text; a bar would end the cell.
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;") or "-"


if __name__ == "__main__":
    sys.exit(main())
