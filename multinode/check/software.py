"""Software of the job: its interpreter, what is installed for it, and that the nodes agree on it."""

from __future__ import annotations

from collections.abc import Iterator

from multinode.check.inspection import Inspection
from multinode.check.rule import Case, Check, Rule, disagreements, launch_check
from multinode.job.job import Job, LlamaFactoryJob
from multinode.records.benchmark import Benchmark

# Different versions of these on two nodes break the rendezvous, the collectives or the numbers.
_MUST_AGREE = ("torch", "llamafactory", "deepspeed", "transformers", "accelerate", "peft")

_PACKAGES = {"torchrun": "torch", "llamafactory-cli": "llamafactory"}

NO_INTERPRETER = Rule(
    "interpreter",
    "error",
    catches="the job's interpreter is not on a node",
    message="no interpreter for the job: {reason}",
    hint="name the training environment's in the hostfile: python=/path/to/env/bin/python",
)
NOT_INSTALLED = Rule(
    "packages",
    "error",
    catches="what the job imports is not installed for its interpreter",
    message="{words} not installed for {python}",
    hint="correct python= in the hostfile, or on the node:\n{python} -m pip install {packages!s}",
)
OTHER_SHELL = Rule(
    "interpreter",
    "error",
    catches="the training environment is found in an interactive shell only (conda, modules, .bashrc)",
    message="over SSH the job would run {python}, which has no {words}; an interactive shell finds {other}: what sets "
    "that up (conda, a module, ~/.bashrc) is not read when a command runs over SSH",
    hint="name it in the hostfile, on the line of {node}: python={other}",
)
TOOL_MISSING = Rule(
    "packages",
    "error",
    catches="a program that starts the job (torchrun, llamafactory-cli) is neither beside the interpreter nor on PATH",
    message="{tool} was not found beside {python}, nor on the PATH of a non-interactive shell{elsewhere}: the job "
    "could not be started",
    hint="name the environment that has it in the hostfile (python=), or on the node:\n"
    "{python} -m pip install {package}",
)
VERSIONS_DIFFER = Rule(
    "versions",
    "error",
    catches="nodes have different versions of a package that must be equal",
    message="{package} is {version} here and {expected} on {peer}: they would not fit together, whichever is right",
    hint="if that of {peer} is right, on {node}:\n{python} -m pip install {package}=={public}{build!s}",
)


@launch_check
def check_interpreter(inspection: Inspection) -> Iterator[Case]:
    """The job's interpreter exists on every node."""
    for node, found in inspection.known:
        if found.python is None and "python3" not in found.interactive:
            yield NO_INTERPRETER.found(node.name, reason=found.missing.get("python", "none was found"))


@Check
def check_interactive(inspection: Inspection) -> Iterator[Case]:
    """The interpreter that a non-interactive shell finds is the one with torch."""
    for node, found in inspection.known:
        other = found.interactive.get("python3")
        if node.python is None and other is not None and other != found.python:
            yield OTHER_SHELL.found(node.name, python=found.python or "no python3", words="torch", other=other)


@launch_check
def check_packages(inspection: Inspection) -> Iterator[Case]:
    """What the job imports is installed for its interpreter on every node."""
    needed = ("torch",) if inspection.training is None else ("torch", "llamafactory")
    for node, found in inspection.known:
        missing = [name for name in needed if name not in found.packages]
        # Where another shell finds an interpreter, that is what has to be corrected.
        known = found.python is not None and "packages" not in found.missing and "python3" not in found.interactive
        if missing and known:
            words, packages = " and ".join(missing), " ".join(missing)
            yield NOT_INSTALLED.found(node.name, words=words, packages=packages, python=found.python)


@Check
def check_tools(inspection: Inspection) -> Iterator[Case]:
    """The programs that start the job are there."""
    for node, found in inspection.known:
        for tool in needed_tools(inspection.job) if found.tools or found.interactive else ():
            # Where a package is missing altogether, that is what has to be fixed.
            package = _PACKAGES[tool]
            if tool not in found.tools and package in found.packages:
                other = found.interactive.get(tool)
                elsewhere = f" (an interactive shell finds {other})" if other else ""
                yield TOOL_MISSING.found(
                    node.name, tool=tool, package=package, python=found.python, elsewhere=elsewhere
                )


@Check
def check_versions(inspection: Inspection) -> Iterator[Case]:
    """What must be equal on all nodes is equal to that of the first node that has it."""
    for package in _MUST_AGREE:
        versions = {node.name: found.packages[package] for node, found in inspection.known if package in found.packages}
        for name, version, peer, expected in disagreements(versions):
            # What pip cannot know of a version such as 2.8.0+cu126: its build is of another package index.
            public, _, build = expected.partition("+")
            yield VERSIONS_DIFFER.found(
                name,
                package=package,
                version=version,
                expected=expected,
                public=public,
                build=f" (from the package index of its {build} builds, where {expected} came from)" if build else "",
                peer=peer,
                python=inspection.facts[name].python,
            )


def needed_tools(job: Job | Benchmark | None) -> tuple[str, ...]:
    """The programs that start a job of this kind."""
    return tuple(_PACKAGES) if isinstance(job, LlamaFactoryJob) else ()
