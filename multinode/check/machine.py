"""What a job needs of a machine: interpreter, packages, memory, limits, a clock; and no machine twice."""

from __future__ import annotations

import ipaddress
import re
import statistics
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from multinode.check.gpus import used_gpus
from multinode.check.rule import Check, CheckFinding, CheckRules, Inspection, disagreements, launch_check, listed
from multinode.cluster.facts import Interface
from multinode.job.frameworks import FRAMEWORKS
from multinode.job.job import Job, ScriptJob, TrainingJob, set_options
from multinode.records.benchmark import Benchmark
from multinode.stats.unknown import Unknown, entries, or_none
from multinode.units import GIB, format_duration, format_figure

# Different versions of these break the rendezvous, the collectives or the results.
_MUST_AGREE = ("torch", "deepspeed", "transformers", "accelerate", "peft")
_LOW_DISK_GIB = 1.0


_INTERPRETER = CheckRules("interpreter")
_PACKAGES = CheckRules("packages")
_VERSIONS = CheckRules("versions")
_MACHINE = CheckRules("machine")
_CLOCK = CheckRules("clock")

NO_INTERPRETER = _INTERPRETER.error(
    about="a node does not have the job's interpreter",
    message="no interpreter for the job: {reason}",
    hint="set the interpreter of the training environment in the hostfile: python=/path/to/env/bin/python",
)
NOT_INSTALLED = _PACKAGES.error(
    about="the job's interpreter lacks packages that the job imports",
    message="{python} lacks {words}",
    hint="correct python= in the hostfile, or run on the node:\n{python} -m pip install {packages!s}",
)
OTHER_SHELL = _INTERPRETER.error(
    about="the training environment is only available in interactive shells (conda, modules, .bashrc)",
    message="over SSH, the job would run {python}, which has no {words}. An interactive shell finds {other}, because "
    "it runs start-up commands (conda, modules, ~/.bashrc) that a command over SSH does not run",
    hint="set this on the line of {node} in the hostfile: python={other}",
)
TOOL_MISSING = _PACKAGES.error(
    about="a program that starts the job (torchrun, llamafactory-cli) is neither next to the interpreter nor on PATH",
    message="{tool} is neither next to {python} nor on the PATH of a non-interactive shell{elsewhere}, so the job "
    "cannot start",
    hint="in the hostfile, set python= to an interpreter whose environment has it, or run on the node:\n{python} -m "
    "pip install {package}",
)
VERSIONS_DIFFER = _VERSIONS.error(
    about="nodes have different versions of a package, although the versions must match",
    message="{package} is {version} here and {expected} on {peer}, but the versions must match",
    hint="if {peer} has the right version, run this on {node}:\n{python} -m pip install {package}=={public}{build!s}",
)


@launch_check
def check_interpreter(inspection: Inspection) -> Iterator[CheckFinding]:
    """The job's interpreter exists on every node."""
    for node, facts in inspection.known:
        if isinstance(facts.python, Unknown) and "python3" not in entries(facts.interactive):
            yield NO_INTERPRETER.found(node.name, reason=facts.python.reason)


@Check
def check_interactive(inspection: Inspection) -> Iterator[CheckFinding]:
    """The interpreter of a non-interactive shell is the one with torch."""
    for node, facts in inspection.known:
        other = entries(facts.interactive).get("python3")
        if node.python is None and other is not None and other != facts.python:
            yield OTHER_SHELL.found(node.name, python=or_none(facts.python) or "no python3", words="torch", other=other)


@launch_check
def check_packages(inspection: Inspection) -> Iterator[CheckFinding]:
    """The job's packages are installed for its interpreter on every node."""
    needed = ("torch", *(inspection.training.kind.packages if inspection.training is not None else ()))
    for node, facts in inspection.known:
        # If another shell finds an interpreter, PATH has to be fixed.
        if isinstance(facts.packages, Unknown) or "python3" in entries(facts.interactive):
            continue
        missing = [name for name in needed if name not in facts.packages.values]
        if missing:
            words, packages = " and ".join(missing), " ".join(missing)
            yield NOT_INSTALLED.found(node.name, words=words, packages=packages, python=or_none(facts.python))


@Check
def check_tools(inspection: Inspection) -> Iterator[CheckFinding]:
    """The programs that start the job exist."""
    for node, facts in inspection.known:
        for tool in needed_tools(inspection.job) if facts.tools or entries(facts.interactive) else ():
            # A missing package has to be fixed first.
            package = inspection.training.kind.tools[tool] if inspection.training is not None else ""
            if tool not in facts.tools and package in entries(facts.packages):
                other = entries(facts.interactive).get(tool)
                elsewhere = f" (an interactive shell finds {other})" if other else ""
                yield TOOL_MISSING.found(
                    node.name, tool=tool, package=package, python=or_none(facts.python), elsewhere=elsewhere
                )


@Check
def check_versions(inspection: Inspection) -> Iterator[CheckFinding]:
    """Versions that must be equal agree with the first node that has the package."""
    own = [package for framework in FRAMEWORKS.values() for package in framework.packages]
    for package in (*_MUST_AGREE, *own):
        found = {node.name: entries(facts.packages).get(package) for node, facts in inspection.known}
        versions = {name: version for name, version in found.items() if version is not None}
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
                python=or_none(inspection.facts[name].python),
            )


def needed_tools(job: Job | Benchmark | None) -> tuple[str, ...]:
    """The programs that start a job of this kind."""
    return tuple(job.training.kind.tools) if job is not None and job.training is not None else ()


SAME_MACHINE = _MACHINE.error(
    about="one machine is listed twice in the hostfile, with two names or addresses",
    message="it is the same machine as {peer} (hostname {names}). The workers of both nodes would share its cores and "
    "GPUs, and would not use the network. NCCL refuses two workers on one GPU",
    hint=(
        "remove one of the two lines from the hostfile, and set slots= on the other line to the number of GPUs of the "
        "machine"
    ),
)
SHARED_MACHINE = _MACHINE.warning(
    about="two containers on one machine are listed as two nodes",
    message="it is another container on the machine of {peer} ({hostname} and {other}). The two containers share the "
    "cores, memory and NIC of this machine. If both see the same GPU, both train on it, because NCCL treats them as "
    "two hosts",
    hint="give each container its own GPUs (docker: --gpus device=0), or use the machine as one node",
)
BRIDGED_CONTAINER = _MACHINE.warning(
    about="a docker container without host networking, whose address other machines cannot reach",
    message="the node is a container on Docker's bridge network. Only the machine that runs it can reach its address "
    "{addr}, so workers on other machines cannot connect to it",
    hint="start the container with --network=host, and give its sshd its own port: port= in the hostfile",
)
CLOCK_OFF = _CLOCK.warning(
    about="a node's clock differs from the others' by more than two seconds",
    message="its clock is {skew} {way} {peer}. Times in logs are not comparable, a failure may be attributed to the "
    "wrong node, and certificates may seem expired",
    hint="run this on {node}:\nsudo timedatectl set-ntp true",
)
CONTROLLER_CLOCK_OFF = _CLOCK.warning(
    about="the controller's clock differs from all nodes' clocks",
    message="the clock of this machine, the controller, is {skew} {way} the clocks of the nodes. Times in logs are "
    "not comparable",
    hint="on this machine:\nsudo timedatectl set-ntp true",
)

SMALL_SHM = _MACHINE.warning(
    about="shared memory is too small, as it is by default in docker, so data loader workers and NCCL may fail with a "
    "bus error",
    message="shared memory (/dev/shm) on {nodes} is only {total}, but {users} share data there. A worker may fail with "
    "`Bus error` or `No space left on device`",
    hint="with docker, start the container with --shm-size=16g (or --ipc=host); otherwise run on {nodes!s}:\nsudo "
    "mount -o remount,size=16G /dev/shm",
)
FULL_SHM = _MACHINE.warning(
    about="files of dead processes fill /dev/shm",
    message="only {free} of the {total} of shared memory (/dev/shm) on {nodes} is free, but {users} share data there. "
    "A worker may fail with `Bus error`",
    hint="list the files on {nodes!s}, and remove files that no process uses:\nls -lat /dev/shm",
)
DISK_FULL = _MACHINE.error(
    about="no free space on the disk where a run stores its log and samples",
    message="only {free} is free on the disk of the home directory, where a run stores its log. The run would fail "
    "immediately",
    hint="free space on {node}. To find out which directories are large:\ndu -xh --max-depth=2 ~ | sort -h | tail",
)
DISK_LOW = _MACHINE.warning(
    about=f"less than {_LOW_DISK_GIB:g} GiB is free on the disk where a run stores its log and samples",
    message="only {free} is free on the disk of the home directory, where a run stores its log. A checkpoint may not "
    "fit there",
    hint="free space on {node}. To find out which directories are large:\ndu -xh --max-depth=2 ~ | sort -h | tail",
)
OFFLOAD_TOO_LARGE = _MACHINE.warning(
    about="DeepSpeed offloads to the CPU, but the node has too little memory",
    message="the DeepSpeed JSON offloads {what} to the CPU. For {billions} billion parameters ({source}) on {count} "
    "nodes, this needs about {need} GiB on each node, but {nodes} may use only {there} GiB. The kernel would kill a "
    "worker (exit code -9)",
    hint="remove {keys!s} from the DeepSpeed JSON, train an adapter ({option!s}), or train on more nodes",
)
MEMORY_LIMITED = _MACHINE.note(
    about="a container or login session may use only part of the machine's memory",
    message="{nodes} may use only {limit} of the machine's {total} GiB of memory, although `free` shows all of it. "
    "Above this limit, the kernel kills a worker (exit code -9)",
    hint="raise the limit. With docker, use --memory; with systemd:\nsystemctl set-property user-$UID.slice "
    "MemoryMax=infinity",
)
FEW_OPEN_FILES = _MACHINE.warning(
    about="the limit on open files is too low for training",
    message="a process on {nodes} may open only {limit} files, but sockets to other workers and data loaders need "
    "more (`Too many open files`)",
    hint="run on {nodes!s} as root, then log in again:\n{raise_files!s}",
)
LOW_OPEN_FILES = _MACHINE.note(
    about="the limit on open files is too low for large training jobs",
    message="a process on {nodes} may open only {limit} files; many data loader workers or a large cluster may need "
    "more (`Too many open files`)",
    hint="run on {nodes!s} as root, then log in again:\n{raise_files!s}",
)
FEW_PROCESSES = _MACHINE.warning(
    about="the limit on processes and threads is too low for training",
    message="on {nodes}, user {user} may have only {limit} processes and threads, but each worker needs dozens "
    "(`Resource temporarily unavailable`)",
    hint="run this on {nodes!s} as root, then log in again:\nprintf '* soft nproc unlimited\\n' > "
    "/etc/security/limits.d/multinode-nproc.conf",
)

_SKEW_S = 2.0
# Docker's subnets for its bridges.
_BRIDGES = ipaddress.ip_network("172.16.0.0/12")
_MIB_PER_GIB = 1024
_SMALL_SHM_GIB = 1.0
# Docker's default size.
_DOCKER_SHM_GIB = 64 / _MIB_PER_GIB
_NO_DISK_GIB = 50 / _MIB_PER_GIB
_FEW_FILES, _LOW_FILES = 1024, 4096
_RAISE_FILES = "printf '* - nofile 65536\\n' > /etc/security/limits.d/multinode-nofile.conf"
_FEW_PROCESSES = 1024
_ALL = 0.95
# Bytes per parameter, the minimum of DeepSpeed's own estimates (estimate_zero2_model_states_mem_needs,
# estimate_zero3_model_states_mem_needs): fp32 weights, two moments and gradients; and half-precision weights.
_OPTIMIZER_BYTES = 16
_PARAM_BYTES = 2
_BILLIONS = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)[bB](?![A-Za-z0-9])")


@Check
def check_same_machine(inspection: Inspection) -> Iterator[CheckFinding]:
    """No two nodes are the same machine."""
    pairs = set()
    for (peer, its), (node, facts) in combinations(inspection.known, 2):
        if isinstance(facts.boot_id, Unknown) or facts.boot_id != its.boot_id or node.name in pairs:
            continue
        pairs.add(node.name)
        if not (node.gpus is not None and peer.gpus is not None and not set(node.gpus) & set(peer.gpus)):
            hostname, other = or_none(facts.hostname), or_none(its.hostname)
            one_system = not isinstance(facts.machine_id, Unknown) and facts.machine_id == its.machine_id
            rule = SAME_MACHINE if hostname == other or one_system else SHARED_MACHINE
            names = listed(filter(None, (other, hostname))) or "unknown"
            yield rule.found(node.name, peer=peer.name, hostname=hostname, other=other, names=names)


@Check
def check_container_network(inspection: Inspection) -> Iterator[CheckFinding]:
    """A container's network is reachable from other machines."""
    links = list(inspection.links)
    reached = {attempt.peer for attempt in inspection.connectivity.attempts if attempt.error is None}
    for node, interface in links if len(links) > 1 else ():
        addr = inspection.place(node.name).addr
        in_container = inspection.facts[node.name].container in {"docker", "containerd"}
        if in_container and addr is not None and _is_bridged(interface, addr) and node.name not in reached:
            yield BRIDGED_CONTAINER.found(node.name, addr=addr)


@Check
def check_clocks(inspection: Inspection) -> Iterator[CheckFinding]:
    """The clocks of nodes and controller agree, within the accuracy of a probe."""
    read = {node.name: facts.clock_offset_s for node, facts in inspection.known}
    offsets = {name: offset for name, offset in read.items() if not isinstance(offset, Unknown)}
    if not offsets:
        return
    # The one that differs is wrong: the controller, if no node agrees with it.
    alone = all(abs(offset) > _SKEW_S for offset in offsets.values())
    right = statistics.median_low(offsets.values()) if alone else 0.0
    if alone:
        yield CONTROLLER_CLOCK_OFF.found(None, **_skew(-right))
    wrong = {name: offset - right for name, offset in offsets.items() if abs(offset - right) > _SKEW_S}
    for name, skew in wrong.items():
        yield CLOCK_OFF.found(name, peer="those of the other nodes" if alone else "this machine's", **_skew(skew))
    slow, fast = (pick(offsets, key=lambda name: offsets[name]) for pick in (min, max))
    if not wrong and offsets[fast] - offsets[slow] > _SKEW_S:
        yield CLOCK_OFF.found(fast, peer=f"that of {slow}", **_skew(offsets[fast] - offsets[slow]))


@Check
def check_shared_memory(inspection: Inspection) -> Iterator[CheckFinding]:
    """Shared memory is large enough for the workers."""
    for node, facts in inspection.known:
        total, free = or_none(facts.shm_total_gib), or_none(facts.shm_free_gib)
        if total is None:
            continue
        users = _shm_users(inspection, on_gpus=len(used_gpus(inspection, node, facts)) > 1)
        if users is None and isinstance(inspection.job, ScriptJob) and total <= _DOCKER_SHM_GIB:
            users = "data loader workers, if the script has any,"
        if users is not None and total < _SMALL_SHM_GIB:
            yield SMALL_SHM.found(node.name, total=_size(total), users=users)
        elif users is not None and free is not None and free < _DOCKER_SHM_GIB:
            yield FULL_SHM.found(node.name, total=_size(total), users=users, free=_size(free))


@launch_check
def check_disk(inspection: Inspection) -> Iterator[CheckFinding]:
    """There is space for a run's log and samples."""
    for node, facts in inspection.known:
        free = or_none(facts.disk_free_gib)
        if free is not None and free < _LOW_DISK_GIB:
            yield (DISK_FULL if free < _NO_DISK_GIB else DISK_LOW).found(node.name, free=_size(free))


@Check
def check_offload(inspection: Inspection) -> Iterator[CheckFinding]:
    """DeepSpeed's offloaded states fit into memory."""
    job, count = inspection.training, len(inspection.cluster.nodes)
    if job is None:
        return
    parts, option = _offloaded_parts(job), set_options(job, finetuning_type="lora")
    for node, facts in inspection.known if parts else ():
        parameters, source = _count_parameters(job, facts.model_config)
        total = or_none(facts.memory_total_gib)
        if total is None:
            continue
        usable = min(total, or_none(facts.memory_limit_gib) or total)
        need = parameters * sum(size for _, _, size in parts) / count / GIB
        if need > usable:
            yield OFFLOAD_TOO_LARGE.found(
                node.name,
                what=" and ".join(part for part, _, _ in parts),
                keys=" and ".join(key for _, key, _ in parts),
                option=option,
                billions=format_figure(parameters / 1e9),
                source=source,
                count=count,
                need=f"{need:.0f}",
                there=f"{usable:.0f}",
            )


@Check
def check_limits(inspection: Inspection) -> Iterator[CheckFinding]:
    """The limits inherited from the login, and on memory, suffice for the job."""
    for node, facts in inspection.known:
        total, limit = or_none(facts.memory_total_gib), or_none(facts.memory_limit_gib)
        if total is not None and limit is not None and limit < _ALL * total:
            yield MEMORY_LIMITED.found(node.name, limit=format_figure(limit), total=format_figure(total))
        files, processes = facts.limits.get("open_files"), facts.limits.get("processes")
        if files is not None and files < _LOW_FILES:
            rule = FEW_OPEN_FILES if files < _FEW_FILES else LOW_OPEN_FILES
            yield rule.found(node.name, limit=files, raise_files=_RAISE_FILES)
        user = or_none(facts.user)
        # The kernel does not apply it to root.
        if processes is not None and processes < _FEW_PROCESSES and user not in {None, "root"}:
            yield FEW_PROCESSES.found(node.name, limit=processes, user=user)


def _is_bridged(interface: Interface, addr: str) -> bool:
    on_bridge = interface.name == "eth0" and interface.driver in {None, "veth"}
    return on_bridge and ipaddress.ip_address(addr) in _BRIDGES


def _skew(skew_s: float) -> dict[str, str]:
    return {"skew": format_duration(abs(skew_s)), "way": "ahead of" if skew_s > 0 else "behind"}


def _shm_users(inspection: Inspection, *, on_gpus: bool) -> str | None:
    loaders = inspection.training.arguments.get("dataloader_num_workers") if inspection.training else None
    if type(loaders) is int and loaders > 0:
        return f"{loaders} data loader workers of each training worker"
    workers = max(inspection.workers_of_nodes() or (1,))
    return f"{workers} workers with NCCL" if on_gpus and workers > 1 else None


def _offloaded_parts(job: TrainingJob) -> list[tuple[str, str, int]]:
    if job.deepspeed_text is None:
        return []
    from multinode.job.deepspeed import parse_deepspeed

    deepspeed, parts = parse_deepspeed(job.deepspeed_text), []
    # With LoRA the optimizer is small.
    if deepspeed and deepspeed.offload_optimizer == "cpu" and job.arguments.get("finetuning_type") == "full":
        parts.append(("optimizer", "offload_optimizer", _OPTIMIZER_BYTES))
    if deepspeed and deepspeed.offload_parameters == "cpu":
        parts.append(("parameters", "offload_param", _PARAM_BYTES))
    return parts


def _count_parameters(job: TrainingJob, model: dict[str, Any] | None) -> tuple[float, str]:
    """Parameters of the model, and the source: config.json, or its name (`...-8B`); otherwise 0."""
    from multinode.model.model_size import parse_model
    from multinode.model.tensors import counted_model

    counted, shape = counted_model(model), parse_model(model or {})
    if counted is not None:
        return float(counted.tensors().parameters), "counted on the node"
    if shape is not None:
        return float(shape.parameters), "according to config.json"
    name = str(job.arguments.get("model_name_or_path", ""))
    match = _BILLIONS.search(name.rstrip("/").rpartition("/")[2])
    return float(match[1]) * 1e9 if match is not None else 0.0, "according to the model's name"


def _size(gib: float) -> str:
    return f"{gib:.1f} GiB" if gib >= 1 else f"{gib * _MIB_PER_GIB:.0f} MiB"
