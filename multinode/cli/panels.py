"""Help in sections: verbs by what one wants to do, with every summary whole; options by what they concern.

The sections are Typer's `rich_help_panel`. Typer itself shows them with rich alone, which takes longer to import than
the help takes to print.
"""

from __future__ import annotations

from typing import Any

import typer.core

_OTHERS = "Commands"
# Wrapped by the formatter, never cut.
_WHOLE = 1000


class PanelCommand(typer.core.TyperCommand):
    """Lists its options by panel: arguments first, then those without a panel."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """A section for each panel, in the order of the parameters."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            plain = "Arguments" if parameter.param_type_name == "argument" else "Options"
            if record is not None:
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or plain, []).append(record)
        for panel, rows in panels.items():
            if rows:
                with formatter.section(panel):
                    formatter.write_dl(rows)


class PanelGroup(typer.core.TyperGroup):
    """Lists its verbs by panel."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - typer's signature
        """A section for each panel, in the order of the verbs."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            panel = getattr(command, "rich_help_panel", None) or _OTHERS
            panels.setdefault(panel, []).append((name, command.get_short_help_str(_WHOLE)))
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)
