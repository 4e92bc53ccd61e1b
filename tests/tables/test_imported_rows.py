from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.findings.finding import message_of
from multinode.predict.rounded import parse_rounded
from multinode.stats.estimate import Estimate, exactly
from multinode.stats.unknown import UNMEASURED, known, reason_of, unknown_fields
from multinode.sweep.figures import CellRow, CellTable
from multinode.sweep.table import relative_to
from multinode.tables.imported_columns import IMPORTED
from multinode.tables.imported_forms import Cell, Form, Line, TableError
from multinode.tables.imported_rows import imported_rows, label_rows, with_derived
from multinode.tables.imported_table import Extras, ImportedRow, make_table, parse_table


def rows(text: str) -> tuple[CellRow, ...]:
    return imported_rows(parse_table(text, "table.csv", Extras()).rows)


def messages(row: CellRow) -> tuple[str, ...]:
    return tuple(found.message for found in row.contradictions)


def test_a_row_is_a_cell_that_says_where_it_is_from() -> None:
    (row,) = rows(
        "model,gpu,nodes,gpus,method,batch,accumulation,samples/s,memory_gib,samples,tokens,epochs,seq_len,bf16\n"
        "llama,RTX 4090,2,4,lora,2,8,10.0,20.5,1000,500000,3,1024,true\n"
    )
    assert (row.source, row.state, row.device) == ("imported", "measured", "RTX 4090")
    assert (row.nodes, row.workers_per_node, row.world_size, row.global_batch) == (2, 2, 4, 64)
    assert (row.settings.model, row.settings.method, row.settings.precision) == ("llama", "lora", "bf16")
    assert (row.settings.per_device_batch, row.settings.accumulation, row.settings.sequence_length) == (2, 8, 1024)
    assert (known(row.samples_per_s).low, known(row.samples_per_s).high) == pytest.approx((9.95, 10.05))
    assert known(row.tokens_per_s).value == pytest.approx(5000)
    assert known(row.tgs).value == pytest.approx(1250)
    assert known(row.whole_s).value == pytest.approx(300)
    assert (row.peak_memory_gib, row.dataset_samples, row.tokens_per_sample) == (20.5, 1000, 500)
    assert row.contradictions == ()


def test_what_a_table_does_not_tell_is_missing_with_its_reason() -> None:
    (row,) = rows("gpus,samples/s\n1,2.5\n")
    told = {"world_size", "samples_per_s"}
    unknown = {"device", "tokens_per_s", "mfu", "whole_s", "step_time_ms", "energy_j_per_sample", "global_batch"}
    assert unknown <= unknown_fields(row).keys()
    assert not told & unknown_fields(row).keys()
    assert {reason_of(getattr(row, name)) for name in unknown} == {"not in the table"}


def test_not_fp16_is_no_word_for_what_it_was() -> None:
    assert [row.settings.precision for row in rows("gpus,fp16\n1,false\n1,true\n")] == [None, "fp16"]


def test_out_of_memory_is_a_state_and_not_a_figure() -> None:
    gpu, node, fine = rows("gpus,samples/s,memory_mb\n1,,OOM\n1,OOM node,\n1,2.5,100\n")
    assert [(row.state, row.out_of, row.peak_memory_gib) for row in (gpu, node)] == [
        ("out_of_memory", "gpu", UNMEASURED),
        ("out_of_memory", "node", UNMEASURED),
    ]
    assert "the GPU ran out of memory, according to the table" in message_of(gpu.why)
    assert (fine.state, fine.out_of, fine.why) == ("measured", None, None)


def test_a_row_that_ran_out_of_memory_and_has_a_speed_contradicts_itself() -> None:
    (row,) = rows("gpus,samples/s,memory_mb\n1,2.5,OOM\n")
    assert messages(row) == ("it ran out of memory but has samples/s",)


def test_a_row_without_figures_is_skipped_and_says_so() -> None:
    (row,) = rows("gpus,batch,samples/s\n1,2,-\n")
    assert (row.state, message_of(row.why)) == ("skipped", "the table has no figures for it")


def test_a_contradiction_is_named_and_the_figures_stand_as_they_were() -> None:
    (row,) = rows("gpus,samples,epochs,samples/s,runtime\n1,1000,1,10.00,150.0\n")
    assert messages(row) == ("samples/s x runtime is 1,500, but samples x epochs is 1,000: 50.0% more",)
    assert (known(row.samples_per_s).value, known(row.whole_s).value) == (10.0, 150.0)


def test_rows_of_a_large_table_are_told_apart_and_can_be_stored() -> None:
    found = rows("gpu,gpus,samples,epochs,samples/s\n" + "RTX 4090,1,1100,1,2.5\n" * 500)
    assert len({row.label for row in found}) == 500
    assert msgspec.json.decode(msgspec.json.encode(found), type=tuple[CellRow, ...]) == found


def _is_taken(cell: Cell) -> bool:
    try:
        make_table(Form([Line(1, [cell])]), Extras())
    except TableError:
        return False
    return True


_text = st.sampled_from(["1", "7", "0.085", "1e15", "1e-12", "1000000000000", "OOM", "-", "", "28:04", "true", "words"])


@given(st.lists(st.dictionaries(st.sampled_from(sorted(IMPORTED)), _text, max_size=12), max_size=4))
def test_whatever_a_table_tells_its_rows_can_be_compared_and_stored(texts: list[dict[str, str]]) -> None:
    read: list[ImportedRow] = []
    for cells in texts:
        # What a column refuses never gets as far as a row.
        known = [cell for title, text in cells.items() if _is_taken(cell := Cell(1, title, text))]
        once = {IMPORTED[cell.title].column.name: cell for cell in known}
        read += make_table(Form([Line(1, list(once.values()))]), Extras()).rows
    table = relative_to(CellTable(run_id="run", job="job", cells=imported_rows(read)))
    assert msgspec.json.decode(msgspec.json.encode(table), type=CellTable) == table


def test_utilisation_network_and_energy_are_taken_as_they_are_given() -> None:
    (row,) = rows("stage,gpus,samples/s,mfu,hfu,network_share,energy_j_per_sample\nsft,1,2.5,45%,0.60,0.1,300\n")
    assert (row.settings.stage, row.mfu, row.hfu, row.network_share) == ("sft", 0.45, 0.6, 0.1)
    assert row.energy_j_per_sample == 300
    assert not {"mfu", "hfu", "network_share", "energy_j_per_sample"} & unknown_fields(row).keys()
    assert rows("gpus,mfu\n1,45%\n")[0].state == "measured"


def test_shares_of_a_peak_have_to_fit_the_flops() -> None:
    (row,) = rows("gpus,mfu,hfu,model_tflops,hardware_tflops\n1,0.400,0.600,66.0,88.0\n")
    assert len(row.contradictions) == 1
    assert messages(row)[0].startswith("MFU x the hardware's TFLOP/s is 35.2")


def row(words: dict[str, str], **counts: int) -> ImportedRow:
    return ImportedRow(line=7, words=words, figures={name: exactly(count) for name, count in counts.items()})


def test_a_label_has_the_device_and_what_tells_it_from_others() -> None:
    rows = [
        row({"device": "NVIDIA GeForce RTX 4090", "method": "LoRA", "model": "b"}, world_size=1, per_device_batch=2),
        row({"device": "RTX 4090", "method": "full ZeRO-3 offload", "model": "b"}, world_size=2, per_device_batch=2),
    ]
    assert label_rows(rows) == ["rtx-4090-x1", "rtx-4090-x2"]
    same = [msgspec.structs.replace(one, figures=rows[0].figures) for one in rows]
    assert label_rows(same) == ["rtx-4090-x1-lora", "rtx-4090-x1-full-zero-3-offload"]


def test_models_are_named_where_nothing_else_differs() -> None:
    rows = [row({"device": "A100", "method": "LoRA", "model": f"org/Model-{size}B"}, world_size=1) for size in (7, 70)]
    assert label_rows(rows) == ["a100-x1-org-model-7b", "a100-x1-org-model-70b"]


def test_a_name_is_taken_as_it_is() -> None:
    assert label_rows([row({"label": "My run (2)"}), row({"label": "Other"})]) == ["My run (2)", "Other"]


def test_rows_of_one_name_are_told_apart() -> None:
    rows = [row({"label": "a"}), row({"label": "a", "fp16": "yes"}), row({"label": "a", "precision": "INT 8"})]
    assert label_rows(rows) == ["a", "a-fp16", "a-int-8"]
    assert label_rows([row({"label": "a"}), row({"label": "a-2"}), row({"label": "a"})]) == ["a", "a-2", "a-3"]
    assert label_rows([row({}), row({})]) == ["line-7", "line-7-2"]


_rows = st.builds(
    row,
    st.dictionaries(
        st.sampled_from(["label", "device", "model", "precision", "fp16"]), st.sampled_from(["yes", "a", "a-2"])
    ),
    world_size=st.integers(1, 3),
)


@given(st.lists(_rows, max_size=8))
def test_labels_are_unique_and_never_empty(rows: list[ImportedRow]) -> None:
    labels = label_rows(rows)
    assert len(labels) == len(rows) == len(set(labels))
    assert all(labels)


def derived(**values: float) -> dict[str, float]:
    return {name: figure.value for name, figure in with_derived({n: exactly(v) for n, v in values.items()}).items()}


@pytest.mark.parametrize(
    ("given_", "name", "value"),
    [
        ({"nodes": 2, "workers_per_node": 4}, "world_size", 8),
        ({"world_size": 8, "nodes": 2}, "workers_per_node", 4),
        ({"world_size": 8, "per_device_batch": 2, "accumulation": 4}, "global_batch", 64),
        ({"all_devices_batch": 32, "accumulation": 4}, "global_batch", 128),
        ({"all_devices_batch": 32, "world_size": 4}, "per_device_batch", 8),
        ({"global_batch": 128, "world_size": 4, "per_device_batch": 8}, "accumulation", 4),
        ({"dataset_samples": 1100, "epochs": 2, "whole_s": 200}, "samples_per_s", 11),
        ({"dataset_samples": 1100, "epochs": 2, "samples_per_s": 11}, "whole_s", 200),
        ({"steps_per_s": 0.5, "global_batch": 32}, "samples_per_s", 16),
        ({"steps_per_s": 0.5}, "step_time_ms", 2000),
        ({"steps": 32, "whole_s": 64}, "step_time_ms", 2000),
        ({"samples_per_s": 16, "global_batch": 32}, "step_time_ms", 2000),
        ({"step_time_ms": 2000, "global_batch": 32}, "samples_per_s", 16),
        ({"samples_per_s": 2, "tokens": 5000, "dataset_samples": 10}, "tokens_per_s", 1000),
        ({"tgs": 1000, "world_size": 4, "tokens_per_sample": 500}, "samples_per_s", 8),
        ({"tokens_per_s": 4000, "world_size": 4}, "tgs", 1000),
        ({"price_gpu_per_hour": 9.3, "world_size": 2}, "price_per_hour", 18.6),
        ({"price_purchase_gpu": 80000, "world_size": 2}, "price_purchase", 160000),
    ],
)
def test_a_figure_follows_from_others(given_: dict[str, float], name: str, value: float) -> None:
    assert derived(**given_)[name] == pytest.approx(value)


def test_nothing_is_assumed() -> None:
    # Whether gradients were accumulated, and over how many nodes the GPUs stand, nobody told.
    assert derived(world_size=2, per_device_batch=4) == {"world_size": 2, "per_device_batch": 4}
    assert "per_device_batch" not in derived(all_devices_batch=33, world_size=4)


def test_a_figure_that_is_told_stays_though_it_contradicts() -> None:
    assert derived(dataset_samples=1000, epochs=1, samples_per_s=10, whole_s=500)["whole_s"] == 500


def test_what_follows_is_known_no_better_than_what_it_follows_from() -> None:
    found = with_derived(
        {"samples_per_s": parse_rounded("0.085"), "dataset_samples": exactly(1100), "epochs": exactly(1)}
    )
    assert (found["whole_s"].low, found["whole_s"].high) == pytest.approx((1100 / 0.0855, 1100 / 0.0845))


_NAMES = [
    "world_size",
    "nodes",
    "accumulation",
    "global_batch",
    "dataset_samples",
    "epochs",
    "whole_s",
    "tokens",
    "tokens_per_s",
]


@given(st.dictionaries(st.sampled_from(_NAMES), st.floats(1e-9, 1e15).map(exactly)))
def test_any_figures_are_completed_and_none_is_changed(told: dict[str, Estimate]) -> None:
    found = with_derived(told)
    assert {name: found[name] for name in told} == told
    assert all(0 < figure.low <= figure.high < float("inf") for figure in found.values())
