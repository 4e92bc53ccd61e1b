"""How nodes are reached: throw-away keys, and every text that names them (ssh_config, hosts, sshd_config, hostfile)."""

from __future__ import annotations

from pathlib import Path

from multinode.cluster.cluster import LAB_SSH_CONFIG
from multinode.lab.processes import run_all
from multinode.lab.state import STATE_DIR, LabSpec, NodeAddresses, NodeFile, node_addresses, node_dir, node_name
from multinode.node.own_files import replace_file

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
