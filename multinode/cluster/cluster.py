"""Cluster and Node: the content of a hostfile, in node-rank order. What a node really has is in its facts."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

# A leading `-` would be read as an option.
_Text = Annotated[str, Meta(pattern=r"\A(?!-)\s*\S")]
_User = Annotated[str, Meta(pattern=r"\A[^\s-]\S*\Z")]
# The kernel's limit is 15 characters. `^`, `=` and `,` are NCCL's syntax, which the plan adds.
_NAME = r"[A-Za-z0-9_.][A-Za-z0-9_.:@-]{0,14}"
_InterfaceNames = Annotated[str, Meta(pattern=rf"\A{_NAME}(?:,{_NAME}){{0,15}}\Z")]
# A device, with its port if it has several: `mlx5_0`, `mlx5_0:1`.
_HCA = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}(?::[1-9]\d{0,2})?"
_HcaNames = Annotated[str, Meta(pattern=rf"\A{_HCA}(?:,{_HCA}){{0,31}}\Z")]
_JumpHost = Annotated[str, Meta(pattern=r"\A(?:[^\s@-][^\s@]*@)?[A-Za-z0-9_.:][A-Za-z0-9_.:%-]*\Z")]
_Price = Annotated[float, Meta(ge=0, le=1e12)]


LAB_SSH_CONFIG = "/run/multinode/lab/ssh_config"
"""What the hostfile of `multinode lab up` names for each of its nodes."""


REACHING = frozenset({"user", "port", "key", "jump", "ssh_config", "slurm_job"})
"""Fields of a node that say how it is reached, and nothing of what runs there."""


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A line of the hostfile. A field is None if the line does not have its key.

    Attributes:
        name: the name that SSH uses: a host name, an address, or an alias in the SSH configuration.
        slots: workers on this node.
        gpus: GPU ids of the workers, in order; as many as `slots`.
        addr: the node's IP address on the training network.
        ifname: the node's interfaces on the training network, separated by commas. The first one has the address.
        hca: RDMA devices that NCCL may use, separated by commas, each with or without its port.
        user: SSH user.
        port: SSH port.
        key: path of the SSH private key, on the controller.
        jump: SSH jump host, `[user@]host[:port]`.
        ssh_config: an SSH configuration to read instead of ~/.ssh/config, as with `ssh -F`.
        slurm_job: id of the Slurm job whose steps reach the node, instead of SSH.
        python: interpreter of the training environment, on the node.
        workdir: working directory of the job, on the node.
        price: cost of the node per hour, in the user's currency.
        price_gpu: cost of each GPU in use per hour, in place of `price`.
        price_purchase: cost of buying the node.
        price_purchase_gpu: cost of buying each GPU in use, in place of `price_purchase`.
        env: environment variables for the job on this node only.
    """

    name: str
    slots: Annotated[int, Meta(ge=1, le=1024)] | None = None
    gpus: tuple[Annotated[int, Meta(ge=0, le=1023)], ...] | None = None
    addr: str | None = None
    ifname: _InterfaceNames | None = None
    hca: _HcaNames | None = None
    user: _User | None = None
    port: Annotated[int, Meta(ge=1, le=65535)] | None = None
    key: _Text | None = None
    jump: _JumpHost | None = None
    ssh_config: _Text | None = None
    slurm_job: Annotated[int, Meta(ge=1)] | None = None
    python: _Text | None = None
    workdir: _Text | None = None
    price: _Price | None = None
    price_gpu: _Price | None = None
    price_purchase: _Price | None = None
    price_purchase_gpu: _Price | None = None
    env: dict[str, str] = {}

    @property
    def is_virtual(self) -> bool:
        """Whether it is one of the lab's, which share this machine's processors; also of a lab that is down."""
        return self.ssh_config == LAB_SSH_CONFIG

    @property
    def ifnames(self) -> tuple[str, ...]:
        """The interfaces in the line."""
        return _split(self.ifname)

    @property
    def hcas(self) -> tuple[str, ...]:
        """The RDMA devices in the line."""
        return _split(self.hca)

    def may_use(self, device: str, port: int) -> bool:
        """Whether NCCL may use this port of an RDMA device."""
        return not self.hcas or device in self.hcas or f"{device}:{port}" in self.hcas

    def hourly(self, workers: int) -> float | None:
        """Cost of the node per hour with this number of workers, one per GPU; None if unknown."""
        return _price_of(self.price, self.price_gpu, workers)

    def purchase(self, workers: int) -> float | None:
        """Cost of buying the node, or this number of its GPUs; None if unknown."""
        return _price_of(self.price_purchase, self.price_purchase_gpu, workers)


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The nodes of a hostfile. The index of a node is its node rank.

    Attributes:
        nodes: at least one node.
        source: the hostfile's path, for messages.
        hosts: the `--hosts` argument; empty if the nodes came from elsewhere.
    """

    nodes: tuple[Node, ...]
    source: str
    hosts: str = ""

    def first(self, count: int) -> Cluster:
        """Copy of the cluster with only its first `count` nodes."""
        return msgspec.structs.replace(self, nodes=self.nodes[:count])


def _split(names: str | None) -> tuple[str, ...]:
    return tuple(names.split(",")) if names is not None else ()


def _price_of(whole: float | None, gpu: float | None, workers: int) -> float | None:
    return gpu * workers if whole is None and gpu is not None else whole


def local_cluster(slots: int, python: str) -> Cluster:
    """This machine as the only node; its workers communicate over loopback.

    Args:
        slots: workers.
        python: interpreter of the training environment.
    """
    node = Node(name="localhost", slots=slots, addr="127.0.0.1", ifname="lo", python=python)
    return Cluster(nodes=(node,), source="localhost")
