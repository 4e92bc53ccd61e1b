"""Writes docs/reference/troubleshooting.md from the catalogue of errors, in English and in Chinese.

With --check, says whether both pages are current. A Chinese text has the commands, options and variables of the English
one. What is around the entries of the Chinese page is in troubleshooting.zh-CN.yaml.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import yaml
from reference_pages import write_or_check

from multinode.cli.verbs import VERBS
from multinode.diagnose.known_errors import PROJECTS, KnownError, known_errors
from multinode.diagnose.translation import Meaning, chinese_meanings

_FOLDER = Path(__file__).parent.parent / "docs" / "reference"
_CHINESE = _FOLDER / "troubleshooting.zh-CN.yaml"

_HEADER = """\
# Troubleshooting: error messages

<!-- Written by scripts/make_catalogue_reference.py. -->

[In Chinese](troubleshooting.zh-CN.md)

Search this page for the text of your error; `...` stands for any text. If a run has several errors, the first one
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
    "of_peers": "; printed by the peers of a worker that is gone",
    "is_general": "; general: a more specific error takes precedence",
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
    """A page in one language: `errors` has the texts of an error by its id, where they are not the catalogue's own."""

    header: str
    words: Mapping[str, str]
    errors: Mapping[str, Meaning]
    stop: str


def main() -> int:
    """Write what is not current, or name it; nothing is written where a translation is not whole."""
    around = yaml.safe_load(_CHINESE.read_text())
    problems = [*check_translation(known_errors(), chinese_meanings())]
    for problem in problems:
        print(problem)
    if problems:
        return 1
    pages = {
        "troubleshooting.md": Language(_HEADER, _WORDS, {}, "."),
        "troubleshooting.zh-CN.md": Language(**around, errors=chinese_meanings(), stop="\N{IDEOGRAPHIC FULL STOP}"),
    }
    return write_or_check({_FOLDER / name: render_reference(page) for name, page in pages.items()}, __doc__)


def check_translation(errors: Mapping[str, KnownError], translated: Mapping[str, Meaning]) -> Iterator[str]:
    """What Chinese texts lack of the English ones, or have beyond them."""
    for name in sorted(errors.keys() ^ translated.keys()):
        yield f"{name}: it stands in {'the catalogue' if name in errors else 'Chinese'} alone"
    for name in (name for name in errors if name in translated):
        error, meaning = errors[name], translated[name]
        texts = (f"{error.cause} {error.fix}", f"{meaning.cause} {meaning.fix}")
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
    texts = language.errors.get(error.id, error)
    told = "".join(words[remark] for remark in _REMARKS if getattr(error, remark))
    return (
        f"\n### {error.id}\n\n"
        + "".join(f"    {text}\n" for text in error.texts)
        + f"\n- {words['cause']}{_text(texts.cause, language.stop)}\n"
        + f"- {words['fix']}{_text(texts.fix.format(node='NODE'), language.stop)}\n"
        + f"- {words['check']}{checks}{words['kind']}{kind}{told}\n"
        + f"- {words['source']}{error.source}\n"
    )


def _text(text: str, stop: str) -> str:
    # Angle brackets and stars stay text.
    escaped = text.replace("<", "&lt;").replace("*", "\\*")
    return escaped if escaped.endswith(stop) else f"{escaped}{stop}"


if __name__ == "__main__":
    sys.exit(main())
