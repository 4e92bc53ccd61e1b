from __future__ import annotations

import msgspec
from rich.console import Console

from multinode.analyse.advice.advice import Advice, Recommendations, Tried
from multinode.analyse.prediction.cost_model import StepParts
from multinode.analyse.prediction.forecast import PredictedScenario
from multinode.analyse.steps.bottleneck import Bottleneck
from multinode.report.advice.advice_sheet import advice_lines, how_sheet
from multinode.report.render.table import sheet_table

OUTLOOK = PredictedScenario(
    link_gbit_per_s=0.1,
    nodes=2,
    workers_per_node=1,
    per_device_batch=2,
    accumulation=1,
    strategy="DDP",
    step_time_ms=1000,
    samples_per_s=4,
    interval=(3, 5),
    speedup=1,
    efficiency=0.5,
    parts=StepParts(compute_ms=1, optimizer_ms=0, host_ms=0, data_ms=0, comm_ms=0, beyond_ms=0, exposed_ms=0),
    bottleneck=Bottleneck(kind="network"),
)
HALVED = Advice(
    name="gradients as fp16",
    gain=1.784,
    interval=(1.7, 1.9),
    outlook=OUTLOOK,
    memory_gib=-0.5,
    meaning="gradients are rounded",
    command="--grad-compress fp16",
    why="half the bytes",
)
BATCH = msgspec.structs.replace(HALVED, name="per-device batch 4", memory_gib=None)
COUNSEL = Recommendations(
    sources=("2 nodes: run r",),
    today=OUTLOOK,
    measured_samples_per_s=3.9,
    advice=(HALVED, BATCH),
    notes=("be careful",),
)


def shown(recommendations: Recommendations) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(sheet_table(how_sheet(recommendations, recommendations.advice)))
    return captured.get()


def test_a_row_has_gain_interval_memory_meaning_and_command() -> None:
    lines = shown(COUNSEL).splitlines()
    row = next(line for line in lines if line.startswith("gradients as fp16"))
    for figure in ("x1.78", "1.70 - 1.90", "-0.50", "gradients are rounded", "--grad-compress fp16"):
        assert figure in row
    assert "unknown" in next(line for line in lines if line.startswith("per-device batch 4"))
    assert "measured" not in "".join(line for line in lines if "*" in line)
    measured = msgspec.structs.replace(COUNSEL, advice=(msgspec.structs.replace(HALVED, measured=True), BATCH))
    assert "x1.78 *" in shown(measured)
    assert "* measured" in shown(measured)
    assert "measured " not in lines[1]
    assert lines[-1].strip() == "as it stands: 4 samples/s predicted (3 to 5), 3.9 measured"


def test_what_was_tried_stands_beside_what_was_predicted() -> None:
    good = Tried(run_id="r-1", samples_per_s=6.8, gain=1.75, error=0.0194, is_covered=True)
    failed = Tried(run_id="r-2", reason="a: out of memory")
    advice = (msgspec.structs.replace(HALVED, tried=good), msgspec.structs.replace(BATCH, tried=failed))
    tried = Tried(run_id="r-0", samples_per_s=3.89)
    recommendations = msgspec.structs.replace(COUNSEL, advice=advice, today_tried=tried)
    text = shown(recommendations)
    row = next(line for line in text.splitlines() if line.startswith("gradients as fp16"))
    assert "x1.75" in row
    assert "+1.9%" in row
    assert "failed" in text
    assert "3.89 in a short run now" in text
    assert "per-device batch 4 was tried: a: out of memory" in list(advice_lines(recommendations, advice))


def test_what_the_gpus_have_no_room_for_is_marked() -> None:
    unfit = msgspec.structs.replace(HALVED, fits=False)
    assert "does not fit the GPUs; gradients are rounded" in shown(msgspec.structs.replace(COUNSEL, advice=(unfit,)))


def test_lines_say_why_then_notes_then_sources() -> None:
    assert list(advice_lines(COUNSEL, (HALVED,))) == [
        "gradients as fp16: half the bytes",
        "note: be careful",
        "from 2 nodes: run r",
    ]


def test_foreign_text_does_nothing_to_a_terminal() -> None:
    hostile = msgspec.structs.replace(HALVED, why="\x1b[2J", meaning="\x1b]0;x\x07", command="[/bold] [red]")
    recommendations = msgspec.structs.replace(COUNSEL, advice=(hostile,))
    assert "\x1b" not in shown(recommendations)
    assert "[/bold] [red]" in shown(recommendations)
    assert "\x1b" not in "".join(advice_lines(recommendations, (hostile,)))
