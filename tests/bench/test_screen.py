from __future__ import annotations

from collections.abc import Iterable
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from multinode.bench.figures import BenchReport
from multinode.bench.nodes import BenchPart
from multinode.bench.screen import next_step, show
from multinode.bench.sheets import bench_sheets
from multinode.render.sheet import Block, Labels, Sheet
from multinode.render.table import screen_text, sheet_table
from multinode.render.terminal import block_parts
from tests.bench.made_up_bench import gpu, limited, on_cpu, on_gpu, part, processors, report, speed, speeds
from tests.golden import Golden

HELD = report(
    part(0, on_cpu(speeds(0.001), processors(100, job=2.0))),
    part(1, on_cpu(speeds(0.0003), processors(100, job=0.6), limited(0.6)), node="node[bold]1"),
)


def sheet_of(found: BenchReport, title: str) -> Sheet:
    return next(sheet for sheet in bench_sheets(found) if sheet.title.startswith(title))


def test_the_verdict_comes_with_its_fix_and_what_else_differs() -> None:
    slow = report(
        part(0, on_gpu(speeds(), gpu())),
        part(1, on_gpu(speeds(0.5), gpu(sm_clock_mhz=700, throttle=("sw_power_cap",)), torch="2.1.0")),
    )
    rows = labelled_rows(show(slow), details=True)
    assert rows[:2] == [
        ("Cause", rows[0][1]),
        ("Fix", "compare the power limits: ssh node1 nvidia-smi -q -d POWER,PERFORMANCE"),
    ]
    also = [text for label, text in rows if label == "Also likely"]
    assert also[0].startswith("GPU 0 on node1 ran at 700 of 1410 MHz")
    assert any(text.startswith("node1 has torch 2.1.0") for text in also)
    assert not any(label == "Also likely" for label, _ in labelled_rows(show(slow), details=False))


def labelled_rows(blocks: Iterable[Block], *, details: bool) -> list[tuple[str, str]]:
    hidden = "brief" if details else "full"
    shown = (block for block in blocks if isinstance(block, Labels) and block.detail != hidden)
    return [row for block in shown for row in block.rows]


GPUS = (
    part(0, on_gpu(speeds(), gpu())),
    part(1, on_gpu(speeds(0.5), gpu(sm_clock_mhz=700, throttle=("sw_power_cap",)))),
)


@pytest.mark.parametrize(
    ("name", "found", "details"),
    [
        ("bench_slow", report(*GPUS), False),
        ("bench_details", report(*GPUS), True),
        ("bench_ok", report(GPUS[0], part(1, on_gpu(speeds(0.99), gpu()))), False),
        ("bench_cpu", HELD, False),
        ("bench_failed", report(GPUS[0], part(1, (), run_id=None, error="no route to node1")), False),
        ("bench_nothing", report(part(0, (), error="no route")), False),
    ],
)
def test_the_screen(golden: Golden, name: str, found: BenchReport, *, details: bool) -> None:
    golden.check_answer(name, show(found), details=details)


def test_the_next_command_is_the_same_bench_after_a_fix_or_the_network() -> None:
    assert next_step(report(*GPUS), " --hosts h").command == "fix that, then: multinode bench --hosts h"
    assert next_step(report(GPUS[0], part(1, on_gpu(speeds(), gpu()))), "").command == "multinode nccl-test"


def test_a_row_a_worker_with_the_share_of_the_data_sheet_and_a_mark_where_it_is_slow() -> None:
    found = report(part(0, on_gpu(speeds(), gpu())), part(1, on_gpu(speeds(0.5), gpu())))
    products, memory = sheet_of(found, "matrix products"), sheet_of(found, "memory")
    assert [(column.name, column.unit) for column in products.columns[3:]] == [("bf16", "TFLOP/s"), ("at", "MHz/W")]
    assert products.rows == (
        ("node0", "0", "alone", "250.0 80%", "1400/-"),
        ("node1", "0", "alone", "125.0 40%!", "1400/-"),
        ("best", "", "", "250.0", ""),
        ("worst", "", "", "125.0", ""),
    )
    assert products.notes[0].startswith("! slow")
    assert [column.name for column in memory.columns[3:]] == ["copy", "to GPU", "at"]
    assert memory.rows[1:3] == (
        ("node1", "0", "alone", "850.1 42%!", "12.0!", "1400/-"),
        ("best", "", "", "1,700", "24.0", ""),
    )


def test_layers_stand_forward_and_with_their_backward_pass_a_sheet_a_type() -> None:
    shape: dict[str, Any] = {
        "size": None,
        "batch": 16,
        "sequence": 512,
        "hidden": 1024,
        "feedforward": 4096,
        "attentions": 1,
    }
    both = [
        speed("bert", 1.0, **shape, dtype=dtype, backward=way, times_us=(500_000.0 * (1 + way),), index=way)
        for dtype in ("fp16", "bf16")
        for way in (False, True)
    ]
    sheets = [sheet for sheet in bench_sheets(report(part(0, on_gpu(both)))) if "layers" in sheet.title]
    assert [sheet.title.split(",")[0] for sheet in sheets] == [
        f"transformer layers in {one}" for one in ("fp16", "bf16")
    ]
    # 2 * 16 * 512 * (4 h^2 + 2 s h + 2 h f) FLOP in half a second; three times as many in one.
    assert sheets[0].rows == (("node0", "0", "alone", "0.447 / 0.670"),)


def test_a_processors_thousandths_of_a_teraflop_have_digits() -> None:
    assert [row[3] for row in sheet_of(HELD, "matrix products").rows[:2]] == ["0.250", "0.0750!"]
    assert sheet_of(HELD, "matrix products by").rows[0] == (
        *("bf16", "4096", "alone", "0.250", "node0/0"),
        *("0.163", "0.0750", "node[bold]1/0", "-", "1.1%"),
    )


def test_of_many_workers_the_slowest_are_shown() -> None:
    found = report(*(part(rank, on_gpu(speeds(0.5 if rank == 77 else 1.0), gpu())) for rank in range(100)))
    sheet = sheet_of(found, "matrix products")
    assert sheet.rows[0][0] == "node77"
    assert len(sheet.rows) == 32 + 2
    assert sheet.notes[-1] == "the slowest 32 of 100 rows"
    assert "and 68 more" in sheet_of(found, "devices").notes


def test_what_a_node_calls_itself_is_no_markup() -> None:
    output = StringIO()
    for sheet in bench_sheets(HELD):
        Console(file=output, width=200).print(sheet_table(sheet))
    assert "node[bold]1" in output.getvalue()


def test_what_could_not_be_measured_says_why_and_on_how_many() -> None:
    def failing(rank: int) -> BenchPart:
        return part(rank, on_gpu(speeds(), [speed("matmul", 1.0, index=3, size=8192, times_us=(), error="no memory")]))

    assert sheet_of(report(failing(0), failing(1), failing(2)), "not measured").rows == (
        ("matmul 8192 bf16", "node0/0 and 2 others", "no memory"),
    )
    assert not any(sheet.title == "not measured" for sheet in bench_sheets(HELD))


def test_nothing_measured_is_no_table() -> None:
    found = report(part(0, (), error="no route"))
    assert bench_sheets(found) == ()
    text = screen_text(block_parts(show(found)))
    assert text.splitlines()[0] == "node0 could not be measured (alone): no route"
    assert "no device was measured" in text
