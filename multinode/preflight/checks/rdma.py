"""RDMA: NCCL takes InfiniBand and RoCE without being asked, so either every node has it or none may use it."""

from __future__ import annotations

from collections.abc import Iterator

from multinode.core.cluster.cluster import Node
from multinode.core.cluster.facts import NodeFacts
from multinode.preflight.checks.gpus import used_gpus
from multinode.preflight.inspection import Inspection
from multinode.preflight.rule import Case, Check, Rule, listed

__all__ = ["check_locked_memory", "check_rdma"]

RDMA_ON_SOME = Rule(
    "rdma",
    "warning",
    catches="RDMA that works on some nodes only: NCCL takes it there, and the others cannot follow",
    message="RDMA is active on {having} ({ports}), and here {what}: NCCL would take it there and cannot here, and the "
    "first collective may hang or fall back without a word",
    hint="on every node in the hostfile: env.NCCL_NET=Socket (a network plugin ignores NCCL_IB_DISABLE=1)",
)
RDMA_IDLE = Rule(
    "rdma",
    "note",
    catches="RDMA NICs without an active port",
    message="the RDMA ports of {nodes} are not active ({ports}): NCCL passes them over and uses the network interface",
    hint="if it should be used: ibstat on {nodes!s} shows cable and subnet manager; else nothing needs to be done",
)
RDMA_EVERYWHERE = Rule(
    "rdma",
    "note",
    catches="RDMA on every node: NCCL's traffic does not go where multinode counts it",
    message="RDMA is active on every node ({ports}): NCCL will use it beside the network interface, whose counters "
    "then do not show the training's traffic",
    hint="to stay on the interface: env.NCCL_NET=Socket on every node in the hostfile; the log says `Using network`",
)

LOCKED_MEMORY = Rule(
    "rdma",
    "warning",
    catches="a limit on locked memory where RDMA needs to lock its buffers",
    message="a process may lock {limit} MiB of memory, and RDMA is active here: NCCL locks its buffers for the NIC "
    "and fails (`ibv_reg_mr failed`, `Cannot allocate memory`)",
    hint="docker: --ulimit memlock=-1; else on {node}, as root:\n"
    "printf '* - memlock unlimited\\n' > /etc/security/limits.d/multinode-memlock.conf",
)

_SHOWN = 4
# Less than a few channels of NCCL need for their buffers.
_LOCKED_BYTES = 1 << 28


@Check
def check_rdma(inspection: Inspection) -> Iterator[Case]:
    """RDMA is active on all nodes where NCCL runs, or on none."""
    nodes = [(node, found) for node, found in inspection.known if used_gpus(inspection, node, found)]
    # gloo knows no RDMA, and a single node no network.
    if len(nodes) < 2 or all(_is_off(inspection, node, found) for node, found in nodes):  # noqa: PLR2004
        return
    having = [(node.name, _ports(found)) for node, found in nodes if _active(found)]
    if len(having) == len(nodes):
        yield RDMA_EVERYWHERE.found(None, ports=having[0][1])
        return
    names = listed((name for name, _ in having), _SHOWN)
    for node, found in nodes:
        if having and not _active(found):
            what = f"it is not ({_ports(found)})" if found.rdma else "there is none"
            yield RDMA_ON_SOME.found(node.name, having=names, ports=having[0][1], what=what)
        elif found.rdma and not having:
            yield RDMA_IDLE.found(node.name, ports=_ports(found))


@Check
def check_locked_memory(inspection: Inspection) -> Iterator[Case]:
    """NCCL may lock the buffers that it hands to an RDMA card."""
    for node, found in inspection.known:
        locked = found.limits.get("locked_memory_bytes")
        # The kernel does not hold root to the limit; it does hold a container's root to it.
        is_free = (found.user == "root" and found.container is None) or _is_off(inspection, node, found)
        on_gpus = bool(used_gpus(inspection, node, found))
        if locked is not None and locked < _LOCKED_BYTES and on_gpus and _active(found) and not is_free:
            yield LOCKED_MEMORY.found(node.name, limit=locked >> 20)


def _active(found: NodeFacts) -> bool:
    return any(port.state == "ACTIVE" for port in found.rdma)


def _is_off(inspection: Inspection, node: Node, found: NodeFacts) -> bool:
    """Whether NCCL has been told to leave RDMA alone; the environment wins over its files."""
    files = {name: value for values in found.nccl_files.values() for name, value in values.items()}
    env = files | inspection.env(node)
    return env.get("NCCL_IB_DISABLE") == "1" or env.get("NCCL_NET", "").lower() == "socket"


def _ports(found: NodeFacts) -> str:
    words = ([f"{port.device}:{port.port}", port.link_layer, port.state] for port in found.rdma[:_SHOWN])
    return ", ".join(" ".join(filter(None, each)) for each in words)
