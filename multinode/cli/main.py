"""The multinode command: lists the verbs, imports the one that is asked for, and alone prints errors."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import typer
import typer.core
import typer.main

from multinode.cli.panels import PanelGroup
from multinode.cli.verbs import VERBS, common_options, dashed, load_verb, usual_name
from multinode.errors import Interrupted, MultinodeError, UsageError

# Of writing to a file that names none: its disk is full or gone.
_STDOUT_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.ESTALE, errno.EBADF}
_COMPLETE = "_MULTINODE_COMPLETE"
# Columns of a help, however wide the terminal is.
_WIDEST = 100
# Of verbs that compute from stored runs.
_TRIED = "multinode tune --judge speed --from RUN measures the advised changes"
_OF_VERBS = {"advise": dict.fromkeys(("--try", "--pick", "--job", "--repeats", "--steps", "--hosts"), _TRIED)}


# What Typer says of a command line, of which Typer exports the kinds alone.
_ParseError: Any = typer.BadParameter.__base__
_KIND = re.compile(r"is not a valid (int|float)\b(?: range)?")
_NEIGHBOURS = re.compile(r"\.? Did you mean (\S+?)(?:,.*)?\?$")


class _Verbs(PanelGroup):
    """Lists the verbs from `VERBS`, and imports one when it is run or completed."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, verb in VERBS.items():
            self.add_command(typer.core.TyperCommand(name, short_help=verb.summary, rich_help_panel=verb.panel))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """`help`, `help VERB` and `version` are what people type for --help and --version."""
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        elif args == ["version"]:
            args = ["--version"]
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed

    def make_context(self, *args: Any, **settings: Any) -> Any:
        """Parse the command line; errors appear in our own form."""
        with _as_ours():
            return super().make_context(*args, **settings)

    def invoke(self, ctx: Any) -> Any:
        """Read the options of a verb and run it; errors appear in our own form."""
        with _as_ours(ctx):
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb itself in the place of its listing.

        Raises:
            UsageError: it is one of another launcher, or has become part of another.
        """
        if args[0] not in self.commands:
            from multinode.job.typed_command import starts_program

            other = next((name for name, verb in VERBS.items() if args[0] in verb.also), None)
            if other is None and starts_program(args[0]):
                import shlex

                line = shlex.join(("multinode", "launch", "--", *args))
                raise UsageError(f"{args[0]} is not a multinode command: put your program after --", hint=line)
            args = [other or args[0], *args[1:]]
        name, listed, rest = super().resolve_command(ctx, args)
        if listed is None:
            return name, listed, rest
        verb = load_verb(listed.name or "")
        _answer_others(verb, rest)
        return name, verb, rest


@contextlib.contextmanager
def _as_ours(ctx: Any = None) -> Iterator[None]:
    """Raise what Typer says of a command line as UsageError, with the option or verb that was meant, or the help."""
    try:
        yield
    except _ParseError as error:
        if type(error).show is not _ParseError.show:
            # A help in place of a message.
            raise
        names = getattr(error, "possibilities", None)
        text = error.message if names else error.format_message()
        meant = _NEIGHBOURS.search(text)
        nearest = names[0] if names else meant[1].strip("'") if meant is not None else None
        text = _KIND.sub(lambda kind: "is not a whole number" if kind[1] == "int" else "is not a number", text)
        text = _NEIGHBOURS.sub("", text).rstrip(".")
        verb = error.ctx.command_path if error.ctx else f"multinode {ctx.invoked_subcommand}" if ctx else "multinode"
        hint = f"did you mean {nearest}?" if nearest else f"{verb} --help"
        raise UsageError(f"{text[:1].lower()}{text[1:]}", hint=hint) from None


def _answer_others(verb: Any, args: list[str]) -> None:
    """Refuse the options of other launchers that a verb does not have, with what does it here."""
    own = {option for parameter in verb.params for option in (*parameter.opts, *parameter.secondary_opts)}
    # What stands behind -- is the script's.
    given = args[: args.index("--")] if "--" in args else args
    for word in given:
        name = word.partition("=")[0]
        if not name.startswith("-") or name in own or f"--{usual_name(name.lstrip('-'))}" in own:
            continue
        hint = _OF_VERBS.get(verb.name, {}).get(name) or (_hint_elsewhere(name) if "--hosts" in own else None)
        if "--average" in own and (average := _respelled(name, given)) is not None:
            hint = f"--average {average}"
        if hint is not None:
            raise UsageError(f"no such option: {name}", hint=hint)


def _respelled(option: str, args: list[str]) -> str | None:
    """The value of --average that asks for the same as the options that it replaces; None if this is another one."""
    from multinode.levers.former import respell_average

    words = [word.partition("=") for word in args]
    values = {name[2:]: value or after for (name, _, value), after in zip(words, [*args[1:], ""], strict=True)}
    return respell_average(values) if respell_average({option[2:]: ""}) is not None else None


def _hint_elsewhere(option: str) -> str | None:
    """What does here what an option of another launcher does."""
    from multinode.job.launchers import find_meaning, option_name

    meaning = find_meaning(option_name(option))
    return meaning.hint if meaning is not None else None


def build_app() -> typer.Typer:
    """The command with all its verbs."""
    app = typer.Typer(
        cls=_Verbs,
        name="multinode",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        # Inherited by every verb.
        context_settings={
            "help_option_names": ["-h", "--help"],
            "token_normalize_func": dashed,
            "max_content_width": _WIDEST,
        },
        help="Launch a training job on several nodes over SSH or Slurm, and measure the cost of the network.",
        epilog="To see the options of a command: multinode COMMAND --help",
    )
    app.callback()(common_options)
    return app


def run() -> None:
    """Entry point: run the command, print what went wrong, exit with its code."""
    if _COMPLETE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()
    try:
        try:
            build_app()()
        finally:
            # At the interpreter's end a failure would be a traceback that nobody can put right.
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        if error.errno not in _STDOUT_ERRORS or error.filename is not None:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        print_error(MultinodeError(f"cannot write to stdout: {error.strerror}"))
        sys.exit(MultinodeError.exit_code)
    except MultinodeError as error:
        from multinode.cli.output import print_traceback

        print_traceback(error)
        if error.run_id is None or not _print_ending(error.run_id):
            print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print_error(Interrupted("interrupted"))
        sys.exit(Interrupted.exit_code)


def _print_ending(run_id: str) -> bool:
    from multinode.cli.running import print_ending

    return print_ending(run_id)


def print_error(error: MultinodeError) -> None:
    """One message on stderr: what, where, the command that failed, the fix; details above it."""
    lines = []
    if error.detail:
        lines += [f"  {line}" for line in error.detail.splitlines()]
    lines.append(f"error: {error}")
    if error.ran:
        lines.append(f"  ran:  {error.ran}")
    if error.hint:
        lines.append(f"  hint: {error.hint}")
    sys.stderr.write("\n".join(lines) + "\n")
