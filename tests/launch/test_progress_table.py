from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from multinode.launch.progress_table import ProgressTable, progress_line
from multinode.records.progress import NicRate, NodeProgress, RecentSteps, RunProgress, TrainingTime
from multinode.records.run import Stall
from multinode.records.samples import DdpSample, GpuSample, NicSample, StepSample

READ = NicSample(time_s=0, mono_ns=0, ifname="eth0", rx_bytes=0, tx_bytes=0)
WAITING = NodeProgress(name="box2", node_rank=1, ranks=(2, 3))
BUSY = NodeProgress(
    name="box1",
    node_rank=0,
    ranks=(0, 1),
    state="running",
    step=12,
    total_steps=100,
    recent_us=(250_000.0, 350_000.0, 300_000.0),
    samples_per_step=8,
    loss=1.23456,
    net_in_gbit_per_s=0.25,
    net_out_gbit_per_s=0.5,
    nics={"eth0": NicRate(sample=READ, in_gbit_per_s=0.25, out_gbit_per_s=0.5)},
    ifname="eth0",
    link_gbit_per_s=1.0,
)


def trained(took_us: float, tokens: int, exposed_us: float) -> RecentSteps:
    """A worker after its first step."""
    step = StepSample(rank=0, step=1, time_s=0, mono_ns=0, step_time_us=took_us, tokens=tokens)
    counters = {"forward_us": 0, "backward_us": 0, "comm_us": exposed_us, "overlap_us": 0}
    ddp = DdpSample(awaited=False, rank=0, step=1, iteration=1, bucket_sizes_bytes=(), **counters)
    worker = RecentSteps()
    worker.take(step)
    worker.take(ddp)
    return worker


PROFILED = msgspec.structs.replace(
    BUSY,
    gpus={
        6: GpuSample(
            time_s=0, mono_ns=0, index=6, sm_percent=92.0, memory_used_gib=21.3, power_w=380.0, temperature_c=71.0
        )
    },
    workers={0: trained(1e6, 4096, 290_000.0)},
)


def progress(*nodes: NodeProgress) -> RunProgress:
    return RunProgress(run_id="r", job="sft.yaml", world_size=4, nodes=nodes, elapsed_s=65.0)


def rendered(*nodes: NodeProgress, width: int = 160) -> str:
    return printed(progress(*nodes), width)


def printed(shown: RunProgress, width: int = 160) -> str:
    output = io.StringIO()
    Console(file=output, width=width, color_system=None).print(ProgressTable(shown))
    return output.getvalue()


def row(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if name in line]
    return line.replace("\u2502", " ").split()


def test_what_is_known_besides_stands_below_the_table() -> None:
    shown = msgspec.structs.replace(progress(BUSY, WAITING), note="Early verdict: 1 node is faster")
    *_, last = printed(shown).splitlines()
    assert last.strip() == "Early verdict: 1 node is faster"


def test_a_node_that_trains_shows_all_its_figures_with_units_in_the_header() -> None:
    text = rendered(BUSY, WAITING)
    assert "sft.yaml  run r" in text
    assert "1 min 05 s, about 26.4 s left" in text
    assert text.count("Gbit/s") == 2
    assert "(ms)" in text
    assert row(text, "box1") == [
        "box1", "0-1", "running", "12/100", "300.0", "26.7", "1.235", "0.250", "0.500", "50%",
    ]  # fmt: skip


def test_what_is_not_known_is_a_dash_and_never_a_nought() -> None:
    assert row(rendered(BUSY, WAITING), "box2") == ["box2", "2-3", "connecting", *"-------"]


def test_until_the_first_step_the_table_and_the_line_say_what_a_node_does() -> None:
    loading = msgspec.structs.replace(WAITING, state="running", stage="loading the model 50%")
    assert "running, loading the model 50%" in rendered(BUSY, loading)
    assert "box2 running, loading the model 50%" in progress_line(progress(BUSY, loading))


def test_a_column_that_has_nothing_on_any_node_is_left_out() -> None:
    text = rendered(BUSY, WAITING)
    assert not any(name in text for name in ("TGS", "SM", "exposed", "power"))
    assert "samples" not in rendered(WAITING)


def test_tokens_exposed_communication_and_gpus_are_shown_where_they_are_known() -> None:
    text = rendered(PROFILED, WAITING)
    assert row(text, "box1") == [
        "box1", "0-1", "running", "12/100", "300.0", "26.7", "4,096", "1.235", "29%", "0.250", "0.500", "50%", "92",
        "21.3", "380", "71",
    ]  # fmt: skip
    assert row(text, "box2")[-1] == "-"
    assert "exposed communication 29% (of the worker that waited least)" in text


@pytest.mark.parametrize(
    ("width", "kept", "left_out"),
    [(120, ("TGS", "exposed", "SM"), ()), (80, ("exposed", "link", "samples"), ("TGS", "(W)", "(C)"))],
)
def test_on_a_narrow_terminal_the_least_important_columns_go_and_none_is_cut(
    width: int, kept: tuple[str, ...], left_out: tuple[str, ...]
) -> None:
    far = msgspec.structs.replace(
        PROFILED, name="box1.example", step=120_000, total_steps=900_000, recent_us=(1_234_567.0,)
    )
    text = rendered(far, WAITING, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert all(name in text for name in kept)
    assert not any(name in text for name in left_out)
    assert "\u2026" not in text
    assert "120000/900000" in text


def test_the_others_of_many_nodes_are_summed_up_in_the_same_columns() -> None:
    nodes = [msgspec.structs.replace(PROFILED, name=f"n{index}", node_rank=index) for index in range(20)]
    others = row(rendered(*nodes), "others")
    assert "160.0" not in others
    assert others[-4:] == ["92", "-", "-", "-"]
    assert "29%" in others
    assert "50%" in others


def test_a_figure_as_long_as_a_line_does_not_push_the_others_out() -> None:
    text = rendered(msgspec.structs.replace(PROFILED, net_in_gbit_per_s=1.7e308), WAITING, width=120)
    assert "over 1,000,000,000" in " ".join(row(text, "box1"))
    assert "TGS" in text


def test_an_end_or_a_lost_contact_stands_in_place_of_the_state() -> None:
    ended = msgspec.structs.replace(BUSY, state="ended", message="exit code 1")
    assert "exit code 1" in rendered(ended)


def test_names_and_messages_are_text_and_no_markup() -> None:
    odd = msgspec.structs.replace(BUSY, name="[red]box[/red]", message="[link=x]end[/]", ranks=(0,))
    text = rendered(odd)
    assert "[red]box[/red]" in text
    assert "[link=x]end[/]" in text


def test_no_name_and_no_message_moves_the_cursor() -> None:
    odd = msgspec.structs.replace(BUSY, name="box\x1b[2J", message="end\x1b]0;title\x07\r")
    assert "\x1b" not in rendered(odd)
    assert "\x07" not in progress_line(progress(odd))


def test_the_rate_of_all_nodes_and_what_tgs_means_stand_below_the_table() -> None:
    both = (PROFILED, msgspec.structs.replace(PROFILED, name="box2", node_rank=1))
    caption = " ".join(rendered(*both).splitlines()[-2:])
    assert "; 53.3 samples/s in total" in caption
    assert "TGS: tokens per GPU and second" in caption
    assert "in total" not in rendered(BUSY, WAITING)
    assert "in total" not in rendered(BUSY)
    assert "53.3 samples/s in total" in progress_line(progress(*both))


def test_one_line_says_it_all_where_there_is_no_terminal() -> None:
    assert (
        progress_line(progress(BUSY, WAITING))
        == "1 min 05 s, about 26.4 s left  box1 step 12/100 300 ms loss 1.235 | box2 connecting"
    )
    starting = msgspec.structs.replace(WAITING, state="running")
    ended = msgspec.structs.replace(BUSY, state="ended", message="done")
    assert progress_line(progress(starting, ended)) == "1 min 05 s  box2 running, importing | box1 done"
    lost = msgspec.structs.replace(BUSY, message="contact lost")
    assert "box1 contact lost | box2" in progress_line(progress(lost, WAITING))


def test_a_standstill_stands_below_the_table_as_it_was_said() -> None:
    stall = Stall(time_s=1.0, silent_s=300.0, message="rank 1 on box1 is in main ([odd].py:3)")
    output = io.StringIO()
    table = ProgressTable(msgspec.structs.replace(progress(BUSY), stall=stall))
    Console(file=output, width=160, color_system=None).print(table)
    assert "rank 1 on box1 is in main ([odd].py:3)" in output.getvalue()


def test_a_training_that_is_stopped_at_its_time_is_counted_by_its_time() -> None:
    trains = msgspec.structs.replace(BUSY, total_steps=None)
    shown = msgspec.structs.replace(progress(trains), training=TrainingTime(limit_s=600.0, trained_s=40.0))
    said = "1 min 05 s, trained 40.0 s of 10 min 00 s, about 9 min 20 s left"
    assert progress_line(shown).startswith(said)
    text = printed(shown)
    assert said in text
    assert row(text, "box1")[3] == "12"


def test_an_ended_node_has_no_rates_of_its_nic() -> None:
    ended = msgspec.structs.replace(BUSY, name="box2", node_rank=1, state="ended")
    text = rendered(BUSY, ended)
    assert {"0.250", "0.500", "50%"} <= set(row(text, "box1"))
    assert not {"0.250", "0.500", "50%"} & set(row(text, "box2"))
    assert "net in" not in rendered(ended)
