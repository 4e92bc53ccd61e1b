"""Golden files: a text is compared whole with a committed one; `pytest --update-golden` writes them anew.

A screen is compared at the widths at which it is read: a narrow terminal and a wide one, without colour.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from multinode.errors import MultinodeError
from multinode.findings.finding import Finding
from multinode.render.sheet import Block
from multinode.render.table import WIDE, Part, screen_text
from multinode.render.terminal import block_parts

__all__ = ["Golden", "error_of", "raised", "screen_of"]

_WIDTHS = (80, 120, 160)
_CUT = "\N{HORIZONTAL ELLIPSIS}"


def screen_of(blocks: Iterable[Block], width: int = WIDE, *, details: bool = False) -> str:
    """An answer as a terminal shows it."""
    return screen_text(block_parts(blocks, details=details, width=width), width)


E = TypeVar("E", bound=Exception)


def error_of(call: Callable[..., object], *args: Any, **named: Any) -> MultinodeError:
    """What the call is refused with."""
    return raised(MultinodeError, call, *args, **named)


def raised(kind: type[E], call: Callable[..., object], *args: Any, **named: Any) -> E:
    """What the call raises; for errors of the node's own code."""
    with pytest.raises(kind) as caught:
        call(*args, **named)
    return caught.value


def _figure(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


class Golden:
    """The committed files of one directory."""

    def __init__(self, directory: Path, *, update: bool) -> None:
        """Compare with the files of `directory`, or write them."""
        self._directory = directory
        self._update = update

    def check(self, name: str, text: str) -> None:
        """Fail with a diff unless the file of this name has just this text."""
        path = self._directory / name
        if self._update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        expected = path.read_text() if path.is_file() else ""
        if text != expected:
            diff = difflib.unified_diff(expected.splitlines(), text.splitlines(), str(path), "now", lineterm="")
            pytest.fail("\n".join((*diff, "if that is meant: pytest --update-golden")), pytrace=False)

    def check_findings(self, name: str, cases: Mapping[str, Finding | Iterable[Finding]]) -> None:
        """Compare what was found in each case: severity, code, node, rank and figures, then message and hint."""
        told = []
        for case, found in cases.items():
            lines = [f"# {case}"]
            for one in [found] if isinstance(found, Finding) else found:
                figures = ", ".join(f"{key} {_figure(value)}" for key, value in one.figures.items())
                rank = getattr(one, "rank", None)
                place = ", ".join(filter(None, (one.node, "" if rank is None else f"rank {rank}")))
                head = (getattr(one, "severity", ""), one.code or "-", f"({place})" if place else "", figures)
                lines.append(" ".join(filter(None, head)))
                lines += [f"  {line}" for line in one.message.splitlines()]
                lines += [f"  > {line}" for line in (one.hint or "").splitlines()]
            told.append("\n".join(lines))
        self.check(f"{name}.txt", "\n\n".join(told) + "\n")

    def check_errors(
        self,
        name: str,
        cases: Mapping[str, BaseException | None],
        directory: Path | None = None,
        shown: Mapping[str, str] | None = None,
    ) -> None:
        """Compare what each case was refused with: kind and node, message, hint and detail; of others kind and text.

        Args:
            name: of the file.
            cases: errors by what was typed or read.
            directory: whose path is shown as DIR.
            shown: further texts that differ from run to run, and what is shown for them.
        """
        told = []
        for case, error in cases.items():
            if not isinstance(error, MultinodeError):
                assert error is not None, case
                told.append(f"# {case}\n{type(error).__name__}\n  {error}")
                continue
            head = type(error).__name__ + (f" ({error.node})" if error.node else "")
            lines = [f"# {case}", head, f"  {error.message}", *(f"  > {line}" for line in error.hint_lines)]
            told.append("\n".join([*lines, *(f"  | {line}" for line in error.detail.splitlines())]))
        self._check_shown(name, told, directory, shown)

    def check_texts(
        self,
        name: str,
        cases: Mapping[str, str],
        directory: Path | None = None,
        shown: Mapping[str, str] | None = None,
    ) -> None:
        """Compare what was printed in each case; `directory` and `shown` as in `check_errors`."""
        self._check_shown(name, [f"# {case}\n{text.rstrip()}" for case, text in cases.items()], directory, shown)

    def _check_shown(
        self, name: str, told: Sequence[str], directory: Path | None, shown: Mapping[str, str] | None
    ) -> None:
        text = "\n\n".join(told) + "\n"
        for one, word in {**({} if directory is None else {str(directory): "DIR"}), **(shown or {})}.items():
            # As a word of its own: it may be a number.
            text = re.sub(rf"(?<!\w){re.escape(one)}(?!\w)", word, text)
        self.check(f"{name}.txt", text)

    def check_screen(
        self,
        name: str,
        parts: Iterable[Part] | Callable[[int], Iterable[Part]],
        most_lines: int | None = None,
        widths: Sequence[int] = _WIDTHS,
    ) -> None:
        """The same of a screen, at every width; no line may be wider, and nothing cut or moved by a control code.

        Args:
            name: of the file.
            parts: of the screen; or what makes them for a width.
            most_lines: that it may have, at every width.
            widths: of the terminals.
        """
        shown, every = [], parts if callable(parts) else list(parts)
        for width in widths:
            made = list(every(width) if callable(every) else every)
            text = screen_text(made, width)
            assert "\x1b" not in text
            assert _CUT not in text
            assert most_lines is None or text.count("\n") <= most_lines
            # A part that is one line stays one, whatever its width: a command is copied whole.
            whole = {one for one in made if isinstance(one, str)}
            assert all(len(line) <= width for line in text.splitlines() if line not in whole)
            shown.append(f"=== {width} columns\n{text}")
        self.check(f"{name}.txt", "\n".join(shown))

    def check_answer(
        self,
        name: str,
        blocks: Iterable[Block] | Callable[[int], Iterable[Block]],
        *,
        details: bool = False,
        most_lines: int | None = None,
        widths: Sequence[int] = _WIDTHS,
    ) -> None:
        """An answer as its screen, as `check_screen` does it."""
        every = blocks if callable(blocks) else list(blocks)

        def parts(width: int) -> Iterable[Part]:
            return block_parts(every(width) if callable(every) else every, details=details, width=width)

        self.check_screen(name, parts, most_lines, widths)
