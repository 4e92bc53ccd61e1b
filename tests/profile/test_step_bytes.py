from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.profile.step_bytes import SeenTraffic
from multinode.records.samples import CallCount, NicSample, Sample, WorkerSample
from multinode.stats.unknown import known
from tests.golden import Golden
from tests.profile.seen_trainings import (
    BEGUN_NS,
    BUCKET,
    DDP,
    STEP_NS,
    STEPS,
    Passed,
    S,
    Training,
    both_ways,
    call,
    counted,
    ddp,
    end_ns,
    figures,
    fsdp,
    hybrid_calls,
    hybrid_groups,
    model,
    see,
    seen,
    zero2,
)
from tests.reasons import reasons

Calls = Callable[[int], list[CallCount]]


def codes(traffic: SeenTraffic) -> list[str]:
    return [finding.code for finding in traffic.findings]


@pytest.mark.parametrize(
    ("calls", "workers", "asked", "on_the_nic"),
    [
        # Parts of S: what a worker is asked to send, and what facts of gloo and of its NICs say a node sends.
        (ddp, 1, 1.0, 1.0),
        (ddp, 2, 1.5, 1.5),
        (zero2(1), 1, 1.5, 1.5),
        (zero2(4), 1, 4.5, 4.5),
        (zero2(1), 2, 2.25, 2.25),
    ],
)
def test_calls_and_nics_agree_for_what_gloo_makes_as_rings(
    calls: Calls, workers: int, asked: float, on_the_nic: float
) -> None:
    traffic = seen(DDP, calls=calls, workers=workers, nics=both_ways(on_the_nic * S))
    assert figures(traffic) == pytest.approx([asked * S, on_the_nic * S, on_the_nic * S], rel=0.002)
    assert traffic.findings == ()
    assert reasons(traffic.bytes_per_step) == {}


def test_fsdp_on_gloo_moves_two_where_one_and_a_half_was_asked_for_and_the_reason_is_said() -> None:
    # Of nine parts, the outermost unit's five are gathered once, the others twice.
    whole = (13 * S / 9 + S) / 2
    traffic = seen(DDP, calls=fsdp, model=model("fsdp2"), nics=both_ways(whole + S / 2))
    assert figures(traffic) == pytest.approx([whole, whole + S / 2, whole + S / 2], rel=0.002)
    (found,) = traffic.findings
    assert (found.code, found.figures["op"]) == ("gloo-reduce-scatter", "reduce_scatter")
    assert (found.figures["asked_bytes"], found.figures["expected_bytes"]) == pytest.approx((S / 2, S), rel=0.002)


def test_fsdp_on_nccl_moves_what_was_asked_for() -> None:
    whole = (13 * S / 9 + S) / 2
    traffic = seen(DDP, calls=fsdp, backend="nccl", nics=both_ways(whole))
    assert figures(traffic) == pytest.approx([whole] * 3, rel=0.002)
    assert traffic.findings == ()


def test_the_backend_that_serves_the_models_device_is_taken() -> None:
    both = "cpu:gloo,cuda:nccl"
    on_cpu = seen(DDP, calls=fsdp, backend=both)
    on_gpu = seen(DDP, calls=fsdp, backend=both, model=model("fsdp2") | {"device": "cuda"})
    assert {row.backend for row in on_cpu.calls} == {"gloo"}
    assert {row.backend for row in on_gpu.calls} == {"nccl"}
    assert known(on_cpu.bytes_per_step.expected) > 1.3 * known(on_gpu.bytes_per_step.expected)


def test_the_calls_are_listed_most_bytes_first_in_the_mean_of_the_steps() -> None:
    rows = seen(DDP, workers=2).calls
    assert [(row.op, row.ranks, row.nodes, row.count, row.source) for row in rows] == [
        ("all_reduce", 4, 2, 3.0, "ddp"),
        ("all_reduce", 4, 2, 1.0, "ddp"),
        ("all_reduce", 4, 2, 1.0, "call"),
    ]
    assert rows[0].size_bytes == BUCKET
    assert rows[0].backend == "gloo"


def test_a_node_that_sends_over_another_interface_is_named_with_it() -> None:
    def nics(node: int, _step: int) -> Passed:
        return {"ens1f0": (S if node == 0 else 900, S), "eth0": (2000 if node == 0 else S, 2000)}

    (found,) = seen(DDP, nics=nics).findings
    assert (found.code, found.node, found.figures["other"]) == ("other-interface", "node-1", "eth0")
    assert found.figures["seen_bytes"] == pytest.approx(900, rel=0.05)


def test_all_nodes_over_another_interface_leave_the_nics_figure_small() -> None:
    traffic = seen(DDP, nics=lambda _node, _step: {"ens1f0": (500, 500), "eth0": (S, S)})
    assert traffic.bytes_per_step.nic == pytest.approx(500, rel=0.05)
    (found,) = traffic.findings
    assert (found.code, found.figures["other"]) == ("other-interface", "eth0")
    assert found.message.endswith("1 more node differs in the same way.")


def test_all_interfaces_that_the_hostfile_names_count() -> None:
    def nics(_node: int, _step: int) -> Passed:
        return {"ens1f0": (S / 2, S / 2), "ens1f1": (S / 2, S / 2)}

    rails = seen(DDP, backend="nccl", nics=nics, ifnames=("ens1f0", "ens1f1"))
    assert rails.bytes_per_step.nic == pytest.approx(S, rel=0.002)
    assert rails.findings == ()
    assert codes(seen(DDP, backend="nccl", nics=nics)) == ["other-interface"]


def test_rdma_ports_count_where_they_carry_more_than_the_nic() -> None:
    traffic = seen(DDP, backend="nccl", nics=lambda _node, _step: {"ens1f0": (1000, 1000), "mlx5_0/1": (S, S)})
    assert traffic.bytes_per_step.nic == pytest.approx(S, rel=0.002)
    (found,) = traffic.findings
    assert (found.code, found.figures) == ("rdma", {"ports": "mlx5_0/1"})


def test_a_lack_that_no_nic_explains_is_called_unexplained() -> None:
    (found,) = seen(DDP, nics=both_ways(S / 2)).findings
    assert (found.code, found.node) == ("unexplained-lack", "node-0")
    assert (found.figures["seen_bytes"], found.figures["expected_bytes"]) == pytest.approx((S / 2, S), rel=0.002)


def test_nccls_tree_is_recognised_by_what_passed_the_nics() -> None:
    # Half of S up and down each edge of the trees 0-2-1 and 1-0-2.
    factors = [1.5, 1.0, 1.5]

    def nics(node: int, _step: int) -> Passed:
        return {"ens1f0": (factors[node] * S, factors[node] * S)}

    tree = seen(DDP, nodes=3, backend="nccl", nics=nics)
    (found,) = tree.findings
    assert (found.code, found.figures["algorithm"], found.figures["protocol"]) == ("other-algorithm", "tree", "Simple")
    ring = seen(DDP, nodes=3, backend="nccl", nics=both_ways(4 / 3 * S))
    assert ring.findings == ()


def test_unequal_nodes_pass_on_what_a_ring_of_all_workers_does() -> None:
    gloo = seen(DDP, unequal=(2, 1), nics=both_ways(4 / 3 * S))
    assert figures(gloo) == pytest.approx([4 / 3 * S] * 3, rel=0.002)
    assert (gloo.findings, reasons(gloo.bytes_per_step)) == ((), {})
    # Between two nodes a tree sends S once, whatever is in them.
    tree = seen(DDP, unequal=(4, 1), backend="nccl", nics=both_ways(S))
    (found,) = tree.findings
    assert (found.code, found.figures["algorithm"], found.figures["protocol"]) == ("other-algorithm", "tree", "Simple")


@pytest.mark.parametrize(("proto", "told"), [("LL", True), ("simple, ll", True), ("^LL", False), (None, False)])
def test_a_protocol_explains_large_calls_only_if_nccl_proto_names_it(proto: str | None, told: bool) -> None:  # noqa: FBT001 - a table
    def started(node: int) -> list[Sample]:
        return [WorkerSample(rank=node, local_rank=0, world_size=2, time_s=0.0, source="trainer", nccl_proto=proto)]

    (found,) = seen(DDP, backend="nccl", nics=both_ways(2 * S), more=started).findings
    assert (found.code, found.figures.get("protocol")) == (
        ("other-algorithm", "LL") if told else ("unexplained-excess", None)
    )


def test_calls_that_are_all_small_may_take_nccls_protocol_for_them() -> None:
    def small(_rank: int) -> list[CallCount]:
        return [call("all_reduce", 200_000.0, count=20)]

    (found,) = seen(DDP, backend="nccl", calls=small, nics=both_ways(2 * 4_000_000.0)).findings
    assert (found.code, found.figures["protocol"]) == ("other-algorithm", "LL")


@pytest.mark.parametrize(
    ("ifname", "networks", "shared"),
    [("lo", (None, None), True), ("eth0", ("b/1", "b/1"), True), ("eth0", ("b/1", "b/2"), False)],
)
def test_nodes_that_count_one_interface_are_told_before_anything_else(
    ifname: str,
    networks: tuple[str | None, ...],
    shared: bool,  # noqa: FBT001 - a table
) -> None:
    def started(node: int) -> list[Sample]:
        network = networks[node]
        return [WorkerSample(rank=node, local_rank=0, world_size=2, time_s=0.0, source="trainer", network=network)]

    def nics(_node: int, _step: int) -> Passed:
        return {ifname: (2 * S, 2 * S)}

    (found,) = seen(DDP, backend="nccl", nics=nics, ifname=ifname, more=started).findings
    assert (found.code, found.figures["ifname"]) == ("shared-interface" if shared else "unexplained-excess", ifname)
    counted_bytes = found.figures["seen_bytes"], found.figures["expected_bytes"]
    assert counted_bytes == pytest.approx((2 * S, 2 * S if shared else S), rel=0.002)


def test_twice_the_bytes_are_unexplained_on_gloo() -> None:
    (found,) = seen(DDP, nics=both_ways(2 * S)).findings
    assert (found.code, found.node) == ("unexplained-excess", "node-0")


def test_what_a_few_steps_carried_is_told_from_what_every_step_does() -> None:
    def nics(node: int, step: int) -> Passed:
        checkpoint = 40 * S if step == 12 and node == 0 else 0
        return {"ens1f0": (S + checkpoint, S)}

    traffic = seen(DDP, nics=nics)
    assert traffic.bytes_per_step.nic == pytest.approx(S * (15 + 40) / 15, rel=0.01)
    assert codes(traffic) == ["excess-of-few-steps"]


def idle(rate_bytes: int) -> Callable[[int], list[Sample]]:
    """A node whose NIC carries so much in the time of a step, before the training begins."""

    def samples(_node: int) -> list[Sample]:
        moments = [BEGUN_NS - 2_000_000_000 + index * STEP_NS for index in range(20)]
        return [
            NicSample(time_s=0.0, mono_ns=moment, ifname="ens1f0", tx_bytes=index * rate_bytes, rx_bytes=0)
            for index, moment in enumerate(moments)
        ]

    return samples


def test_what_passes_the_nic_without_the_training_is_told_and_not_subtracted() -> None:
    quiet = seen(DDP, more=idle(S // 200))
    assert quiet.findings == ()
    busy = seen(DDP, nics=both_ways(1.3 * S), more=idle(3 * S // 10))
    assert busy.bytes_per_step.nic == pytest.approx(1.3 * S, rel=0.01)
    assert codes(busy) == ["idle", "excess-before"]
    assert busy.findings[0].figures["idle_bytes"] == pytest.approx(0.3 * S, rel=0.01)


def sampler(_node: int) -> list[Sample]:
    """A sampler that reads the NIC at other moments than the ends of steps."""
    moments = [end_ns(0) + index * 130_000_000 for index in range(-2, STEPS)]
    samples: list[Sample] = []
    for moment in moments:
        total = counted(*[max(0.0, S * (moment - end_ns(0)) / STEP_NS)] * 2)
        samples.append(
            NicSample(
                time_s=0.0,
                mono_ns=moment,
                ifname="ens1f0",
                tx_bytes=total.tx_bytes,
                rx_bytes=total.rx_bytes,
                tx_packets=total.tx_packets,
                rx_packets=total.rx_packets,
            )
        )
    return samples


def test_without_counters_at_the_steps_ends_the_samplers_are_interpolated_and_that_is_said() -> None:
    traffic = seen(DDP, nics=None, more=sampler)
    assert traffic.bytes_per_step.nic == pytest.approx(S, rel=0.01)
    assert codes(traffic) == ["interpolated"]


def test_why_bytes_of_a_step_are_unknown_is_said(golden: Golden) -> None:
    cases = {
        "no backend of a model without a device": seen(DDP, calls=fsdp, backend="cpu:gloo,cuda:nccl", model=None),
        "no counters": seen(DDP, nics=None),
        "no interface": seen(DDP, ifname=None),
        "an operation without an algorithm": seen(DDP, calls=lambda rank: [*ddp(rank), call("reduce", S)]),
        "a receiver that may be on the node": seen(
            DDP, workers=2, calls=lambda rank: [call("send" if rank else "recv", S)]
        ),
        "uneven parts of an all-to-all": seen(DDP, calls=lambda rank: [call("all_to_all", S * (1 + rank))]),
        "no collectives recorded": seen(DDP, calls=None, nics=None),
        "nothing recorded": see(Training(nodes=2).observed()),
    }
    told = {case: reasons(found.bytes_per_step).items() for case, found in cases.items()}
    lines = [line for case in told for line in (f"# {case}", *(f"{name}: {reason}" for name, reason in told[case]))]
    golden.check("bytes_unknown.txt", "\n".join(lines) + "\n")


def test_one_node_is_expected_to_send_nothing_and_its_nic_counts_other_traffic() -> None:
    traffic = seen(DDP, nodes=1, workers=2, nics=both_ways(5000))
    assert figures(traffic) == pytest.approx([S, 0, 5000], rel=0.05)
    assert codes(traffic) == ["one-node"]
    assert figures(seen(DDP, nodes=1, workers=2, calls=None, nics=None)) == [None, 0, None]


def test_one_worker_sends_nothing_even_where_it_recorded_no_calls() -> None:
    traffic = seen(DDP, nodes=1, calls=None, nics=None)
    assert figures(traffic) == [0, 0, None]


def test_hybrid_sharding_shares_the_nic_between_the_groups_of_local_ranks() -> None:
    traffic = seen(DDP, workers=2, backend="nccl", groups=hybrid_groups, calls=hybrid_calls, nics=both_ways(S))
    # 3 x 1/2 S inside, and S/2 across from each of two workers of a node.
    assert figures(traffic) == pytest.approx([2 * S, S, S], rel=0.002)
    assert codes(traffic) == ["inside-a-node", "inside-a-node", "groups-share-a-nic"]


def test_groups_are_matched_by_their_ranks_as_names_mean_something_in_one_worker_alone() -> None:
    traffic = seen(
        DDP,
        groups=lambda rank: {f"mine-{rank}": (0, 1)},
        calls=lambda rank: [call("all_reduce", S, group=f"mine-{rank}")],
    )
    assert traffic.bytes_per_step.expected == pytest.approx(S)


def test_nccls_ring_stays_on_a_node_where_gloos_follows_the_groups_order() -> None:
    def groups(_rank: int) -> dict[str, tuple[int, ...]]:
        return {"0": (0, 2, 1, 3)}

    by_backend = {
        backend: seen(DDP, workers=2, backend=backend, groups=groups, nics=None).bytes_per_step.expected
        for backend in ("nccl", "gloo")
    }
    assert by_backend == pytest.approx({"nccl": 1.5 * S, "gloo": 3 * S})


def test_gloos_broadcast_is_sent_by_the_root_alone_and_counted_where_it_leaves() -> None:
    def nics(node: int, _step: int) -> Passed:
        return {"ens1f0": [(2 * S, 0), (S, S), (0, S), (0, S)][node]}

    traffic = seen(DDP, nodes=4, calls=lambda _rank: [call("broadcast", S)], nics=nics)
    assert figures(traffic) == pytest.approx([S, 2 * S, 2 * S], rel=0.01)
    assert codes(traffic)[0] == "gloo-broadcast"


def test_what_no_algorithm_is_known_for_is_named_unless_it_is_small() -> None:
    small = seen(DDP, calls=lambda rank: [*ddp(rank), call("reduce", 8), call("barrier", 0)])
    assert small.bytes_per_step.expected == pytest.approx(S)
    large = seen(DDP, calls=lambda rank: [*ddp(rank), call("reduce", S)])
    assert large.bytes_per_step.calls == pytest.approx(2 * S)


def test_a_send_counts_with_its_sender_and_crosses_between_workers_of_different_nodes() -> None:
    def calls(rank: int) -> list[CallCount]:
        return [call("send" if rank == 0 else "recv", S)]

    def nics(node: int, _step: int) -> Passed:
        return {"ens1f0": (S, 0) if node == 0 else (0, S)}

    assert figures(seen(DDP, calls=calls, nics=nics)) == pytest.approx([S, S, S], rel=0.01)


def test_the_busier_direction_is_compared_where_many_send_to_one() -> None:
    def calls(rank: int) -> list[CallCount]:
        return [call("send", S)] if rank else [call("recv", S, 3)]

    def nics(node: int, _step: int) -> Passed:
        return {"ens1f0": (S, 0) if node else (0, 3 * S)}

    traffic = seen(DDP, nodes=4, calls=calls, nics=nics)
    assert figures(traffic) == pytest.approx([S, 3 * S, 3 * S], rel=0.01)
    assert codes(traffic) == ["path-of-a-call"] * 2


def test_uneven_parts_of_an_all_to_all_are_not_taken_for_even_ones() -> None:
    even = seen(DDP, calls=lambda _rank: [call("all_to_all", S)], nics=both_ways(S / 2))
    assert figures(even) == pytest.approx([S / 2] * 3, rel=0.01)


def test_no_steps_or_no_records_give_no_figures() -> None:
    assert figures(seen(DDP, calls=None, nics=None)) == [None, None, None]
    assert figures(see(Training(nodes=2).observed())) == [None, None, None]


def test_workers_that_call_nothing_are_expected_to_send_nothing() -> None:
    traffic = seen(DDP, calls=lambda _rank: [], nics=both_ways(5000))
    assert figures(traffic) == pytest.approx([0, 0, 5000], rel=0.05)
    assert codes(traffic) == ["other-traffic"]
    (found,) = seen(DDP, calls=lambda _rank: []).findings
    assert (found.code, found.node, found.figures["ifname"]) == ("unexplained-traffic", "node-0", "ens1f0")


def test_few_bytes_are_not_held_against_the_nics() -> None:
    traffic = seen(DDP, calls=lambda _rank: [call("all_reduce", 4096)], nics=both_ways(9000))
    assert codes(traffic) == ["too-little"]


def test_what_is_said_of_bytes_that_differ(golden: Golden) -> None:
    def over(**ways: tuple[float, float]) -> Callable[[int, int], Passed]:
        return lambda _node, _step: {name.replace("_0_1", "_0/1"): way for name, way in ways.items()}

    def sharded(_rank: int) -> list[CallCount]:
        return [call("all_to_all", S), call("broadcast", S)]

    nccl = msgspec.structs.replace(DDP, backend="nccl")
    cases = {
        "fsdp on gloo": seen(DDP, calls=fsdp, nics=None),
        "parts and broadcasts of two workers on a node": seen(DDP, calls=sharded, workers=2, nics=None),
        "groups inside nodes and across them": seen(
            nccl, workers=2, groups=hybrid_groups, calls=hybrid_calls, nics=both_ways(S)
        ),
        "over another interface": seen(DDP, nics=over(ens1f0=(500, 500), eth0=(S, S))),
        "over an RDMA port beside the NIC": seen(nccl, nics=over(ens1f0=(S, S), mlx5_0_1=(2 * S, 2 * S))),
        "an RDMA port for a part": seen(nccl, nics=over(ens1f0=(0.6 * S, 0.6 * S), mlx5_0_1=(0.4 * S, 0.4 * S))),
        "less than expected": seen(DDP, nics=both_ways(S / 2)),
        "more than expected": seen(DDP, nics=both_ways(2 * S)),
        "more, as before the training": seen(DDP, nics=both_ways(1.3 * S), more=idle(3 * S // 10)),
        "an algorithm that fits": seen(nccl, unequal=(4, 1), nics=both_ways(S)),
        "no calls": seen(DDP, calls=lambda _rank: [], nics=both_ways(5000)),
        "no calls, and much traffic": seen(DDP, calls=lambda _rank: []),
        "few bytes": seen(DDP, calls=lambda _rank: [call("all_reduce", 4096)], nics=both_ways(9000)),
        "one node": seen(DDP, nodes=1, workers=2, nics=both_ways(5000)),
        "the sampler's counters": seen(DDP, nics=None, more=sampler),
    }
    golden.check_findings("bytes_per_step", {name: traffic.findings for name, traffic in cases.items()})


@given(
    st.lists(st.floats(min_value=2048, max_value=1e9), min_size=1, max_size=6),
    st.sampled_from(["gloo", "nccl"]),
    st.integers(min_value=2, max_value=4),
    st.integers(min_value=1, max_value=3),
)
def test_a_ring_of_all_workers_puts_on_a_nic_what_it_asks_of_a_worker(
    sizes: list[float], backend: str, nodes: int, workers: int
) -> None:
    training = Training(
        nodes=nodes, workers=workers, backend=backend, calls=lambda _rank: [call("all_reduce", one) for one in sizes]
    )
    three = see(training.observed()).bytes_per_step
    total = nodes * workers
    assert three.calls == pytest.approx(2 * (total - 1) / total * sum(sizes))
    assert three.expected == pytest.approx(three.calls)
