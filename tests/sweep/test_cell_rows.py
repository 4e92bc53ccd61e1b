from __future__ import annotations

from typing import Any

import msgspec
import pytest

from multinode.cluster.facts import Gpu, NodeFacts
from multinode.findings.finding import Finding, message_of
from multinode.model.workload import FullRun, JobSettings
from multinode.profile.throughput import Utilisation
from multinode.records.plan import LaunchPlan
from multinode.runs.devices import devices_of
from multinode.runs.stored_run import StoredRun
from multinode.series.grid import CellRecord, GridCell
from multinode.stats.estimate import Estimate, of_repeats
from multinode.stats.unknown import UNMEASURED, Unknown, known, or_none, or_unknown, reason_of, unknown_fields
from multinode.sweep.figures import CellRow
from multinode.sweep.rows import device_of, fill_rows, make_row, with_full_run
from tests import make
from tests.contrast.made_up_sides import node_use, run_of, split_summary, summary_of

CELL = GridCell(label="1x2-lora-batch2", settings={"finetuning_type": "lora"}, nodes=1)


def row_of(*runs: StoredRun) -> CellRow:
    record = CellRecord(cell=CELL, state="measured", run_ids=tuple(run.require_summary().run_id for run in runs))
    return make_row(record, runs)


def used(tflops: float) -> Utilisation:
    return Utilisation(
        model_tflops=tflops, hardware_tflops=1.5 * tflops, mfu=tflops / 165, hfu=None, denominator="165", rule=""
    )


def test_a_row_has_the_mean_of_its_repeats_and_their_interval() -> None:
    row = row_of(*(run_of(summary_of(rate, tokens_per_s=128 * rate, tgs=64 * rate)) for rate in (24.0, 20.0, 25.0)))
    assert row.samples_per_s == of_repeats([24.0, 20.0, 25.0])
    assert (known(row.tokens_per_s).value, known(row.tgs).value) == (128 * 23, 64 * 23)
    assert (row.state, row.label, row.nodes, row.workers_per_node, row.world_size) == ("measured", CELL.label, 1, 2, 2)
    assert (row.settings.model, row.global_batch, row.varied) == ("tiny", 4, {"finetuning_type": "lora"})


def test_unequal_nodes_have_workers_in_all_and_no_number_on_each() -> None:
    cell = msgspec.structs.replace(CELL, nodes=2)
    run = run_of(node_names=("a", "b"), workers=(2, 1))
    measured = make_row(CellRecord(cell=cell, state="measured", run_ids=("r",)), (run,))
    assert (measured.nodes, measured.world_size, measured.global_batch) == (2, 3, 6)
    assert reason_of(measured.workers_per_node) == "the nodes have unequal numbers of workers"
    # What is known of those that were measured on these nodes is known of the others.
    waiting = make_row(CellRecord(cell=cell))
    assert [row.world_size for row in fill_rows([measured, waiting])] == [3, 3]


def test_memory_is_of_the_worker_that_needed_most_in_any_repeat() -> None:
    peaks: tuple[dict[int, float], ...] = ({0: 3.0, 1: 4.5}, {0: 5.25}, {})
    runs = [run_of(summary_of(nodes=(node_use(peak_worker_memory_gib=peak),))) for peak in peaks]
    assert row_of(*runs).peak_memory_gib == 5.25
    bare = row_of(runs[-1])
    assert bare.peak_memory_gib == Unknown("no worker reported its memory")


def test_the_network_s_share_is_what_a_step_exposes() -> None:
    runs = [run_of(split_summary(exposed_ms, step_ms=200.0)) for exposed_ms in (40.0, 60.0)]
    assert row_of(*runs).network_share == pytest.approx(0.25)
    unsplit = row_of(run_of(summary_of()))
    assert unsplit.network_share == Unknown("it was not measured")


def test_utilisation_stands_where_every_repeat_has_it_and_says_why_where_not() -> None:
    both = row_of(*(run_of(summary_of(utilisation=used(tflops))) for tflops in (40.0, 60.0)))
    assert (both.model_tflops, both.hardware_tflops) == (50.0, 75.0)
    assert both.mfu == pytest.approx(50 / 165)
    assert both.hfu == Unknown("165")
    unknown = Unknown("the model's shape is unknown")
    one = row_of(run_of(summary_of(utilisation=used(40.0))), run_of(summary_of(utilisation=unknown)))
    assert one.mfu == unknown


def test_prices_of_the_hostfile_stand_in_the_row() -> None:
    row = row_of(run_of(summary_of(tokens_per_s=2000.0), price_per_hour=0.8, price_purchase=3200.0))
    assert (row.price_per_hour, row.price_purchase) == (0.8, 3200.0)
    assert row.cost_per_million_tokens == pytest.approx(0.8 / (2000 * 3600) * 1e6)
    bare = row_of(run_of())
    assert "price=" in reason_of(bare.price_per_hour)
    assert "price_purchase=" in reason_of(bare.price_purchase)


@pytest.mark.parametrize(
    ("state", "out_of", "shown"),
    [
        ("out_of_memory", "gpu", "out_of_memory"),
        ("out_of_memory", "node", "out_of_memory"),
        ("skipped", None, "skipped"),
        ("failed", None, "failed"),
        ("waiting", None, "waiting"),
        ("running", None, "waiting"),
    ],
)
def test_a_cell_without_figures_is_a_row_with_its_reason(state: str, out_of: str | None, shown: str) -> None:
    cell = msgspec.structs.replace(CELL, workers_per_node=4)
    row = make_row(CellRecord(cell=cell, state=state, out_of=out_of, why=Finding(message="so it is")))
    assert (row.state, row.out_of, message_of(row.why), row.samples_per_s) == (shown, out_of, "so it is", UNMEASURED)
    assert (row.nodes, row.world_size) == (1, 4)


def test_a_measured_cell_that_tells_no_speed_or_has_lost_its_runs_says_so() -> None:
    silent = run_of(summary_of(samples_per_s=Unknown("no worker counted them")))
    row = row_of(silent)
    assert (row.state, row.samples_per_s) == ("failed", UNMEASURED)
    assert "no worker counted them" in message_of(row.why)
    assert message_of(row_of().why) == "its runs are no longer stored"


def test_every_figure_of_a_measured_row_that_is_none_has_a_reason() -> None:
    row = row_of(run_of())
    imported = {"parameters", "trainable_parameters", "network_gbit_per_s", "nics", "rdma", "shortfall", "unjudged"}
    others = {name for name in row.__struct_fields__ if getattr(row, name) is None} - imported
    assert others == {"out_of", "why", "relative", "currency"}
    assert all(unknown.reason for unknown in unknown_fields(row).values())
    assert msgspec.json.decode(msgspec.json.encode(row), type=CellRow) == row


TWO = (Gpu(index=0, name="NVIDIA GeForce RTX 3090"), Gpu(index=1, name="NVIDIA GeForce RTX 4090"))


def plan(*gpus: tuple[int, ...] | None) -> LaunchPlan:
    return make.plan(*(make.node_plan(f"n{rank}", rank, workers=2, gpus=ids) for rank, ids in enumerate(gpus)))


@pytest.mark.parametrize(
    ("gpus", "found", "device"),
    [
        ([(1,)], [TWO], "NVIDIA GeForce RTX 4090"),
        ([(1,), (1,)], [TWO, TWO], "NVIDIA GeForce RTX 4090"),
        ([(0, 1), (1,)], [TWO, TWO], "1 x NVIDIA GeForce RTX 3090 + 2 x NVIDIA GeForce RTX 4090"),
        ([None, None], [(), ()], "CPU"),
        ([(1,), None], [TWO, ()], "1 x NVIDIA GeForce RTX 4090 + 2 x CPU"),
        ([(5,)], [TWO], None),
        ([(0,), (0,)], [TWO], None),
    ],
)
def test_a_device_is_named_as_the_nodes_name_what_their_workers_use(
    gpus: list[tuple[int, ...] | None], found: list[tuple[Gpu, ...]], device: str | None
) -> None:
    facts = {f"n{rank}": NodeFacts(node=f"n{rank}", gpus=listed) for rank, listed in enumerate(found)}
    assert or_none(device_of(devices_of(plan(*gpus), facts))) == device


@pytest.mark.parametrize(
    ("told", "device"),
    [
        (("AMD EPYC 9B14 96-Core Processor",) * 2, "AMD EPYC 9B14 96-Core Processor"),
        (("AMD EPYC 9B14 96-Core Processor", None), "2 x AMD EPYC 9B14 96-Core Processor + 2 x CPU"),
        ((None, None), "CPU"),
        (("", " \n"), "CPU"),
        ((" a\nlie\t", "a lie"), "a lie"),
        (("x" * 1000,) * 2, "x" * 80),
    ],
)
def test_workers_without_gpus_compute_on_the_processors_that_their_node_names(
    told: tuple[str | None, ...], device: str
) -> None:
    facts = {f"n{rank}": NodeFacts(node=f"n{rank}", processor=or_unknown(name)) for rank, name in enumerate(told)}
    assert device_of(devices_of(plan(None, None), facts)) == device


def test_a_processor_is_no_device_of_workers_with_gpus() -> None:
    facts = {"n0": NodeFacts(node="n0", gpus=TWO, processor="AMD EPYC 9B14 96-Core Processor")}
    assert devices_of(plan((1,)), facts) == ({"NVIDIA GeForce RTX 4090": 1},)


def test_devices_are_counted_node_by_node() -> None:
    facts = {name: NodeFacts(node=name, gpus=TWO) for name in ("n0", "n1")}
    first, second = devices_of(plan((0, 1), (1,)), facts)
    assert first == {"NVIDIA GeForce RTX 3090": 1, "NVIDIA GeForce RTX 4090": 1}
    assert second == {"NVIDIA GeForce RTX 4090": 1}


LORA = JobSettings(model="m", method="lora", lora_rank=8, strategy="DDP", per_device_batch=2, accumulation=4)
FULL = msgspec.structs.replace(LORA, method="full", lora_rank=None)


def measured(settings: JobSettings, nodes: int = 1, **varied: Any) -> CellRow:
    return CellRow(
        label=f"{nodes}-{varied}", nodes=nodes, workers_per_node=2, settings=settings, varied=varied, device="A100"
    )


def filled(*measured_rows: CellRow, nodes: int = 1, workers: int | None = None, **varied: Any) -> CellRow:
    """A cell that ran out of memory beside those that were measured."""
    out = CellRow(label="out", state="out_of_memory", nodes=nodes, workers_per_node=or_unknown(workers), varied=varied)
    *same, found = fill_rows([*measured_rows, out])
    assert same == list(measured_rows)
    return found


def test_what_all_measured_cells_agree_on_holds_for_the_others() -> None:
    row = filled(measured(LORA, per_device_train_batch_size=2), per_device_train_batch_size=8)
    assert row.settings == msgspec.structs.replace(LORA, per_device_batch=8)
    assert (row.device, row.workers_per_node, row.world_size, row.global_batch) == ("A100", 2, 2, 8 * 4 * 2)


def test_a_setting_is_taken_of_the_cells_that_the_sweep_set_alike() -> None:
    rows = [measured(LORA, finetuning_type="lora"), measured(FULL, finetuning_type="full")]
    assert filled(*rows, finetuning_type="full").settings == FULL
    assert filled(*rows, finetuning_type="lora").settings.lora_rank == 8


def test_what_no_measured_cell_shows_is_taken_of_the_sweep_or_unknown() -> None:
    row = filled(measured(LORA, finetuning_type="lora"), finetuning_type="full")
    assert (row.settings.method, row.settings.lora_rank, row.settings.model) == ("full", None, "m")
    row = filled(measured(LORA, deepspeed=None), deepspeed="z3.json")
    assert row.settings.strategy is None
    row = filled(measured(LORA, cutoff_len=512), cutoff_len="long")
    assert row.settings.sequence_length is None


def test_without_a_measured_cell_only_what_the_sweep_set_is_known() -> None:
    row = filled(per_device_train_batch_size=4, finetuning_type="full", nodes=2, workers=1)
    assert row.settings == JobSettings(method="full", per_device_batch=4)
    assert (row.world_size, row.global_batch, row.device) == (2, UNMEASURED, UNMEASURED)


def test_workers_that_the_hostfile_decides_are_those_of_cells_on_as_many_nodes() -> None:
    two = msgspec.structs.replace(measured(LORA, nodes=2), workers_per_node=4, device="H100")
    row = filled(measured(LORA), two, nodes=2)
    assert (row.workers_per_node, row.world_size, row.device) == (4, 8, "H100")
    assert filled(measured(LORA), nodes=3).workers_per_node == UNMEASURED


def row(label: str, rate: float | None = 10.0, world_size: int = 2, batch: int | None = 4, **known: Any) -> CellRow:
    speed = UNMEASURED if rate is None else Estimate(value=rate, low=rate / 2, high=rate * 2)
    batches = or_unknown(batch)
    state = "skipped" if rate is None else "measured"
    return CellRow(label=label, state=state, samples_per_s=speed, world_size=world_size, global_batch=batches, **known)


def times(rows: tuple[CellRow, ...]) -> list[float | None]:
    return [known(one.whole_s).value if not isinstance(one.whole_s, Unknown) else None for one in rows]


def test_epochs_are_so_many_times_the_data() -> None:
    rows, trains = with_full_run([row("a", dataset_samples=1100), row("b", 20.0)], FullRun(epochs=3.0))
    assert times(rows) == [330.0, 165.0]
    (note,) = trains
    assert (
        note.message
        == "The full run has 3 epochs of the dataset (1,100 samples). Its time is calculated from the speed of the "
        "measured steps."
    )
    assert rows[0].whole_s == Estimate(value=330.0, low=165.0, high=660.0)


def test_a_cell_that_packs_its_data_otherwise_trains_the_same_data() -> None:
    rows, trains = with_full_run([row("a", dataset_samples=1000), row("b", dataset_samples=250)], FullRun(epochs=1.0))
    assert times(rows) == [100.0, 25.0]
    (note,) = trains
    assert note.message == (
        "The full run has 1 epoch of the dataset. Its time is calculated from the speed of the measured steps."
    )


def test_steps_are_those_of_the_file_s_batch_on_the_most_workers_in_every_cell() -> None:
    cells = [row("a", batch=2), row("b", world_size=4, batch=64), row("c", None, world_size=8, batch=None)]
    rows, trains = with_full_run(cells, FullRun(steps=100), worker_batch=16)
    assert times(rows) == [1280.0, 1280.0, None]
    (note,) = trains
    assert note.message == (
        "In every cell, the full run has 12,800 samples (100 steps of 16 samples per worker on 8 workers). Its time "
        "is calculated from the speed of the measured steps."
    )


def test_a_largest_cell_without_figures_counts_as_well() -> None:
    cells = [
        row("a", batch=32, world_size=4),
        msgspec.structs.replace(row("b", None, batch=None), world_size=UNMEASURED),
    ]
    assert times(with_full_run(cells, FullRun(steps=10), worker_batch=8)[0]) == [32.0, None]
    assert times(with_full_run(cells, FullRun(steps=10), worker_batch=8, least_workers=8)[0]) == [64.0, None]
    assert times(with_full_run(cells, FullRun(steps=10), least_workers=8)[0]) == [64.0, None]


def test_steps_of_a_file_that_does_not_say_are_those_of_the_first_cell_with_the_most_workers() -> None:
    cells = [row("a", batch=2), row("b", world_size=4, batch=32), row("c", world_size=4, batch=64)]
    assert times(with_full_run(cells, FullRun(steps=10))[0]) == [32.0, 32.0, 32.0]


@pytest.mark.parametrize(
    ("whole", "reason"),
    [
        (FullRun(), "its number of steps or epochs"),
        (FullRun(epochs=2.0), "the number of samples in the dataset"),
        (FullRun(steps=5), "the batch per worker"),
    ],
)
def test_what_is_not_known_is_said_of_measured_rows(whole: FullRun, reason: str) -> None:
    rows, trains = with_full_run([row("a", batch=None), row("b", None, batch=None)], whole)
    assert trains == ()
    assert reason in reason_of(rows[0].whole_s)
    assert unknown_fields(rows[1]) == {}
