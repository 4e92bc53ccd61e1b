"""Writes docs/reference/troubleshooting.md from the catalogue of errors; with --check, says whether it is current."""

from __future__ import annotations

import sys
from pathlib import Path

from reference_pages import write_or_check

from multinode.launch.known_errors import ERRORS, PROJECTS, KnownError

REFERENCE = Path(__file__).parent.parent / "docs" / "reference" / "troubleshooting.md"

_HEADER = """\
# Troubleshooting: error messages

Written by `scripts/make_catalogue_reference.py` from the catalogue in `multinode/launch/known_errors.py`;
`scripts/check` sees that it is current. The diagnosis of a failed run uses the same catalogue: `multinode launch`,
`multinode show` and `--json` (`first_failure.error_id`, `.cause`, `.hint`) name the entry that they found.

Search this page for the text of your error. `...` stands for what varies. *Check* names what finds the cause before a
launch ([the checks](checks.md)), *kind* is `first_failure.kind`. Of several errors in one run, the first counts: what
*peers* say is a consequence of another worker's end. The questions behind some of them, and how the tool answers:
[frequently asked questions](../faq.md).
"""


def main() -> int:
    """Write what is not current, or name it."""
    return write_or_check({REFERENCE: render_reference()}, __doc__)


def render_reference() -> str:
    """The whole document."""
    parts = [_HEADER]
    for project in PROJECTS:
        errors = [error for error in ERRORS if error.project == project]
        parts += [f"\n## {project}\n", *map(_section, errors)]
    return "".join(parts)


def _section(error: KnownError) -> str:
    checks = ", ".join(f"[{name}](checks.md#{name})" for name in error.checks) or "-"
    kind = f"`{error.kind}`" if error.kind else "-"
    remarks = {
        "; what peers say of a worker that is gone": error.of_peers,
        "; general: an error that says more counts instead": error.is_general,
        "; not an error by itself": error.is_harmless,
    }
    told = "".join(remark for remark, holds in remarks.items() if holds)
    return (
        f"\n### {error.id}\n\n"
        + "".join(f"    {text}\n" for text in error.texts)
        + f"\n- **Cause**: {_text(error.cause)}\n"
        + f"- **Fix**: {_text(error.fix.replace('{node}', 'NODE'))}\n"
        + f"- **Check**: {checks}; **kind**: {kind}{told}\n"
        + f"- **Source**: {error.source}\n"
    )


def _text(text: str) -> str:
    # Angle brackets and stars stay text.
    escaped = text.replace("<", "&lt;").replace("*", "\\*")
    return escaped if escaped.endswith(".") else f"{escaped}."


if __name__ == "__main__":
    sys.exit(main())
