"""Software of the job: its interpreter and packages, and that the nodes agree."""

from __future__ import annotations

from collections.abc import Iterator

from multinode.check.inspection import Inspection
from multinode.check.rule import Case, Check, Rule, disagreements, launch_check
from multinode.job.job import Job, LlamaFactoryJob
from multinode.records.benchmark import Benchmark

# Different versions of these break the rendezvous, the collectives or the results.
_MUST_AGREE = ("torch", "llamafactory", "deepspeed", "transformers", "accelerate", "peft")

_PACKAGES = {"torchrun": "torch", "llamafactory-cli": "llamafactory"}

NO_INTERPRETER = Rule(
    "interpreter",
    "error",
    catches="the job's interpreter is not on a node",
    message="no interpreter for the job: {reason}",
    hint="name the interpreter of the training environment in the hostfile: python=/path/to/env/bin/python",
)
NOT_INSTALLED = Rule(
    "packages",
    "error",
    catches="packages that the job imports are not installed for its interpreter",
    message="{words} not installed for {python}",
    hint="correct python= in the hostfile, or on the node:\n{python} -m pip install {packages!s}",
)
OTHER_SHELL = Rule(
    "interpreter",
    "error",
    catches="the training environment is available in interactive shells only (conda, modules, .bashrc)",
    message=(
        "over SSH the job would run {python}, which has no {words}; an interactive shell finds {other}: its setup "
        "(conda, a module, ~/.bashrc) is not read for commands over SSH"
    ),
    hint="name it on the line of {node} in the hostfile: python={other}",
)
TOOL_MISSING = Rule(
    "packages",
    "error",
    catches="a program that starts the job (torchrun, llamafactory-cli) is neither beside the interpreter nor on PATH",
    message=(
        "{tool} is neither beside {python} nor on the PATH of a non-interactive shell{elsewhere}: the job could not "
        "start"
    ),
    hint=(
        "name an environment that has it in the hostfile (python=), or on the node:\n{python} -m pip install {package}"
    ),
)
VERSIONS_DIFFER = Rule(
    "versions",
    "error",
    catches="nodes have different versions of a package that must match",
    message="{package} is {version} here and {expected} on {peer}: the versions must match",
    hint="if {peer} has the right one, on {node}:\n{python} -m pip install {package}=={public}{build!s}",
)


@launch_check
def check_interpreter(inspection: Inspection) -> Iterator[Case]:
    """The job's interpreter exists on every node."""
    for node, found in inspection.known:
        if found.python is None and "python3" not in found.interactive:
            yield NO_INTERPRETER.found(node.name, reason=found.missing.get("python", "none was found"))


@Check
def check_interactive(inspection: Inspection) -> Iterator[Case]:
    """The interpreter of a non-interactive shell is the one with torch."""
    for node, found in inspection.known:
        other = found.interactive.get("python3")
        if node.python is None and other is not None and other != found.python:
            yield OTHER_SHELL.found(node.name, python=found.python or "no python3", words="torch", other=other)


@launch_check
def check_packages(inspection: Inspection) -> Iterator[Case]:
    """The job's packages are installed for its interpreter on every node."""
    needed = ("torch",) if inspection.training is None else ("torch", "llamafactory")
    for node, found in inspection.known:
        missing = [name for name in needed if name not in found.packages]
        # If another shell finds an interpreter, PATH has to be fixed.
        known = found.python is not None and "packages" not in found.missing and "python3" not in found.interactive
        if missing and known:
            words, packages = " and ".join(missing), " ".join(missing)
            yield NOT_INSTALLED.found(node.name, words=words, packages=packages, python=found.python)


@Check
def check_tools(inspection: Inspection) -> Iterator[Case]:
    """The programs that start the job exist."""
    for node, found in inspection.known:
        for tool in needed_tools(inspection.job) if found.tools or found.interactive else ():
            # A missing package has to be fixed first.
            package = _PACKAGES[tool]
            if tool not in found.tools and package in found.packages:
                other = found.interactive.get(tool)
                elsewhere = f" (an interactive shell finds {other})" if other else ""
                yield TOOL_MISSING.found(
                    node.name, tool=tool, package=package, python=found.python, elsewhere=elsewhere
                )


@Check
def check_versions(inspection: Inspection) -> Iterator[Case]:
    """Versions that must be equal agree with the first node that has the package."""
    for package in _MUST_AGREE:
        versions = {node.name: found.packages[package] for node, found in inspection.known if package in found.packages}
        for name, version, peer, expected in disagreements(versions):
            # Pip cannot find a local version such as 2.8.0+cu126: it is on another package index.
            public, _, build = expected.partition("+")
            yield VERSIONS_DIFFER.found(
                name,
                package=package,
                version=version,
                expected=expected,
                public=public,
                build=f" (from the package index for {build} builds, the source of {expected})" if build else "",
                peer=peer,
                python=inspection.facts[name].python,
            )


def needed_tools(job: Job | Benchmark | None) -> tuple[str, ...]:
    """The programs that start a job of this kind."""
    return tuple(_PACKAGES) if isinstance(job, LlamaFactoryJob) else ()
