"""The catalogue: every check, in the order in which a person mends things. Runs them; knows none of their rules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator

import msgspec

from multinode.core.check.finding import SEVERITIES, Finding, Rule
from multinode.preflight.checks import (
    access,
    gpus,
    interfaces,
    link,
    machine,
    occupancy,
    paths,
    ports,
    rdma,
    resources,
    software,
    strategy,
    streams,
    training,
    variables,
)
from multinode.preflight.inspection import Inspection

__all__ = ["CHECKS", "CHECK_NAMES", "RULES", "Check", "check_all", "check_before_launch", "sort_findings"]


class Check(msgspec.Struct, frozen=True):
    """One check.

    Attributes:
        before_launch: whether a launch makes it as well: what it finds would leave the run hanging or dead.
    """

    judge: Callable[[Inspection], Iterator[Finding]]
    before_launch: bool = False


CHECKS = (
    Check(software.check_interpreter, before_launch=True),
    Check(software.check_interactive),
    Check(software.check_packages, before_launch=True),
    Check(software.check_tools),
    Check(software.check_versions),
    Check(machine.check_same_machine),
    Check(machine.check_container_network),
    Check(machine.check_clocks),
    Check(resources.check_shared_memory),
    Check(resources.check_disk),
    Check(resources.check_memory_limit),
    Check(resources.check_offload),
    Check(resources.check_limits),
    Check(gpus.check_backend, before_launch=True),
    Check(gpus.check_presence, before_launch=True),
    Check(gpus.check_counts),
    Check(gpus.check_models),
    Check(gpus.check_drivers),
    Check(gpus.check_torch_builds),
    Check(occupancy.check_gpus_free),
    Check(occupancy.check_leftovers),
    Check(rdma.check_rdma),
    Check(rdma.check_locked_memory),
    Check(interfaces.check_routes),
    Check(interfaces.check_subnets),
    Check(interfaces.check_media),
    Check(interfaces.check_unset_interface),
    Check(interfaces.check_hostnames),
    Check(variables.check_interface_names, before_launch=True),
    Check(variables.check_agreement),
    Check(variables.check_socket_counts),
    Check(variables.check_stray_variables),
    Check(variables.check_hidden_gpus),
    Check(link.check_link_up, before_launch=True),
    Check(link.check_link_speeds),
    Check(link.check_link_health),
    Check(link.check_mtus),
    Check(streams.check_streams),
    Check(paths.check_workdir, before_launch=True),
    Check(paths.check_paths, before_launch=True),
    Check(paths.check_output),
    Check(paths.check_contents),
    Check(paths.check_revisions),
    Check(paths.check_shared),
    Check(training.check_spaces, before_launch=True),
    Check(training.check_arguments, before_launch=True),
    Check(training.check_deepspeed, before_launch=True),
    Check(training.check_batch_size),
    Check(training.check_deepspeed_on_cpu),
    Check(training.check_timeout),
    Check(strategy.check_strategy),
    Check(ports.check_master_port, before_launch=True),
    Check(ports.check_ports, before_launch=True),
)


def _rules() -> Iterator[Rule]:
    yield from access.ACCESS_RULES
    for module in dict.fromkeys(sys.modules[check.judge.__module__] for check in CHECKS):
        yield from (value for value in vars(module).values() if isinstance(value, Rule))


# Every kind of finding; those of one check stand together, in the order of the checks.
RULES = tuple(_rules())
# The rows of the matrix.
CHECK_NAMES = tuple(dict.fromkeys(rule.check for rule in RULES))


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
