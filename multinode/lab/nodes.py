"""Start the nodes: one process 1 each, all at the same time, and wait until each node's sshd answers."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import msgspec

from multinode.decoding import decode_json
from multinode.errors import NodeFailed
from multinode.lab.access import node_files
from multinode.lab.network import speed_text
from multinode.lab.processes import children_of, init_environment, poll, process_ref
from multinode.lab.requirements import SSHD
from multinode.lab.state import (
    DATA_IFNAME,
    LabNode,
    LabSpec,
    NodeFile,
    assign_cores,
    node_addresses,
    node_dir,
    node_name,
)

_INIT_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from multinode.lab.node_init import main; main()"
_ROOT = Path(__file__).parents[2]
# What the kernel would say of the whole machine, or of a veth, and says otherwise on a node.
BOOT_ID_FILE = "/proc/sys/kernel/random/boot_id"
SPEED_FILE = f"/sys/class/net/{DATA_IFNAME}/speed"
_START_DEADLINE_S = 60.0
_SSHD_DEADLINE_S = 10.0
_BANNER = b"SSH-2.0"


class _Order(msgspec.Struct, frozen=True, kw_only=True):
    """What process 1 of a node is told (node_init reads it)."""

    name: str
    namespace: str
    store: str
    disk_bytes: int
    cores: tuple[int, ...] | None
    boot_id: str
    kernel_files: dict[str, str]
    files: list[NodeFile]
    executables: tuple[str, str]
    shared_files: tuple[str, ...]


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What it answers."""

    pid: int | None = None
    error: str | None = None


def start_nodes(spec: LabSpec, ranks: Sequence[int]) -> tuple[LabNode, ...]:
    """Start these nodes of the lab.

    Raises:
        NodeFailed: a node could not be set up, or its sshd does not answer.
    """
    orders = [_order(spec, rank) for rank in ranks]
    pids = _start_inits(orders)
    addresses = [node_addresses(spec, rank) for rank in ranks]
    for order, address in zip(orders, addresses, strict=True):
        _wait_for_sshd(order.name, address.management)
    sshds = children_of(set(pids), "sshd")
    nodes = []
    for rank, order, address, pid in zip(ranks, orders, addresses, pids, strict=True):
        init, sshd = process_ref(pid), sshds.get(pid)
        if init is None or sshd is None:
            raise _failed(order.name, "it died during set-up")
        nodes.append(
            LabNode(
                name=order.name,
                node_rank=rank,
                addr=address.data,
                management_addr=address.management,
                rate_gbit_per_s=spec.rate_gbit_per_s,
                cores=order.cores,
                boot_id=order.boot_id,
                init=init,
                sshd=sshd,
            )
        )
    return tuple(nodes)


def write_speed(node: LabNode, rate_gbit_per_s: float | None) -> None:
    """Have the node's training interface say another line rate, as a card does that has negotiated anew."""
    # Written in place: the file is mounted over the kernel's, and a new one would not be.
    Path(f"/proc/{node.init.pid}/root{SPEED_FILE}").write_text(speed_text(rate_gbit_per_s) + "\n")


def _order(spec: LabSpec, node_rank: int) -> _Order:
    name = node_name(node_rank)
    return _Order(
        name=name,
        namespace=f"/run/netns/mn-{name}",
        store=str(node_dir(name) / "store"),
        disk_bytes=spec.disk_bytes,
        cores=assign_cores(spec, tuple(sorted(os.sched_getaffinity(0))), node_rank),
        boot_id=(boot_id := str(uuid.uuid4())),
        kernel_files={BOOT_ID_FILE: boot_id, SPEED_FILE: speed_text(spec.rate_gbit_per_s)},
        files=[*node_files(spec, node_rank, uuid.uuid4().hex), *spec.files],
        executables=(SSHD, spec.python),
        shared_files=spec.shared_files,
    )


def _start_inits(orders: list[_Order]) -> list[int]:
    """Start process 1 of every node; returns their numbers as the controller sees them."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for order in orders:
            started.append(_start_init(order))  # noqa: PERF401 - `finally` must know those that started
        return [_init_pid(order, process) for order, process in zip(orders, started, strict=True)]
    finally:
        for process in started:
            process.kill()
            process.wait(timeout=_START_DEADLINE_S)
            if process.stdout is not None:
                process.stdout.close()


def _start_init(order: _Order) -> subprocess.Popen[bytes]:
    # It exists when a node is started again.
    Path(order.store).mkdir(mode=0o700, exist_ok=True)
    with log_path(order.name).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _INIT_PROGRAM, str(_ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={"PATH": os.defpath} | init_environment(),
            # Ctrl-C in the terminal is for `lab up`, which then takes its nodes down in order.
            start_new_session=True,
        )
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(order))
            process.stdin.close()
            process.stdin = None
    return process


def _init_pid(order: _Order, process: subprocess.Popen[bytes]) -> int:
    try:
        stdout, _ = process.communicate(timeout=_START_DEADLINE_S)
        answer = decode_json(stdout or b"{}", _Answer)
    except (subprocess.TimeoutExpired, msgspec.DecodeError) as error:
        raise _failed(order.name, f"set-up failed: {error}") from error
    if answer.pid is None:
        raise _failed(order.name, f"set-up failed: {answer.error or 'its first process died'}")
    return answer.pid


def _wait_for_sshd(name: str, address: str) -> None:
    error: Exception | None = None
    for _ in poll(_SSHD_DEADLINE_S):
        try:
            with socket.create_connection((address, 22), timeout=_SSHD_DEADLINE_S) as connection:
                if connection.recv(len(_BANNER)) == _BANNER:
                    return
        except OSError as refused:
            error = refused
    hint = "check whether a firewall on this machine drops packets on mn-mgmt"
    raise _failed(name, f"its sshd does not answer at {address}: {error}", hint)


def log_path(name: str) -> Path:
    """What a node's sshd says."""
    return node_dir(name) / "sshd.log"


def _failed(name: str, message: str, hint: str | None = None) -> NodeFailed:
    lines = log_path(name).read_text(errors="replace").splitlines()[-10:]
    return NodeFailed(message, node=name, hint=hint, detail="\n".join(lines))
