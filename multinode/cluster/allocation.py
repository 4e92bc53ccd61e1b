"""What a scheduler, or an Ansible inventory, says of the nodes, as text -> a Cluster.

Slurm: `scontrol show job --details` and `scontrol show node` of 22.05 or newer. dstack, SkyPilot, Kubeflow's MPI
runtime, PBS and OAR: their variables and files, as their documentation and sources have them.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.hostfile import NodeList, expand_ranges, make_node, parse_hostfile, render_hostfile
from multinode.cluster.hostfile_line import WrongLine
from multinode.decoding import convert, decode_json
from multinode.errors import HostfileError, UsageError, printable_line

_MOST_NODES = 4096
# A comma between names, not inside brackets.
_BETWEEN = re.compile(r",(?![^\[]*\])")
_STATE = re.compile(r"\bJobState=(\w+)")
_NODES_OF = re.compile(r"^\s+Nodes=(\S+) CPU_IDs=\S* Mem=\S*(?: GRES=(\S*))?", re.MULTILINE)
_INDEXES = re.compile(r"\([^)]*\)")
_RESOURCE = re.compile(r"[A-Za-z0-9_.-]+(?::[A-Za-z0-9_.-]+)?:[1-9]\d*")
_ADDRESS = re.compile(r"\bNodeName=(\S+).*?\bNodeAddr=(\S+)", re.DOTALL)
_GPU_NODE = re.compile(r"\bNodeName=(\S+).*?\bGres=\S*\bgpu:", re.DOTALL)
_NODE_LIST = re.compile(r"^\s+NodeList=(\S+)", re.MULTILINE)
_TASKS = re.compile(r"(\d{1,6})(?:\(x(\d{1,6})\))?", re.ASCII)
# Kubeflow's MPI runtime mounts it in the launcher (mpi-operator, Trainer); sshd of its images listens on this port.
MPI_HOSTFILE = "/etc/mpi/hostfile"
_MPI_SSH_PORT = 2222
# Nodes of a SkyPilot cluster reach each other with it.
_SKYPILOT_KEY = "~/.ssh/sky-cluster-key"
# Of a scheduler: its variable with a list of addresses, the one with the GPUs of each node.
_ADDRESS_LISTS = {
    "dstack": ("DSTACK_NODES_IPS", "DSTACK_GPUS_PER_NODE"),
    "SkyPilot": ("SKYPILOT_NODE_IPS", "SKYPILOT_NUM_GPUS_PER_NODE"),
}
# Variables with the path of a file of names. OAR's has a line for each core, which says nothing of workers.
_PBS_FILE, _OAR_FILES = "PBS_NODEFILE", ("OAR_NODEFILE", "OAR_NODE_FILE")

# Slurm's words for a job that still holds its nodes.
_HOLDS_NODES = frozenset({"RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "STOPPED"})


class Allocation(msgspec.Struct, frozen=True, kw_only=True):
    """A Slurm job, from `scontrol show job --details`."""

    state: str  # Slurm's name, `RUNNING`
    node_list: str = ""  # its nodes, in Slurm's notation
    # generic resources per node, as for `srun --gres`, `gpu:a100:2`; nodes without any are missing
    resources: dict[str, str] = {}

    @property
    def holds_nodes(self) -> bool:
        """Whether steps can be started in it."""
        return self.state in _HOLDS_NODES


def expand_node_list(text: str) -> list[str]:
    """The names in a node list: `gpu[01-02],login` stands for gpu01, gpu02, login."""
    return [name for part in _BETWEEN.split(text) if part for name in expand_ranges(part, _MOST_NODES)]


def parse_job(text: str) -> Allocation:
    """A job from `scontrol show job --details JOB`.

    Raises:
        ValueError: it cannot be parsed.
    """
    state = _STATE.search(text)
    if state is None:
        raise ValueError("it has no JobState=")
    resources: dict[str, str] = {}
    for nodes, listed in _NODES_OF.findall(text):
        named = [index for index in _INDEXES.sub("", listed).split(",") if _RESOURCE.fullmatch(index)]
        if named:
            resources |= dict.fromkeys(expand_node_list(nodes), ",".join(named))
    nodes_named = _NODE_LIST.search(text)
    node_list = nodes_named[1] if nodes_named is not None and nodes_named[1] != "(null)" else ""
    return Allocation(state=state[1], node_list=node_list, resources=resources)


def parse_node_addresses(text: str) -> dict[str, str]:
    """The address of each node from `scontrol show node --oneliner`, if it is an IP address."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        match = _ADDRESS.search(line)
        if match is not None:
            with contextlib.suppress(ValueError):
                values[match[1]] = str(ipaddress.ip_address(match[2]))
    return values


def parse_gpu_nodes(text: str) -> frozenset[str]:
    """Nodes whose GPUs Slurm manages, from `scontrol show node --oneliner`."""
    return frozenset(match[1] for line in text.splitlines() if (match := _GPU_NODE.search(line)) is not None)


def allocation_hostfile(
    job_id: int, environ: Mapping[str, str], allocation: Allocation, addresses: Mapping[str, str]
) -> tuple[Cluster, str]:
    """The nodes of an allocation, and the equivalent hostfile.

    A node with GPUs has as many slots as GPUs that the job may use there, which the node reports. Others have the
    allocation's tasks per node if requested, otherwise one.

    Args:
        job_id: the job.
        environ: the environment of a process in the allocation.
        allocation: from `scontrol`.
        addresses: of its nodes.

    Raises:
        UsageError: the environment names no nodes, or cannot be parsed.
    """
    try:
        names = expand_node_list(environ.get("SLURM_JOB_NODELIST", ""))
        tasks = _tasks_per_node(environ, len(names))
    except ValueError as error:
        raise UsageError(f"cannot parse Slurm's environment: {error}") from error
    if not names:
        raise UsageError("SLURM_JOB_NODELIST names no node", hint=_WHERE)
    nodes = tuple(
        Node(
            name=name,
            slots=None if name in allocation.resources else count,
            addr=addresses.get(name),
            slurm_job=job_id,
        )
        for name, count in zip(names, tasks, strict=True)
    )
    source = f"Slurm job {job_id}"
    text = f"# {source}\n{render_hostfile(Cluster(nodes=nodes, source=source))}"
    # Slurm's names and addresses are checked by reading the hostfile back.
    return parse_hostfile(text, source), text


def scheduled_hostfile(
    environ: Mapping[str, str], is_there: Callable[[str], bool], read: Callable[[str], str]
) -> tuple[str, Cluster, str] | None:
    """Which of dstack, SkyPilot, Kubeflow, PBS and OAR gave this process its nodes; the nodes; their hostfile.

    Args:
        environ: the environment of a process that the scheduler started.
        is_there: whether a file exists here; `~` begins the home directory.
        read: its text.

    Returns:
        None if none of them did; the first if several did.
    """
    listed = _listed_addresses(environ, is_there) or _named_files(environ, is_there, read)
    if listed is None:
        return None
    scheduler, source, nodes = listed
    text = f"# {scheduler}: {source}\n{render_hostfile(Cluster(nodes=nodes, source=source))}"
    return scheduler, parse_hostfile(text, source), text


def _listed_addresses(
    environ: Mapping[str, str], is_there: Callable[[str], bool]
) -> tuple[str, str, tuple[Node, ...]] | None:
    for scheduler, (variable, gpus) in _ADDRESS_LISTS.items():
        addresses = environ.get(variable, "").replace(",", " ").split()
        if not addresses:
            continue
        try:
            names = [str(ipaddress.ip_address(address)) for address in addresses]
        except ValueError as error:
            raise UsageError(f"{variable} of {scheduler} is invalid: {error}") from None
        count = environ.get(gpus, "")
        slots = int(count) if count.isdecimal() and int(count) else None
        key = _SKYPILOT_KEY if scheduler == "SkyPilot" and is_there(_SKYPILOT_KEY) else None
        return scheduler, f"${variable}", tuple(Node(name=name, slots=slots, key=key) for name in names)
    return None


def _named_files(
    environ: Mapping[str, str], is_there: Callable[[str], bool], read: Callable[[str], str]
) -> tuple[str, str, tuple[Node, ...]] | None:
    if is_there(MPI_HOSTFILE):
        nodes = parse_hostfile(read(MPI_HOSTFILE), MPI_HOSTFILE).nodes
        return "Kubeflow", MPI_HOSTFILE, tuple(_at_port(node, _MPI_SSH_PORT) for node in nodes)
    for variable in (_PBS_FILE, *_OAR_FILES):
        path = environ.get(variable)
        if not path:
            continue
        if not is_there(path):
            raise UsageError(
                f"{variable}={path} does not exist here", hint="run multinode in the job's shell on its first node"
            )
        if variable == _PBS_FILE:
            return "PBS", f"${variable}", parse_hostfile(read(path), path).nodes
        names = dict.fromkeys(read(path).split())
        return "OAR", f"${variable}", parse_hostfile("\n".join(names), path).nodes
    return None


def _at_port(node: Node, port: int) -> Node:
    return node if node.port is not None else msgspec.structs.replace(node, port=port)


_WHERE = "salloc -N2 multinode ..., or: multinode submit -N2 -- launch ..."


def _tasks_per_node(environ: Mapping[str, str], count: int) -> list[int | None]:
    """Only if the user requested tasks: otherwise Slurm derives a number from the CPUs."""
    if not {"SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"} & environ.keys():
        return [None] * count
    tasks: list[int | None] = []
    for part in environ.get("SLURM_TASKS_PER_NODE", "").split(","):
        match = _TASKS.fullmatch(part)
        if match is None:
            raise ValueError(f"SLURM_TASKS_PER_NODE={environ.get('SLURM_TASKS_PER_NODE')!r}")
        tasks += [int(match[1])] * int(match[2] or 1)
    if len(tasks) != count:
        raise ValueError(f"SLURM_TASKS_PER_NODE lists {len(tasks)} nodes, but SLURM_JOB_NODELIST lists {count}")
    return tasks


_HOST = "host"
# Including the names from before Ansible 2.0, which it still reads.
_READ = {
    "ansible_host": _HOST,
    "ansible_ssh_host": _HOST,
    "ansible_port": "port",
    "ansible_ssh_port": "port",
    "ansible_user": "user",
    "ansible_ssh_user": "user",
    "ansible_ssh_private_key_file": "key",
    "ansible_private_key_file": "key",
}
_META = "_meta"
_SHOWN = 12


class _Group(msgspec.Struct, frozen=True):
    hosts: list[str] = []
    children: list[str] = []


class _Meta(msgspec.Struct, frozen=True):
    hostvars: dict[str, dict[str, Any]] = {}


def parse_inventory(listing: str, group: str | None, source: str = "inventory") -> tuple[Cluster, tuple[str, ...]]:
    """The hosts of a group, in their order, and the names of the variables that say nothing here.

    Args:
        listing: what `ansible-inventory --list` printed.
        group: its name; None is no choice, which is refused with the names that there are.
        source: the inventory's path, for messages.

    Raises:
        HostfileError: `source:host: what is wrong and what was expected`, or it is no such listing.
        UsageError: there is no such group.
    """
    try:
        parts = decode_json(listing, dict[str, Any])
        variables = convert(parts.pop(_META, {}), _Meta).hostvars
        groups = convert(parts, dict[str, _Group])
    except msgspec.DecodeError as wrong:
        raise HostfileError(
            f"{source} is not output of ansible-inventory --list: {wrong}",
            hint="ansible-inventory -i INVENTORY --list | multinode ... --hosts -:GROUP",
        ) from None
    hosts = _members(groups, group) if group is not None else []
    if not hosts:
        raise _no_group(group, groups, source)
    listed, ignored = NodeList(source), dict[str, None]()
    for host in hosts:
        with listed.line(printable_line(host)):
            values = variables.get(host, {})
            ignored |= dict.fromkeys(name for name in values if name not in _READ)
            keys = {_READ[name]: _text(name, value) for name, value in values.items() if name in _READ}
            listed.add(printable_line(host), make_node(keys.pop(_HOST, host), keys, {}))
    return listed.cluster(), tuple(ignored)


def _text(name: str, value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise WrongLine(f"{name} is not text", "use a plain value: encrypted values and lists are not supported")
    return str(value)


def _members(groups: dict[str, _Group], name: str) -> list[str]:
    """The hosts of a group, then those of the groups within it."""
    within = {name: None}
    hosts: dict[str, None] = {}
    waiting = [name]
    for queued in waiting:
        group = groups.get(queued, _Group())
        hosts |= dict.fromkeys(group.hosts)
        waiting += [child for child in dict.fromkeys(group.children) if child not in within]
        within |= dict.fromkeys(group.children)
    return list(hosts)


def _no_group(group: str | None, groups: dict[str, _Group], source: str) -> UsageError:
    reason = "no group was named" if group is None else f"it has no group {group!r} with hosts"
    names = [printable_line(name) for name in groups if _members(groups, name)]
    listed = ", ".join(names[:_SHOWN]) or "none"
    return UsageError(
        f"{source} is an Ansible inventory, but {reason}",
        hint=f"use --hosts {source}:GROUP; groups with hosts: {listed}",
    )
