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

from multinode.cluster.cluster import LAB_SSH_CONFIG
from multinode.decoding import decode_json
from multinode.errors import NodeFailed
from multinode.lab.network import speed_text
from multinode.lab.state import (
    DATA_IFNAME,
    MANAGEMENT_IFNAME,
    SSHD,
    STATE_DIR,
    LabNode,
    LabSpec,
    NodeAddresses,
    NodeFile,
    assign_cores,
    children_of,
    init_environment,
    node_addresses,
    node_dir,
    node_name,
    poll,
    process_ref,
    run_all,
)
from multinode.node.files import replace_file

HOSTFILE = STATE_DIR / "hostfile"
SSH_CONFIG = Path(LAB_SSH_CONFIG)

# On a node.
SSHD_CONFIG = "/etc/ssh/sshd_config"

_CLIENT_KEY = STATE_DIR / "client_key"
_KNOWN_HOSTS = STATE_DIR / "known_hosts"
# sshd runs it at the beginning of every session, before the command; `lab exec` does the same.
REFRESH_SCRIPT = "/etc/ssh/sshrc"

_SSHD_CONFIG_TEXT = """\
ListenAddress {address}
HostKey /etc/ssh/ssh_host_ed25519_key
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
PrintMotd no
AcceptEnv LANG LC_*
Subsystem sftp internal-sftp
"""

_REFRESH_TEXT = """\
# A node remembers what it looked up, also what was not there; the controller may have made or replaced it since.
# Remounting its disks makes it look again. Both names are given so that mount does not consult fstab.
while read -r source place rest; do
  if [ "$source" = mn-disk ]; then LIBMOUNT_FORCE_MOUNT2=always mount -o remount mn-disk "$place"; fi
done < /proc/mounts > /dev/null 2>&1
"""

_HOSTFILE_HEAD = """\
# The nodes of `multinode lab up`; gone after `multinode lab down`.
# OMP_NUM_THREADS: nodes share the cores; threads that wait for a core would be taken for a slow network.
# DISABLE_VERSION_CHECK: LLaMA-Factory 0.9.5 refuses the DeepSpeed that is installed beside it otherwise.
# DS_ACCELERATOR: DeepSpeed would guess from what is installed; these nodes train on the CPU.
"""


def make_keys(spec: LabSpec) -> None:
    """Make one client key for the lab and one host key for each node."""
    keys = [(_CLIENT_KEY, "multinode-lab")]
    keys += [(_host_key(name), name) for name, _ in _nodes(spec)]
    run_all([["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)] for path, comment in keys])


def write_access_files(spec: LabSpec) -> None:
    """Write what the controller needs to reach the nodes: hostfile, ssh_config and known_hosts."""
    texts = {
        HOSTFILE: hostfile_text(spec),
        SSH_CONFIG: _ssh_config(spec, str(_CLIENT_KEY), str(_KNOWN_HOSTS)),
        _KNOWN_HOSTS: _known_hosts(spec),
    }
    for path, text in texts.items():
        replace_file(path, text.encode())


def node_files(spec: LabSpec, node_rank: int, machine_id: str) -> list[NodeFile]:
    """What differs between a node's disk and the controller's."""
    name, address = node_name(node_rank), node_addresses(spec, node_rank).management
    known_hosts = "~/.ssh/known_hosts"
    return [
        NodeFile("/etc/hostname", f"{name}\n"),
        NodeFile("/etc/hosts", _hosts(spec, node_rank)),
        NodeFile("/etc/machine-id", f"{machine_id}\n", mode=0o444),
        NodeFile(SSHD_CONFIG, sshd_config(address)),
        NodeFile("/etc/ssh/ssh_host_ed25519_key", _host_key(name).read_text(), mode=0o600),
        NodeFile("/etc/ssh/ssh_host_ed25519_key.pub", f"{_public(_host_key(name))}\n"),
        NodeFile(REFRESH_SCRIPT, _REFRESH_TEXT),
        NodeFile("/root/.ssh/authorized_keys", f"{_public(_CLIENT_KEY)}\n", mode=0o600),
        NodeFile("/root/.ssh/id_ed25519", _CLIENT_KEY.read_text(), mode=0o600),
        NodeFile("/root/.ssh/known_hosts", _known_hosts(spec), mode=0o600),
        NodeFile("/root/.ssh/config", _ssh_config(spec, "~/.ssh/id_ed25519", known_hosts), mode=0o600),
    ]


def sshd_config(address: str) -> str:
    """How a node's sshd is configured that listens at this address."""
    return _SSHD_CONFIG_TEXT.format(address=address)


def hostfile_text(spec: LabSpec) -> str:
    """The nodes, a line each."""
    lines = [_HOSTFILE_HEAD]
    job_env = " ".join(f"env.{name}={value}" for name, value in spec.job_env.items())
    for name, addresses in _nodes(spec):
        where = f"addr={addresses.data} ssh_config={SSH_CONFIG} python={spec.python}"
        lines.append(f"{name} slots={spec.slots} {where} {job_env}\n")
    return "".join(lines)


def _ssh_config(spec: LabSpec, identity: str, known_hosts: str) -> str:
    blocks = [f"Host {name}\n  HostName {addresses.management}\n" for name, addresses in _nodes(spec)]
    common = (
        f"Host {' '.join(name for name, _ in _nodes(spec))}\n  Port 22\n  User root\n  IdentityFile {identity}\n"
        f"  IdentitiesOnly yes\n  UserKnownHostsFile {known_hosts}\n  StrictHostKeyChecking yes\n"
    )
    return "".join([*blocks, common])


def _known_hosts(spec: LabSpec) -> str:
    return "".join(f"{name},{addresses.management} {_public(_host_key(name))}\n" for name, addresses in _nodes(spec))


def _hosts(spec: LabSpec, node_rank: int) -> str:
    own = node_name(node_rank)
    others = [f"{addresses.management} {name}\n" for name, addresses in _nodes(spec) if name != own]
    return "".join(["127.0.0.1 localhost\n", f"127.0.1.1 {own}\n", "::1 localhost ip6-localhost\n", *others])


def _nodes(spec: LabSpec) -> list[tuple[str, NodeAddresses]]:
    return [(node_name(rank), node_addresses(spec, rank)) for rank in range(spec.node_count)]


def _host_key(name: str) -> Path:
    return node_dir(name) / "host_key"


def _public(key: Path) -> str:
    return key.with_suffix(".pub").read_text().strip()


_INIT_PROGRAM = "import sys; sys.path.append(sys.argv[1]); from multinode.lab.node_init import main; main()"
_ROOT = Path(__file__).parents[2]
# What the kernel would say of the whole machine, or of a veth, and says otherwise on a node.
BOOT_ID_FILE = "/proc/sys/kernel/random/boot_id"
SPEED_FILE = f"/sys/class/net/{DATA_IFNAME}/speed"
# Unknown: the 10 Gbit/s of a veth would be the fastest network, and `init` would choose it.
MANAGEMENT_SPEED_FILE = f"/sys/class/net/{MANAGEMENT_IFNAME}/speed"
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


class _NodeStarted(msgspec.Struct, frozen=True, kw_only=True):
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
    """Have the node's training interface say another line rate, as a NIC does that has negotiated anew."""
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
        kernel_files={BOOT_ID_FILE: boot_id, SPEED_FILE: speed_text(spec.rate_gbit_per_s), MANAGEMENT_SPEED_FILE: "-1"},
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
        answer = decode_json(stdout or b"{}", _NodeStarted)
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
