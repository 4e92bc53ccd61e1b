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
from tests.profile.made_up_steps import MadeUp, always, changed


def bottleneck(made_up: MadeUp) -> Bottleneck:
    observed = made_up.observed()
    exposure = find_exposure(observed)
    split = split_steps(exposure)
    stragglers = find_stragglers(observed, exposure, split, (), rooted=0.0)
    return find_bottleneck(split, stragglers, find_waiting(observed, exposure))


def test_a_slow_network_is_told_with_its_figures() -> None:
    found = bottleneck(MadeUp(transfer_ms=always(298.0), compute_ms=always(206.0)))
    assert found.kind == "network"
    assert found.share == 298 / 512
    assert found.message == "exposed communication takes 298 ms of 512 ms per step (58%)"


def test_a_straggler_costs_what_it_is_late_and_not_what_the_workers_wait_on_average() -> None:
    found = bottleneck(MadeUp(transfer_ms=always(150.0), compute_ms=always(100.0, r1=300.0)))
    assert found.kind == "straggler"
    assert found.message.startswith("waiting for node1 takes 200 ms of 458 ms per step (44%): ")


def test_a_slow_loader_on_every_node_is_the_data() -> None:
    found = bottleneck(MadeUp(data_ms=always(150.0)))
    assert (found.kind, found.message) == ("data", "waiting for batches takes 150 ms of 266 ms per step (56%)")


def test_nodes_that_take_turns_to_be_late_are_no_straggler_and_still_cost() -> None:
    found = bottleneck(MadeUp(compute_ms=lambda rank, step: 250.0 if (rank + step) % 2 else 100.0))
    assert (found.kind, found.code) == ("straggler", "alternating-stragglers")
    assert found.message == (
        "waiting for slower workers takes 150 ms of 268 ms per step (56%); they alternate, so no single node is "
        "the cause"
    )


def test_a_node_that_is_always_late_is_not_said_to_take_turns_where_it_could_not_be_named() -> None:
    few = bottleneck(MadeUp(steps=4, compute_ms=always(100.0, r1=200.0)))
    assert (few.kind, few.code, few.share) == ("straggler", "no-straggler", 100 / 218)
    assert few.figures == pytest.approx({"part_ms": 100, "step_ms": 218})
    assert few.message == ("waiting for other workers takes 100 ms of 218 ms per step (46%); no single node stands out")
    most = bottleneck(MadeUp(nodes=((0,), (1,), (2,)), compute_ms=always(300.0, r0=100.0)))
    assert "turns" not in most.message


def test_what_python_does_between_the_phases_is_the_host() -> None:
    assert bottleneck(MadeUp(host_ms=60.0)).kind == "host"


def test_a_training_that_nothing_holds_up_computes() -> None:
    found = bottleneck(MadeUp(transfer_ms=always(4.0)))
    assert found.kind == "compute"
    assert found.message == (
        "compute-bound: compute and optimizer take 105 ms of 112 ms per step (94%); no other part exceeds 5%"
    )


def test_what_could_not_be_told_is_said_where_nothing_else_is_found() -> None:
    found = bottleneck(MadeUp(device="cuda", told_by="device", transfer_ms=always(1.0)))
    assert (found.kind, found.share) == ("compute", None)
    assert found.message.startswith("no measured part exceeds 5% of ")
    # As with FSDP and ZeRO-3.
    assert found.message.endswith("whether it is launch-bound is unknown, because only DDP times its passes on the GPU")
    assert "; not measured: host; whether" in found.message


def test_without_the_exposed_communication_nothing_is_said() -> None:
    found = bottleneck(MadeUp(device="cuda", told_by="nothing", data_ms=always(400.0)))
    assert (found.kind, found.share) == ("unknown", None)
    assert "--trace" in found.message


def test_no_step_is_unknown() -> None:
    assert find_bottleneck(StepSplit()).kind == "unknown"


@pytest.mark.parametrize("made_up", [MadeUp(told_by="device"), MadeUp(nodes=((0,),), told_by="device")])
def test_a_gpu_whose_computing_is_not_known_is_not_said_to_wait_for_batches(made_up: MadeUp) -> None:
    """The loader collates in the training process while the GPU computes."""
    loading = msgspec.structs.replace(made_up, device="cuda", data_ms=always(90.0), transfer_ms=always(1.0))
    found = bottleneck(loading)
    assert (found.kind, found.share) == ("compute", None)
    assert "; not measured: host; the host waited 90 ms (" in found.message
    assert "for batches, while the GPU may have computed; whether" in found.message
    assert bottleneck(msgspec.structs.replace(loading, device="cpu", told_by="host")).kind == "data"


@pytest.mark.parametrize(("host_ms", "kind"), [(45.0, "launch"), (9.0, "compute")])
def test_compute_in_which_the_gpu_follows_the_host_is_launch_bound(host_ms: float, kind: str) -> None:
    split = split_steps(find_exposure(MadeUp(transfer_ms=always(0.0), compute_ms=always(50.0)).observed()))
    on_gpu = msgspec.structs.replace(split, device="cuda", passes=Passes(host_ms=host_ms, gpu_ms=50.0))
    found = find_bottleneck(on_gpu)
    assert found.kind == kind
    assert ("the GPU waits for the host" in found.message) == (kind == "launch")


def test_communication_inside_a_node_is_not_the_network() -> None:
    split = split_steps(find_exposure(MadeUp(transfer_ms=always(50.0), compute_ms=always(50.0)).observed()))
    inside = msgspec.structs.replace(split, mean=msgspec.structs.replace(known(split.mean), local_ms=45.0))
    found = find_bottleneck(inside)
    assert found.kind == "local"
    assert found.message.startswith("exposed communication between the workers of a node takes 45 ms")
    # On one node there is no network.
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
