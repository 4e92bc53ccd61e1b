"""NodeFacts: what a probe found on a node. Facts carry no judgement; None always comes with a reason in `missing`."""

from __future__ import annotations

import msgspec

__all__ = ["Gpu", "Interface", "NodeFacts", "PathFact", "Route"]


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """One network interface.

    Attributes:
        name: its name.
        addresses: its IPv4 addresses with prefix length, `10.0.0.1/24`.
        up: whether it is up and has a carrier (operstate up, or unknown for virtual ones).
        mtu: in bytes.
        speed_gbit_per_s: what the card says it negotiated.
        kind: `ethernet`, `loopback`, `bridge`, `wireless`, `virtual` or `infiniband`.
    """

    name: str
    addresses: tuple[str, ...] = ()
    up: bool = False
    mtu: int | None = None
    speed_gbit_per_s: float | None = None
    kind: str = "ethernet"


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """The way the kernel would send to a peer.

    Attributes:
        peer: the peer's address.
        source: our address that the kernel picks; None where there is no route.
        ifname: the interface of that address.
        error: why there is none.
    """

    peer: str
    source: str | None = None
    ifname: str | None = None
    error: str | None = None


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU as nvidia-smi lists it."""

    index: int
    name: str
    memory_total_mib: float | None = None
    memory_used_mib: float | None = None
    driver: str | None = None


class PathFact(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a path of the job exists on the node: `file`, `directory` or `missing`; relative ones start at cwd."""

    path: str
    kind: str
    writable: bool = False


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What one node is. Unknown keys from a newer agent are ignored; every missing value has a reason.

    Attributes:
        node: the node's name in the hostfile.
        hostname: what the node calls itself.
        user: the user that SSH logged in as.
        home: that user's home directory.
        boot_id: the kernel's boot id; equal ids mean the same machine.
        time_s: the node's wall clock when it answered, seconds since the epoch.
        cores: processors that a job may use.
        memory_total_gib: physical memory.
        disk_free_gib: free space where runs are kept.
        agent_python: version of the interpreter that runs the agent.
        python: absolute path of the job's interpreter.
        python_version: its version.
        packages: versions of torch, llamafactory, ... in the job's environment; an absent key is not installed.
        cwd: the directory in which the job would run.
        interfaces: all network interfaces.
        routes: the ways to the peers that were asked for.
        ssh_address: the node's address that SSH connected to.
        hostname_address: what the node's own name resolves to.
        gpus: its GPUs; empty when there is none.
        paths: the job's paths.
        port_users: ports that were asked for and are taken, with who holds them where that can be seen.
        env: variables of the SSH environment that would change a run (RANK, PET_*, NCCL_*, ...).
        missing: reason by name of every fact that could not be had.
    """

    node: str = ""
    hostname: str | None = None
    user: str | None = None
    home: str | None = None
    boot_id: str | None = None
    time_s: float | None = None
    cores: int | None = None
    memory_total_gib: float | None = None
    disk_free_gib: float | None = None
    agent_python: str | None = None
    python: str | None = None
    python_version: str | None = None
    packages: dict[str, str] = {}
    cwd: str | None = None
    interfaces: tuple[Interface, ...] = ()
    routes: tuple[Route, ...] = ()
    ssh_address: str | None = None
    hostname_address: str | None = None
    gpus: tuple[Gpu, ...] = ()
    paths: tuple[PathFact, ...] = ()
    port_users: dict[str, str] = {}
    env: dict[str, str] = {}
    missing: dict[str, str] = {}
