"""Variables: what a profile, NCCL's files or the hostfile preset, and what it does to a run that multinode starts."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase

from multinode.core.check.finding import Finding, Rule
from multinode.core.cluster.cluster import Node
from multinode.core.cluster.facts import NodeFacts
from multinode.core.job.job import LlamaFactoryJob
from multinode.core.measure.benchmark import CollectiveTest
from multinode.core.run.engines.place import STRAY_VARIABLES
from multinode.preflight.grouping import group_findings, listed
from multinode.preflight.inspection import Inspection
from multinode.preflight.nccl_sockets import select_interfaces, takes_by_prefix

__all__ = [
    "check_agreement",
    "check_hidden_gpus",
    "check_interface_names",
    "check_socket_counts",
    "check_stray_variables",
]

NAMES_NO_INTERFACE = Rule(
    check="variables",
    severity="error",
    catches="NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names no interface of a node, and the job would get it",
    message="{name}={value} from {source} matches none of its interfaces that have an address ({present}): "
    "{reader} finds no socket interface, and the job ends or hangs at its first collective",
    hint="{way!s}",
)
NAMES_NO_INTERFACE_YET = Rule(
    check="variables",
    severity="warning",
    catches="NCCL_SOCKET_IFNAME in the hostfile names no interface, in a job that does not use NCCL",
    message="{name}={value} from {source} matches none of its interfaces that have an address ({present}): without "
    "GPUs nothing reads it, and with them the job would end at its first collective",
    hint="{way!s}",
)
NAMES_MORE = Rule(
    check="variables",
    severity="warning",
    catches="NCCL_SOCKET_IFNAME is a prefix or an exclusion, and takes more interfaces than meant (eth1 takes eth10)",
    message="{name}={value} from {source} takes {taken}: without = NCCL reads names as beginnings, with ^ it takes all "
    "others, and it sends over every interface that it takes, also over those that lead to no other node",
    hint="{way!s}",
)
NAMES_ANOTHER = Rule(
    check="variables",
    severity="warning",
    catches="NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names another interface than the data plane's",
    message="{name}={value} from {source} takes {taken}, and the data plane of the node is {ifname}: the rendezvous "
    "uses one network and the collectives another, which was not checked",
    hint="{way!s}",
)
NAME_OVERRIDDEN = Rule(
    check="variables",
    severity="note",
    catches="NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME is preset to something else than multinode's launches set",
    message="{name}={value} stands in {source} on {nodes}; multinode's launches set it to the data plane, launches by "
    "hand use the preset",
    hint="{way!s}",
)
SETTINGS_DIFFER = Rule(
    check="variables",
    severity="warning",
    catches="NCCL settings differ between nodes: NCCL_NET, NCCL_IB_DISABLE, NCCL_P2P_DISABLE, NCCL_ALGO and others",
    message="{name} is {value} on {nodes} and {expected} on {peer}: NCCL expects the same on every node; with "
    "transports or algorithms that do not fit together, the first collective hangs or is slow",
    hint="set it alike for all nodes, on every line of the hostfile: env.{name}=VALUE; or nowhere: {way!s}",
)
TOO_MANY_SOCKETS = Rule(
    check="variables",
    severity="warning",
    catches="NCCL_SOCKET_NTHREADS times NCCL_NSOCKS_PERTHREAD is more than NCCL's 64",
    message="NCCL_SOCKET_NTHREADS={threads} times NCCL_NSOCKS_PERTHREAD={sockets} is {count} on {nodes}: NCCL "
    "allows 64 sockets, and lowers the second to {allowed} with a warning",
    hint="choose values whose product is at most 64, or leave both out: more sockets are often slower",
)
STRAY = Rule(
    check="variables",
    severity="note",
    catches="stray RANK, WORLD_SIZE, NODE_RANK, MASTER_ADDR, PET_* and the like in a profile or in ~/.deepspeed_env",
    message="{source} on {nodes} has {names}, which changes a run behind its launcher's back: multinode keeps it from "
    "its jobs, launches by hand get it",
    hint="on {nodes!s}, find it and take it out: {command!s}",
)
HOSTFILE_OVERRIDES = Rule(
    check="variables",
    severity="warning",
    catches="the hostfile sets NODE_RANK, NNODES, MASTER_ADDR or the like, which multinode works out",
    message="env.{name}={value} of the hostfile takes the place of what multinode works out for LLaMA-Factory: a wrong "
    "one makes nodes wait for each other without an end",
    hint="take env.{name}= out of the hostfile",
)
GPUS_HIDDEN = Rule(
    check="variables",
    severity="warning",
    catches="CUDA_VISIBLE_DEVICES is preset on a node and hides GPUs that the job would use",
    message="CUDA_VISIBLE_DEVICES={value} in {source} leaves the job {visible} of {count} GPUs: a worker "
    "for each GPU would end with 'invalid device ordinal'",
    hint="name the GPUs in the hostfile, which wins: gpus={example}; or take the variable out: {command!s}",
)

_SESSION = "the environment of an SSH session"
_HOSTFILE = "the hostfile"
_DEEPSPEED_ENV = "~/.deepspeed_env"
_NCCL = "NCCL_SOCKET_IFNAME"
_GLOO = "GLOO_SOCKET_IFNAME"
_PROFILES = "~/.bashrc ~/.profile ~/.ssh/environment /etc/environment"
_SHOWN_CHARACTERS = 80
# What both ends of a connection, or all ranks of a collective, must read alike.
_MUST_AGREE = (
    "NCCL_NET",
    "NCCL_NET_PLUGIN",
    "NCCL_IB_DISABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NCCL_NTHREADS",
    "NCCL_BUFFSIZE",
    "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_SOCKET_NTHREADS",
    "NCCL_NSOCKS_PERTHREAD",
    "NCCL_SOCKET_FAMILY",
    "NCCL_CROSS_NIC",
)
_MOST_SOCKETS = 64
_WHOLE = re.compile(r"\s*\d{1,6}")
# llamafactory_command sets these, and the hostfile's variables after them.
_WORKED_OUT = ("NODE_RANK", "NNODES", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT", "RANK")


def check_interface_names(inspection: Inspection) -> Iterator[Finding]:
    """What the job gets as names of its interface names its data plane, and that alone."""
    overridden: list[tuple[str, dict[str, str]]] = []
    for node, found in inspection.known:
        endpoint = inspection.endpoints.get(node.name)
        ifname = endpoint.ifname if endpoint else None
        for name in (_NCCL, _GLOO):
            source, value = next(_presets(node, found, name), (None, ""))
            if source is None or not found.interfaces:
                continue
            if source == _HOSTFILE or ifname is None:
                yield from _judge_name(inspection, node, name, (source, value))
            elif _is_read(inspection, name) and _taken(found, name, value) != (ifname,):
                overridden.append((node.name, _values(name, source, value)))
    yield from group_findings(NAME_OVERRIDDEN, overridden)


def check_agreement(inspection: Inspection) -> Iterator[Finding]:
    """NCCL reads the same settings on every node."""
    nodes = list(inspection.known)
    for name in _MUST_AGREE if _is_read(inspection, _NCCL) else ():
        read = {node.name: next(_presets(node, found, name), ("", None)) for node, found in nodes}
        values = Counter(value for _, value in read.values())
        if len(values) < 2:  # noqa: PLR2004 - two differ
            continue
        expected = values.most_common(1)[0][0]
        peer = next(node for node, (_, value) in read.items() if value == expected)
        way = _way(name, next(source for source, _ in read.values() if source))
        shared = {"name": name, "expected": _shown(expected), "peer": peer, "way": way}
        cases = [(node, {**shared, "value": _shown(value)}) for node, (_, value) in read.items() if value != expected]
        yield from group_findings(SETTINGS_DIFFER, cases)


def check_socket_counts(inspection: Inspection) -> Iterator[Finding]:
    """NCCL is asked for no more sockets than it makes."""
    cases = []
    for node, found in inspection.known if _is_read(inspection, _NCCL) else ():
        threads, sockets = (
            _whole(next(_presets(node, found, name), ("", ""))[1])
            for name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")
        )
        count = threads * sockets
        if count > _MOST_SOCKETS:
            values = {"threads": threads, "sockets": sockets, "count": count, "allowed": _MOST_SOCKETS // threads}
            cases.append((node.name, {name: str(value) for name, value in values.items()}))
    yield from group_findings(TOO_MANY_SOCKETS, cases)


def check_stray_variables(inspection: Inspection) -> Iterator[Finding]:
    """No variable of another launcher waits in a profile, nor in the hostfile one that multinode works out."""
    cases = []
    for node, found in inspection.known:
        for source, variables in ((_SESSION, found.env), (_DEEPSPEED_ENV, found.deepspeed_env)):
            names = sorted(name for name in variables if any(fnmatchcase(name, stray) for stray in STRAY_VARIABLES))
            if names:
                pattern = "|".join(re.escape(name) for name in names)
                files = _PROFILES if source == _SESSION else source
                values = {
                    "names": listed(names),
                    "source": source,
                    "command": f"grep -nE {shlex.quote(pattern)} {files}",
                }
                cases.append((node.name, values))
    yield from group_findings(STRAY, cases)
    if isinstance(inspection.job, LlamaFactoryJob):
        for node in inspection.cluster.nodes:
            for name in _WORKED_OUT:
                if name in node.env:
                    yield HOSTFILE_OVERRIDES.found(node.name, name=name, value=_shown(node.env[name]))


def check_hidden_gpus(inspection: Inspection) -> Iterator[Finding]:
    """No preset hides GPUs that the job would use."""
    name = "CUDA_VISIBLE_DEVICES"
    for node, found in inspection.known:
        value = found.env.get(name)
        if value is None or node.gpus is not None or name in node.env:
            continue
        visible = _count_visible(value)
        wanted = node.slots if node.slots is not None else len(found.gpus)
        if found.gpus and visible < min(wanted, len(found.gpus)):
            yield GPUS_HIDDEN.found(
                node.name,
                value=_shown(value),
                source=_SESSION,
                visible=visible,
                count=len(found.gpus),
                example=",".join(str(gpu.index) for gpu in found.gpus[:wanted]),
                command=f"grep -n {name} {_PROFILES}",
            )


def _presets(node: Node, found: NodeFacts, name: str) -> Iterator[tuple[str, str]]:
    """Where a variable is set beside multinode itself, and to what; who comes first, wins."""
    if name in node.env:
        yield _HOSTFILE, node.env[name]
    if name in found.env:
        yield _SESSION, found.env[name]
    if name.startswith("NCCL_"):
        for path, values in found.nccl_files.items():
            if name in values:
                yield path, values[name]


def _judge_name(inspection: Inspection, node: Node, name: str, preset: tuple[str, str]) -> Iterator[Finding]:
    """What is wrong with names that the job will get as they are."""
    source, value = preset
    found = inspection.facts[node.name]
    endpoint = inspection.endpoints.get(node.name)
    ifname = endpoint.ifname if endpoint and endpoint.ifname != "lo" else None
    taken = _taken(found, name, value)
    values = _values(name, source, value, ifname)
    if not _is_read(inspection, name):
        if not taken and source == _HOSTFILE:
            yield NAMES_NO_INTERFACE_YET.found(node.name, present=_present(found), **values)
    elif not taken:
        reader = "NCCL" if name == _NCCL else "gloo"
        yield NAMES_NO_INTERFACE.found(node.name, present=_present(found), reader=reader, **values)
    elif ifname is not None and ifname not in taken:
        yield NAMES_ANOTHER.found(node.name, taken=listed(taken), ifname=ifname, **values)
    elif len(taken) > 1 and name == _NCCL and takes_by_prefix(value):
        yield NAMES_MORE.found(node.name, taken=listed(taken), **values)


def _taken(found: NodeFacts, name: str, value: str) -> tuple[str, ...]:
    if name == _NCCL:
        return tuple(one.name for one in select_interfaces(found.interfaces, value, found.nccl_version))
    # Gloo takes whole names; `=` would be a part of one.
    names = value.split(",")
    return tuple(one.name for one in found.interfaces if one.addresses and one.name in names)


def _is_read(inspection: Inspection, name: str) -> bool:
    """Whether the job reads it: gloo is part of every job, NCCL wants GPUs."""
    job = inspection.job
    if name == _GLOO:
        return True
    if isinstance(job, CollectiveTest) and job.backend is not None:
        return job.backend == "nccl"
    return any(found.gpus or found.nccl_version is not None for _, found in inspection.known)


def _values(name: str, source: str, value: str, ifname: str | None = None) -> dict[str, str]:
    return {"name": name, "source": source, "value": _shown(value), "way": _way(name, source, ifname)}


def _way(name: str, source: str, ifname: str | None = None) -> str:
    if source == _HOSTFILE:
        exact = "=" if name == _NCCL else ""
        meant = " (the second = is NCCL's: this name exactly)" if exact else ""
        instead = f"; or write env.{name}={exact}{ifname}{meant}" if ifname and name in {_NCCL, _GLOO} else ""
        return f"take env.{name}=... out of the node's line in the hostfile, and multinode sets it{instead}"
    return f"take it out: grep -n {name} {_PROFILES if source == _SESSION else shlex.quote(source)}"


def _present(found: NodeFacts) -> str:
    return listed([one.name for one in found.interfaces if one.addresses]) or "none"


def _shown(value: str | None) -> str:
    if value is None:
        return "not set"
    return value if len(value) <= _SHOWN_CHARACTERS else f"{value[:_SHOWN_CHARACTERS]}..."


def _whole(value: str | None) -> int:
    digits = _WHOLE.match(value or "")
    return int(digits.group()) if digits else 0


def _count_visible(value: str) -> int:
    """GPUs that CUDA shows: those before the first that is none (CUDA C++ Programming Guide, environment variables)."""
    count = 0
    for entry in value.split(","):
        if not re.fullmatch(r"\d+|(GPU|MIG)-.+", entry.strip()):
            break
        count += 1
    return count
