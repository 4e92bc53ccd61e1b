"""Help in sections: verbs by what one wants to do, options by what they concern; of long verbs the everyday ones.

The sections are Typer's `rich_help_panel`. Typer itself shows them with rich alone, which takes longer to import than
the help takes to print.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer
import typer.core

_Function = TypeVar("_Function", bound=Callable[..., Any])

_OTHERS = "Commands"
# Wrapped by the formatter, never cut.
_WHOLE = 1000
# A help with more options than this is long: it shows those below, and the others with --help-all.
_MANY = 22
_EVERYDAY = {
    "hosts", "nodes", "workers_per_node", "set_", "with_", "synthetic", "deepspeed_set", "grad_compress", "engine",
    "env", "setup", "copy_code", "balance", "average", "check", "detach", "restarts", "on_hang", "hang_timeout",
    "notify", "export", "fetch",
    # Of what is measured.
    "begin", "end", "op", "dtype", "pairs", "tune", "backend", "local", "min_busbw", "compare", "mode", "each_node",
    "steps", "repeats", "min_efficiency", "grid", "grid_arg", "minutes", "sort", "where", "output", "budget", "seeds",
    "learning_rates", "candidates", "from_", "fresh",
}  # fmt: skip
# What nearly all verbs have stands at the end.
_OUTPUT = {"dry_run", "details", "as_json", "quiet", "verbose", "help", "help_all"}
_CHOICES_SHOWN = 40
_WIDE = 28
_ALL = "multinode.help-all"


def metavar(parameter: Any) -> str:
    """The placeholder of a parameter's value: `PORT`, `N`, `table|csv`, `[RUN]...`."""
    name = parameter.metavar
    if name is None:
        choices = "|".join(map(str, getattr(parameter.type, "choices", ())))
        fallback = "N" if bounds(parameter) != (None, None) else parameter.name.strip("_").upper().replace("_", "-")
        name = choices if 0 < len(choices) <= _CHOICES_SHOWN else fallback
    return f"{name}..." if parameter.nargs == -1 and not name.endswith("...") else str(name)


def bounds(parameter: Any) -> tuple[float | None, float | None]:
    """The minimum and maximum; some releases of Typer have them on the parameter, others on its type."""
    holder = parameter if hasattr(parameter, "min") else parameter.type
    return getattr(holder, "min", None), getattr(holder, "max", None)


def range_text(parameter: Any) -> str:
    """The range as a sentence with a leading blank; empty without limits."""
    least, most = bounds(parameter)
    if least is None and most is None:
        return ""
    if most is None:
        return f" At least {least:.12g}."
    return f" At most {most:.12g}." if least is None else f" From {least:.12g} to {most:.12g}."


def default_text(parameter: Any) -> str:
    """Its default as typed; empty without a meaningful one."""
    value = parameter.default
    if value is None or (value is False and not parameter.secondary_opts) or callable(value):
        return ""
    if isinstance(value, bool):
        return str((parameter.opts if value else parameter.secondary_opts)[0])
    return f"{value:g}" if isinstance(value, float) else str(value)


def spelling(parameter: Any) -> str:
    """`--nodes K`, `-d, --detach`, `--check / --no-check`, or an argument's name."""
    if parameter.param_type_name == "argument":
        return metavar(parameter)
    names = ", ".join(sorted(parameter.opts, key=len))
    if parameter.secondary_opts:
        return f"{names} / {', '.join(parameter.secondary_opts)}"
    return names if parameter.is_flag else f"{names} {metavar(parameter)}"


def examples(*commands: str, note: str = "") -> str:
    """The end of a help: commands to copy, a line each, and a note."""
    # Lines behind \b are printed as they are.
    return "\n".join(
        ["\b", "Examples:", *(f"  multinode {command}" for command in commands), *([note] if note else [])]
    )


class PanelCommand(typer.core.TyperCommand):
    """Lists arguments, the verb's own options, then options by panel, and last what nearly all verbs have."""

    def get_params(self, ctx: Any) -> list[Any]:
        """With --help-all, if there are too many for --help."""
        params: list[Any] = super().get_params(ctx)
        if len(_options(params)) <= _MANY:
            return params
        if not hasattr(self, "_help_all"):
            self._help_all = typer.core.TyperOption(
                param_decls=["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                default=False,
                callback=_show_all,
                help="Show all options and exit.",
            )
        return [*params, self._help_all]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """`[OPTIONS] [JOB]`."""
        arguments = [param for param in self.get_params(ctx) if param.param_type_name == "argument"]
        return [
            "[OPTIONS]",
            *(metavar(argument) if argument.required else _optional(metavar(argument)) for argument in arguments),
        ]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """A section for each panel, in the order of the parameters."""
        params = self.get_params(ctx)
        whole = ctx.meta.get(_ALL, False) or len(_options(params)) <= _MANY
        shown = [
            param
            for param in params
            if whole or param.param_type_name == "argument" or param.name in _EVERYDAY | _OUTPUT
        ]
        _write_options(shown, formatter, whole=whole)
        if len(shown) < len(params):
            formatter.write_paragraph()
            formatter.write_text(f"{len(params) - len(shown)} more options: {ctx.command_path} --help-all")


def _write_options(params: list[Any], formatter: Any, *, whole: bool) -> None:
    panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    output: list[tuple[str, str]] = []
    for parameter in params:
        if getattr(parameter, "hidden", False):
            continue
        plain = "Arguments" if parameter.param_type_name == "argument" else "Options"
        panel = getattr(parameter, "rich_help_panel", None) or plain
        rows = output if parameter.name in _OUTPUT else panels.setdefault(panel, [])
        rows.append((spelling(parameter), _meaning(parameter, whole=whole)))
    # Where there is nothing else, these are the options.
    last = "Output" if panels["Options"] or len(panels) > len(("Arguments", "Options")) else "Options"
    for panel, rows in [*((name, rows) for name, rows in panels.items() if rows), (last, output)]:
        with formatter.section(panel):
            formatter.write_dl(rows, col_max=_WIDE)


def _show_all(ctx: Any, _: Any, value: bool) -> None:
    if value:
        ctx.meta[_ALL] = True
        typer.echo(ctx.get_help())
        ctx.exit()


def _options(params: list[Any]) -> list[Any]:
    return [param for param in params if param.param_type_name == "option" and not getattr(param, "hidden", False)]


def _optional(name: str) -> str:
    return name if name.startswith("[") else f"[{name}]"


def _meaning(parameter: Any, *, whole: bool) -> str:
    """Its help; its default; with everything, its range, too."""
    words = f"{parameter.help or ''}{range_text(parameter) if whole else ''}"
    default = "" if parameter.show_default is False else default_text(parameter)
    return f"{words}  [default: {default}]" if default else words


class PanelGroup(typer.core.TyperGroup):
    """Lists its verbs by panel."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Options, then verbs."""
        with formatter.section("Options"):
            formatter.write_dl([(spelling(param), _meaning(param, whole=True)) for param in self.get_params(ctx)])
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - typer's signature
        """A section for each panel, in the order of the verbs."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            panel = getattr(command, "rich_help_panel", None) or _OTHERS
            panels.setdefault(panel, []).append((name, command.get_short_help_str(_WHOLE)))
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)


class PanelApp(typer.Typer):
    """An app whose commands show their options by panel."""

    def command(
        self, name: str | None = None, *, cls: Any = PanelCommand, **settings: Any
    ) -> Callable[[_Function], _Function]:
        """As Typer's."""
        return super().command(name, cls=cls, **settings)
