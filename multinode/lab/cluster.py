"""The lab's verbs for the other layers: up, down, status, rate, exec, refresh. There is one lab a machine."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from multinode.cluster.cluster import Cluster
from multinode.errors import Interrupted, MultinodeError, NodeFailed, UsageError
from multinode.lab.network import (
    CONTROLLER_IFNAME,
    SWITCH_NAMESPACE,
    LinkSpeed,
    make_links,
    make_namespaces,
    measure_links,
    rate_text,
    shape_node,
)
from multinode.lab.nodes import HOSTFILE, REFRESH_SCRIPT, make_keys, start_nodes, write_access_files, write_speed
from multinode.lab.state import (
    STATE_DIR,
    Lab,
    LabNode,
    LabSpec,
    NamespaceId,
    assign_cores,
    check_free_network,
    check_requirements,
    controller_boot_id,
    is_alive,
    load_lab,
    lock_lab,
    namespace_id,
    node_addresses,
    node_dir,
    node_name,
    poll,
    processes_of_lab,
    run_all,
    run_program,
    runs_of,
    save_lab,
    signal_all,
)
from multinode.node.files import list_names, read_mounts
from multinode.units import format_list

_NETNS_DIR = Path("/run/netns")
_OUR_NAMESPACE = re.compile(rf"{SWITCH_NAMESPACE}|mn-node\d+")
_DEADLINE_S = 20.0
_GROUP_DEADLINE_S = 10.0


class Remains(msgspec.Struct, frozen=True, kw_only=True):
    """What there is of a lab on this machine."""

    namespaces: tuple[str, ...] = ()  # names of network namespaces
    processes: tuple[int, ...] = ()
    interfaces: tuple[str, ...] = ()  # the controller's interfaces
    # directories of control groups that hold nodes to a part of the processors or of the memory
    cgroups: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()  # mount points below the state directory
    directories: tuple[str, ...] = ()  # the state directory

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return self != Remains()

    def describe(self) -> str:
        """Everything there is, one by one: `namespaces mn-node0, mn-switch; processes 4711`."""
        return "; ".join(f"{kind} {', '.join(map(str, remains))}" for kind, remains in self._kinds() if remains)

    def count(self) -> str:
        """How much there is: `namespaces: 3, processes: 4`."""
        return ", ".join(f"{kind}: {len(remains)}" for kind, remains in self._kinds() if remains)

    def _kinds(self) -> Iterator[tuple[str, tuple[object, ...]]]:
        for kind in self.__struct_fields__:
            yield kind, getattr(self, kind)


def find_remains(former: frozenset[NamespaceId] = frozenset()) -> Remains:
    """Look for a lab, whole or in parts; `former` are namespaces whose names are gone already."""
    names = _namespaces()
    ids = {number for name in names if (number := namespace_id(_NETNS_DIR / name)) is not None}
    return Remains(
        namespaces=tuple(names),
        processes=tuple(processes_of_lab(ids | former)),
        interfaces=tuple(name for _, name in socket.if_nameindex() if name == CONTROLLER_IFNAME),
        cgroups=tuple(map(str, find_groups())),
        mounts=tuple(mount.place for mount in read_mounts() if mount.place.startswith(f"{STATE_DIR}/")),
        directories=(str(STATE_DIR),) if STATE_DIR.exists() else (),
    )


def sweep() -> Remains:
    """Take away whatever there is of a lab, and see that it is gone; returns what there was.

    Raises:
        MultinodeError: something is left.
    """
    remains = find_remains()
    former = frozenset(number for name in remains.namespaces if (number := namespace_id(_NETNS_DIR / name)) is not None)
    _kill(former)
    for group in remains.cgroups:
        remove_group(Path(group))
    if remains.interfaces:
        run_program(["ip", "link", "del", CONTROLLER_IFNAME])
    for name in remains.namespaces:
        run_program(["ip", "netns", "del", name])
    _forget_netns_dir()
    for place in reversed(remains.mounts):
        run_program(["umount", "--lazy", place])
    if STATE_DIR.exists():
        shutil.rmtree(STATE_DIR)
    if STATE_DIR.parent.is_dir() and not any(STATE_DIR.parent.iterdir()):
        STATE_DIR.parent.rmdir()
    left = find_remains(former)
    if left:
        raise MultinodeError(
            (f"the lab was not removed completely: {left.describe()}"), hint="run again: multinode lab down"
        )
    return remains


def find_groups(node: str | None = None) -> list[Path]:
    """The control groups of our lab's nodes, or of this one, in all trees; their names say whose they are."""
    name = re.compile(rf"mn-{node or 'node[0-9]+'}-{our_mark()}")
    places = {mount.place for mount in read_mounts() if mount.filesystem in {"cgroup", "cgroup2"}}
    paths = (Path(place, entry) for place in sorted(places) for entry in list_names(place) if name.fullmatch(entry))
    return [path for path in paths if (path / "cgroup.procs").exists()]


def our_mark() -> int:
    """Names our network namespace, as a lab does: one inside a container is none of the machine's around it."""
    return Path("/proc/self/ns/net").stat().st_ino


def remove_group(group: Path) -> None:
    """Remove a control group whose processes are gone or going; one that is not there is fine.

    Raises:
        MultinodeError: it does not get empty.
    """
    error: OSError | None = None
    for _ in poll(_GROUP_DEADLINE_S):
        try:
            for folder, _, _ in os.walk(group, topdown=False):
                Path(folder).rmdir()
        except FileNotFoundError:
            return
        except OSError as busy:
            error = busy
        else:
            return
    raise MultinodeError(f"the control group {group} cannot be removed: {error}")


def _kill(namespaces: frozenset[NamespaceId]) -> None:
    """The end of a node's first process ends all its processes."""
    for _ in poll(_DEADLINE_S):
        pids = processes_of_lab(set(namespaces))
        if not pids:
            return
        signal_all(pids, signal.SIGKILL)
    raise MultinodeError(
        f"processes of the lab do not exit: {', '.join(map(str, pids))}",
        hint="one of them may be waiting for a disk: see their state in `ps`, then run again: multinode lab down",
    )


def _namespaces() -> list[str]:
    if not _NETNS_DIR.is_dir():
        return []
    return sorted(path.name for path in _NETNS_DIR.iterdir() if _OUR_NAMESPACE.fullmatch(path.name))


def _forget_netns_dir() -> None:
    """Undo what the first `ip netns add` on a machine does to this directory, once it is empty again."""
    if _NETNS_DIR.is_dir() and not any(_NETNS_DIR.iterdir()):
        with contextlib.suppress(MultinodeError):
            while True:
                run_program(["umount", str(_NETNS_DIR)])
        _NETNS_DIR.rmdir()


_DIR_MODE = 0o700
_DOWN_HINT = "run this first: multinode lab down"
_SIGNAL_EXIT = 128
# Enters the control groups before `--`, then runs what is after it.
_JOIN_GROUPS = 'while [ "$1" != -- ]; do echo $$ > "$1" || exit; shift; done; shift; exec "$@"'


class NodeStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One node as it is now."""

    name: str
    state: str  # `up`; `down` when its first process or its sshd is gone
    addr: str  # on the training network
    management_addr: str  # where SSH reaches it
    ifname: str  # its training interface
    rate: str  # line rate of that interface, as `lab rate` takes it; `none` is unshaped
    rate_gbit_per_s: float | None  # its rate as a number; None is unshaped
    cores: tuple[int, ...] | None  # the cores it is pinned to; None is all of them
    init_pid: int | None  # process 1 of the node, as the controller numbers it; None is gone
    sshd_pid: int | None  # of its sshd, as the controller numbers it; None is gone


class LabStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The lab as it is now."""

    schema: str = "multinode.lab/2"
    hostfile: str | None  # its path; None where no lab is up
    nodes: tuple[NodeStatus, ...]  # in node-rank order


class LabUp(LabStatus, frozen=True, kw_only=True):
    """A lab that was just created."""

    links: tuple[LinkSpeed, ...]  # speed of each link, from node 0 to the others and back


def up_lab(
    spec: LabSpec,
    say: Callable[[str], None] = lambda _: None,
    on_link: Callable[[LinkSpeed], None] = lambda _: None,
    *,
    measure: bool = True,
) -> Lab:
    """Make a lab and measure its links; what was begun and not finished is taken back.

    `on_link` is told what each link carries once it is measured, which takes about a second per node (`measure`).

    Raises:
        UsageError: it cannot be created here, or one stands already.
        NodeFailed, MultinodeError: something did not work.
        Interrupted: Ctrl-C.
    """
    check_requirements()
    _check_spec(spec)
    with lock_lab():
        _check_nothing_stands(spec)
        try:
            lab = _make_lab(spec, say)
            if measure:
                say("measuring links")
                for speed in measure_links(lab):
                    on_link(speed)
            save_lab(lab)
        except KeyboardInterrupt as error:
            say("interrupted: undoing the partial set-up")
            sweep()
            raise Interrupted("the lab was not created", hint="its parts have been removed") from error
        except BaseException:
            sweep()
            raise
        return lab


def down_lab() -> Remains:
    """Take the lab away, or whatever a crash or a reboot left of one; returns what there was."""
    check_requirements()
    with lock_lab():
        return sweep()


def live_runs() -> dict[str, str]:
    """The runs that are in progress in this machine's lab, each with its nodes, since when, and what runs.

    None where there is no lab.
    """
    lab = load_lab()
    runs_by_node = {node.name: runs_of(node) for node in lab.nodes} if lab is not None else {}
    runs = sorted(set[str]().union(*runs_by_node.values()))
    nodes = {run: [name for name, its in runs_by_node.items() if run in its] for run in runs}
    return {run: f"on {format_list(names, 3)} {runs_by_node[names[0]][run]}" for run, names in nodes.items()}


def require_idle(cluster: Cluster) -> None:
    """Leave a lab alone that nobody named, while somebody's run is going on in it.

    Raises:
        UsageError: the cluster is this machine's lab, and there is one.
    """
    lab = load_lab()
    runs = live_runs() if lab is not None and cluster.source == lab.hostfile else {}
    if runs:
        raise UsageError(
            f"no hosts were given, and the lab has an active run: {describe_runs(runs)}",
            hint=f"follow it with multinode attach {next(iter(runs))}; to check anyway, add --force or --hosts lab",
        )


def describe_runs(runs: Mapping[str, str]) -> str:
    """Runs in one sentence: whose they are."""
    return format_list([f"{run} {trouble}" for run, trouble in runs.items()], 4)


def require_lab() -> Lab:
    """The lab that stands.

    Raises:
        UsageError: there is none.
    """
    lab = load_lab()
    if lab is None:
        message, hint = explain_missing()
        raise UsageError(message, hint=hint)
    return lab


def explain_missing() -> tuple[str, str]:
    """Why no lab is up, or why we cannot tell, and what fixes it."""
    if not STATE_DIR.exists():
        return "no lab is up on this machine", "start one: multinode lab up"
    if not os.access(STATE_DIR, os.R_OK):
        return "the lab of this machine belongs to root", "run it with sudo"
    return "no lab is up, but parts of an incomplete lab, or of a lab from before a reboot, remain", _DOWN_HINT


def describe_lab(lab: Lab | None) -> LabStatus:
    """Look at every node of the lab."""
    if lab is None:
        return LabStatus(hostfile=None, nodes=())
    return LabStatus(hostfile=lab.hostfile, nodes=tuple(_describe_node(node) for node in lab.nodes))


def set_rate(names: Sequence[str], rate_gbit_per_s: float | None) -> Lab:
    """Give the training links of these nodes another line rate, while jobs run; None takes the shaping away."""
    with lock_lab():
        lab = require_lab()
        chosen = {lab.node(name).node_rank for name in names}
        for rank in chosen:
            shape_node(rank, rate_gbit_per_s)
            if is_alive(lab.nodes[rank].init):
                write_speed(lab.nodes[rank], rate_gbit_per_s)
        nodes = tuple(
            msgspec.structs.replace(node, rate_gbit_per_s=rate_gbit_per_s) if node.node_rank in chosen else node
            for node in lab.nodes
        )
        changed = msgspec.structs.replace(lab, nodes=nodes)
        save_lab(changed)
        return changed


def ns_command(node: LabNode) -> tuple[str, ...]:
    """What goes before a command to run it in all of a node's namespaces, on its cores, in its control group if any."""
    enter = ("nsenter", "--target", str(node.init.pid), "--mount", "--uts", "--ipc", "--net", "--pid", "--")
    pin = ("taskset", "--cpu-list", ",".join(map(str, node.cores))) if node.cores else ()
    groups = [str(group / "cgroup.procs") for group in find_groups(node.name)]
    join = ("sh", "-c", _JOIN_GROUPS, "sh", *groups, "--") if groups else ()
    return (*join, *pin, *enter)


def login_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What an SSH login as root finds in its environment; the terminal's kind is the caller's."""
    login = {
        "HOME": "/root",
        "LOGNAME": "root",
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "SHELL": "/bin/bash",
        "USER": "root",
    }
    return login | ({"TERM": environ["TERM"]} if "TERM" in environ else {})


def exec_in_node(node: LabNode, argv: Sequence[str]) -> int:
    """Run a command on a node with our own stdin, stdout and stderr; the node sees the controller's files as they are.

    Returns:
        Its exit code; 128 and the number of the signal that ended it.

    Raises:
        NodeFailed: the node is down.
    """
    if not is_alive(node.init):
        raise NodeFailed(
            "the node is down", node=node.name, hint="restart the lab: multinode lab down, then multinode lab up"
        )
    # The script's exit status does not matter; the words after `sh` never become shell text.
    refreshed = ["sh", "-c", f'. {REFRESH_SCRIPT}; cd && exec "$@"', "sh", *argv]
    process = subprocess.Popen([*ns_command(node), *refreshed], env=login_environment(os.environ))
    while True:
        try:
            code = process.wait()
        except KeyboardInterrupt:
            # The terminal told the command, too: its own end decides.
            continue
        return code if code >= 0 else _SIGNAL_EXIT - code


def refresh(lab: Lab | None = None) -> None:
    """Let every node that lives see files as they are on the controller now; without a lab there is nothing to do.

    SSH sessions do this by themselves when they begin, so only a process that runs already may need it.
    """
    lab = lab or load_lab()
    if lab is not None:
        alive = [node for node in lab.nodes if is_alive(node.init)]
        run_all([[*ns_command(node), "sh", REFRESH_SCRIPT] for node in alive])


def _describe_node(node: LabNode) -> NodeStatus:
    init_alive, sshd_alive = is_alive(node.init), is_alive(node.sshd)
    return NodeStatus(
        name=node.name,
        state="up" if init_alive and sshd_alive else "down",
        addr=node.addr,
        management_addr=node.management_addr,
        ifname=node.ifname,
        rate=rate_text(node.rate_gbit_per_s),
        rate_gbit_per_s=node.rate_gbit_per_s,
        cores=node.cores,
        init_pid=node.init.pid if init_alive else None,
        sshd_pid=node.sshd.pid if sshd_alive else None,
    )


def _check_spec(spec: LabSpec) -> None:
    node_addresses(spec, 0)
    assign_cores(spec, tuple(sorted(os.sched_getaffinity(0))), 0)
    if spec.slots < 1:
        raise UsageError(f"a node cannot offer {spec.slots} slots", hint="use --slots 1 or more")
    if not os.access(spec.python, os.X_OK):
        raise UsageError(f"{spec.python} does not exist or is not executable", hint="name an interpreter with --python")
    if not spec.python.startswith("/") or len(spec.python.split()) != 1:
        raise UsageError(f"{spec.python!r} is not an absolute path without spaces", hint="name it with --python")
    if spec.python.startswith("/run/"):
        raise UsageError(f"nodes have their own /run, so they cannot use {spec.python}", hint="use another path")


def _check_nothing_stands(spec: LabSpec) -> None:
    lab = load_lab()
    if lab is not None:
        raise UsageError(f"a lab of {len(lab.nodes)} nodes is already up", hint=_DOWN_HINT)
    remains = find_remains()
    if remains:
        raise UsageError(f"parts of an earlier lab remain: {remains.describe()}", hint=_DOWN_HINT)
    check_free_network(spec)


def _make_lab(spec: LabSpec, say: Callable[[str], None]) -> Lab:
    STATE_DIR.parent.mkdir(exist_ok=True)
    STATE_DIR.mkdir(mode=_DIR_MODE)
    for rank in range(spec.node_count):
        node_dir(node_name(rank)).mkdir(mode=_DIR_MODE, parents=True)
    say("creating keys and links")
    make_keys(spec)
    write_access_files(spec)
    make_namespaces(spec)
    make_links(spec)
    say("starting nodes")
    nodes = start_nodes(spec, range(spec.node_count))
    return Lab(
        spec=spec,
        controller_boot_id=controller_boot_id(),
        hostfile=str(HOSTFILE),
        directory=str(Path.cwd()),
        nodes=nodes,
    )
