"""Writes docs/reference/troubleshooting.md from the catalogue of errors, in English and in Chinese.

With --check, says whether both pages are current. The Chinese texts are those of troubleshooting.zh-CN.yaml: every
error has one, with the commands, options and variables of the English text.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml
from reference_pages import write_or_check

from multinode.cli.main import VERBS
from multinode.diagnose.known_errors import ERRORS, PROJECTS, KnownError

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
    """A page in one language: `texts` has cause and fix by the id of the error."""

    header: str
    words: Mapping[str, str]
    texts: Mapping[str, Sequence[str]]
    stop: str


def main() -> int:
    """Write what is not current, or name it; nothing is written where a translation is not whole."""
    chinese = yaml.safe_load(_CHINESE.read_text())
    problems = [*check_translation(chinese["errors"])]
    for problem in problems:
        print(f"{_CHINESE.name}: {problem}")
    if problems:
        return 1
    english = Language(_HEADER, _WORDS, {error.id: (error.cause, error.fix) for error in ERRORS}, ".")
    translated = Language(chinese["header"], chinese["words"], chinese["errors"], "\N{IDEOGRAPHIC FULL STOP}")
    pages = {"troubleshooting.md": english, "troubleshooting.zh-CN.md": translated}
    return write_or_check({_FOLDER / name: render_reference(page) for name, page in pages.items()}, __doc__)


def check_translation(texts: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """What it lacks of the catalogue, or has beyond it."""
    for error in ERRORS:
        if error.id not in texts:
            yield f"{error.id} is not translated"
            continue
        here, there = (set(_KEPT.findall(" ".join(text))) for text in (texts[error.id], (error.cause, error.fix)))
        if here != there:
            yield f"{error.id} differs from the English text in {', '.join(sorted(here ^ there))}"
    yield from (f"{name} is no error of the catalogue" for name in texts if name not in {one.id for one in ERRORS})


def render_reference(language: Language) -> str:
    """The whole document."""
    parts = [language.header]
    for project in PROJECTS:
        errors = [error for error in ERRORS if error.project == project]
        parts += [f"\n## {project}\n", *(_section(error, language) for error in errors)]
    return "".join(parts)


def _section(error: KnownError, language: Language) -> str:
    checks = ", ".join(f"[{name}](checks.md#{name})" for name in error.checks) or "-"
    kind = f"`{error.kind}`" if error.kind else "-"
    words, (cause, fix) = language.words, language.texts[error.id]
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
