"""The batch script of `multinode submit` for sbatch: its shell becomes the controller. Pure text."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Sequence

import msgspec

from multinode.errors import UsageError
from multinode.secret_values import redact_words

# Beside the grace period: time for nodes to verify that nothing is left, and Slurm's resolution of a minute.
_VERIFY_S = 60
_GRACE_OPTION = "--grace-period"
_DEFAULT_GRACE_S = 10.0
_SUBMITTED = frozenset({"launch", "check", "nccl-test", "bench", "contrast", "sweep", "tune"})


class BatchJob(msgspec.Struct, frozen=True, kw_only=True):
    """What is submitted."""

    options: tuple[str, ...]  # of sbatch, as typed
    command: tuple[str, ...]  # the command of multinode and its arguments
    python: str  # the interpreter of the controller
    runs: str  # the directory of runs


def batch_script(job: BatchJob) -> str:
    """The script, which people can read, change and submit by hand.

    Raises:
        UsageError: no command that runs on nodes, it names its nodes, or the script would contain a secret.
    """
    verb, *arguments = job.command or ("",)
    if verb not in _SUBMITTED:
        raise UsageError(
            f"{verb!r} cannot be submitted" if verb else "no command follows --",
            hint=f"multinode submit -N2 -- launch job.yaml; or {', '.join(sorted(_SUBMITTED - {'launch'}))}",
        )
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    taken = next((word for word in own if word == "--hosts" or word.startswith("--hosts=")), None)
    if taken is not None:
        raise UsageError(f"{taken}: a submitted command gets its nodes from Slurm", hint="remove --hosts")
    if redact_words(job.command) != job.command:
        raise UsageError(
            "the command contains a secret, which others could read in the batch script",
            hint="export it, and pass only its name: --env HF_TOKEN",
        )
    lines = _directives(job.options)
    names = [line.split()[0].partition("=")[0] for line in lines]
    if "--job-name" not in names and not any(name.startswith("-J") for name in names):
        lines.insert(0, "--job-name=multinode")
    if "--signal" not in names:
        lines.append(f"--signal=B:TERM@{math.ceil(_grace_s(own)) + _VERIFY_S}")
    command = (job.python, "-m", "multinode", verb, "--hosts", "auto", *arguments)
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in lines),
            "# The shell becomes the controller, so that Slurm's SIGTERM before the time limit stops the run in order.",
            f"export MULTINODE_RUNS={shlex.quote(job.runs)}",
            f"exec {shlex.join(command)}",
            "",
        ]
    )


def _directives(words: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for word in words:
        if "\n" in word or "\r" in word:
            raise UsageError(f"{word!r}: an sbatch option cannot contain a line break")
        if word.startswith("-"):
            name, equals, value = word.partition("=")
            lines.append(f"{name}={shlex.quote(value)}" if equals else shlex.quote(word))
        elif lines:
            lines[-1] += f" {shlex.quote(word)}"
        else:
            raise UsageError(
                f"{word!r} is not an sbatch option", hint="multinode submit -N2 --time=1:00:00 -- launch job.yaml"
            )
    return lines


def _grace_s(arguments: Sequence[str]) -> float:
    for word, following in itertools.pairwise([*arguments, ""]):
        name, equals, value = word.partition("=")
        if name == _GRACE_OPTION:
            try:
                return max(0.0, min(float(value if equals else following), 86400.0))
            except ValueError:
                break
    return _DEFAULT_GRACE_S
