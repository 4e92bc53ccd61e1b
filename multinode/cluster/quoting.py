"""Command: argv, environment and directory, and its text for people. The only module that quotes.

Quoting is for display and for the few constant command lines of the transport; jobs travel as data.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable

import msgspec

from multinode.cluster.cluster import Node
from multinode.secret_values import FORWARDED, redact, redact_text, redact_words


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """A program to run."""

    argv: tuple[str, ...]
    env: dict[str, str] = {}
    # variables removed from the environment first; a trailing `*` removes all with that prefix
    unset: tuple[str, ...] = ()
    path_first: str | None = None  # directory to prepend to PATH; None leaves PATH unchanged
    cwd: str | None = None  # directory; None is the user's home on the node
    # variables in `env` whose values come from the controller's environment and are never shown
    forwarded: tuple[str, ...] = ()
    # shell text that runs first, in `cwd`, in a login bash; variables and PATH are set again after it
    prelude: str | None = None


def shown_environment(command: Command) -> dict[str, str]:
    """Its variables for display and storage: without the values of secrets and of forwarded ones."""
    shown: dict[str, str] = redact(command.env)
    return shown | dict.fromkeys(command.forwarded, FORWARDED)


def hosts_option(hosts: str) -> str:
    """` --hosts` with its argument, or an empty text."""
    return f" --hosts {shlex.quote(hosts)}" if hosts else ""


def is_ipv6(address: str) -> bool:
    """Whether an address, or a host name in its place, is an IPv6 address."""
    return ":" in address


def bracketed(address: str) -> str:
    """The address as written before a colon and a port."""
    return f"[{address}]" if is_ipv6(address) else address


def quote_path(path: str) -> str:
    """Quote a word for a POSIX shell; a leading `~/` becomes `"$HOME"/`, which also works in an assignment."""
    if path == "~":
        return '"$HOME"'
    if path.startswith("~/"):
        return '"$HOME"/' + (shlex.quote(path[2:]) if path[2:] else "")
    return shlex.quote(path)


def ssh_words(node: Node, program: str) -> list[str]:
    """`ssh` or `scp` with the options for a node; the destination follows."""
    options = {"-F": node.ssh_config, "-P" if program == "scp" else "-p": node.port, "-i": node.key, "-J": node.jump}
    return [program, *(str(word) for option in options.items() if option[1] is not None for word in option)]


def destination(node: Node) -> str:
    """The node as an argument of `ssh`, with the user in the hostfile, if any."""
    return f"{node.user}@{node.name}" if node.user else node.name


_SSH = re.compile(r"\bssh (\S+) (?=(')?)")


def as_steps(text: str, nodes: Iterable[Node]) -> str:
    """The text with `ssh NODE COMMAND` for nodes in a Slurm job replaced by a step of that job."""
    jobs = {node.name: node.slurm_job for node in nodes if node.slurm_job is not None}

    def step(match: re.Match[str]) -> str:
        if match[1] not in jobs:
            return match[0]
        # The part that ssh passes to a shell.
        shell = "sh -c " if match[2] else ""
        return f"srun --jobid={jobs[match[1]]} --overlap --nodelist={match[1]} --nodes=1 --ntasks=1 {shell}"

    return _SSH.sub(step, text) if jobs else text


def render_command(command: Command) -> str:
    """The command as typed in a POSIX shell, one variable per line, secrets redacted.

    The text can be run: every value is quoted, and `unset` becomes `env -u` (a prefix stays a comment).
    """
    lines: list[str] = []
    prefixes = [name for name in command.unset if name.endswith("*")]
    if prefixes:
        lines.append("# not set in the job's environment: " + ", ".join(prefixes))
    if command.cwd is not None:
        lines.append(f"cd {quote_path(command.cwd)} &&")
    if command.prelude is not None:
        # The line break ends a comment at the end of the text.
        lines.append(f"{{ {redact_text(command.prelude)}\n}} &&")
    words = [f"-u {shlex.quote(name)}" for name in command.unset if not name.endswith("*")]
    if words:
        lines.append("env " + " ".join(words) + " \\")
    elif command.env or command.path_first:
        lines.append("env \\")
    if command.path_first is not None:
        lines.append(f'  PATH={quote_path(command.path_first)}:"$PATH" \\')
    lines += [f"  {name}={quote_path(value)} \\" for name, value in shown_environment(command).items()]
    lines.append("  " + " ".join(quote_path(word) for word in redact_words(command.argv)))
    return "\n".join(lines)
