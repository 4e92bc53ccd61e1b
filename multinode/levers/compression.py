"""Compression of DDP's gradients (`--grad-compress`): in 16 bits, or by PowerSGD. Pure.

The mechanism is `worker/levers/compress.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from multinode.errors import UsageError
from multinode.levers.lever import Lever, Need, Workers

_DTYPES = ("fp16", "bf16")
_POWER_SGD = re.compile(r"powersgd(?::([1-9]\d{0,2})(?::\d{1,6})?)?", re.ASCII)
_USUAL_RANK = 4


class Compression(Lever, frozen=True, kw_only=True):
    """What DDP's gradients are sent as."""

    title: ClassVar[str] = "gradient compression"
    heading: ClassVar[str] = "gradients sent"
    phrase: ClassVar[str] = "gradient dtype on the wire"
    column: ClassVar[str] = "grad_compress"
    needs: ClassVar[tuple[Need, ...]] = (
        Need("instrumentation", hint="remove --no-profile; the records also show whether gradients were compressed"),
        Need(
            "ddp",
            hint="use communication_data_type in the DeepSpeed JSON or the reduce dtype of FSDP's mixed precision; or ",
        ),
    )

    kind: str  # `fp16`, `bf16` or `powersgd[:RANK[:START]]`

    @property
    def given(self) -> Mapping[str, str | int]:
        """Its option."""
        return {"grad-compress": self.kind}

    @property
    def words(self) -> str:
        """As typed: `fp16`."""
        return self.kind

    @property
    def rank(self) -> int | None:
        """Columns of PowerSGD's thin matrices; None for 16 bits."""
        match = _POWER_SGD.fullmatch(self.kind)
        return None if match is None else int(match[1] or _USUAL_RANK)

    @property
    def algorithm(self) -> str | None:
        """PowerSGD approximates the gradients; a cast to 16 bits only rounds them."""
        return None if self.rank is None else f"its gradients are sent as {self.kind}"

    def check(self, workers: Workers) -> None:
        """Refuse an unknown kind.

        Raises:
            UsageError: it is one.
        """
        del workers
        if self.kind not in _DTYPES and self.rank is None:
            raise UsageError(
                f"{self.option}: unknown compression",
                hint=f"use one of {', '.join(_DTYPES)}, powersgd, powersgd:RANK, powersgd:RANK:START",
            )

    def environment(self, workers: Workers) -> dict[str, str]:
        """Its kind, as typed."""
        del workers
        from multinode.worker.levers.compress import VARIABLE

        return {VARIABLE: self.kind}


def parse_compression(text: str) -> Compression:
    """What `--grad-compress` asks for.

    Raises:
        UsageError: there is no such compression.
    """
    found = Compression(kind=text)
    found.check(Workers())
    return found
