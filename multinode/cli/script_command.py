"""A command whose arguments after `--` belong to the user's script and are never read as our options."""

from __future__ import annotations

from typing import Any

import typer.core

__all__ = ["SCRIPT", "ScriptCommand"]

SCRIPT = "multinode.script"


class ScriptCommand(typer.core.TyperCommand):
    """Keeps everything behind the first `--` in `ctx.meta[SCRIPT]`: a tuple, or None where there was no `--`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Split at `--`, and parse what stands before it."""
        ctx.meta[SCRIPT] = None
        if "--" in args:
            at = args.index("--")
            ctx.meta[SCRIPT] = tuple(args[at + 1 :])
            args = args[:at]
        return super().parse_args(ctx, args)
