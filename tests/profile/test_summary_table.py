from __future__ import annotations

import msgspec

from multinode.profile.calls import SeenCall
from multinode.profile.figures import FigureNote
from multinode.profile.machine_use import GpuUse, NodeUse
from multinode.profile.nics import NicUse
from multinode.profile.step_split import KnownSteps, StepSplit
from multinode.profile.summary import Comm, Summary
from multinode.profile.summary_sheets import summary_sheets
from multinode.stats.unknown import Unknown
from tests import make
from tests.golden import Golden, screen_of
from tests.profile.observing import SUMMARY

NO_STEP = Unknown("no worker recorded a step")
BARE = make.no_steps()


def shown(summary: Summary, width: int = 80) -> str:
    return screen_of(summary_sheets(summary), width)


def line(text: str, *begins: str) -> list[str]:
    (found,) = [one for one in text.splitlines() if one.split()[: len(begins)] == list(begins)]
    return found.split()[len(begins) :]


def test_every_figure_stands_there_with_its_unit_and_the_rule_beside_it(golden: Golden) -> None:
    """The verdict comes first, with its cause and what to do."""
    golden.check_answer("summary", summary_sheets(SUMMARY))


def test_what_rests_on_some_of_the_samples_says_of_how_many(golden: Golden) -> None:
    split = msgspec.structs.replace(SUMMARY.split, steps=KnownSteps(known=4, measured=25))
    partly = msgspec.structs.replace(SUMMARY, counted_masks=0.143, split=split)
    golden.check_answer("summary_partly", summary_sheets(partly), widths=(160,))
    assert shown(msgspec.structs.replace(SUMMARY, counted_masks=1.0)) == shown(SUMMARY)


def test_the_parts_of_a_step_are_in_ms_in_percent_and_as_bars() -> None:
    text = shown(SUMMARY)
    assert line(text, "exposed", "communication") == ["120.5", "30.0%", "#########"]
    assert line(text, "compute")[:2] == ["210.0", "52.3%"]


def test_many_names_leave_room_for_the_reason(golden: Golden) -> None:
    names = [f"a_figure_of_a_long_name_{number}" for number in range(6)]
    bare = msgspec.structs.replace(
        BARE, notes=tuple(FigureNote(concerns=name, message="there is no counter for it") for name in names)
    )
    golden.check_answer("summary_long_names", summary_sheets(bare), widths=(80,))


def test_a_figure_that_every_node_lacks_is_told_once() -> None:
    notes = (FigureNote(concerns="gpus", message="no NVML"),)
    nodes = tuple(NodeUse(node=f"n{at}", node_rank=at, ranks=(at,), notes=notes) for at in range(8))
    assert line(shown(msgspec.structs.replace(BARE, nodes=nodes)), "gpus") == ["no", "NVML"]


def test_what_a_part_could_not_tell_is_missing_as_well() -> None:
    summary = msgspec.structs.replace(
        BARE,
        comm=Comm(overlap=Unknown("nothing told it")),
        split=StepSplit(mean=make.split(1.0, data_ms=Unknown("no loader"))),
    )
    text = shown(summary)
    assert line(text, "overlap") == ["nothing", "told", "it"]
    assert line(text, "data_ms") == ["no", "loader"]


def test_without_a_peak_there_is_no_share_of_it_and_the_reason_in_its_place(golden: Golden) -> None:
    """The work of a tiny model has digits."""
    assert SUMMARY.utilisation is not None
    used = msgspec.structs.replace(
        SUMMARY.utilisation,
        model_tflops=0.0123,
        hardware_tflops=0.0164,
        mfu=None,
        hfu=None,
        denominator="the peak is not known",
    )
    sheets = summary_sheets(msgspec.structs.replace(SUMMARY, utilisation=used))
    golden.check_answer("summary_no_peak", [sheet for sheet in sheets if sheet.title == "speed"], widths=(120,))


def test_a_run_of_which_nothing_is_known_shows_why_and_no_empty_table() -> None:
    assert [one.strip() for one in shown(BARE).splitlines()] == [
        "missing",
        "figure         why",
        "\u2500" * 40,
        "samples_per_s  no worker recorded a step",
    ]


def test_what_a_node_says_of_itself_is_text_and_neither_markup_nor_a_command_to_the_terminal() -> None:
    node = NodeUse(
        node="[red]n[/]\x1b[2J",
        node_rank=0,
        ranks=(0,),
        nics=(NicUse(ifname="eth0\x07"),),
        notes=(FigureNote(concerns="x", message="\x1b]0;owned\x07[bold]"),),
    )
    text = shown(msgspec.structs.replace(BARE, nodes=(node,)), width=160)
    assert "[red]n[/]?[2J" in text
    assert "?]0;owned?[bold]" in text
    assert not {"\x1b", "\x07"} & set(text)


def test_of_many_calls_the_largest_are_shown_and_the_rest_counted(golden: Golden) -> None:
    calls = tuple(
        SeenCall(op="all_gather", ranks=4, nodes=2, backend=None, size_bytes=1e6 * size, count=2.0)
        for size in range(12, 0, -1)
    )
    many = msgspec.structs.replace(BARE, comm=Comm(calls=calls))
    golden.check_answer("summary_many_calls", summary_sheets(many), widths=(80,))


def test_workers_on_the_cpus_of_nodes_with_gpus_are_told_so(golden: Golden) -> None:
    node = NodeUse(node="spark", node_rank=0, ranks=(0,), gpus=(GpuUse(index=0, sm_percent=0.0),))
    on_cpus = msgspec.structs.replace(
        SUMMARY, nodes=(node, node), split=msgspec.structs.replace(SUMMARY.split, device="cpu")
    )
    golden.check_answer("summary_cpus", summary_sheets(on_cpus), widths=(120,))
    on_gpus = msgspec.structs.replace(on_cpus, split=msgspec.structs.replace(SUMMARY.split, device="cuda"))
    assert shown(on_gpus, 120) != shown(on_cpus, 120)
