"""Variables that a shell profile, NCCL's files or the hostfile set, and their effect on a run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatchcase

from multinode.check.ports import select_interfaces, takes_by_prefix
from multinode.check.rule import (
    Check,
    CheckFinding,
    CheckRule,
    CheckRules,
    Inspection,
    disagreements,
    launch_check,
    listed,
)
from multinode.cluster.accelerators import accelerator_named
from multinode.cluster.cluster import Node
from multinode.cluster.facts import NodeFacts
from multinode.job.engines.place import STRAY_VARIABLES
from multinode.records.benchmark import CollectiveTest
from multinode.stats.unknown import or_empty, or_none

_VARIABLES = CheckRules("variables")

NAMES_NO_INTERFACE = _VARIABLES.error(
    about="NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names no interface of a node",
    message="{name}={value} from {source} matches none of the interfaces that have an address ({present}). {reader} "
    "finds no socket interface, so the job fails or hangs at its first collective",
    hint="{way!s}",
)
NAMES_NO_INTERFACE_YET = _VARIABLES.warning(
    about="NCCL_SOCKET_IFNAME in the hostfile matches no interface of a node, which affects only jobs that use NCCL",
    message="{name}={value} from {source} matches none of the interfaces that have an address ({present}). Jobs "
    "without GPUs ignore it, but jobs with GPUs would fail at their first collective",
    hint="{way!s}",
)
NAMES_MORE = _VARIABLES.warning(
    about="NCCL_SOCKET_IFNAME is a prefix or an exclusion that matches more interfaces than intended (eth1 also "
    "matches eth10)",
    message="{name}={value} from {source} matches {taken}. Without =, NCCL treats names as prefixes; with ^, it uses "
    "all other interfaces. NCCL sends over every matching interface, even one that reaches no other node",
    hint="{way!s}",
)
NAMES_ANOTHER = _VARIABLES.warning(
    about="NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME does not name the data plane's interface",
    message="{name}={value} from {source} selects {taken}, but the node's data plane is {ifname}. The rendezvous would "
    "use the data plane, but the collectives would use another network, which multinode does not check",
    hint="{way!s}",
)
NAME_OVERRIDDEN = _VARIABLES.note(
    about="a node sets NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME to a different value than multinode does for its jobs",
    message="{name}={value} is set in {source} on {nodes}. multinode sets it to the data plane's interface for its "
    "jobs, but manual launches use this value",
    hint="{way!s}",
    by_hand=True,
)
SETTINGS_DIFFER = _VARIABLES.warning(
    about="NCCL settings differ between nodes (NCCL_NET, NCCL_IB_DISABLE, NCCL_P2P_DISABLE, NCCL_ALGO and others)",
    message="{name} is {value} on {nodes}, but {expected} on {peer}. NCCL expects the same value on every node. "
    "With different transports or algorithms, the first collective hangs or is slow",
    hint="set the same value on every line of the hostfile (env.{name}=VALUE), or {way!s}",
)
TOO_MANY_SOCKETS = _VARIABLES.warning(
    about="NCCL_SOCKET_NTHREADS x NCCL_NSOCKS_PERTHREAD exceeds NCCL's limit of 64",
    message="NCCL_SOCKET_NTHREADS={threads} x NCCL_NSOCKS_PERTHREAD={sockets} is {count} on {nodes}. NCCL allows 64 "
    "sockets, so it reduces NCCL_NSOCKS_PERTHREAD to {allowed} and prints a warning",
    hint="set values whose product is at most 64, or unset both; more sockets are often slower",
)
STRAY = _VARIABLES.note(
    about="RANK, WORLD_SIZE, NODE_RANK, MASTER_ADDR, PET_* or similar are set in a profile or in ~/.deepspeed_env",
    message="{source} on {nodes} sets {names}. Such variables override the settings of a launcher. multinode unsets "
    "them for its jobs, but manual launches inherit them",
    hint="find the lines on {nodes!s} that set them, and remove these lines:\n{command!s}",
    by_hand=True,
)
RANKS_OVERRIDDEN = _VARIABLES.warning(
    about="the hostfile or --env sets NODE_RANK, NNODES, MASTER_ADDR or a similar variable that multinode sets",
    message="{name}={value} from {source} replaces the value that multinode sets for LLaMA-Factory. With a wrong "
    "value, the nodes wait for each other forever",
    hint="remove {name} from {source!s}",
)
GPUS_HIDDEN = _VARIABLES.warning(
    about="CUDA_VISIBLE_DEVICES or its equivalent is set on a node and hides GPUs that the job would use",
    message="{name}={value} in {source} shows the job only {visible} of {count} GPUs. With one worker per GPU, the job "
    "would fail with 'invalid device ordinal'",
    hint="if you may use only these GPUs, set slots= in the hostfile to their number. Otherwise remove the variable:\n"
    "{command!s}",
)
GPUS_NOT_VISIBLE = _VARIABLES.error(
    about="gpus= names a GPU that CUDA_VISIBLE_DEVICES hides on the node",
    message="the hostfile assigns GPU {ids} to it, but {name}={value} in {source} hides this GPU. multinode does not "
    "use GPUs that the node's environment hides",
    hint="choose gpus= from {there}. If you may use the hidden GPUs, remove the variable instead:\n{command!s}",
)

PYTHON_HOME = _VARIABLES.warning(
    about="PYTHONHOME is set in a profile, the hostfile or --env, so the job's interpreter loads the wrong standard "
    "library",
    message="PYTHONHOME={value} from {source} makes {python} load its standard library from there. If that library "
    "belongs to another Python, the job fails with `No module named 'encodings'`",
    hint="{way!s}",
)

_SESSION = "the environment of an SSH session"
_HOSTFILE = "the hostfile"
_OPTION = "--env"
# Variables that reach a job launched by multinode, whatever its interface.
_GIVEN = frozenset({_HOSTFILE, _OPTION})
_DEEPSPEED_ENV = "~/.deepspeed_env"
_NCCL = "NCCL_SOCKET_IFNAME"
_GLOO = "GLOO_SOCKET_IFNAME"
_PROFILES = "~/.bashrc ~/.profile ~/.ssh/environment /etc/environment"
_SHOWN_CHARACTERS = 80
# Settings that both ends of a connection, or all ranks of a collective, must share.
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
# llamafactory_command sets these, followed by the hostfile's variables.
_SET_BY_US = ("NODE_RANK", "NNODES", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT", "RANK")


@launch_check
def check_interface_names(inspection: Inspection) -> Iterator[CheckFinding]:
    """Variables that name interfaces name exactly the one for data."""
    for node, facts in inspection.known:
        place = inspection.place(node.name)
        ifname = place.ifname
        for name in (_NCCL, _GLOO) if or_empty(facts.interfaces) else ():
            source, value = _preset(inspection, node, facts, name)
            if value is None:
                continue
            taken = _taken(facts, name, value)
            values = {"name": name, "source": source, "value": _shown_of(inspection, name, value)}
            if source not in _GIVEN and ifname is not None:
                due = {ifname, *(place.ifnames if name == _NCCL else ())}
                if _is_read(inspection, name) and set(taken) != due:
                    yield NAME_OVERRIDDEN.found(node.name, **values, way=_way(name, source))
                continue
            meant = ifname if ifname != "lo" else None
            rule = _judge_name(name, value, taken, meant)
            if not _is_read(inspection, name):
                rule = NAMES_NO_INTERFACE_YET if not taken and source in _GIVEN else None
            if rule is not None:
                yield rule.found(
                    node.name,
                    **values,
                    way=_way(name, source, meant),
                    present=listed(interface.name for interface in or_empty(facts.interfaces) if interface.addresses)
                    or "none",
                    reader="NCCL" if name == _NCCL else "gloo",
                    taken=listed(taken),
                    ifname=meant,
                )


@Check
def check_agreement(inspection: Inspection) -> Iterator[CheckFinding]:
    """NCCL reads the same settings on every node."""
    for name in _MUST_AGREE if _is_read(inspection, _NCCL) else ():
        presets = {node.name: _preset(inspection, node, facts, name) for node, facts in inspection.known}
        source = next((source for source, _ in presets.values() if source), "")
        values = {node: value for node, (_, value) in presets.items()}
        for node, value, peer, expected in disagreements(values, majority=True):
            yield SETTINGS_DIFFER.found(
                node, name=name, value=_shown(value), expected=_shown(expected), peer=peer, way=_way(name, source)
            )


@Check
def check_socket_counts(inspection: Inspection) -> Iterator[CheckFinding]:
    """NCCL is asked for no more sockets than its maximum."""
    for node, facts in inspection.known if _is_read(inspection, _NCCL) else ():
        threads, sockets = (
            int(digits[0]) if (digits := _WHOLE.match(_preset(inspection, node, facts, name)[1] or "")) else 0
            for name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD")
        )
        count = threads * sockets
        if count > _MOST_SOCKETS:
            allowed = _MOST_SOCKETS // threads
            yield TOO_MANY_SOCKETS.found(node.name, threads=threads, sockets=sockets, count=count, allowed=allowed)


@Check
def check_stray_variables(inspection: Inspection) -> Iterator[CheckFinding]:
    """No variable of another launcher is set in a profile, and none that multinode computes in the hostfile."""
    for node, facts in inspection.known:
        for source, variables in ((_SESSION, facts.env), (_DEEPSPEED_ENV, facts.deepspeed_env)):
            names = sorted(name for name in variables if any(fnmatchcase(name, stray) for stray in STRAY_VARIABLES))
            if names:
                pattern = shlex.quote("|".join(map(re.escape, names)))
                command = f"grep -nE {pattern} {_PROFILES if source == _SESSION else source}"
                yield STRAY.found(node.name, names=listed(names), source=source, command=command)
    given = [(node.name, _HOSTFILE, node.env) for node in inspection.cluster.nodes]
    for where, source, variables in (*given, (None, _OPTION, inspection.options.environment.env)):
        for name in _SET_BY_US if inspection.training is not None else ():
            if name in variables:
                value = _shown_of(inspection, name, variables[name]) if source == _OPTION else _shown(variables[name])
                yield RANKS_OVERRIDDEN.found(where, name=name, value=value, source=source)


@Check
def check_python_home(inspection: Inspection) -> Iterator[CheckFinding]:
    """The job's interpreter finds its own library."""
    for node, facts in inspection.known:
        source, value = _preset(inspection, node, facts, "PYTHONHOME")
        if value:
            searched = (f"find and remove it on {node.name}:", f"grep -n PYTHONHOME {_PROFILES}")
            way = searched if source == _SESSION else f"remove it from {source}"
            python = or_none(facts.python) or "the job's interpreter"
            yield PYTHON_HOME.found(node.name, value=_shown(value), source=source, python=python, way=way)


@launch_check
def check_hidden_gpus(inspection: Inspection) -> Iterator[CheckFinding]:
    """No variable hides GPUs that the job would use."""
    for node, facts in inspection.known:
        names = accelerator_named(facts.accelerator).visible
        name = next((name for name in names if name in facts.env), None)
        if name is None or name in node.env | inspection.options.environment.env:
            continue
        preset = facts.env[name]
        words = {"name": name, "value": _shown(preset), "source": _SESSION, "command": f"grep -n {name} {_PROFILES}"}
        if node.gpus is not None:
            shown = {gpu.index for gpu in facts.visible_gpus}
            hidden = [
                str(gpu.index) for gpu in or_empty(facts.gpus) if gpu.index in node.gpus and gpu.index not in shown
            ]
            if hidden:
                there = ",".join(map(str, sorted(shown))) or "none"
                yield GPUS_NOT_VISIBLE.found(node.name, **words, ids=" and ".join(hidden), there=there)
            continue
        visible, count = _count_visible(preset), len(or_empty(facts.gpus))
        wanted = node.slots if node.slots is not None else count
        if visible < min(wanted, count):
            yield GPUS_HIDDEN.found(node.name, **words, visible=visible, count=count)


def _preset(inspection: Inspection, node: Node, facts: NodeFacts, name: str) -> tuple[str, str | None]:
    files = facts.nccl_files if name.startswith("NCCL_") else {}
    given = {_OPTION: inspection.options.environment.env, _HOSTFILE: node.env}
    for source, variables in {**given, _SESSION: facts.env, **files}.items():
        if name in variables:
            return source, variables[name]
    return "", None


def _judge_name(name: str, value: str, taken: tuple[str, ...], meant: str | None) -> CheckRule | None:
    if not taken:
        return NAMES_NO_INTERFACE
    if meant is not None and meant not in taken:
        return NAMES_ANOTHER
    return NAMES_MORE if len(taken) > 1 and name == _NCCL and takes_by_prefix(value) else None


def _taken(facts: NodeFacts, name: str, value: str) -> tuple[str, ...]:
    interfaces = or_empty(facts.interfaces)
    if name == _NCCL:
        version = or_none(facts.nccl_version)
        return tuple(interface.name for interface in select_interfaces(interfaces, value, version))
    # Gloo takes whole names; `=` would be part of one.
    return tuple(
        interface.name for interface in interfaces if interface.addresses and interface.name in value.split(",")
    )


def _is_read(inspection: Inspection, name: str) -> bool:
    if name == _GLOO:
        return True
    if isinstance(inspection.job, CollectiveTest) and inspection.job.backend is not None:
        return inspection.job.backend == "nccl"
    return any(or_empty(facts.gpus) or or_none(facts.nccl_version) is not None for _, facts in inspection.known)


def _way(name: str, source: str, ifname: str | None = None) -> tuple[str, ...]:
    if source not in _GIVEN:
        return "remove it:", f"grep -n {name} {_PROFILES if source == _SESSION else shlex.quote(source)}"
    instead = ""
    if ifname:
        meant = " (the second = means an exact match in NCCL)" if name == _NCCL else ""
        option = "--env " if source == _OPTION else "env."
        instead = f"; or write {option}{name}={'=' if name == _NCCL else ''}{ifname}{meant}"
    where = "remove --env {}" if source == _OPTION else "remove env.{}=... from the node's line in the hostfile"
    ours = ", and multinode sets it" if name in {_NCCL, _GLOO} else ""
    return (f"{where.format(name)}{ours}{instead}",)


def _shown_of(inspection: Inspection, name: str, value: str) -> str:
    """A forwarded value is never shown."""
    return "(forwarded)" if name in inspection.options.environment.forwarded else _shown(value)


def _shown(value: str | None) -> str:
    if value is None:
        return "not set"
    return value if len(value) <= _SHOWN_CHARACTERS else f"{value[:_SHOWN_CHARACTERS]}..."


def _count_visible(value: str) -> int:
    """CUDA ignores every id from the first invalid one on (CUDA C++ Programming Guide, environment variables)."""
    count = 0
    for entry in value.split(","):
        if not re.fullmatch(r"\d+|(GPU|MIG)-.+", entry.strip()):
            break
        count += 1
    return count
