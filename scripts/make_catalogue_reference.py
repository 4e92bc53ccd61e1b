"""Writes docs/reference/troubleshooting.md from the catalogue of errors, in English and in Chinese.

With --check, says whether both pages are current. A Chinese text has the commands, options and variables of the English
one; what stands around the entries of the Chinese page is in troubleshooting.zh-CN.yaml.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import yaml
from reference_pages import write_or_check

from multinode.cli.verbs import VERBS
from multinode.diagnose.known_errors import PROJECTS, KnownError, known_errors

_FOLDER = Path(__file__).parent.parent / "docs" / "reference"
_CHINESE = _FOLDER / "troubleshooting.zh-CN.yaml"

_HEADER = """\
# Troubleshooting: error messages

<!-- Written by scripts/make_catalogue_reference.py. -->

[In Chinese](troubleshooting.zh-CN.md)

Search this page for the text of your error; `...` stands for what varies. If a run has several errors, the first one
counts: *peers* print such a text because another worker ended. *Check* is the check that finds the cause before a
launch ([the checks](checks.md)), *kind* is `first_failure.kind`. `multinode launch`, `multinode show` and
`multinode explain` use the same catalogue; in `--json`, `first_failure.error_id` names the entry. Background:
[frequently asked questions](../faq.md).
"""
_WORDS = {
    "cause": "**Cause**: ",
    "fix": "**Fix**: ",
    "check": "**Check**: ",
    "kind": "; **kind**: ",
    "source": "**Source**: ",
    "of_peers": "; what peers say of a worker that is gone",
    "is_general": "; general: an error that says more counts instead",
    "is_harmless": "; not an error by itself",
}
_REMARKS = ("of_peers", "is_general", "is_harmless")
# What a reader types, or looks for, is the same in every language.
_KEPT = re.compile(
    rf"multinode (?:{'|'.join(VERBS)})\b|(?<![\w-])--?[a-z][\w-]*|[A-Z][A-Z0-9]*_[A-Z0-9_]+|\w+=|(?<!\w)/\w[\w/]*"
    r"|\{node\}|\b(?:ssh|docker|dmesg|nvidia-smi|ulimit|chmod|export)\b|\w+_\w+",
    re.ASCII,
)


class Language(NamedTuple):
    """A page in one language: `suffix` is that of the fields of an error that have its cause and fix."""

    header: str
    words: Mapping[str, str]
    suffix: str
    stop: str


def main() -> int:
    """Write what is not current, or name it; nothing is written where a translation is not whole."""
    problems = [*check_translation(known_errors().values())]
    for problem in problems:
        print(problem)
    if problems:
        return 1
    chinese = yaml.safe_load(_CHINESE.read_text())
    pages = {
        "troubleshooting.md": Language(_HEADER, _WORDS, "", "."),
        "troubleshooting.zh-CN.md": Language(**chinese, suffix="_zh", stop="\N{IDEOGRAPHIC FULL STOP}"),
    }
    return write_or_check({_FOLDER / name: render_reference(page) for name, page in pages.items()}, __doc__)


def check_translation(errors: Iterable[KnownError]) -> Iterator[str]:
    """What Chinese texts lack of the English ones, or have beyond them."""
    for error in errors:
        texts = (f"{error.cause} {error.fix}", f"{error.cause_zh} {error.fix_zh}")
        english, chinese = (set(_KEPT.findall(text)) for text in texts)
        if english != chinese:
            yield f"{error.id}: the Chinese text differs in {', '.join(sorted(english ^ chinese))}"


def render_reference(language: Language) -> str:
    """The whole document."""
    parts = [language.header]
    for project in PROJECTS:
        errors = [error for error in known_errors().values() if error.project == project]
        parts += [f"\n## {project}\n", *(_section(error, language) for error in errors)]
    return "".join(parts)


def _section(error: KnownError, language: Language) -> str:
    checks = ", ".join(f"[{name}](checks.md#{name})" for name in error.checks) or "-"
    kind = f"`{error.kind}`" if error.kind else "-"
    words = language.words
    cause, fix = (getattr(error, f"{name}{language.suffix}") for name in ("cause", "fix"))
    told = "".join(words[remark] for remark in _REMARKS if getattr(error, remark))
    return (
        f"\n### {error.id}\n\n"
        + "".join(f"    {text}\n" for text in error.texts)
        + f"\n- {words['cause']}{_text(cause, language.stop)}\n"
        + f"- {words['fix']}{_text(fix.replace('{node}', 'NODE'), language.stop)}\n"
        + f"- {words['check']}{checks}{words['kind']}{kind}{told}\n"
        + f"- {words['source']}{error.source}\n"
    )


def _text(text: str, stop: str) -> str:
    # Angle brackets and stars stay text.
    escaped = text.replace("<", "&lt;").replace("*", "\\*")
    return escaped if escaped.endswith(stop) else f"{escaped}{stop}"


if __name__ == "__main__":
    sys.exit(main())
