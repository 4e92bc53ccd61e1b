"""Writes docs/reference/cli.md from the command itself; with --check, says whether the file is as it would be written.

Reads the parameters, not the help text: that depends on the terminal's width and on the release of Typer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from multinode.cli.main import build_app

REFERENCE = Path(__file__).parent.parent / "docs" / "reference" / "cli.md"

_HEADER = """\
# The command line

Written by `scripts/make_cli_reference.py` from the command itself; `scripts/check` sees that it is current.

stdout is data, stderr is talk. Exit codes:

| code | meaning |
|---|---|
| 0 | done |
| 1 | the job, the check or the test failed |
| 2 | the command line or a configuration is wrong |
| 3 | a node could not be reached |
| 130 | interrupted |
"""


def main() -> int:
    """Write the reference, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the file is not current")
    arguments = parser.parse_args()
    text = render_reference()
    if not arguments.check:
        REFERENCE.parent.mkdir(parents=True, exist_ok=True)
        REFERENCE.write_text(text)
        return 0
    if REFERENCE.is_file() and REFERENCE.read_text() == text:
        return 0
    print("docs/reference/cli.md is not current; write it anew: .venv/bin/python scripts/make_cli_reference.py")
    return 1


def render_reference() -> str:
    """The whole document."""
    return _HEADER + "".join(_render(name, command) for name, command in walk_commands())


def walk_commands() -> Iterator[tuple[str, Any]]:
    """Every command as a person types it, parents before children."""
    yield from _walk("multinode", typer.main.get_command(build_app()))


def parameter_names(parameter: Any) -> list[str]:
    """The spellings of an option, or an argument's name."""
    return [*parameter.opts, *parameter.secondary_opts]


def _walk(name: str, command: Any) -> Iterator[tuple[str, Any]]:
    yield name, command
    for child, subcommand in getattr(command, "commands", {}).items():
        yield from _walk(f"{name} {child}", subcommand)


def _render(name: str, command: Any) -> str:
    visible = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    arguments = [parameter for parameter in visible if parameter.param_type_name == "argument"]
    options = [parameter for parameter in visible if parameter.param_type_name == "option"]
    lines = ["", f"## `{name}`", "", _usage(name, command, arguments, options)]
    lines += ["", _plain(command.help)] if command.help else []
    for title, parameters in (("argument", arguments), ("option", options)):
        if parameters:
            lines += ["", f"| {title} | meaning | default |", "|---|---|---|", *map(_row, parameters)]
    lines += ["", _plain(command.epilog)] if command.epilog else []
    return "\n".join(lines) + "\n"


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
    bounded = getattr(parameter, "min", None) is not None or getattr(parameter, "max", None) is not None
    name = str(parameter.metavar or ("N" if bounded else parameter.name.strip("_").upper().replace("_", "-")))
    return f"{name}..." if parameter.nargs == -1 and not name.endswith("...") else name


def _range(parameter: Any) -> str:
    least, most = getattr(parameter, "min", None), getattr(parameter, "max", None)
    if least is None and most is None:
        return ""
    if most is None:
        return f" At least {least:g}."
    return f" At most {most:g}." if least is None else f" {least:g} to {most:g}."


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
