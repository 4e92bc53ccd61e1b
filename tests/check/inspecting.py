"""Inspections for tests of checks: two nodes that are well, but for what a test changes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from multinode.check.rule import SEVERITIES, CheckFinding, Inspection
from multinode.cluster.dataplane import Endpoint
from multinode.cluster.facts import Gpu, Interface, NodeFacts
from multinode.job.job import ScriptJob, TrainingJob
from multinode.stats.unknown import Entries
from tests import make
from tests.golden import Golden

PACKAGES = {"torch": "2.8.0", "llamafactory": "0.9.5"}
SCRIPT = ScriptJob(argv=("train.py",))
SFT = TrainingJob(config_path="sft.yaml", text="", config={})


def facts(name: str, number: int = 1) -> NodeFacts:
    """Facts of a node that is well; `number` is the last of its data-plane address."""
    return NodeFacts(
        node=name,
        python="/env/bin/python",
        packages=Entries(PACKAGES),
        cwd="/work",
        gpus=(Gpu(index=0, name="NVIDIA GeForce RTX 4090"),),
        port_range=(32768, 60999),
        interfaces=(
            Interface(name="eth0", addresses=(f"10.0.0.{number}/24",), up=True, mtu=1500, speed_gbit_per_s=1.0),
        ),
    )


def inspection(names: str = "ab", **changes: Any) -> Inspection:
    """Nodes of these one-letter names, all well."""
    everything: dict[str, Any] = {
        "cluster": make.cluster(*names),
        "facts": {name: facts(name, number) for number, name in enumerate(names, 1)},
        "endpoints": {
            name: Endpoint(addr=f"10.0.0.{number}", ifname="eth0", link_gbit_per_s=1.0)
            for number, name in enumerate(names, 1)
        },
        "job": SFT,
        "master_port": 29500,
    }
    return Inspection(**{**everything, **changes})


def but(before: Inspection, names: Iterable[str], **changes: Any) -> Inspection:
    """The same with other facts of the nodes of these one-letter names."""
    changed = {name: replace(before.facts[name], **changes) for name in names}
    return replace(before, facts=before.facts | changed)


_PROGRAMS = "sudo|multinode (check|copy|nccl-test|stop)|export|ssh|git|printf|grep|kill|traceroute|sha256sum"
_COMMAND = re.compile(
    rf"\b(({_PROGRAMS}) \S|(ls|du|tc|ip|nvidia-smi|ssh-keygen|ssh-copy-id) -|ip (route|address|link)\b)"
)


def command_in_words(hint: str) -> str:
    """The command in a hint's first line, which wraps; empty where there is none. Other lines are copied whole."""
    found = _COMMAND.search(hint.partition("\n")[0])
    return found[0] if found is not None else ""


def only(findings: Iterable[CheckFinding]) -> CheckFinding:
    """The one finding, which must be something its user can act on."""
    (finding,) = findings
    assert finding.severity in SEVERITIES
    assert finding.hint
    assert not command_in_words(finding.hint)
    return finding


def silent(*found: Iterable[CheckFinding]) -> None:
    """Nothing was found, by none of these checks."""
    assert [list(findings) for findings in found] == [[]] * len(found)


def check_cases(golden: Golden, name: str, cases: Mapping[str, Iterable[CheckFinding]]) -> None:
    """Something is found in each case, all of it what its user can act on; severity, node and words are the golden."""
    found = {case: tuple(findings) for case, findings in cases.items()}
    assert [case for case, findings in found.items() if not findings] == []
    for finding in (one for findings in found.values() for one in findings):
        only([finding])
    golden.check_findings(name, found)
