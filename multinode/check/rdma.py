"""RDMA: NCCL uses InfiniBand and RoCE by default, so either every node has it or none may use it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from multinode.check.gpus import used_gpus
from multinode.check.rule import Check, CheckFinding, CheckRules, Inspection, disagreements, listed
from multinode.cluster.cluster import Node
from multinode.cluster.facts import Interface, NodeFacts, RdmaPort
from multinode.stats.unknown import Unknown, or_empty

_RDMA = CheckRules("rdma")

RDMA_ON_SOME = _RDMA.warning(
    about="RDMA works on some nodes only, so NCCL uses it only there",
    message="RDMA is active on {having} ({ports}), but here {what}. NCCL would use RDMA there but not here, so the "
    "first collective may hang, or NCCL silently falls back",
    hint="set env.NCCL_NET=Socket for every node in the hostfile. NCCL_IB_DISABLE=1 is not enough, because network "
    "plugins ignore it",
)
RDMA_IDLE = _RDMA.note(
    about="RDMA NICs without an active port",
    message="the RDMA ports of {nodes} are not active ({ports}), so NCCL uses the network interface",
    hint="to use them, check the cable and the subnet manager with ibstat on {nodes!s}",
)
RDMA_EVERYWHERE = _RDMA.note(
    about="RDMA is active on every node, so NCCL's traffic bypasses the network interfaces that multinode counts",
    message="RDMA is active on every node ({ports}). NCCL will use it, so the counters of the network interface will "
    "not show the job's traffic",
    hint="to use the network interface instead, set env.NCCL_NET=Socket for every node in the hostfile. NCCL's log "
    "then shows `Using network`",
)

LOCKED_MEMORY = _RDMA.warning(
    about="the limit on locked memory is too low for RDMA",
    message="RDMA is active, but a process may lock only {limit} MiB of memory. NCCL locks its buffers for the NIC "
    "and would fail (`ibv_reg_mr failed`, `Cannot allocate memory`)",
    hint="with docker, use --ulimit memlock=-1; otherwise run on {node} as root:\nprintf '* - memlock unlimited\\n' > "
    "/etc/security/limits.d/multinode-memlock.conf",
)
RDMA_SLOT = _RDMA.warning(
    about="an RDMA NIC's PCIe slot is slower than its link",
    message=("{port} has negotiated {rate:g} Gbit/s, but its PCIe slot carries {slot:g} Gbit/s (maximum: {most:g})"),
    hint="use another slot, set the slot's width in the BIOS, or connect both halves of a two-part NIC. To compare "
    "LnkCap and LnkSta on {node}:\nlspci -vv",
)
RDMA_HALF_A_PORT = _RDMA.note(
    about="hca= names only one of the PCIe connections of a port; each port of a DGX Spark has two",
    message="{port} has negotiated {rate:g} Gbit/s, but its PCIe connection carries only {slot:g} Gbit/s, and hca= "
    "does not name the port's other connections ({others})",
    hint="to use the whole port, name all of its connections in the hostfile: hca={devices}",
)
RDMA_NAMED_IDLE = _RDMA.warning(
    about="hca= in the hostfile names a port that is not active",
    message="hca= in the hostfile names {port}, which is {state}. NCCL ignores this port. If no other port is active, "
    "the job uses the network interface",
    hint="check the cable and switch port of {port} (for InfiniBand, also the subnet manager), or remove it from hca=",
)
RDMA_WITHOUT_ADDRESS = _RDMA.warning(
    about="one of two active RoCE ports has no IP address, so NCCL may not use it",
    message="{port} is active with {rate:g} Gbit/s, but its interface {ifname} has no IP address. NCCL may fail, or "
    "send all traffic over {other}",
    hint="give {ifname} an address in a separate network on every node, or name the ports for NCCL in the hostfile: "
    "hca={device}",
)
RDMA_OTHER_NETWORK = _RDMA.warning(
    about="an active RoCE port shares no network with the active RoCE ports of another node",
    message="{port} is in {networks}, but {peer} has no active RoCE port in this network. NCCL pairs the ports of two "
    "nodes in order, so it may pair ports that cannot connect",
    hint="compare the cables and addresses of {node} and {peer}, or name the ports that share a network in the "
    "hostfile: hca={others}",
)
RDMA_MTU = _RDMA.note(
    about="RoCE uses interfaces with an MTU below 4200, so its packets are smaller than possible",
    message="{port} sends over {ifname} with an MTU of {mtu}, so RoCE sends packets of {packet} instead of 4096 bytes",
    hint="set an MTU of 4200 or more on the switch and every node. If the switch's MTU is 9000, run as root:\nip link "
    "set {ifname} mtu 9000",
)
RDMA_ACS = _RDMA.warning(
    about=(
        "PCIe access control (ACS) between an RDMA NIC and a GPU on the same switch sends GPUDirect traffic through "
        "the CPU"
    ),
    message="PCIe access control (ACS) is on for {bridges}. It sends traffic between {ports} and the GPUs on the same "
    "switch through the CPU. GPUDirect RDMA then reaches about half of its rate, or hangs",
    hint="disable ACS in the BIOS (together with VT-d or AMD-Vi), or run on {node} as root after every boot:{fix!s}",
)
RDMA_IOMMU = _RDMA.note(
    about="an IOMMU translates the addresses of an RDMA NIC, so GPUDirect may be slow or hang",
    message="an IOMMU ({iommu}) translates the addresses of {ports}. GPUDirect RDMA then goes through the CPU, is "
    "slower, and may hang",
    hint="disable the IOMMU in the BIOS (VT-d, AMD-Vi), or add iommu=pt to the kernel command line in "
    "/etc/default/grub of {node}",
)
RDMA_FIRMWARE = _RDMA.note(
    about="RDMA NICs of the same model with different firmware on two nodes",
    message="its {board} NIC has firmware {version}, but {peer} has {expected}",
    hint="if one node is slower or fails, install the same firmware on all nodes",
)

_ROCE_MTU = 4200
# Maximum overhead of a RoCE packet; payloads are powers of two.
_ROCE_HEADERS = 58
_SHOWN = 4
_IOMMUS = ("dmar", "ivhd")
# Less than NCCL's buffers for a few channels.
_LOCKED_BYTES = 1 << 28


@Check
def check_rdma(inspection: Inspection) -> Iterator[CheckFinding]:
    """RDMA is active on all nodes that use NCCL, or on none."""
    nodes = _nodes(inspection)
    # gloo does not use RDMA, and a single node no network.
    if len(nodes) < 2 or all(_is_off(inspection, node, facts) for node, facts in nodes):  # noqa: PLR2004
        return
    having = [(node.name, _ports(facts)) for node, facts in nodes if _active(facts)]
    if len(having) == len(nodes):
        yield RDMA_EVERYWHERE.found(None, ports=having[0][1])
        return
    names = listed((name for name, _ in having), _SHOWN)
    for node, facts in nodes:
        if having and not _active(facts):
            reason = f"it is not ({_ports(facts)})" if facts.rdma else "there is none"
            yield RDMA_ON_SOME.found(node.name, having=names, ports=having[0][1], what=reason)
        elif facts.rdma and not having:
            yield RDMA_IDLE.found(node.name, ports=_ports(facts))


@Check
def check_locked_memory(inspection: Inspection) -> Iterator[CheckFinding]:
    """NCCL may lock the buffers for an RDMA NIC."""
    for node, facts in _nodes(inspection):
        locked = facts.limits.get("locked_memory_bytes")
        # The kernel does not apply the limit to root, except to a container's root.
        is_free = (facts.user == "root" and isinstance(facts.container, Unknown)) or _is_off(inspection, node, facts)
        if locked is not None and locked < _LOCKED_BYTES and _active(facts) and not is_free:
            yield LOCKED_MEMORY.found(node.name, limit=locked >> 20)


@Check
def check_rdma_ports(inspection: Inspection) -> Iterator[CheckFinding]:
    """Each active port reaches its negotiated rate, to every other node."""
    nodes = [(node, facts) for node, facts in _nodes(inspection) if not _is_off(inspection, node, facts)]
    if len(nodes) < 2:  # noqa: PLR2004 - a single node needs no network
        return
    for node, facts in nodes:
        ports = [port for port in facts.rdma if port.state == "ACTIVE"]
        for port in facts.rdma if node.hcas else ():
            if port.state not in {"ACTIVE", None}:
                yield RDMA_NAMED_IDLE.found(node.name, port=_name(port), state=port.state)
        for port in ports:
            slot, rate = port.pcie_gbit_per_s, port.rate_gbit_per_s
            if slot is not None and rate is not None and slot < rate:
                yield from _judge_slot(node, port, inspection.facts[node.name], slot, rate)
        for port in ports:
            if port.link_layer == "Ethernet":
                yield from _judge_roce(node, facts, port, nodes)


def _judge_slot(node: Node, port: RdmaPort, facts: NodeFacts, slot: float, rate: float) -> Iterator[CheckFinding]:
    """A slot that carries less than the link; all PCIe connections of the port count, even if NCCL uses one alone."""
    twins = [other for other in facts.rdma if other.state == "ACTIVE" and port.shares_port(other)]
    if slot + sum(twin.pcie_gbit_per_s or 0.0 for twin in twins) < rate:
        most = port.pcie_max_gbit_per_s or slot
        yield RDMA_SLOT.found(node.name, port=_name(port), rate=rate, slot=slot, most=most)
        return
    unused = [twin for twin in twins if not node.may_use(twin.device, twin.port)]
    if unused:
        yield RDMA_HALF_A_PORT.found(
            node.name,
            port=_name(port),
            rate=rate,
            slot=slot,
            others=listed(map(_name, unused), _SHOWN),
            devices=",".join((*node.hcas, *(twin.device for twin in unused))),
        )


def _judge_roce(
    node: Node, mine: NodeFacts, port: RdmaPort, nodes: Sequence[tuple[Node, NodeFacts]]
) -> Iterator[CheckFinding]:
    interface = _interface(mine, port)
    if interface is None:
        return
    addressed = [port for port in _roce(mine) if (other := _interface(mine, port)) is not None and other.addresses]
    if not interface.addresses:
        if addressed:
            yield RDMA_WITHOUT_ADDRESS.found(
                node.name,
                port=_name(port),
                rate=port.rate_gbit_per_s or 0.0,
                ifname=interface.name,
                other=listed(map(_name, addressed), _SHOWN),
                device=",".join(port.device for port in addressed),
            )
        return
    if interface.mtu is not None and interface.mtu < _ROCE_MTU:
        packet = 1 << max(8, (interface.mtu - _ROCE_HEADERS).bit_length() - 1)
        yield RDMA_MTU.found(node.name, port=_name(port), ifname=interface.name, mtu=interface.mtu, packet=packet)
    own = set(map(str, interface.networks))
    for peer, facts in nodes:
        there = {
            str(network)
            for port in _roce(facts)
            if (other := _interface(facts, port)) is not None
            for network in other.networks
        }
        # The network of a port without an address is unknown.
        is_whole = all((other := _interface(facts, port)) is not None and other.addresses for port in _roce(facts))
        if peer.name != node.name and is_whole and there and not own & there:
            meeting = [
                port.device
                for port in addressed
                if (other := _interface(mine, port)) is not None and set(map(str, other.networks)) & there
            ]
            yield RDMA_OTHER_NETWORK.found(
                node.name,
                port=_name(port),
                networks=listed(sorted(own)),
                peer=peer.name,
                others=",".join(meeting) or "NAMES",
            )
            return


@Check
def check_rdma_path(inspection: Inspection) -> Iterator[CheckFinding]:
    """Traffic between an active port and a GPU on its switch stays below the switch."""
    for node, facts in _nodes(inspection):
        ports = [port for port in facts.rdma if port.state == "ACTIVE"]
        if len(inspection.cluster.nodes) == 1 or _is_off(inspection, node, facts):
            continue
        apart = [port for port in ports if port.acs]
        if apart:
            bridges = tuple(dict.fromkeys(bridge for port in apart for bridge in port.acs))
            yield RDMA_ACS.found(
                node.name,
                bridges=listed(bridges, _SHOWN),
                ports=listed(map(_name, apart), _SHOWN),
                fix=("", *(f"setpci -s {bridge} ECAP_ACS+0x6.w=0000" for bridge in bridges)),
            )
            continue
        # Arm's are always on, and harmless.
        translated = [port for port in ports if (port.iommu or "").startswith(_IOMMUS)]
        if translated:
            names = listed(map(_name, translated), _SHOWN)
            yield RDMA_IOMMU.found(node.name, iommu=translated[0].iommu, ports=names)


@Check
def check_rdma_firmware(inspection: Inspection) -> Iterator[CheckFinding]:
    """NICs of one model have the same firmware."""
    boards = sorted({port.board for _, facts in inspection.known for port in facts.rdma if port.board})
    for board in boards:
        versions = {
            node.name: next((port.firmware for port in facts.rdma if port.board == board), None)
            for node, facts in inspection.known
        }
        firmware = {name: version for name, version in versions.items() if version is not None}
        for name, version, peer, expected in disagreements(firmware, majority=True):
            yield RDMA_FIRMWARE.found(name, board=board, version=version, peer=peer, expected=expected)


def _nodes(inspection: Inspection) -> list[tuple[Node, NodeFacts]]:
    return [
        (
            node,
            msgspec.structs.replace(
                facts, rdma=tuple(port for port in facts.rdma if node.may_use(port.device, port.port))
            ),
        )
        for node, facts in inspection.known
        if used_gpus(inspection, node, facts)
    ]


def _roce(facts: NodeFacts) -> list[RdmaPort]:
    return [port for port in facts.rdma if port.state == "ACTIVE" and port.link_layer == "Ethernet"]


def _interface(facts: NodeFacts, port: RdmaPort) -> Interface | None:
    return next((interface for interface in or_empty(facts.interfaces) if interface.name == port.ifname), None)


def _name(port: RdmaPort) -> str:
    return f"{port.device}:{port.port}"


def _active(facts: NodeFacts) -> bool:
    return any(port.state == "ACTIVE" for port in facts.rdma)


def _is_off(inspection: Inspection, node: Node, facts: NodeFacts) -> bool:
    """Environment variables take precedence over NCCL's configuration files."""
    files = {name: value for values in facts.nccl_files.values() for name, value in values.items()}
    env = files | inspection.env(node)
    return env.get("NCCL_IB_DISABLE") == "1" or env.get("NCCL_NET", "").lower() == "socket"


def _ports(facts: NodeFacts) -> str:
    words = ([f"{port.device}:{port.port}", port.link_layer, port.state] for port in facts.rdma[:_SHOWN])
    return ", ".join(" ".join(filter(None, each)) for each in words)
