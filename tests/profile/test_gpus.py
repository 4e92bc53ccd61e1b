from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from multinode.profile.figures import FigureNote
from multinode.profile.machine_use import DIVIDED, GpuUse, NodeUse, use_of_gpus
from multinode.profile.observed import ObservedNode
from multinode.profile.summary_sheets import summary_sheets
from multinode.records.samples import GpuSample
from multinode.stats.counter_rates import Span
from multinode.stats.unknown import UNMEASURED, Unknown
from tests import make

SECOND = 1_000_000_000
# The measured steps begin here, by the node's clock, and end there.
START_S, END_S = 15, 30


def used(samples: list[GpuSample]) -> tuple[tuple[GpuUse, ...], tuple[FigureNote, ...]]:
    """What is said of a node's GPUs, and why the rest is not."""
    node = ObservedNode(name="node0", node_rank=0, ranks=(0,), samples=tuple(samples))
    return use_of_gpus(node, Span(start_ns=START_S * SECOND, end_ns=END_S * SECOND), float(END_S - START_S))


def gpus(index: int = 0, **figures: Callable[[int], Any]) -> list[GpuSample]:
    return [
        GpuSample(
            time_s=0,
            mono_ns=moment * SECOND,
            index=index,
            **{name: figure(moment) for name, figure in figures.items()},
        )
        for moment in range(32)
    ]


def test_a_gpu_over_the_steps_that_count() -> None:
    use, _ = used(
        gpus(
            index=7,
            sm_percent=lambda moment: 98 if moment >= START_S else 0,
            memory_used_gib=lambda moment: 20.0 if moment == 18 else 30.0 if moment == 2 else 18.0,
            memory_total_gib=lambda _: 24.0,
            power_w=lambda moment: 300.0 if moment >= START_S else 20.0,
            power_limit_w=lambda _: 450.0,
            sm_clock_mhz=lambda _: 2520.0,
            sm_clock_max_mhz=lambda _: 3105.0,
            temperature_c=lambda moment: 83.0 if moment == 22 else 70.0,
            energy_j=lambda moment: 1e6 + (300.0 * moment if moment >= START_S else 0.0),
            throttle=lambda moment: ("sw_power_cap", "hw_slowdown") if moment % 4 == 0 else ("sw_power_cap",),
        )
    )
    (gpu,) = use
    assert gpu.energy_j == pytest.approx(4500.0)
    assert msgspec.structs.replace(gpu, energy_j=UNMEASURED) == GpuUse(
        index=7,
        sm_percent=98,
        peak_memory_gib=20.0,
        memory_total_gib=24.0,
        power_w=300.0,
        power_limit_w=450.0,
        sm_clock_mhz=2520.0,
        sm_clock_max_mhz=3105.0,
        temperature_c=83.0,
        throttle={"sw_power_cap": 1.0, "hw_slowdown": 4 / 16},
    )


def linked(gen: int, width: int, load: float | None) -> list[GpuSample]:
    """A link that is like this now and then, and at its best otherwise; it could have gen 4 x16."""
    return gpus(
        pcie_gen=lambda moment: gen if moment % 3 == 0 else 4,
        pcie_width=lambda moment: width if moment % 3 == 0 else 16,
        pcie_gen_max=lambda _: 4,
        pcie_width_max=lambda _: 16,
        sm_percent=lambda moment: load if moment % 3 == 0 else 99,
    )


@pytest.mark.parametrize(
    ("gen", "width", "load", "words", "reduced"),
    [
        (3, 8, 97, "gen 3 x8 of gen 4 x16", True),
        (3, 16, 97, "gen 3 x16 of gen 4 x16", False),
        # A link that sleeps while nothing is computed.
        (1, 16, 0, "gen 4 x16 of gen 4 x16", False),
        (99, 8, 97, "gen 4 x16 of gen 4 x16", False),
    ],
)
def test_the_slowest_link_under_load_is_the_one_that_counts(
    gen: int,
    width: int,
    load: float,
    words: str,
    reduced: bool,  # noqa: FBT001 - a column of the table above
) -> None:
    (gpu,), _ = used(linked(gen, width, load))
    assert (gpu.pcie, gpu.pcie_reduced) == (words, reduced)


def test_a_counter_that_goes_backwards_gives_no_energy() -> None:
    (gpu,), _ = used(gpus(temperature_c=lambda _: 60, energy_j=lambda moment: 1000.0 - moment))
    assert (gpu.energy_j, gpu.temperature_c) == (Unknown("the counter went backwards"), 60)


def test_of_a_gpu_that_mig_divides_it_says_why_its_use_is_unknown() -> None:
    (gpu,), _ = used(gpus(mig=lambda _: True, sm_clock_mhz=lambda _: 1755.0))
    assert (gpu.mig, gpu.sm_clock_mhz) == (True, 1755)
    assert {gpu.sm_percent, gpu.peak_memory_gib, gpu.power_w, gpu.energy_j} == {DIVIDED}
    nodes = tuple(NodeUse(node=name, node_rank=0, ranks=(0,), gpus=(gpu,)) for name in ("n0", "n1"))
    sheets = summary_sheets(make.no_steps(nodes=nodes))
    rows = [row for sheet in sheets if sheet.title == "missing" for row in sheet.rows if row[1] == DIVIDED.reason]
    assert rows == [("gpu 0 sm_percent, memory, power and energy", DIVIDED.reason)]
    assert not any("unified memory" in note for sheet in sheets for note in sheet.notes)


def test_gpus_come_by_index_and_one_that_was_lost_before_is_missed() -> None:
    lost = [one for one in gpus(index=1, power_w=lambda _: 300.0) if one.mono_ns < START_S * SECOND]
    use, missing = used([*gpus(index=6), *lost, *gpus(index=0)])
    assert [gpu.index for gpu in use] == [0, 6]
    (note,) = missing
    assert (note.node, note.concerns, note.figures) == ("node0", "gpu 1", {"gpu": 1})
    assert note.message == "not sampled while the measured steps ran"
