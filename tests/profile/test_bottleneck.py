from __future__ import annotations

import msgspec
import pytest

from multinode.profile.bottleneck import Bottleneck, find_bottleneck
from multinode.profile.exposure import find_exposure
from multinode.profile.observed import observe
from multinode.profile.step_split import Passes, StepSplit, split_steps
from multinode.profile.stragglers import find_stragglers, find_waiting
from multinode.records.samples import CallCount, DeviceWaitSample, GroupSample, Sample, StepSample, TrafficSample
from multinode.stats.unknown import known
from tests.golden import Golden
from tests.profile.made_up_steps import MadeUp, always, changed


def bottleneck(made_up: MadeUp) -> Bottleneck:
    observed = made_up.observed()
    exposure = find_exposure(observed)
    split = split_steps(exposure)
    stragglers = find_stragglers(observed, exposure, split, (), rooted=0.0)
    return find_bottleneck(split, stragglers, find_waiting(observed, exposure))


def paced(host_ms: float) -> Bottleneck:
    """Of a GPU that takes 50 ms for the passes that its host launches in this time."""
    split = split_steps(find_exposure(MadeUp(transfer_ms=always(0.0), compute_ms=always(50.0)).observed()))
    return find_bottleneck(msgspec.structs.replace(split, device="cuda", passes=Passes(host_ms=host_ms, gpu_ms=50.0)))


def inside_a_node() -> Bottleneck:
    split = split_steps(find_exposure(MadeUp(transfer_ms=always(50.0), compute_ms=always(50.0)).observed()))
    return find_bottleneck(
        msgspec.structs.replace(split, mean=msgspec.structs.replace(known(split.mean), local_ms=45.0))
    )


# As with FSDP and ZeRO-3, whose passes nothing times on a GPU. The loader collates while the GPU computes.
ON_GPU = MadeUp(device="cuda", told_by="device", transfer_ms=always(1.0))
LOADING = msgspec.structs.replace(ON_GPU, data_ms=always(90.0))
CASES = {
    "a slow network": bottleneck(MadeUp(transfer_ms=always(298.0), compute_ms=always(206.0))),
    "a straggler": bottleneck(MadeUp(transfer_ms=always(150.0), compute_ms=always(100.0, r1=300.0))),
    "slow loaders": bottleneck(MadeUp(data_ms=always(150.0))),
    "late in turns": bottleneck(MadeUp(compute_ms=lambda rank, step: 250.0 if (rank + step) % 2 else 100.0)),
    "late, few steps": bottleneck(MadeUp(steps=4, compute_ms=always(100.0, r1=200.0))),
    "most nodes late": bottleneck(MadeUp(nodes=((0,), (1,), (2,)), compute_ms=always(300.0, r0=100.0))),
    "python between the phases": bottleneck(MadeUp(host_ms=60.0)),
    "nothing": bottleneck(MadeUp(transfer_ms=always(4.0))),
    "nothing, passes untimed": bottleneck(ON_GPU),
    "loading, passes untimed": bottleneck(LOADING),
    "loading on one node, passes untimed": bottleneck(msgspec.structs.replace(LOADING, nodes=((0,),))),
    "loading, on a CPU": bottleneck(msgspec.structs.replace(LOADING, device="cpu", told_by="host")),
    "communication untimed": bottleneck(MadeUp(device="cuda", told_by="nothing", data_ms=always(400.0))),
    "no step": find_bottleneck(StepSplit()),
    "the host sets the pace": paced(45.0),
    "the GPU sets the pace": paced(9.0),
    "inside a node": inside_a_node(),
}


def test_the_words_of_every_case_are_the_golden_ones(golden: Golden) -> None:
    golden.check_findings("bottleneck", CASES)


@pytest.mark.parametrize(
    ("name", "kind", "share"),
    [
        ("a slow network", "network", 298 / 512),
        # It costs what it is late, and not what the workers wait on average.
        ("a straggler", "straggler", 200 / 458),
        ("slow loaders", "data", 150 / 266),
        ("late in turns", "straggler", 150 / 268),
        ("late, few steps", "straggler", 100 / 218),
        ("most nodes late", "straggler", 100 / 318),
        ("python between the phases", "host", 60 / 177),
        ("nothing", "compute", 105 / 112),
        ("nothing, passes untimed", "compute", None),
        ("loading, passes untimed", "compute", None),
        ("loading on one node, passes untimed", "compute", None),
        ("loading, on a CPU", "data", 90 / 197),
        ("communication untimed", "unknown", None),
        ("no step", "unknown", None),
        ("the host sets the pace", "launch", 56 / 58),
        ("the GPU sets the pace", "compute", 55 / 58),
        ("inside a node", "local", 45 / 108),
    ],
)
def test_the_largest_part_of_a_step_is_the_bottleneck(name: str, kind: str, share: float | None) -> None:
    found = CASES[name]
    assert (found.kind, found.share) == (kind, pytest.approx(share) if share is not None else None)


def test_on_one_node_there_is_no_network() -> None:
    split = split_steps(find_exposure(MadeUp(transfer_ms=always(50.0), compute_ms=always(50.0)).observed()))
    assert find_bottleneck(split).kind == "network"
    assert find_bottleneck(split, nodes=1).kind == "local"


@pytest.mark.parametrize("told_by", ["host", "ddp"])
def test_what_a_host_waited_for_inside_its_node_is_a_part_of_exposed_communication(told_by: str) -> None:
    def inside(sample: Sample) -> Sample:
        if isinstance(sample, StepSample):
            longer = (sample.step_time_us or 0) + 40_000
            phases = (sample.phases_us or {}) | {"comm_local": 40_000}
            return msgspec.structs.replace(sample, step_time_us=longer, phases_us=phases)
        return sample

    split = split_steps(find_exposure(changed(MadeUp(told_by=told_by).observed(), inside)))
    mean = known(split.mean)
    assert (mean.exposed_ms, mean.local_ms) == pytest.approx((50.0, 40.0))
    assert find_bottleneck(split).kind == "local"


def test_what_ddp_reduces_inside_each_node_is_not_the_network() -> None:
    observed = MadeUp(nodes=((0, 1), (2, 3)), transfer_ms=always(50.0)).observed()

    def reduced_by(*groups: tuple[int, ...]) -> StepSplit:
        nodes = []
        for node in observed.nodes:
            told: list[Sample] = []
            for rank in node.ranks:
                (ranks,) = (group for group in groups if rank in group)
                call = CallCount(op="all_reduce", group="g", size_bytes=1000, count=1, source="ddp")
                told.append(GroupSample(rank=rank, group="g", ranks=ranks, backend="gloo"))
                told.append(TrafficSample(rank=rank, traffic=0, calls=(call,)))
            nodes.append(msgspec.structs.replace(node, samples=(*told, *node.samples)))
        return split_steps(find_exposure(observe("r", nodes)))

    assert find_bottleneck(reduced_by((0, 1), (2, 3))).kind == "local"
    assert find_bottleneck(reduced_by((0, 1, 2, 3))).kind == "network"


def test_what_a_gpu_waited_for_inside_its_node_is_a_part_of_exposed_communication() -> None:
    def inside(sample: Sample) -> Sample:
        if isinstance(sample, DeviceWaitSample):
            return msgspec.structs.replace(sample, local_us=4000.0)
        return sample

    split = split_steps(find_exposure(changed(MadeUp(device="cuda", told_by="device").observed(), inside)))
    mean = known(split.mean)
    assert (mean.exposed_ms, mean.local_ms) == pytest.approx((10.0, 4.0))
