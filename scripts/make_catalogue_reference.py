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

Search this page for the text of your error. In the messages below, `...` stands for any text. If a run has
several errors, start with the first one. When a worker exits, its peers also print errors, but these are only
consequences.

- **Check** lists the checks that can find the cause before a launch. See [the checks](checks.md).
- **Kind** is the value of `first_failure.kind` in the output of `--json`.
- The heading of an entry is the value of `first_failure.error_id`.

`multinode launch`, `multinode show` and `multinode explain` look up errors in this catalogue. For background, see the
[frequently asked questions](../faq.md).
"""
_WORDS = {
    "cause": "**Cause**: ",
    "fix": "**Fix**: ",
    "check": "**Check**: ",
    "kind": "**Kind**: ",
    "note": "**Note**: ",
    "source": "**Source**: ",
    "of_peers": "This error can be a consequence: workers also print it after another worker has exited.",
    "is_general": "This error is generic. If the log has a more specific error, use that one.",
    "is_harmless": "This message alone does not mean that the run has failed.",
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
    between: str  # two steps of a fix
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
        "troubleshooting.md": Language(_HEADER, _WORDS, {}, between="; ", stop="."),
        "troubleshooting.zh-CN.md": Language(
            **around,
            errors=chinese_meanings(),
            between="\N{FULLWIDTH SEMICOLON}",
            stop="\N{IDEOGRAPHIC FULL STOP}",
        ),
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
    words, stop = language.words, language.stop
    texts = language.errors.get(error.id, error)
    checks = ", ".join(f"[{name}](checks.md#{name})" for name in error.checks)
    notes = " ".join(words[remark] for remark in _REMARKS if getattr(error, remark))
    rows = {
        "cause": _text(texts.cause, stop),
        "fix": _steps(texts.fix.format(node="NODE"), language),
        "check": checks,
        "kind": f"`{error.kind}`" if error.kind else "",
        "note": notes,
        "source": error.source,
    }
    texts_printed = "".join(f"    {text}\n" for text in error.texts)
    told = "".join(f"\n{words[name]}{row}\n".replace(" \n", "\n") for name, row in rows.items() if row)
    return f"\n### {error.id}\n\n{texts_printed}{told}"


def _steps(fix: str, language: Language) -> str:
    """The steps of a fix: one as a sentence, several as a list."""
    steps = fix.split(language.between)
    if len(steps) == 1:
        return _text(_capital(steps[0]), language.stop)
    return "\n" + "".join(f"\n- {_text(_capital(step), '')}" for step in steps)


def _capital(text: str) -> str:
    """An English step with a capital; in Chinese, a step may begin with a command."""
    return text[0].upper() + text[1:] if text.isascii() else text


def _text(text: str, stop: str) -> str:
    # Angle brackets and stars stay text.
    escaped = text.replace("<", "&lt;").replace("*", "\\*")
    return escaped if escaped.endswith(stop) else f"{escaped}{stop}"


if __name__ == "__main__":
    sys.exit(main())
