"""Result: what a call returns, shown as the command shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from multinode.render.blocks import fragment
from multinode.render.sheet import Block, Prose
from multinode.render.table import Part, screen_text
from multinode.render.terminal import block_parts

Held = TypeVar("Held")
_WIDTH = 100


class Result(msgspec.Struct, Generic[Held], frozen=True, kw_only=True):
    """The result of a call. A notebook shows it as a report, and `print` prints what the command prints.

    Attributes:
        value: what was measured or found.
        directory: the directory of the run; None if nothing was stored.
        screen: renders the output of the command; None if it is rendered from `blocks`.
        blocks: renders the report; None if there is only `screen`.
        details: whether output that is rendered from `blocks` includes the details.
    """

    value: Held
    directory: Path | None = None
    screen: Callable[[], Iterable[Part]] | None = None
    blocks: Callable[[], Iterable[Block]] | None = None
    details: bool = False

    def document(self) -> Any:
        """What the command prints with `--json`."""
        document = getattr(self.value, "document", None)
        return self.value if document is None else document()

    def __str__(self) -> str:
        blocks = self.blocks() if self.blocks is not None else ()
        parts = block_parts(blocks, details=self.details, width=_WIDTH) if self.screen is None else self.screen()
        return screen_text(parts, _WIDTH).rstrip()

    def __repr__(self) -> str:
        where = "" if self.directory is None else f", {str(self.directory)!r}"
        return f"<Result of {type(self.value).__name__}{where}>"

    def _repr_html_(self) -> str:
        return fragment(self.blocks() if self.blocks is not None else self._screen_blocks())

    def _screen_blocks(self) -> Iterator[Block]:
        yield Prose(str(self), "verbatim")
