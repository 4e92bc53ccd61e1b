"""The screens of sweep, table and nccl-test --tune, whole, at 80 and 160 columns."""

from __future__ import annotations

import functools

import msgspec
import pytest

from multinode.findings.finding import Finding
from multinode.network.measure import scan_messages
from multinode.network.nccl_tuning import TunedSetting, TuneReport
from multinode.network.tuning_screen import show
from multinode.records.benchmark import CollectiveTest
from multinode.stats.estimate import Estimate
from multinode.stats.unknown import Unknown
from multinode.sweep.figures import Cheapest
from multinode.sweep.notes import with_notes
from multinode.sweep.screen import show as show_table
from tests.golden import Golden, screen_of
from tests.sweep.cells import PUBLISHED, SWEEP, renamed

CELLS = {
    "sweep": with_notes(
        msgspec.structs.replace(
            SWEEP,
            cells=(
                msgspec.structs.replace(SWEEP.cells[0], disturbances=(Finding(message="box1: CPU steal was 6%"),)),
                *SWEEP.cells[1:],
            ),
            cheapest=Cheapest(
                deadline_s=60.0,
                label="1x2-lora-batch8",
                message=(
                    "1x2-lora-batch8 is the cheapest within the deadline of 1 min 00 s: the full run costs "
                    "0.012 EUR and takes 54.2 s."
                ),
            ),
        )
    ),
    "table-published": PUBLISHED,
    "table-empty": msgspec.structs.replace(
        SWEEP, cells=(), notes=(Finding(message="None of the 16 rows matches nodes=4."),)
    ),
}


def about(value: float, off: float = 0.01) -> Estimate:
    return Estimate(value=value, low=value * (1 - off), high=value * (1 + off), repeats=3)


def tried(axis: str, gain: float, **env: str) -> TunedSetting:
    return TunedSetting(axis=axis, env=env, time_us=about(9000.0 / gain), gain=about(gain))


SOCKETS = {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}
TUNED = TuneReport(
    run_id="20260501-ab",
    backend="nccl",
    nodes=("box1", "box2"),
    repeats=3,
    test=CollectiveTest(messages=scan_messages(["all_reduce"], [1 << 20, 16 << 20])),
    default_us=about(9000.0),
    settings=(
        tried("sockets", 1.05, NCCL_SOCKET_NTHREADS="1", NCCL_NSOCKS_PERTHREAD="4"),
        tried("sockets", 1.24, **SOCKETS),
        TunedSetting(axis="algorithm", env={"NCCL_ALGO": "allreduce:tree"}, gain=Unknown("no algorithm available")),
        tried("protocol", 1.02, NCCL_PROTO="Simple"),
        tried("protocol", 0.61, NCCL_PROTO="LL"),
        tried("buffer", 0.99, NCCL_BUFFSIZE="8388608"),
    ),
    together=msgspec.structs.replace(tried("together", 1.27, **SOCKETS, NCCL_PROTO="Simple"), gain=about(1.27, 0.03)),
    mtu=1500,
    link_gbit_per_s=10.0,
    jumbo_gain=1.052,
)
assert TUNED.together is not None
TUNINGS = {
    "tune": TUNED,
    "tune-nothing": msgspec.structs.replace(
        TUNED,
        settings=tuple(
            msgspec.structs.replace(one, gain=about(0.99)) if isinstance(one.gain, Estimate) else one
            for one in TUNED.settings
        ),
        together=None,
        jumbo_gain=None,
    ),
    "tune-inconclusive": msgspec.structs.replace(
        TUNED, together=msgspec.structs.replace(TUNED.together, gain=about(1.02, 0.05))
    ),
    "tune-gloo": TuneReport(run_id="", backend="gloo", nodes=("box1", "box2"), test=TUNED.test),
}


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("details", [False, True], ids=["short", "details"])
def test_a_table_of_cells_is_the_golden_one(name: str, *, details: bool, golden: Golden) -> None:
    shown = functools.partial(show_table, CELLS[name])
    golden.check_answer(f"{name}-details" if details else name, shown, details=details)


@pytest.mark.parametrize("name", TUNINGS)
def test_a_tuning_is_the_golden_one(name: str, golden: Golden) -> None:
    golden.check_answer(name, show(TUNINGS[name]))


def test_every_setting_that_was_tried_is_in_the_details(golden: Golden) -> None:
    golden.check_answer("tune-details", show(TUNED), details=True)


def test_of_many_rows_the_first_are_shown_and_the_rest_is_told() -> None:
    rows = tuple(msgspec.structs.replace(PUBLISHED.cells[0], label=f"row{number:04}") for number in range(41))
    text = screen_of(show_table(msgspec.structs.replace(PUBLISHED, cells=rows), 100), 100)
    assert sum(line.startswith("row") for line in text.splitlines()) == 40
    assert "1 more rows: --where, --details or --format csv" in text


def test_foreign_words_are_shown_as_text_in_the_small_table_too() -> None:
    text = screen_of(show_table(renamed(SWEEP, "[red]x\x1b[2J"), 160), 160)
    assert "\x1b" not in text
    assert "[red]x?[2J" in text
