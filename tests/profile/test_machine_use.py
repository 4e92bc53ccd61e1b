from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import pytest

from multinode.contrast.side import make_side
from multinode.profile.machine_use import GpuUse, NodeUse, use_of
from multinode.profile.measured import energy_of
from multinode.profile.nics import RATES
from multinode.profile.observed import ObservedNode, observe
from multinode.profile.summary_sheets import summary_sheets
from multinode.records.samples import (
    CgroupSample,
    CpuSample,
    NicBytes,
    NicSample,
    NoteSample,
    Sample,
    StepSample,
    TcpSample,
    WorkerSample,
    parse_samples,
)
from multinode.stats.unknown import UNMEASURED, Unknown, known, or_unknown, reason_of, unknown_fields
from tests import make
from tests.contrast.made_up_sides import node_use, run_of, summary_of

SECOND = 1_000_000_000
# The training begins ten seconds after the samplers; a step a second; the first five are warm-up.
BEGIN_S, STEPS, WARM_UP = 10, 20, 5
# The measured steps begin here, by the node's clock, and end there.
START_S, END_S = BEGIN_S + WARM_UP, BEGIN_S + STEPS
MBYTE = 1_000_000


def steps(rank: int = 0, **changes: Any) -> list[StepSample]:
    return [
        StepSample(rank=rank, step=step, time_s=0, mono_ns=(BEGIN_S + step) * SECOND, step_time_us=1e6, **changes)
        for step in range(1, STEPS + 1)
    ]


def missing(use: NodeUse) -> list[tuple[str, ...]]:
    """Which figures of the node the screen says are unknown, and why."""
    summary = make.no_steps(nodes=(use,))
    return [row for sheet in summary_sheets(summary) if sheet.title == "missing" for row in sheet.rows]


def used(*samples: Sample, ifname: str | None = "ens1f0", ranks: tuple[int, ...] = (0,)) -> NodeUse:
    """The use of a node with these samples beside its steps."""
    node = ObservedNode(
        name="node0",
        node_rank=0,
        ranks=ranks,
        ifname=ifname,
        link_gbit_per_s=1.0,
        samples=(*(step for rank in ranks for step in steps(rank)), *samples),
    )
    return use_of(node, observe("r", [node]))


def nic(moment_s: float, rx: float, tx: float = 0, ifname: str = "ens1f0") -> NicSample:
    return NicSample(time_s=0, mono_ns=round(moment_s * SECOND), ifname=ifname, rx_bytes=round(rx), tx_bytes=round(tx))


def nics(rate: Callable[[int], float], moments: Iterable[int] = range(32), **changes: Any) -> list[NicSample]:
    """A NIC that receives so many bytes in each second, and sends twice as many."""
    total, samples = 0.0, []
    for moment in moments:
        samples.append(nic(moment, total, 2 * total, **changes))
        total += rate(moment)
    return samples


def test_a_nics_rate_is_that_of_the_steps_that_count_alone() -> None:
    # Ten MB a second while they run, and much more before and after.
    use = used(*nics(lambda second: 10 * MBYTE if START_S <= second < END_S else 60 * MBYTE))
    (one,) = use.nics
    assert one.ifname == "ens1f0"
    assert one.in_gbit_per_s == pytest.approx(0.08)
    assert one.out_gbit_per_s == pytest.approx(0.16)
    assert one.share == pytest.approx(0.16)
    assert one.link_gbit_per_s == 1.0


def test_between_two_samples_a_line_is_drawn() -> None:
    # Every four seconds, so that none is at an end of the measured steps.
    use = used(*nics(lambda _: 40 * MBYTE, moments=range(1, 40))[::4])
    assert use.nics[0].in_gbit_per_s == pytest.approx(0.32)


def test_the_peak_is_the_highest_second_and_not_a_moment() -> None:
    bursts = nics(lambda second: 50 * MBYTE if second % 5 == 0 else 0)
    # Read again at once: two readings that are next to each other say nothing of a rate.
    jitter = [nic(20.001, bursts[20].rx_bytes + MBYTE, bursts[20].tx_bytes + MBYTE)]
    (one,) = used(*bursts, *jitter).nics
    assert one.in_gbit_per_s == pytest.approx(0.08)
    assert one.peak_in_gbit_per_s == pytest.approx(0.4)
    assert one.peak_out_gbit_per_s == pytest.approx(0.8)


def test_steps_that_read_the_nic_more_often_than_the_sampler_are_taken() -> None:
    sampled = nics(lambda _: 10 * MBYTE)[::10]
    counted = [
        msgspec.structs.replace(step, nics={"ens1f0": NicBytes(rx_bytes=step.step * 20 * MBYTE, tx_bytes=0)})
        for step in steps()
    ]
    node = ObservedNode(name="node0", node_rank=0, ranks=(0,), ifname="ens1f0", samples=(*counted, *sampled))
    (one,) = use_of(node, observe("r", [node])).nics
    assert one.in_gbit_per_s == pytest.approx(0.16)
    assert one.out_gbit_per_s == 0
    assert one.peak_in_gbit_per_s == pytest.approx(0.16)


def test_what_passes_before_the_first_worker_begins_is_idle() -> None:
    traffic = nics(lambda second: MBYTE if second < 8 else 30 * MBYTE)
    workers = [
        WorkerSample(rank=rank, local_rank=rank, world_size=2, time_s=0, source="trainer", begun_mono_ns=begun * SECOND)
        for rank, begun in ((0, 9), (1, 8))
    ]
    (one,) = used(*traffic, *workers, ranks=(0, 1)).nics
    assert one.idle_in_gbit_per_s == pytest.approx(0.008)
    assert one.idle_out_gbit_per_s == pytest.approx(0.016)
    (unknown,) = used(*traffic).nics
    assert unknown.idle_in_gbit_per_s is None


def test_faults_are_of_the_whole_run_and_of_both_ways() -> None:
    first = {"rx_errors": 5, "tx_errors": 1, "rx_dropped": 0, "tx_dropped": 7}
    last = {"rx_errors": 8, "tx_errors": 2, "rx_dropped": 2, "tx_dropped": 7}
    samples = [msgspec.structs.replace(nic(moment, moment), **told) for moment, told in ((0, first), (31, last))]
    (one,) = used(*samples).nics
    assert (one.errors, one.drops) == (4, 2)
    (port,) = used(*nics(lambda _: 1, ifname="mlx5_0/1")).nics
    assert (port.errors, port.drops, port.link_gbit_per_s, port.share) == (UNMEASURED, UNMEASURED, None, UNMEASURED)


def test_the_nic_of_the_data_plane_comes_first_and_the_loopback_not_at_all() -> None:
    samples = [one for name in ("lo", "a0", "mlx5_0/1", "ens1f0", "a\nb") for one in nics(lambda _: 1, ifname=name)]
    assert [one.ifname for one in used(*samples).nics] == ["ens1f0", "a0", "mlx5_0/1"]


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([*nics(lambda _: MBYTE)[:20], *(nic(20 + n, n) for n in range(12))], "the counter went backwards"),
        (nics(lambda _: 1 << 50), "its counter shows more than any NIC can carry"),
        (nics(lambda _: MBYTE)[:17], "not sampled for half of the time"),
        (nics(lambda _: MBYTE)[:1], "not sampled for half of the time"),
    ],
)
def test_counters_that_cannot_be_give_no_rate_and_say_why(samples: list[NicSample], reason: str) -> None:
    use = used(*samples)
    (one,) = use.nics
    assert unknown_fields(one) == dict.fromkeys(RATES, Unknown(reason))
    assert (one.errors, one.share) == (UNMEASURED, UNMEASURED)
    assert [row for row in missing(use) if row[0] == "ens1f0"] == [("ens1f0", reason)]


def test_a_nic_that_began_anew_before_the_steps_that_count_has_its_rate() -> None:
    anew = [nic(moment, MBYTE * (moment + (900 if moment < 5 else 0))) for moment in range(32)]
    assert used(*anew).nics[0].in_gbit_per_s == pytest.approx(0.008)


def test_more_than_the_link_can_is_what_it_says_of_itself_that_is_wrong() -> None:
    use = used(*nics(lambda _: 100 * MBYTE))
    assert use.nics[0].out_gbit_per_s == pytest.approx(1.6)
    assert "1 Gbit/s" in reason_of(use.nics[0].share)


def processors(**figures: Callable[[int], float | None]) -> list[CpuSample]:
    return [
        CpuSample(time_s=0, mono_ns=moment * SECOND, **{name: figure(moment) for name, figure in figures.items()})
        for moment in range(32)
    ]


def test_processors_are_means_over_the_steps_that_count() -> None:
    use = used(
        *processors(
            busy_percent=lambda moment: None if not moment else 80 if START_S < moment <= END_S else 5,
            iowait_percent=lambda moment: 10 if moment == START_S + 1 else 0,
            steal_percent=lambda _: 1.5,
            memory_available_gib=lambda moment: {3: 1.0, 20: 6.0}.get(moment, 30.0),
        )
    )
    assert use.cpu_busy_percent == pytest.approx(80)
    assert use.cpu_iowait_percent == pytest.approx(10 / 15)
    assert use.cpu_steal_percent == pytest.approx(1.5)
    # Before the measured steps there was less.
    assert use.memory_available_gib == 6.0


def test_the_jobs_cores_stand_for_the_time_since_they_were_told_before() -> None:
    # Told every fifth second only: of 15 seconds ten had four cores, and five had one.
    use = used(*processors(job_cores=lambda moment: None if moment % 5 else 4.0 if moment <= 25 else 1.0))
    assert use.job_cores == pytest.approx(3.0)


def limits(quota_cores: float | None, held: Callable[[int], float], **changes: Any) -> list[CgroupSample]:
    """A group that is held for a part of each second."""
    total, samples = 0.0, []
    for moment in range(32):
        samples.append(
            CgroupSample(
                time_s=0,
                mono_ns=moment * SECOND,
                quota_cores=quota_cores,
                throttled_us=total,
                periods=moment * 10,
                throttled_periods=0,
                **changes,
            )
        )
        total += held(moment) * 1e6
    return samples


def test_a_limited_cgroup_is_held_for_a_part_of_the_time() -> None:
    use = used(*limits(0.3, lambda second: 0.7 if second >= START_S else 0.0))
    assert use.quota_cores == 0.3
    assert use.throttled_share == pytest.approx(0.7)
    # The kernel adds up all processors; more than all of the time cannot be held.
    assert used(*limits(0.3, lambda _: 1.7)).throttled_share == 1.0


def test_without_a_limit_nothing_is_held_and_the_reason_says_which() -> None:
    free = used(*limits(None, lambda _: 0.0))
    assert (free.quota_cores, free.throttled_share) == (Unknown("its cgroup has no limit"), UNMEASURED)
    note = NoteSample(message="no control group with the cpu controller can be seen", lacks="cgroup")
    unseen = used(note)
    assert reason_of(unseen.quota_cores) == "no control group with the cpu controller can be seen"
    moved = used(*limits(2.0, lambda second: -0.5 if second == 20 else 0.1))
    assert (moved.quota_cores, moved.throttled_share) == (2.0, Unknown("the counter went backwards"))


def tcp(*counts: tuple[int, int]) -> list[TcpSample]:
    return [
        TcpSample(time_s=0, mono_ns=moment * SECOND, sent_segments=sent, retransmitted_segments=again)
        for moment, (sent, again) in enumerate(counts)
    ]


def test_segments_sent_again_are_a_part_of_all_that_were_sent() -> None:
    assert used(*tcp((1000, 5), (1500, 9), (1990, 15))).retransmitted_share == pytest.approx(0.01)
    assert reason_of(used(*tcp((7, 0), (7, 0))).retransmitted_share) == "nothing was sent"
    assert reason_of(used(*tcp((7, 3), (9, 1))).retransmitted_share) == "the counter went backwards"
    assert reason_of(used().retransmitted_share) == "fewer than two samples"


def test_why_there_is_no_gpu_is_said_by_the_sampler_itself() -> None:
    def told(*notes: NoteSample) -> list[tuple[str, str, str]]:
        return [(note.code, note.concerns, note.message) for note in used(*notes).notes]

    assert told(NoteSample(message="Driver Not Loaded", lacks="gpus")) == [("gpus-unread", "gpus", "Driver Not Loaded")]
    unsampled = [("gpus-not-sampled", "gpus", "no GPU was sampled")]
    assert told() == unsampled
    assert told(NoteSample(message="by a worker", rank=0, lacks="gpus")) == unsampled


def test_workers_have_their_highest_memory() -> None:
    node = ObservedNode(
        name="node0",
        node_rank=0,
        ranks=(0, 1),
        samples=(*steps(0, peak_memory_bytes=3 << 30, peak_reserved_bytes=4 << 30), *steps(1), *steps(5)),
    )
    use = use_of(node, observe("r", [node]))
    assert (use.peak_worker_memory_gib, use.peak_worker_reserved_gib) == ({0: 3.0}, {0: 4.0})


def test_a_node_without_steps_has_what_does_not_depend_on_them() -> None:
    broken = [msgspec.structs.replace(nic(moment, moment), rx_errors=errors) for moment, errors in ((0, 1), (9, 4))]
    node = ObservedNode(
        name="node0",
        node_rank=0,
        ranks=(0,),
        ifname="ens1f0",
        samples=(*broken, *tcp((0, 0), (99, 1))),
    )
    use = use_of(node, observe("r", [node]))
    assert use.window_s == Unknown("none of its workers recorded a measured step")
    assert (use.nics[0].errors, use.nics[0].in_gbit_per_s) == (3, UNMEASURED)
    rows = [name for name, reason in missing(use) if reason == reason_of(use.window_s)]
    assert rows == ["window"]  # once, not for each figure of the window
    assert use.retransmitted_share == pytest.approx(0.01)


def test_a_short_training_without_warm_up_is_seen_from_its_first_step_on() -> None:
    (only,) = steps()[:1]
    traffic = nics(lambda second: 5 * MBYTE if second == BEGIN_S else 0)
    node = ObservedNode(name="node0", node_rank=0, ranks=(0,), ifname="ens1f0", samples=(only, *traffic))
    assert use_of(node, observe("r", [node])).nics[0].in_gbit_per_s == pytest.approx(0.04)


def of_two(own: Sequence[StepSample]) -> NodeUse:
    """The use of a node that recorded these steps, beside one that recorded all."""
    traffic = nics(lambda second: 10 * MBYTE if START_S <= second < END_S else 60 * MBYTE)
    node = ObservedNode(name="node0", node_rank=0, ranks=(0,), ifname="ens1f0", samples=(*own, *traffic))
    other = ObservedNode(name="node1", node_rank=1, ranks=(1,), samples=tuple(steps(1)))
    return use_of(node, observe("r", [node, other]))


@pytest.mark.parametrize("lost", [WARM_UP, WARM_UP + 1, STEPS])
def test_a_record_that_is_lost_at_an_end_of_the_steps_that_count_leaves_the_others(lost: int) -> None:
    use = of_two([step for step in steps() if step.step != lost])
    assert known(use.window_s) > 0
    assert use.nics[0].in_gbit_per_s == pytest.approx(0.08)


def test_why_the_steps_that_count_are_not_found_in_time_is_told_as_it_is() -> None:
    untimed = [msgspec.structs.replace(step, step_time_us=None) for step in steps() if step.step > WARM_UP]
    assert reason_of(of_two(untimed).window_s) == "the start of step 6, the first measured one, is unknown"
    backwards = [msgspec.structs.replace(step, mono_ns=(90 - step.step) * SECOND) for step in steps()]
    assert reason_of(of_two(backwards).window_s).endswith("are implausible")
    assert reason_of(of_two(steps()[:WARM_UP]).window_s) == "none of its workers recorded a measured step"


# The most that a record may hold; what is more makes it none.
HUGE = 1 << 60


@pytest.mark.parametrize(
    "record",
    [
        {"kind": "nic", "ifname": "ens1f0", "rx_bytes": HUGE, "tx_bytes": -HUGE},
        {"kind": "nic", "ifname": "ens1f0", "rx_bytes": 1, "tx_bytes": 1, "mono_ns": HUGE},
        {"kind": "nic", "ifname": "ens1f0", "rx_bytes": 1, "tx_bytes": 1, "mono_ns": -HUGE},
        {"kind": "cpu", "busy_percent": 1e308, "job_cores": 1e308, "memory_available_gib": 1e308},
        {"kind": "cpu", "busy_percent": 1.0, "mono_ns": HUGE},
        {"kind": "cgroup", "throttled_us": 1e308, "periods": 0, "throttled_periods": HUGE, "quota_cores": 1e-308},
        {"kind": "tcp", "sent_segments": HUGE, "retransmitted_segments": HUGE, "mono_ns": HUGE},
        {"kind": "gpu", "index": HUGE, "pcie_gen": HUGE, "pcie_width": HUGE, "energy_j": 1e308, "power_w": 1e308},
        {"kind": "step", "rank": 0, "step": HUGE, "step_time_us": 1e308, "peak_memory_bytes": HUGE},
        {"kind": "step", "rank": 0, "step": 19, "step_time_us": 1.0, "mono_ns": HUGE},
        {"kind": "worker", "rank": 0, "local_rank": 0, "world_size": 1, "source": "", "begun_mono_ns": HUGE},
    ],
)
def test_nothing_that_a_node_says_stops_the_analysis(record: dict[str, Any]) -> None:
    lines = [json.dumps({"time_s": 0.0, "mono_ns": 20 * SECOND, **record}).encode()]
    use = used(
        *parse_samples(lines),
        *nics(lambda _: MBYTE),
        *processors(busy_percent=lambda _: 50),
        *limits(1.0, lambda _: 0.1),
    )
    assert _finite(msgspec.to_builtins(use))


def _finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_finite(one) for one in value.values())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return all(_finite(one) for one in value)
    return not isinstance(value, float) or abs(value) < 1e12


def gpus(*figures: tuple[float | None, float | None]) -> tuple[GpuUse, ...]:
    return tuple(
        GpuUse(index=index, power_w=or_unknown(power), energy_j=or_unknown(energy))
        for index, (power, energy) in enumerate(figures)
    )


def test_energy_is_counted_by_the_gpus_over_the_samples_of_the_window() -> None:
    nodes = (node_use(gpus=gpus((300.0, 1000.0), (200.0, 600.0))),)
    found = energy_of(nodes, 25 * 4, None)
    assert found.power_w == pytest.approx(500.0)
    assert found.j_per_sample == pytest.approx(1600 / (25 * 4))  # 25 steps of 4 samples


def test_energy_follows_from_the_power_where_it_is_not_counted() -> None:
    nodes = (node_use(gpus=gpus((300.0, None), (200.0, 600.0))),)
    assert energy_of(nodes, 25 * 4, 25.0).j_per_sample == pytest.approx(20.0)


def test_energy_follows_from_the_power_where_the_samples_of_the_window_are_not_known() -> None:
    nodes = (node_use(gpus=gpus((300.0, 1000.0), (200.0, 600.0))),)
    assert energy_of(nodes, 0, 25.0).j_per_sample == pytest.approx(20.0)


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        ((), "no GPU of n1 was sampled while the measured steps ran"),
        (((300.0, None),), "not every GPU of n1 was sampled while the measured steps ran"),
        (((300.0, None), (None, None)), "not every GPU reports its power"),
    ],
)
def test_energy_of_some_gpus_is_not_taken_for_that_of_all(
    figures: tuple[tuple[float | None, float | None], ...], reason: str
) -> None:
    found = energy_of((node_use(gpus=gpus(*figures)),), 100, None)
    assert Unknown(reason) in {found.power_w, found.j_per_sample}


def test_a_side_has_the_energy_of_its_repeats_or_a_reason() -> None:
    sampled = summary_of(25.0, nodes=(node_use(gpus=gpus((300.0, None), (200.0, None))),))
    side = make_side("baseline", [run_of(sampled), run_of(sampled)])
    assert [side.power_w, side.energy_j_per_sample] == pytest.approx([500.0, 20.0])
    partly = make_side("baseline", [run_of(sampled), run_of(summary_of(nodes=(node_use(),)))])
    unsampled = Unknown("no GPU of n1 was sampled while the measured steps ran")
    assert partly.power_w == partly.energy_j_per_sample == unsampled
