"""The list of all checks, in the order in which people fix things."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from multinode.check import (
    gpus,
    interfaces,
    link,
    machine,
    mtu,
    paths,
    ports,
    rdma,
    software,
    strategy,
    training,
    variables,
)
from multinode.check.inspection import Inspection
from multinode.check.probe import UNANSWERED, UNVERIFIED
from multinode.check.rule import SEVERITIES, Check, CheckFinding, Rule

# In the order of their module.
_MODULES = (software, machine, gpus, rdma, interfaces, variables, link, mtu, paths, training, strategy, ports)
_MEMBERS = [value for module in _MODULES for value in vars(module).values()]
CHECKS = tuple(value for value in _MEMBERS if isinstance(value, Check))
# Every kind of finding, grouped by check, in the order of the checks.
RULES = (*UNANSWERED, UNVERIFIED, *(value for value in _MEMBERS if isinstance(value, Rule)))
# The rows of the matrix.
CHECK_NAMES = tuple(dict.fromkeys(rule.check for rule in RULES))


def check_all(inspection: Inspection, *, before_launch: bool = False) -> Iterator[CheckFinding]:
    """The findings of all checks, or of those before a launch."""
    for check in CHECKS:
        if check.before_launch or not before_launch:
            yield from check(inspection)


def sort_findings(findings: Iterable[CheckFinding]) -> tuple[CheckFinding, ...]:
    """Errors first, without duplicates, otherwise in the order of the checks."""
    single = {(one.node, one.code, one.message, one.hint): one for one in findings}
    return tuple(sorted(single.values(), key=lambda finding: SEVERITIES.index(finding.severity)))
