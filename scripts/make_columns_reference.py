"""Writes docs/reference/imported-columns.md from the columns of an import; with --check, says if it is current."""

from __future__ import annotations

import sys
from pathlib import Path

from reference_pages import write_or_check

from multinode.tables.imported_columns import DERIVED, IMPORTED, SPEEDS
from multinode.tables.imported_titles import read_title

REFERENCE = Path(__file__).parent.parent / "docs" / "reference" / "imported-columns.md"

_HEADER = """\
# Columns of imported tables

<!-- Written by scripts/make_columns_reference.py. -->

The titles that `multinode import` reads, the column that it makes of them, and its meaning. Capital letters, spaces,
dashes, underscores and brackets make no difference. Titles of one row may differ in unit: `step_time_s` is in seconds.
If a title has no unit, each cell needs one. The unit of a rate is a title too: `tokens/s`, `img/sec/GPU`, `s/it`.
A unit or a scale (`k`, `M`, `B`) may follow a title: `memory (MiB)`, `tokens (M)`. `--column 'TITLE=COLUMN'` takes any
of these names. [How to import a table](../how-to/compare-gpus-by-price.md).

| titles | column | meaning |
|---|---|---|
"""
_MEANINGS = {
    "label": "of the row; else made of the device and what tells the rows apart",
    "device": "what a worker computes on: a GPU, or a CPU",
    "world_size": "GPUs in all",
    "parameters": "of the whole model: `7B`, `110M`",
    "trainable_parameters": "of an adapter, those trained",
    "network_gbit_per_s": "of all NICs of a node together, in bits: `10GbE`, `100 Gbit/s`, `8x400G InfiniBand`, "
    "`4x HDR`. InfiniBand, RoCE and EFA are RDMA; `TCP` or `IPoIB` beside them is not",
    "rdma": "true or false, if the link does not say it",
    "method": "in your own words",
    "stage": "sft, pt, dpo, ...",
    "strategy": "DDP, ZeRO-2, ...",
    "precision": "bf16, fp16, fp32, ...",
    "fp16": "true or false; false does not say what it was instead",
    "bf16": "the same",
    "sequence_length": "in tokens",
    "per_device_batch": "samples per micro-batch",
    "accumulation": "micro-batches per step",
    "all_devices_batch": "samples of a micro-batch of all workers",
    "global_batch": "samples of an optimizer step of all workers",
    "dataset_samples": "samples of the data set",
    "tokens": "tokens of the data set",
    "tokens_per_sample": "padded",
    "steps": "of the whole training",
    "samples_per_s": "of all workers",
    "samples_per_s_per_gpu": "of one worker",
    "tokens_per_s": "of all workers",
    "steps_per_s": "optimizer steps",
    "tgs": "tokens per second of one worker",
    "model_tflops": "of one worker, without recomputation",
    "hardware_tflops": "of one worker, with recomputation",
    "mfu": "share of the device's peak: `0.45` or `45%`",
    "hfu": "the same with recomputation",
    "step_time_ms": "of an optimizer step",
    "network_share": "exposed communication as a share of the step: `0.12` or `12%`",
    "peak_memory_gib": "of the worker that needed most. MB is 1e6 bytes; `nvidia-smi` counts in MiB",
    "whole_s": "of the whole training: seconds, `3:35:20`, or `28:04` (minutes and seconds)",
    "energy_j_per_sample": "of all GPUs",
    "price_per_hour": "of all devices of the row",
    "price_purchase": "of all devices of the row",
    "price_gpu_per_hour": "of one device",
    "price_purchase_gpu": "of one device",
    "currency": "one word, of the row's own prices",
}


def main() -> int:
    """Write what is not current, or name it."""
    return write_or_check({REFERENCE: render_reference()}, __doc__)


def render_reference() -> str:
    """The whole page."""
    titles: dict[str, list[str]] = {}
    for title, one in IMPORTED.items():
        titles.setdefault(one.column.name, []).append(f"`{title}`")
    rows = (f"| {', '.join(found)} | {name} | {_MEANINGS.get(name, '')} |\n" for name, found in titles.items())
    speeds = ", ".join(f"`{name}`" for name in SPEEDS)
    left_out = ", ".join(f"`{name}`" for name in dict.fromkeys(DERIVED) if read_title(name) is None)
    return (
        f"{_HEADER}{''.join(rows)}| {speeds} | by the unit | what the unit of the title or of each cell counts |\n"
        f"\nWorked out from the rows, and left out with a note: {left_out}.\n"
    )


if __name__ == "__main__":
    sys.exit(main())
