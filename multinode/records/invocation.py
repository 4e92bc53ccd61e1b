"""Invocation: the command line of a run, kept with it, so that commands proposed later are those that were typed."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence

import msgspec

# How a result is shown, and how a series is resumed: nothing of the training.
_REPEATABLE = frozenset({"--set", "--env"})
_OF_OUTPUT = frozenset({"--json", "--details", "--dry-run", "--fresh", "--retry-failed", "--quiet", "--verbose"})


class Invocation(msgspec.Struct, frozen=True, kw_only=True):
    """A command line of multinode, without secrets.

    Attributes:
        verb: its verb.
        options: each option with its values: `("--hosts", "hosts.txt")`, `("--detach",)`.
        job: what follows them: a YAML with settings, or `--` and a command.
        alike: the options that change the training itself, by name: another verb must have them all.
    """

    verb: str
    options: tuple[tuple[str, ...], ...] = ()
    job: tuple[str, ...] = ()
    alike: tuple[str, ...] = ()

    @property
    def is_script(self) -> bool:
        """Whether the job is a command behind `--`."""
        return self.job[:1] == ("--",)

    @property
    def arguments(self) -> str:
        """All of it but the verb, with a leading blank."""
        return _text([word for option in self.options for word in option], self.job)

    def line(
        self,
        verb: str,
        known: Collection[str],
        *,
        first: Sequence[str] = (),
        without: Collection[str] = (),
        job: tuple[str, ...] | None = None,
    ) -> str:
        """The command line of another verb for the same training; empty if that verb lacks an option that changes it.

        Args:
            verb: the other verb.
            known: its options.
            first: options to begin with.
            without: options to leave out.
            job: what is trained; None is the same job.
        """
        left_out = {*_OF_OUTPUT, *without}
        if any(name not in known and name not in left_out for name in self.alike):
            return ""
        kept = [option for option in self.options if option[0] in known and option[0] not in left_out]
        words = [*first, *(word for option in kept for word in option)]
        return f"multinode {verb}{_text(words, self.job if job is None else job)}"

    def launch(self, options: str) -> str:
        """The launch of the same training with more options, such as `--nodes 1`, in the place of those it has."""
        more = shlex.split(options)
        # What another verb takes over its nodes is its own.
        known = {option[0] for option in self.options} if self.verb == "launch" else {"--hosts", *self.alike}
        known -= _OF_OUTPUT | (set(more) - _REPEATABLE)
        kept = (word for option in self.options if option[0] in known for word in option)
        return f"multinode launch{_text((*kept, *more), self.job)}"


def _text(options: Sequence[str], job: Sequence[str]) -> str:
    return "".join(f" {shlex.quote(word)}" for word in (*options, *job))
