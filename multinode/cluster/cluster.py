"""Cluster and Node: what a hostfile says, in node-rank order. Says nothing about what a node really has (facts)."""

from __future__ import annotations

import sys
from typing import Annotated

import msgspec
from msgspec import Meta

# What begins with `-` would be taken for an option by the first program that is given it.
_Text = Annotated[str, Meta(pattern=r"\A(?!-)\s*\S")]
_User = Annotated[str, Meta(pattern=r"\A[^\s-]\S*\Z")]
# The kernel's limit is 15 characters. `^`, `=` and `,` are NCCL's syntax: the plan writes that itself.
_NAME = r"[A-Za-z0-9_.][A-Za-z0-9_.:@-]{0,14}"
_InterfaceNames = Annotated[str, Meta(pattern=rf"\A{_NAME}(?:,{_NAME}){{0,15}}\Z")]
# Of a device and, if it has several, of its port: `mlx5_0`, `mlx5_0:1`.
_HCA = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}(?::[1-9]\d{0,2})?"
_HcaNames = Annotated[str, Meta(pattern=rf"\A{_HCA}(?:,{_HCA}){{0,31}}\Z")]
_JumpHost = Annotated[str, Meta(pattern=r"\A(?:[^\s@-][^\s@]*@)?[A-Za-z0-9_.:][A-Za-z0-9_.:%-]*\Z")]
_Price = Annotated[float, Meta(ge=0, le=sys.float_info.max)]


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line of the hostfile. None means that the line does not say.

    Attributes:
        name: what SSH connects to: a host name, an address, or an alias of the SSH configuration.
        slots: workers on this node.
        gpus: GPU ids of the workers, in order; their number equals `slots`.
        addr: the node's IP address on the data plane.
        ifname: the node's interface on the data plane; of several with commas between, the first has the address.
        hca: the RDMA devices that NCCL may use, with commas between, each with or without its port.
        user: SSH user.
        port: SSH port.
        key: path of the SSH private key, on the controller.
        jump: SSH jump host, `[user@]host[:port]`.
        ssh_config: an SSH configuration to read instead of ~/.ssh/config, as `ssh -F` does.
        slurm_job: id of the Slurm job whose steps reach the node, in place of SSH.
        python: interpreter of the training environment, on the node.
        workdir: directory in which the job runs, on the node.
        price: cost of the node per hour, in the user's currency; `price_gpu` of each GPU in use, in its place.
        price_purchase: cost of buying the node; `price_purchase_gpu` of each GPU in use, in its place.
        env: environment variables for the job on this node alone.
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
    def ifnames(self) -> tuple[str, ...]:
        """The interfaces that the line names."""
        return _split(self.ifname)

    @property
    def hcas(self) -> tuple[str, ...]:
        """The RDMA devices that the line names."""
        return _split(self.hca)

    def may_use(self, device: str, port: int) -> bool:
        """Whether the line leaves this port of an RDMA device to NCCL."""
        return not self.hcas or device in self.hcas or f"{device}:{port}" in self.hcas

    def hourly(self, workers: int) -> float | None:
        """What the node costs per hour with so many workers on it, one a GPU; None is unknown."""
        return _price_of(self.price, self.price_gpu, workers)

    def purchase(self, workers: int) -> float | None:
        """What the node, or so many of its GPUs, costs to buy; None is unknown."""
        return _price_of(self.price_purchase, self.price_purchase_gpu, workers)


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The nodes of a hostfile; a node's index is its node rank.

    Attributes:
        nodes: at least one node.
        source: the hostfile's path, for messages.
        hosts: what `--hosts` named; empty where something else did.
    """

    nodes: tuple[Node, ...]
    source: str
    hosts: str = ""

    def first(self, count: int) -> Cluster:
        """The same cluster with its first `count` nodes only."""
        return msgspec.structs.replace(self, nodes=self.nodes[:count])


def _split(names: str | None) -> tuple[str, ...]:
    return tuple(names.split(",")) if names is not None else ()


def _price_of(whole: float | None, gpu: float | None, workers: int) -> float | None:
    return gpu * workers if whole is None and gpu is not None else whole


def local_cluster(slots: int, python: str) -> Cluster:
    """One node that is this very machine; what its workers send each other goes over its loopback.

    Args:
        slots: workers.
        python: interpreter of the training environment.
    """
    node = Node(name="localhost", slots=slots, addr="127.0.0.1", ifname="lo", python=python)
    return Cluster(nodes=(node,), source="localhost")
