from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from multinode.network.nic_path import NicPathCheck, Way, check_nic_path
from multinode.records.samples import CollectiveSample, NicBytes
from multinode.traffic.algorithms import Layout, node_flows, rank_flows

MIB = 1 << 20
S = 16 * MIB
ITERS = 6
TWO = Layout(nodes=2)
FOUR = Layout(nodes=4)
NOTHING = NicBytes(tx_bytes=0, rx_bytes=0, tx_packets=0, rx_packets=0)


def counted(sent: float, received: float, iters: int = ITERS) -> NicBytes:
    """What a NIC counts for so much payload per iteration: 66 bytes a packet more, and bare acknowledgements."""
    tx, rx = round(sent * iters), round(received * iters)
    tx_packets, rx_packets = tx // 1448 + rx // 2896, rx // 1448 + tx // 2896
    return NicBytes(
        tx_bytes=tx + 66 * tx_packets, rx_bytes=rx + 66 * rx_packets, tx_packets=tx_packets, rx_packets=rx_packets
    )


def sample(
    node: int,
    nics: dict[str, NicBytes] | None,
    *,
    collective: str = "all_reduce",
    size_bytes: int = S,
    layout: Layout = TWO,
) -> CollectiveSample:
    return CollectiveSample(
        rank=layout.ranks[node].start,
        collective=collective,
        dtype="float",
        size_bytes=size_bytes,
        count=size_bytes // 4,
        times_us=(1000.0,) * (ITERS - 1),
        nics=nics,
        nic_iters=ITERS,
    )


def ran(
    collective: str, layout: Layout, *, backend: str = "gloo", algorithm: str | None = None, factor: float = 1.0
) -> list[CollectiveSample]:
    """Samples of a run whose traffic between nodes took ens1f0, and that between workers of a node lo."""
    nodes = node_flows(rank_flows(backend, collective, layout, algorithm=algorithm), layout)
    return [
        sample(
            number,
            {
                "ens1f0": counted(factor * node.sent * S, factor * node.received * S),
                "eth0": counted(2000, 3000),
                "docker0": NOTHING,
                "lo": counted(node.inside * S, node.inside * S),
            },
            collective=collective,
            layout=layout,
        )
        for number, node in enumerate(nodes)
    ]


def proved(
    samples: list[CollectiveSample],
    layout: Layout = TWO,
    backend: str = "gloo",
    nics: Mapping[int, tuple[str, ...]] | None = None,
) -> NicPathCheck:
    return check_nic_path(
        samples,
        nics=dict.fromkeys(range(layout.nodes), ("ens1f0",)) if nics is None else nics,
        layout=layout,
        backend=backend,
        node_names=[f"node{number}" for number in range(layout.nodes)],
    )


def told(proof: NicPathCheck) -> tuple[str, ...]:
    return tuple(finding.message for finding in proof.findings)


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all"])
@pytest.mark.parametrize("layout", [TWO, FOUR, Layout(nodes=3, workers_per_node=2), Layout.of((1, 3, 2))])
def test_a_run_over_the_right_nics_is_confirmed(collective: str, layout: Layout) -> None:
    proof = proved(ran(collective, layout), layout)
    assert proof.ok is True
    [sentence] = told(proof)
    assert sentence.startswith("The NIC counters match the expected traffic (ens1f0, within ")
    assert all(load.others == {} for load in proof.messages[0].loads)


def test_a_run_forced_over_another_interface_is_told_with_numbers() -> None:
    wrong = {"ens1f0": counted(400, 400), "eth0": counted(S, S), "lo": NOTHING}
    proof = proved([sample(0, wrong), sample(1, wrong)])
    assert proof.ok is False
    [sentence] = told(proof)
    assert sentence == (
        "node0 and node1 sent 16.0 MiB of 16.0 MiB per iteration (all_reduce of 16 MiB) over eth0, not over ens1f0. "
        "The kernel routes traffic to the other nodes over eth0, or the backend is configured to use eth0."
    )
    assert list(proof.messages[0].loads[0].others) == ["eth0"]
    [finding] = proof.findings
    assert (finding.code, finding.node) == ("other-interface", None)
    assert finding.figures == {"collective": "all_reduce", "size_bytes": S, "ifname": "ens1f0", "other": "eth0"}


def test_one_node_on_a_wrong_way_in_one_direction_is_told_alone() -> None:
    """Requests leave by a default route, answers come in on the right NIC."""
    right = {"ens1f0": counted(S, S), "eth0": NOTHING}
    wrong = {"ens1f0": counted(0.02 * S, S), "eth0": counted(0.98 * S, 0)}
    proof = proved([sample(0, right), sample(1, wrong)])
    assert proof.ok is False
    [sentence] = told(proof)
    assert sentence.startswith("node1 sent 15.7 MiB of 16.0 MiB per iteration (all_reduce of 16 MiB) over eth0, not")
    assert [load.way for load in proof.messages[0].loads] == [Way.NIC, Way.OTHER]


def test_sockets_over_all_interfaces_are_no_proof() -> None:
    """NCCL without NCCL_SOCKET_IFNAME spreads its connections over all NICs."""
    half = {"ens1f0": counted(S / 2, S / 2), "docker0": counted(S / 2, S / 2)}
    proof = proved([sample(0, half), sample(1, half)], backend="nccl")
    assert proof.ok is False
    assert (
        "sent 8.0 MiB of 16.0 MiB per iteration (all_reduce of 16 MiB) over docker0, not over ens1f0" in told(proof)[0]
    )


def test_two_lines_of_a_hostfile_that_are_one_node_are_seen_on_its_loopback() -> None:
    alone = {"ens1f0": NOTHING, "lo": counted(2 * S, 2 * S)}
    proof = proved([sample(0, alone), sample(1, alone)])
    assert proof.ok is False
    assert "over lo, not over ens1f0" in told(proof)[0]


def test_traffic_of_others_beside_the_right_nic_is_named_and_does_no_harm() -> None:
    samples = ran("all_reduce", TWO)
    for one in samples:
        assert one.nics is not None
        one.nics["bond0"] = one.nics["ens1f0"]
    proof = proved(samples)
    assert proof.ok is True
    assert list(proof.messages[0].loads[1].others) == ["bond0"]


def test_rdma_is_recognised_by_its_own_counters() -> None:
    rdma = {"ens1f0": NOTHING, "mlx5_0/1": NicBytes(tx_bytes=S * ITERS, rx_bytes=S * ITERS)}
    proof = proved([sample(0, rdma), sample(1, rdma)], backend="nccl")
    assert proof.ok is None
    [sentence] = told(proof)
    assert sentence == (
        "node0 and node1 sent 16.0 MiB of 16.0 MiB per iteration (all_reduce of 16 MiB) over the RDMA port mlx5_0/1. "
        "The counters of ens1f0 do not include RDMA."
    )


def test_bytes_that_no_counter_saw_are_told() -> None:
    unseen = {"ens1f0": NOTHING, "eth0": counted(1000, 1000)}
    proof = proved([sample(0, unseen), sample(1, unseen)])
    assert proof.ok is None
    assert told(proof) == (
        "node0 and node1 should have sent 16.0 MiB per iteration (all_reduce of 16 MiB), but no counter shows this "
        "traffic.",
    )


def test_a_nic_that_carries_more_than_the_algorithm_moves_confirms_nothing() -> None:
    proof = proved([sample(0, {"ens1f0": counted(S, S)}), sample(1, {"ens1f0": counted(1.4 * S, S)})])
    assert proof.ok is None
    [sentence] = told(proof)
    assert sentence == (
        "node1 sent 22.4 MiB per iteration (all_reduce of 16 MiB) over ens1f0, but 16.0 MiB was expected. There was "
        "other traffic, or the backend used another algorithm."
    )


def test_an_interface_that_cannot_account_for_what_is_missing_is_not_blamed() -> None:
    """An algorithm that moves less than any that is known, while a backup runs on the management network."""
    less = {"ens1f0": counted(0.6 * S, 0.6 * S), "eth0": counted(0.1 * S, 0)}
    proof = proved([sample(0, less), sample(1, less)])
    assert proof.ok is None
    assert [load.way for load in proof.messages[0].loads] == [Way.DIFFERS, Way.DIFFERS]
    spread = {"ens1f0": counted(S / 4, S / 4), **dict.fromkeys(("eth0", "ens2f0", "ens3f0"), counted(S / 4, S / 4))}
    assert proved([sample(0, spread), sample(1, spread)]).ok is False


@pytest.mark.parametrize(
    ("algorithm", "protocol", "factor"),
    [("ring", "Simple", 1.0), ("ring", "LL", 2.0), ("tree", "Simple", 1.0), ("tree", "LL128", 16 / 15)],
)
def test_the_counters_tell_which_algorithm_and_protocol_nccl_ran(algorithm: str, protocol: str, factor: float) -> None:
    layout = Layout(nodes=3, workers_per_node=4)
    samples = ran("all_reduce", layout, backend="nccl", algorithm=algorithm, factor=factor)
    proof = proved(samples, layout, "nccl")
    assert proof.ok is True
    [message] = proof.messages
    assert (message.algorithm, message.protocol) == (algorithm, protocol)
    assert told(proof)[1] == (
        f"According to the NIC counters, NCCL ran the all_reduce of 16 MiB with its {algorithm} algorithm."
    )


def test_a_ring_and_a_tree_of_two_workers_are_the_same() -> None:
    assert proved(ran("all_reduce", TWO, backend="nccl"), TWO, "nccl").messages[0].algorithm == "ring or tree"


def test_small_messages_and_what_is_not_known_are_not_judged() -> None:
    tiny = [sample(node, {"ens1f0": counted(5000, 5000)}, size_bytes=4096) for node in range(2)]
    for proof in (
        proved(tiny),
        proved(ran("all_reduce", TWO), backend="mpi"),
        proved(ran("all_reduce", TWO), nics={0: ()}),
    ):
        assert proof.ok is None
        assert told(proof) == ("Path not checked: no message was large enough for NIC counters, or data is missing.",)
    assert proved([sample(0, None)]) == NicPathCheck(ok=None)
    alone = Layout(nodes=1, workers_per_node=2)
    assert proved(ran("all_reduce", alone), alone) == NicPathCheck(ok=None)


def test_small_messages_beside_large_ones_do_not_spoil_the_proof() -> None:
    # Gloo's own headers are 590 bytes of each; a hundred iterations make a window that is large enough in itself.
    carried = counted(16384 + 590, 16384 + 590, iters=100)
    small = [
        msgspec.structs.replace(sample(node, {"ens1f0": carried}, size_bytes=16384), nic_iters=100, index=1)
        for node in range(2)
    ]
    proof = proved([*ran("all_reduce", TWO), *small])
    assert proof.ok is True
    assert [message.size_bytes for message in proof.messages] == [S, 16384]


def test_a_proof_survives_json() -> None:
    proof = proved(ran("broadcast", FOUR), FOUR)
    assert msgspec.json.decode(msgspec.json.encode(proof), type=NicPathCheck) == proof


def test_counters_that_began_anew_or_are_not_there_accuse_nobody() -> None:
    restarted = {"ens1f0": counted(-5, 0), "eth0": counted(16 << 20, 16 << 20)}
    absent = {"eth0": counted(16 << 20, 16 << 20)}
    for nics in (restarted, absent):
        proof = proved([sample(0, nics), sample(1, nics)])
        assert proof.ok is None
        assert not any("not over" in sentence for sentence in told(proof))
