"""Software of the job: its interpreter, what is installed for it, and that the nodes agree on it."""

from __future__ import annotations

from collections.abc import Iterator

from multinode.core.finding import Finding, Rule
from multinode.core.job import LlamaFactoryJob
from multinode.preflight.inspection import Inspection

__all__ = ["check_interpreter", "check_packages", "check_versions"]

# Different versions of these on two nodes break the rendezvous, the collectives or the numbers.
_MUST_AGREE = ("torch", "llamafactory", "deepspeed", "transformers", "accelerate", "peft")

NO_INTERPRETER = Rule(
    check="interpreter",
    severity="error",
    catches="the job's interpreter is not on a node",
    message="no interpreter for the job: {reason}",
    hint="name the training environment's in the hostfile: python=/path/to/env/bin/python",
)
NOT_INSTALLED = Rule(
    check="packages",
    severity="error",
    catches="what the job imports is not installed for its interpreter",
    message="{words} not installed for {python}",
    hint="on the node: {python} -m pip install {packages}; or correct python=",
)
VERSIONS_DIFFER = Rule(
    check="versions",
    severity="error",
    catches="nodes have different versions of a package that must be equal",
    message="{package} is {version} here and {expected} on {peer}: the nodes would not fit together",
    hint="on {node}: {python} -m pip install {package}=={expected}",
)


def check_interpreter(inspection: Inspection) -> Iterator[Finding]:
    """The job's interpreter exists on every node."""
    for node, found in inspection.known:
        if found.python is None:
            yield NO_INTERPRETER.found(node.name, reason=found.missing.get("python", "none was found"))


def check_packages(inspection: Inspection) -> Iterator[Finding]:
    """What the job imports is installed for its interpreter on every node."""
    if inspection.job is None:
        return
    needed = ("torch", "llamafactory") if isinstance(inspection.job, LlamaFactoryJob) else ("torch",)
    for node, found in inspection.known:
        if found.python is None or "packages" in found.missing:
            continue
        missing = [name for name in needed if name not in found.packages]
        if missing:
            yield NOT_INSTALLED.found(
                node.name, words=" and ".join(missing), packages=" ".join(missing), python=found.python
            )


def check_versions(inspection: Inspection) -> Iterator[Finding]:
    """What must be equal on all nodes is equal to that of the first node that has it."""
    for package in _MUST_AGREE:
        versions = [(node.name, found) for node, found in inspection.known if package in found.packages]
        for name, found in versions[1:]:
            first, expected = versions[0][0], versions[0][1].packages[package]
            if found.packages[package] != expected:
                yield VERSIONS_DIFFER.found(
                    name,
                    node=name,
                    package=package,
                    version=found.packages[package],
                    expected=expected,
                    peer=first,
                    python=found.python,
                )
