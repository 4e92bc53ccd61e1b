"""Access: every node answers over SSH and runs the agent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from multinode.core.check.finding import Finding, Rule
from multinode.errors import MultinodeError
from multinode.transport.refusals import REFUSALS

__all__ = ["ACCESS_RULES", "check_ssh"]

ACCESS_RULES = (
    *(Rule(check="ssh", severity="error", catches=one.catches, message=one.message, hint=one.hint) for one in REFUSALS),
    Rule(
        check="ssh",
        severity="error",
        catches="a node that answers too late, or goes away while it is asked",
        message="no answer within {deadline_s} s",
        hint="is it alive? try: ssh {node} true",
    ),
    Rule(
        check="ssh",
        severity="error",
        catches="a node that cannot run the agent: no python3 in the non-interactive shell, a full or read-only home",
        message="python3 is not on the PATH of a non-interactive shell, and the agent needs it",
        hint="install it on the node (Debian, Ubuntu: apt-get install python3); then: ssh {node} python3 -V",
    ),
)


def check_ssh(errors: Iterable[MultinodeError]) -> Iterator[Finding]:
    """What kept nodes from answering, as findings; the transport has said why and what mends it."""
    for error in errors:
        yield Finding(severity="error", node=error.node, check="ssh", message=error.message, hint=error.hint)
