"""Writes docs/reference/cli.md and cli-lab-fault.md from the command itself; with --check, says if they are current.

Reads the parameters, not the help text: that depends on the terminal's width and on the release of Typer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from reference_pages import write_or_check

from multinode.cli.main import VERBS, build_app, load_verb

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"

_HEADER = """\
# The command line

<!-- Written by scripts/make_cli_reference.py. -->

Results go to stdout; progress, notes and errors to stderr. Every verb also takes `-h` (`--help`), `-q` and `-v`. Exit
codes:

| code | meaning |
|---|---|
| 0 | done |
| 1 | the job, the check or the test failed, or a limit was missed (`--strict`, `--min-busbw`, `--min-efficiency`) |
| 2 | the command line or a configuration is wrong |
| 3 | a node could not be reached |
| 130 | interrupted |

`multinode lab fault` has [a page of its own](cli-lab-fault.md).
"""

_FAULT = "multinode lab fault"
_FAULT_HEADER = """\
# Faults of the lab

<!-- Written by scripts/make_cli_reference.py. -->

About [the lab](../explanation/lab.md). What happens to a run: [faults](../explanation/faults.md). All other commands:
[the command line](cli.md).
"""


def main() -> int:
    """Write what is not current, or name it."""
    return write_or_check(render_files(), __doc__)


def render_files() -> dict[Path, str]:
    """The reference, and that of the lab's faults, by their paths."""
    pages = {"cli.md": [_HEADER], "cli-lab-fault.md": [_FAULT_HEADER]}
    for name, command in walk_commands():
        pages["cli-lab-fault.md" if name.startswith(_FAULT) else "cli.md"].append(_render(name, command))
    return {REFERENCE / name: "".join(parts) for name, parts in pages.items()}


def walk_commands() -> Iterator[tuple[str, Any]]:
    """Every command as a person types it, parents before children."""
    yield "multinode", typer.main.get_command(build_app())
    for name in VERBS:
        yield from _walk(f"multinode {name}", load_verb(name))


def parameter_names(parameter: Any) -> list[str]:
    """The spellings of an option, or an argument's name."""
    return [*parameter.opts, *parameter.secondary_opts]


def _walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for child, subcommand in getattr(command, "commands", {}).items():
        yield from _walk(f"{name} {child}", subcommand)


def _render(name: str, command: Any) -> str:
    common = {"quiet", "verbose"} if " " in name else set()
    visible = [one for one in command.params if not getattr(one, "hidden", False) and one.name not in common]
    arguments = [parameter for parameter in visible if parameter.param_type_name == "argument"]
    options = [parameter for parameter in visible if parameter.param_type_name == "option"]
    lines = ["", f"## `{name}`", "", _usage(name, command, arguments, options)]
    lines += ["", _plain(command.help)] if command.help else []
    lines += _verbs() if " " not in name else []
    for title, parameters in (("argument", arguments), ("option", options)):
        if parameters:
            lines += ["", f"| {title} | meaning | default |", "|---|---|---|", *map(_row, parameters)]
    lines += ["", _plain(command.epilog)] if command.epilog else []
    return "\n".join(lines) + "\n"


def _verbs() -> list[str]:
    """All verbs, by what one wants to do."""
    lines = ["", "| to | verb | does |", "|---|---|---|"]
    return lines + [f"| {verb.panel.lower()} | `{name}` | {verb.summary} |" for name, verb in VERBS.items()]


def _usage(name: str, command: Any, arguments: list[Any], options: list[Any]) -> str:
    words = [name]
    words += ["[OPTIONS]"] if options else []
    words += [_metavar(argument) if argument.required else f"[{_metavar(argument)}]" for argument in arguments]
    words += ["COMMAND"] if hasattr(command, "commands") else []
    return f"    {' '.join(words)}"


def _row(parameter: Any) -> str:
    meaning = _cell(parameter.help or "")
    return f"| `{_spelling(parameter)}` | {meaning}{_range(parameter)} | {_default(parameter)} |"


def _spelling(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return _metavar(parameter)
    names = ", ".join(parameter.opts)
    if parameter.secondary_opts:
        return f"{names} / {', '.join(parameter.secondary_opts)}"
    return names if parameter.is_flag else f"{names} {_metavar(parameter)}"


def _metavar(parameter: Any) -> str:
    bounded = _bounds(parameter) != (None, None)
    name = str(parameter.metavar or ("N" if bounded else parameter.name.strip("_").upper().replace("_", "-")))
    return f"{name}..." if parameter.nargs == -1 and not name.endswith("...") else name


def _range(parameter: Any) -> str:
    least, most = _bounds(parameter)
    if least is None and most is None:
        return ""
    if most is None:
        return f" At least {least:g}."
    return f" At most {most:g}." if least is None else f" {least:g} to {most:g}."


def _bounds(parameter: Any) -> tuple[float | None, float | None]:
    """The least and the greatest value; some releases of Typer have them on the parameter, others on its type."""
    holder = parameter if hasattr(parameter, "min") else parameter.type
    return getattr(holder, "min", None), getattr(holder, "max", None)


def _default(parameter: Any) -> str:
    if parameter.required:
        return "required"
    if parameter.default is None or (parameter.default is False and not parameter.secondary_opts):
        return ""
    if isinstance(parameter.default, bool):
        return f"`{(parameter.opts if parameter.default else parameter.secondary_opts)[0]}`"
    value = f"{parameter.default:g}" if isinstance(parameter.default, float) else str(parameter.default)
    return f"`{_cell(value)}`"


def _plain(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
