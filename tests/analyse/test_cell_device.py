from __future__ import annotations

import pytest

from multinode.analyse.grid.cell_rows import device_of, devices_of
from multinode.core.cluster.facts import Gpu, NodeFacts
from multinode.core.run.command import Command
from multinode.core.run.plan import LaunchPlan, NodePlan

TWO = (Gpu(index=0, name="NVIDIA GeForce RTX 3090"), Gpu(index=1, name="NVIDIA GeForce RTX 4090"))


def plan(*gpus: tuple[int, ...] | None) -> LaunchPlan:
    return LaunchPlan(
        run_id="r",
        engine="torchrun",
        job="j",
        master_addr="10.0.0.1",
        master_port=29500,
        nproc_per_node=2,
        world_size=2 * len(gpus),
        nodes=tuple(
            NodePlan(
                node=f"n{rank}",
                node_rank=rank,
                ranks=(2 * rank, 2 * rank + 1),
                addr=None,
                ifname=None,
                gpus=ids,
                run_dir="/r",
                command=Command(argv=("true",)),
            )
            for rank, ids in enumerate(gpus)
        ),
    )


@pytest.mark.parametrize(
    ("gpus", "found", "device"),
    [
        ([(1,)], [TWO], "NVIDIA GeForce RTX 4090"),
        ([(1,), (1,)], [TWO, TWO], "NVIDIA GeForce RTX 4090"),
        ([(0, 1), (1,)], [TWO, TWO], "1 x NVIDIA GeForce RTX 3090 + 2 x NVIDIA GeForce RTX 4090"),
        ([None, None], [(), ()], "CPU"),
        ([(1,), None], [TWO, ()], "1 x NVIDIA GeForce RTX 4090 + 2 x CPU"),
        ([(5,)], [TWO], None),
        ([(0,), (0,)], [TWO], None),
    ],
)
def test_a_device_is_named_as_the_nodes_name_what_their_workers_use(
    gpus: list[tuple[int, ...] | None], found: list[tuple[Gpu, ...]], device: str | None
) -> None:
    facts = {f"n{rank}": NodeFacts(node=f"n{rank}", gpus=listed) for rank, listed in enumerate(found)}
    assert device_of(devices_of(plan(*gpus), facts)) == device


@pytest.mark.parametrize(
    ("told", "device"),
    [
        (("AMD EPYC 9B14 96-Core Processor",) * 2, "AMD EPYC 9B14 96-Core Processor"),
        (("AMD EPYC 9B14 96-Core Processor", None), "2 x AMD EPYC 9B14 96-Core Processor + 2 x CPU"),
        ((None, None), "CPU"),
        (("", " \n"), "CPU"),
        ((" a\nlie\t", "a lie"), "a lie"),
        (("x" * 1000,) * 2, "x" * 80),
    ],
)
def test_workers_without_gpus_compute_on_the_processors_that_their_node_names(
    told: tuple[str | None, ...], device: str
) -> None:
    facts = {f"n{rank}": NodeFacts(node=f"n{rank}", processor=name) for rank, name in enumerate(told)}
    assert device_of(devices_of(plan(None, None), facts)) == device


def test_a_processor_is_no_device_of_workers_with_gpus() -> None:
    facts = {"n0": NodeFacts(node="n0", gpus=TWO, processor="AMD EPYC 9B14 96-Core Processor")}
    assert devices_of(plan((1,)), facts) == ({"NVIDIA GeForce RTX 4090": 1},)


def test_devices_are_counted_node_by_node() -> None:
    facts = {name: NodeFacts(node=name, gpus=TWO) for name in ("n0", "n1")}
    first, second = devices_of(plan((0, 1), (1,)), facts)
    assert first == {"NVIDIA GeForce RTX 3090": 1, "NVIDIA GeForce RTX 4090": 1}
    assert second == {"NVIDIA GeForce RTX 4090": 1}
