from __future__ import annotations

import msgspec

from multinode.analyse.job.step_messages import StepMessage
from multinode.analyse.nccl_test.pair_speeds import RawTcp
from multinode.analyse.nccl_test.scan_changes import ScanChanges
from multinode.analyse.nccl_test.size_scan import StepEstimate
from multinode.report.nccl_test.scan_text import scan_lines
from tests.analyse.test_size_scan import measured, plan, report


def test_a_normal_sweep_says_what_it_was_held_against_and_that_nothing_is_to_mend() -> None:
    text = "\n".join(scan_lines(report(plan(), measured(plan()))))
    assert "link 1 Gbit/s, which carries 0.118 GB/s of TCP payload at MTU 1500" in text
    assert "raw TCP 0.113 GB/s over one connection, 0.117 GB/s over 4; round trip 60 us" in text
    assert "time = 100 us + size / 0.1177 GB/s" in text
    assert "ens1f0" in text
    assert text.endswith("Nothing to mend.")


def test_times_of_a_launch_are_marked_on_a_gpu() -> None:
    said = report(plan(), measured(plan()))
    short = msgspec.structs.replace(said.rows[0], time_us=12.0)
    fast = msgspec.structs.replace(said, rows=(short, *said.rows[1:]))
    line = "up to 4096 B a call takes less than 30 us"
    told = {
        timer: [one for one in scan_lines(msgspec.structs.replace(fast, timer=timer)) if one.startswith(line)]
        for timer in ("cuda", "clock")
    }
    assert (len(told["cuda"]), told["clock"]) == (1, [])


def test_causes_come_numbered_with_their_hints() -> None:
    lines = scan_lines(report(plan(), measured(plan(), slow=3.0)))
    first = next(number for number, line in enumerate(lines) if line.startswith("  1. "))
    assert lines[first + 1].startswith("     hint: ")


def test_what_was_not_measured_is_not_told() -> None:
    text = "\n".join(scan_lines(report(plan(), measured(plan()), tcp=RawTcp(), speed_gbit_per_s=None)))
    assert "raw TCP 0" not in text
    assert "round trip" not in text


def test_a_training_is_told_in_bytes_calls_and_time_with_its_notes() -> None:
    like = StepEstimate(
        training="DDP with LoRA",
        messages=(StepMessage(collective="all_reduce", size_bytes=1_000_000, times=2, what="bucket"),),
        step_us=250_000.0,
        notes=("some calls are left out",),
    )
    lines = scan_lines(msgspec.structs.replace(report(plan(), measured(plan())), like=like))
    assert any("DDP with LoRA: an optimizer step sends 2.0 MB in 2 calls, which take 0.2 s" in line for line in lines)
    assert "  note: some calls are left out" in lines


def test_changes_are_told_with_the_run_they_are_since() -> None:
    changes = ScanChanges(
        before="earlier",
        now="r",
        text="nothing got slower.",
        environment=("a's ens1f0 now negotiates 1 Gbit/s",),
        came=("b",),
    )
    lines = scan_lines(msgspec.structs.replace(report(plan(), measured(plan())), changes=changes))
    assert lines[-3:] == [
        "since run earlier: nothing got slower.",
        "  a's ens1f0 now negotiates 1 Gbit/s",
        "  new: b",
    ]
