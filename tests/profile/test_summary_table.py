from __future__ import annotations

import msgspec
import pytest

from multinode.profile.calls import SeenCall
from multinode.profile.machine_use import GpuUse, NodeUse
from multinode.profile.nics import NicUse
from multinode.profile.step_split import KnownSteps, StepSplit
from multinode.profile.summary import Comm, Summary
from multinode.profile.summary_sheets import summary_sheets
from multinode.stats.unknown import Unknown
from tests import make
from tests.golden import screen_of
from tests.profile.observing import SUMMARY

NO_STEP = Unknown("no worker recorded a step")
BARE = make.no_steps()


def shown(summary: Summary, width: int = 80) -> str:
    return screen_of(summary_sheets(summary), width)


def line(text: str, *begins: str) -> list[str]:
    (found,) = [one for one in text.splitlines() if one.split()[: len(begins)] == list(begins)]
    return found.split()[len(begins) :]


def test_the_verdict_comes_first_with_its_cause_and_what_to_do() -> None:
    lines = shown(SUMMARY, width=200).splitlines()
    assert lines[0].strip() == "verdict"
    assert "exposed communication takes 120 of 401 ms per step (30%)" in lines[1]
    assert "box2 is 6% slower: box1 spent 6% of the time waiting (rank 2, 3); likely cause: gpu heat" in lines[2]
    assert "GPU 1 of box2 runs at 1410 of 2520 MHz" in lines[3]
    assert "check the fans of box2" in lines[4]


def test_a_figure_that_rests_on_some_of_the_masks_says_so() -> None:
    text = shown(msgspec.structs.replace(SUMMARY, counted_masks=0.143), width=200)
    assert "17,350.0 without padding by the masks of 14.3% of them" in text
    assert "4,337.5 without padding by the masks of 14.3% of them" in text
    assert "by the masks" not in shown(msgspec.structs.replace(SUMMARY, counted_masks=1.0), width=200)


def test_every_figure_stands_there_with_its_unit_and_the_rule_beside_it() -> None:
    text = shown(SUMMARY, width=200)
    for said in (
        "35 measured; the first 5 of 40 steps",
        "401.2 ms (p95 433.5 ms, cv 0.03)",
        "39.9 (all workers)",
        "20,413.0 padding counted, 17,350.0 without padding",
        "5,103.2 padding counted, 4,337.5 without padding",
        "31.0%, 41.2% of 165.2 TFLOP/s per GPU",
        "120.5 ms per step, 30.0% of the step",
        "in training 0.951 GB/s, alone 1.120 GB/s",
        "118.0 ms of it exposed, overlap 40.7%, busbw 0.970 GB/s, 250.0 ms computation",
        "agrees to 2%",
        "the NIC counts 0.6% of acknowledgements",
        "exposed by DDP's counters",
    ):
        assert said in text
    assert ["125.80", "126.30", "127.10"] in [one.split() for one in text.splitlines()]


def test_the_parts_of_a_step_are_in_ms_in_percent_and_as_bars() -> None:
    text = shown(SUMMARY)
    assert line(text, "exposed", "communication") == ["120.5", "30.0%", "#########"]
    assert line(text, "compute")[:2] == ["210.0", "52.3%"]


def test_exposed_communication_says_of_how_many_steps_it_is() -> None:
    split = msgspec.structs.replace(SUMMARY.split, steps=KnownSteps(known=4, measured=25))
    summary = msgspec.structs.replace(SUMMARY, split=split)
    assert "120.5 ms per step, 30.0% of the step, from 4 of 25 measured steps" in shown(summary, 160)


@pytest.mark.parametrize("width", [80, 120])
def test_nothing_is_cut_where_eighty_columns_are_all_there_is(width: int) -> None:
    text = shown(SUMMARY, width)
    assert "\u2026" not in text
    assert max(map(len, text.splitlines())) <= width
    assert line(text, "box2", "ens1f0") == ["2.410", "2.530", "9.100", "10", "25.3%", "0/17", "0.02%"]


def test_a_reason_is_told_once_for_all_that_it_takes_away() -> None:
    text = shown(SUMMARY, width=200)
    assert text.count("the Trainer did not end") == 1
    assert "attention_length, dataset_samples" in text
    assert line(text, "cpu_steal_percent", "(box2)") == ["this", "kernel", "does", "not", "say"]


def test_many_names_leave_room_for_the_reason() -> None:
    names = [f"a_figure_of_a_long_name_{number}" for number in range(6)]
    text = shown(msgspec.structs.replace(BARE, notes=dict.fromkeys(names, "there is no counter that tells it")))
    assert "there is no counter" in text
    assert all(name in text for name in names)


def test_a_figure_that_every_node_lacks_is_told_once() -> None:
    nodes = tuple(NodeUse(node=f"n{at}", node_rank=at, ranks=(at,), notes={"gpus": "no NVML"}) for at in range(8))
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


def test_without_a_peak_there_is_no_share_of_it_and_the_reason_in_its_place() -> None:
    assert SUMMARY.utilisation is not None
    used = msgspec.structs.replace(SUMMARY.utilisation, mfu=None, hfu=None, denominator="the peak is not known")
    text = shown(msgspec.structs.replace(SUMMARY, utilisation=used), width=200)
    assert line(text, "MFU,", "HFU") == ["-:", *["the", "peak", "is", "not", "known"]]
    assert "51.2 per GPU for the model" in text


def test_the_work_of_a_tiny_model_has_digits() -> None:
    assert SUMMARY.utilisation is not None
    used = msgspec.structs.replace(SUMMARY.utilisation, model_tflops=0.0123, hardware_tflops=0.0164)
    text = shown(msgspec.structs.replace(SUMMARY, utilisation=used), width=200)
    assert "0.0123 per GPU for the model, 0.0164 computed" in text


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
        notes={"x": "\x1b]0;owned\x07[bold]"},
    )
    text = shown(msgspec.structs.replace(BARE, nodes=(node,)), width=160)
    assert "[red]n[/]?[2J" in text
    assert "?]0;owned?[bold]" in text
    assert not {"\x1b", "\x07"} & set(text)


def test_of_many_calls_the_largest_are_shown_and_the_rest_counted() -> None:
    calls = tuple(
        SeenCall(op="all_gather", ranks=4, nodes=2, backend=None, size_bytes=1e6 * size, count=2.0)
        for size in range(12, 0, -1)
    )
    text = shown(msgspec.structs.replace(BARE, comm=Comm(calls=calls)))
    assert text.count("all_gather") == 8
    assert "and 4 smaller ones" in text
    assert "12.00" in text
    assert "24.00" in text


def test_workers_on_the_cpus_of_nodes_with_gpus_are_told_so() -> None:
    node = NodeUse(node="spark", node_rank=0, ranks=(0,), gpus=(GpuUse(index=0, sm_percent=0.0),))
    on_cpus = msgspec.structs.replace(
        SUMMARY, nodes=(node, node), split=msgspec.structs.replace(SUMMARY.split, device="cpu")
    )
    words = " ".join(shown(on_cpus, 200).split())
    assert "the workers trained on the CPUs, although the nodes have 2 GPUs" in words
    # Its memory is the node's.
    assert "shares its node's (unified memory)" in words
    on_gpus = msgspec.structs.replace(on_cpus, split=msgspec.structs.replace(SUMMARY.split, device="cuda"))
    assert "trained on the CPUs" not in shown(on_gpus, 200)
