"""Writes docs/reference/cli.md from the command itself; with --check, says if it is current.

Reads the parameters, not the help text: that depends on the terminal's width and on the release of Typer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from reference_pages import write_or_check

from multinode.cli.main import build_app
from multinode.cli.panels import default_text, metavar, range_text, spelling
from multinode.cli.verbs import VERBS, load_verb

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"

_HEADER = """\
# The command line

<!-- Written by scripts/make_cli_reference.py. -->

multinode prints results to stdout. It prints progress, notes and errors to stderr. Every command also accepts `-h`
(`--help`), `-q` and `-v`. If a command has many options, `--help` shows only the most common ones, and `--help-all`
shows all of them.

multinode exits with one of these codes:

| code | meaning |
|---|---|
| 0 | success |
| 1 | the job, check or test failed, or a condition was not met (`--strict`, `--min-busbw`, `--min-efficiency`) |
| 2 | the command line or a configuration file is wrong |
| 3 | a node could not be reached |
| 130 | interrupted |
"""


def main() -> int:
    """Write what is not current, or name it."""
    return write_or_check(render_files(), __doc__)


def render_files() -> dict[Path, str]:
    """The reference by its path."""
    return {REFERENCE / "cli.md": "".join([_HEADER, *(_render(name, command) for name, command in walk_commands())])}


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
    lines += _end(command.epilog or "")
    return "\n".join(lines) + "\n"


def _end(epilog: str) -> list[str]:
    """What stands below the options, with commands as code."""
    lines = [line for line in epilog.splitlines() if line.strip("\b")]
    commands = [line.strip() for line in lines if line.startswith("  ")]
    notes = [line for line in lines if not line.startswith("  ") and line != "Examples:"]
    return [*(["", "```", *commands, "```"] if commands else []), *(["", *notes] if notes else [])]


def _verbs() -> list[str]:
    """All verbs by stage."""
    lines = ["", "| stage | command | purpose |", "|---|---|---|"]
    return lines + [f"| {verb.panel.lower()} | `{name}` | {verb.summary} |" for name, verb in VERBS.items()]


def _usage(name: str, command: Any, arguments: list[Any], options: list[Any]) -> str:
    words = [name]
    words += ["[OPTIONS]"] if options else []
    words += [metavar(argument) if argument.required else f"[{metavar(argument)}]" for argument in arguments]
    words += [command.behind] if hasattr(command, "behind") else []
    words += ["COMMAND"] if hasattr(command, "commands") else []
    return f"    {' '.join(words)}"


def _row(parameter: Any) -> str:
    meaning = _cell(parameter.help or "")
    default = "required" if parameter.required else default_text(parameter)
    told = f"`{_cell(default)}`" if default and not parameter.required else default
    return f"| `{_cell(spelling(parameter))}` | {meaning}{range_text(parameter)} | {told} |"


def _plain(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
