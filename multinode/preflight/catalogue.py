"""The catalogue: every check, in the order in which a person mends things. Runs them; knows none of their rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec

from multinode.core.finding import SEVERITIES, Finding
from multinode.preflight.checks import gpus, paths, software
from multinode.preflight.inspection import Inspection

__all__ = ["CHECKS", "Check", "check_all", "check_before_launch", "sort_findings"]


class Check(msgspec.Struct, frozen=True):
    """One check.

    Attributes:
        judge: the function.
        before_launch: whether a launch makes it as well: what it finds would leave the run hanging or dead.
    """

    judge: Callable[[Inspection], Iterator[Finding]]
    before_launch: bool = False


CHECKS = (
    Check(software.check_interpreter, before_launch=True),
    Check(software.check_packages, before_launch=True),
    Check(software.check_versions),
    Check(gpus.check_backend, before_launch=True),
    Check(paths.check_workdir, before_launch=True),
    Check(paths.check_paths),
)


def check_all(inspection: Inspection) -> Iterator[Finding]:
    """What all checks find."""
    for check in CHECKS:
        yield from check.judge(inspection)


def check_before_launch(inspection: Inspection) -> Iterator[Finding]:
    """What those find that a launch makes."""
    for check in CHECKS:
        if check.before_launch:
            yield from check.judge(inspection)


def sort_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Errors first, each once, otherwise in the order of the checks."""
    return tuple(sorted(dict.fromkeys(findings), key=lambda finding: SEVERITIES.index(finding.severity)))
