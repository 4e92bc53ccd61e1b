from __future__ import annotations

import io

import msgspec
from rich.console import Console

from multinode.launch.progress_table import ProgressTable, progress_line, sum_up, worst_first
from multinode.records.progress import NicRate, NodeProgress, RecentSteps, RunProgress, TrainingTime
from multinode.records.run import Stall
from multinode.records.samples import DdpSample, GpuSample, NicSample, StepSample
from tests.golden import Golden

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


FAR = msgspec.structs.replace(
    PROFILED, name="box1.example", step=120_000, total_steps=900_000, recent_us=(1_234_567.0,)
)
TWO = (PROFILED, msgspec.structs.replace(PROFILED, name="box2", node_rank=1))
LOADING = msgspec.structs.replace(WAITING, state="running", stage="loading the model 50%")
STARTING = msgspec.structs.replace(WAITING, state="running")
ENDED = msgspec.structs.replace(BUSY, state="ended", message="exit code 1")
TRAINS = msgspec.structs.replace(
    progress(msgspec.structs.replace(BUSY, total_steps=None)), training=TrainingTime(limit_s=600.0, trained_s=40.0)
)
ODD = msgspec.structs.replace(BUSY, name="[red]box[/red]", message="[link=x]end[/]", ranks=(0,))
HANGS = Stall(time_s=1.0, silent_s=300.0, message="rank 1 on box1 is in main ([odd].py:3)")
SHOWN = {
    "one trains, one connects": progress(BUSY, WAITING),
    "the other loads its model": progress(BUSY, LOADING),
    "none trains": progress(WAITING),
    "with tokens, exposed communication and a GPU": progress(PROFILED, WAITING),
    "both train": progress(*TWO),
    "a figure as long as a line": progress(msgspec.structs.replace(PROFILED, net_in_gbit_per_s=1.7e308), WAITING),
    "one has ended": progress(BUSY, msgspec.structs.replace(ENDED, name="box2", node_rank=1)),
    "one has ended, alone": progress(ENDED),
    "names that look like markup": progress(ODD),
    "a note": msgspec.structs.replace(progress(BUSY), note="Early verdict: 1 node is faster"),
    "a hang": msgspec.structs.replace(progress(BUSY), stall=HANGS),
    "stopped at its time": TRAINS,
}


def test_the_table_shows_what_is_known_with_its_units_and_a_dash_for_the_rest(golden: Golden) -> None:
    golden.check("progress.txt", "".join(f"=== {case}\n{printed(shown)}\n" for case, shown in SHOWN.items()))


def test_on_a_narrow_terminal_the_least_important_columns_go_and_none_is_cut(golden: Golden) -> None:
    wide = msgspec.structs.replace(PROFILED, net_in_gbit_per_s=1.7e308)
    texts = {}
    for node, width in ((FAR, 160), (FAR, 120), (FAR, 80), (wide, 120)):
        text = rendered(node, WAITING, width=width)
        assert max(map(len, text.splitlines())) <= width
        assert "\u2026" not in text
        texts[f"{node.name} at {width} columns"] = text
    golden.check("progress_narrow.txt", "".join(f"=== {case}\n{text}\n" for case, text in texts.items()))


def busy(rank: int, **changes: object) -> NodeProgress:
    return msgspec.structs.replace(BUSY, name=f"n{rank:02}", node_rank=rank, **changes)


MANY = [busy(rank) for rank in range(32)]


def worst_of_many() -> list[NodeProgress]:
    """One is lost, one is behind, and one is slow."""
    nodes = list(MANY)
    nodes[30] = busy(30, state="lost", message="contact lost")
    nodes[20] = busy(20, step=3)
    nodes[10] = busy(10, recent_us=(900_000.0,))
    return nodes


def in_states(count: int, *states: str) -> list[NodeProgress]:
    return [busy(rank, state=states[rank % len(states)]) for rank in range(count)]


def test_of_many_nodes_the_worst_have_rows_and_the_others_are_summed_up_by_their_state(golden: Golden) -> None:
    profiled = [msgspec.structs.replace(PROFILED, name=f"n{index}", node_rank=index) for index in range(20)]
    shown = {
        "12 nodes": MANY[:12],
        "20 nodes with all figures": profiled,
        "32 nodes, one lost, one behind, one slow": worst_of_many(),
        "64 nodes, of which the last have ended": [
            busy(rank, state="ended" if rank >= 60 else "waiting" if rank >= 58 else "running") for rank in range(64)
        ],
        "64 nodes, of which many have ended": [
            busy(rank, state="ended" if rank >= 20 else "running") for rank in range(64)
        ],
        "256 nodes in all states": in_states(256, "lost", "stopping", "waiting", "starting", "ended", "running"),
    }
    golden.check("progress_many.txt", "".join(f"=== {case}\n{rendered(*nodes)}\n" for case, nodes in shown.items()))


def test_few_nodes_keep_their_order_and_of_many_the_worst_come_first() -> None:
    assert worst_first(MANY[:12], 12) == (tuple(MANY[:12]), ())
    shown, rest = worst_first(worst_of_many(), 12)
    assert [node.node_rank for node in shown[:3]] == [30, 20, 10]
    assert (len(shown), len(rest)) == (11, 21)


def test_the_rest_says_least_step_and_median_time() -> None:
    rest = sum_up([busy(0), busy(1, step=5, state="ended"), NodeProgress(name="x", node_rank=2, ranks=(4,))])
    assert (rest.count, rest.states, rest.step) == (3, "1 waiting, 1 ended, 1 running", 5)
    assert rest.step_time_us == 300_000.0


def test_one_line_says_it_all_where_there_is_no_terminal(golden: Golden) -> None:
    shown = SHOWN | {
        "one starts, one has ended": progress(STARTING, msgspec.structs.replace(ENDED, message="done")),
        "32 nodes": progress(*MANY),
        "contact with one was lost": progress(msgspec.structs.replace(BUSY, message="contact lost"), WAITING),
    }
    golden.check("progress_lines.txt", "".join(f"# {case}\n{progress_line(one)}\n" for case, one in shown.items()))


def test_no_name_and_no_message_moves_the_cursor() -> None:
    odd = msgspec.structs.replace(BUSY, name="box\x1b[2J", message="end\x1b]0;title\x07\r")
    assert "\x1b" not in rendered(odd)
    assert "\x07" not in progress_line(progress(odd))
