from __future__ import annotations

import msgspec
import pytest

from multinode.findings.finding import Finding
from multinode.network.screen import next_step, scan_lines, show
from multinode.network.size_scan import ScanChanges, ScanReport, StepEstimate
from multinode.stats.estimate import exactly
from multinode.traffic.pair_speeds import RawTcp
from multinode.traffic.step_calls import Call
from tests.golden import Golden
from tests.network.test_size_scan import measured, plan, report

WELL = report(plan(), measured(plan()))
SLOW = report(plan(), measured(plan(), slow=3.0))
LIKE = StepEstimate(
    training="DDP with LoRA",
    messages=(Call(collective="all_reduce", size_bytes=1_000_000, times=2, what="bucket"),),
    step_us=250_000.0,
    notes=(Finding(message="some calls are left out"),),
)
CHANGES = ScanChanges(
    before="earlier",
    now="r",
    verdict=Finding(message="nothing got slower."),
    environment=(Finding(message="a's ens1f0 now negotiates 1 Gbit/s"),),
    came=("b",),
)


@pytest.mark.parametrize(
    ("name", "found", "details"),
    [
        ("nccl_test_ok", WELL, False),
        ("nccl_test_details", WELL, True),
        ("nccl_test_slow", SLOW, False),
        ("nccl_test_wrong_path", report(plan(), measured(plan(), nic="eth0")), False),
        ("nccl_test_like", msgspec.structs.replace(WELL, like=LIKE, changes=CHANGES), False),
    ],
)
def test_the_screen(golden: Golden, name: str, found: ScanReport, *, details: bool) -> None:
    golden.check_answer(name, show(found), details=details)


def test_times_of_a_launch_are_marked_on_a_gpu() -> None:
    short = msgspec.structs.replace(WELL.rows[0], time_us=exactly(12.0))
    fast = msgspec.structs.replace(WELL, rows=(short, *WELL.rows[1:]))
    line = "launches: calls of up to 4096 B take less time than "
    said = {
        timer: [one for one in scan_lines(msgspec.structs.replace(fast, timer=timer)) if one.startswith(line)]
        for timer in ("cuda", "clock")
    }
    assert (len(said["cuda"]), said["clock"]) == (1, [])


def test_the_lines_begin_with_the_verdict_and_have_every_figure() -> None:
    lines = scan_lines(WELL)
    assert lines[0].startswith("network OK for a link of 1 Gbit/s: ")
    network = "network: link 1 Gbit/s, TCP line rate 0.118 GB/s of payload at MTU 1500; raw TCP 0.113"
    assert any(line.startswith(network) for line in lines)
    assert any(line.startswith("model: all_reduce: time = 100 us + size / 0.1177 GB/s") for line in lines)


def test_what_was_not_measured_is_not_shown() -> None:
    text = "\n".join(scan_lines(report(plan(), measured(plan()), tcp=RawTcp(), speed_gbit_per_s=None)))
    assert "raw TCP 0" not in text
    assert "round trip" not in text


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (WELL, "multinode contrast --hosts h"),
        (SLOW, "multinode check --hosts h --bandwidth"),
        (
            msgspec.structs.replace(WELL, nodes=("a",)),
            "multinode nccl-test --hosts HOSTFILE (for the network ",
        ),
    ],
)
def test_the_next_command_looks_for_the_cause_or_goes_on_to_the_training(found: ScanReport, expected: str) -> None:
    assert next_step(found, " --hosts h", "multinode contrast --hosts h").command.startswith(expected)
