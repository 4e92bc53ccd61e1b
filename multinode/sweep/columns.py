"""COLUMNS: every possible value of a cell: name, title, unit, parsing and formatting. No rows.

Used for foreign tables (imported_columns.py), sorting, filtering, sheets, CSV files and sentences. The name of a value
is that of a field of `CellRow` or its `Settings`.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from multinode.levers.levers import TYPES
from multinode.predict.published import plain_text
from multinode.units import GIB

_SEPARATORS = re.compile(r"[\s_.:#-]+")

MONEY = "{money}"
"""Placeholder of the currency in a unit."""

BOUGHT_WITH = 10_000
"""Units of money: the speed per single unit would be too small to read."""

_Form = Literal["words", "number", "figure", "share", "money", "duration"]
ColumnKind = Literal["text", "flag", "count", "number", "epochs", "measured", "clock", "share", "price", "link"]


_FORMS: dict[ColumnKind | None, _Form] = {
    "count": "number",
    "link": "number",
    "measured": "figure",
    "clock": "duration",
    "share": "share",
    "price": "money",
}


class CellColumn(msgspec.Struct, frozen=True):
    """A value of a cell."""

    name: str  # for sorting, filtering and CSV files
    title: str = ""  # of its column; empty if no table shows it
    unit: str = ""  # below its title
    rank: int = 99  # columns with a lower rank are kept longer in narrow tables
    shown: _Form | None = None  # its format, if it does not follow from `kind`
    phrase: str = ""  # its title in a sentence, if different
    csv: str = ""  # its name in a CSV file, if the name lacks the unit
    key: str = ""  # of a job that holds the value
    decided_by: tuple[str, ...] = ()  # further keys of a job that decide it
    kind: ColumnKind | None = None  # its type in a foreign table; None if it is no column there
    written: str = ""  # its name in messages about a foreign table, if different
    names: tuple[str, ...] = ()  # its other names in a foreign table
    units: dict[str, float] = {}  # further names in another unit, with the factor to ours
    bare: tuple[str, ...] = ()  # further names without a unit: the cells must have one

    @property
    def form(self) -> _Form:
        """Its format; `words` and `number` identify the cell, the others are measured."""
        return self.shown or _FORMS.get(self.kind, "words")

    @property
    def is_measured(self) -> bool:
        """Whether it is a result of the training, which may be OOM in a foreign table."""
        return self.kind in {"measured", "clock", "share"}

    @property
    def is_figure(self) -> bool:
        """Whether it was measured; otherwise it identifies the cell."""
        return self.form not in {"words", "number"}

    @property
    def is_words(self) -> bool:
        """Whether it holds text, which is left-aligned and may wrap."""
        return self.form == "words"

    @property
    def words(self) -> str:
        """Its title in a sentence."""
        return self.phrase or self.title

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of a job that decide it."""
        return (self.key, *self.decided_by) if self.key else self.decided_by


_FSDP = ("deepspeed", "fsdp")

_COLUMNS = (
    CellColumn(
        "label",
        "cell",
        rank=0,
        kind="text",
        written="name",
        names=("label", "cell", "config", "configuration", "setup", "experiment"),
    ),
    CellColumn("source", "source", rank=40),
    CellColumn("state"),
    CellColumn("out_of"),
    CellColumn("reason"),
    CellColumn(
        "model",
        "model",
        rank=15,
        key="model_name_or_path",
        kind="text",
        names=("model_name", "base_model"),
    ),
    CellColumn(
        "parameters",
        "parameters",
        rank=62,
        shown="number",
        kind="number",
        names=(
            *("params", "num_params", "n_params", "num_parameters", "number_of_parameters", "total_params"),
            *("total_parameters", "model_params", "model_parameters", "model_size", "param_count", "parameter_count"),
        ),
    ),
    CellColumn(
        "trainable_parameters",
        "trainable",
        rank=63,
        phrase="trainable parameters",
        shown="number",
        kind="number",
        names=("trainable_params", "num_trainable_params", "num_trainable_parameters"),
    ),
    CellColumn("dataset", "data set", rank=60, key="dataset", kind="text"),
    CellColumn(
        "device",
        "device",
        rank=14,
        kind="text",
        names=("gpu", "gpu_name", "device_name", "gpu_type", "gpu_model", "accelerator"),
    ),
    CellColumn(
        "world_size",
        kind="count",
        written="devices",
        names=(
            *(
                "gpus",
                "num_gpus",
                "n_gpus",
                "gpu_num",
                "gpu_number",
                "gpu_count",
                "number_of_gpus",
                "num_of_gpus",
                "no_of_gpus",
                "num_devices",
                "total_gpus",
            ),
            *("workers", "num_processes", "world_size"),
        ),
    ),
    CellColumn(
        "nodes",
        "nodes",
        "x workers",
        rank=13,
        phrase="nodes x workers",
        kind="count",
        names=(
            *(
                "num_nodes",
                "nnodes",
                "n_nodes",
                "node_num",
                "node_number",
                "node_count",
                "number_of_nodes",
                "num_of_nodes",
                "no_of_nodes",
                "machines",
            ),
            "num_machines",
        ),
    ),
    CellColumn(
        "workers_per_node",
        kind="count",
        names=(
            *("gpus_per_node", "nproc_per_node", "gpu_num_per_node", "num_gpus_per_node", "gpu_per_node"),
            *("n_gpus_per_node", "gpus_per_machine"),
        ),
    ),
    CellColumn(
        "network_gbit_per_s",
        "link",
        rank=64,
        kind="link",
        names=("link_gbit_per_s",),
        bare=(
            *("link", "link_rate", "link_speed", "network", "network_link", "network_bandwidth", "network_speed"),
            *("inter_node_network", "inter_node_link", "inter_node_bandwidth", "nic", "nic_speed", "nic_bandwidth"),
        ),
    ),
    CellColumn("nics"),
    CellColumn("rdma", kind="flag", names=("use_rdma",)),
    CellColumn(
        "method",
        "method",
        rank=11,
        key="finetuning_type",
        decided_by=("quantization_bit",),
        kind="text",
        names=("finetuning_type", "finetuning_method", "training_method"),
    ),
    CellColumn(
        "lora_rank",
        "LoRA rank",
        rank=70,
        key="lora_rank",
        decided_by=("finetuning_type", "quantization_bit"),
        kind="count",
        names=("lora_r",),
    ),
    CellColumn("stage", "stage", rank=65, key="stage", kind="text"),
    CellColumn(
        "strategy",
        "strategy",
        rank=17,
        decided_by=_FSDP,
        kind="text",
        names=("parallelism",),
    ),
    CellColumn(
        "precision",
        "precision",
        rank=61,
        decided_by=("bf16", "fp16", "pure_bf16"),
        kind="text",
        names=("dtype", "data_type"),
    ),
    CellColumn("fp16", kind="flag"),
    CellColumn("bf16", kind="flag"),
    CellColumn(
        "sequence_length",
        "sequence",
        "tokens",
        rank=16,
        phrase="sequence length",
        csv="sequence_length_tokens",
        key="cutoff_len",
        kind="count",
        names=(
            *("cutoff_len", "max_seq_length", "seq_len", "seq_length", "max_seq_len", "max_length", "context_length"),
            "sequence_len",
        ),
    ),
    CellColumn("packing", "packing", rank=66, decided_by=("packing", "neat_packing", "stage")),
    CellColumn("recompute", "recomputed", rank=67, decided_by=("disable_gradient_checkpointing",)),
    CellColumn("overlap", decided_by=_FSDP),
    *(
        CellColumn(lever.column, lever.heading, rank=rank, phrase=lever.phrase)
        for rank, lever in enumerate(TYPES.values(), start=46)
    ),
    CellColumn("command"),
    CellColumn(
        "per_device_batch",
        "batch",
        rank=12,
        csv="per_device_batch_samples",
        key="per_device_train_batch_size",
        kind="count",
        names=(
            *("batch", "batch_size", "bs", "bsz", "micro_bsz", "per_device_train_batch_size", "per_device_batch_size"),
            *("train_micro_batch_size_per_gpu", "micro_batch_size", "micro_batch", "micro_bs", "mbs"),
            *(
                "batch_size_per_device",
                "batch_size_per_gpu",
                "batch_per_device",
                "batch_per_gpu",
                "per_gpu_batch_size",
                "per_gpu_bs",
            ),
        ),
    ),
    CellColumn(
        "accumulation",
        "accumulation",
        rank=18,
        key="gradient_accumulation_steps",
        kind="count",
        names=(
            *("gradient_accumulation_steps", "gradient_accumulation", "accumulation_steps", "accum_steps"),
            *("grad_accum", "grad_accum_steps", "grad_acc", "grad_acc_steps", "gas"),
        ),
    ),
    CellColumn("all_devices_batch", kind="count", names=("train_bs",)),
    CellColumn(
        "global_batch",
        "global batch",
        rank=20,
        csv="global_batch_samples",
        kind="count",
        names=(
            *("total_train_bs", "total_train_batch_size", "global_batch_size", "gbs", "total_batch_size"),
            *("effective_batch_size", "global_bs", "total_bs", "total_batch", "effective_batch"),
        ),
    ),
    CellColumn(
        "dataset_samples",
        kind="count",
        written="samples",
        names=("dataset_samples", "num_samples", "train_samples", "num_train_samples"),
    ),
    CellColumn("epochs", kind="epochs", names=("num_train_epochs", "epoch", "num_epochs")),
    CellColumn("tokens", kind="count", names=("dataset_tokens",)),
    CellColumn("tokens_per_sample", kind="number"),
    CellColumn(
        "steps",
        kind="count",
        names=("global_step", "optimizer_steps", "total_steps", "num_steps"),
    ),
    CellColumn(
        "samples_per_s",
        "samples/s",
        rank=1,
        kind="measured",
        names=("train_samples_per_second",),
    ),
    CellColumn("samples_per_s_per_gpu", kind="measured"),
    CellColumn("samples_per_s_range", "from, to", rank=33, shown="figure"),
    CellColumn("relative", "relative", rank=2, shown="figure", names=("speedup", "relative_speed")),
    CellColumn(
        "tokens_per_s",
        "tokens/s",
        rank=9,
        kind="measured",
        names=("train_tokens_per_second",),
    ),
    CellColumn("steps_per_s", kind="measured", names=("train_steps_per_second",)),
    CellColumn(
        "tgs",
        "TGS",
        "tokens/s",
        rank=19,
        csv="tgs_tokens_per_s_per_worker",
        kind="measured",
        names=("tokens_per_gpu_per_s",),
    ),
    CellColumn(
        "model_tflops",
        "TFLOP/s",
        "a worker",
        rank=22,
        csv="model_tflop_per_s_per_worker",
        kind="measured",
        # As Megatron-LM logs it.
        names=("throughput per GPU (TFLOP/s/GPU)",),
    ),
    CellColumn("mfu", "MFU", rank=10, kind="share", names=("model_flops_utilization",)),
    CellColumn(
        "hardware_tflops",
        "hardware",
        "TFLOP/s",
        rank=36,
        csv="hardware_tflop_per_s_per_worker",
        kind="measured",
    ),
    CellColumn("hfu", "HFU", rank=23, kind="share"),
    CellColumn(
        "step_time_ms",
        "step",
        "ms",
        rank=5,
        kind="measured",
        units={"step_time_s": 1e3},
        bare=(
            "step_time",
            "iteration_time",
            "iter_time",
            "time_per_step",
            "time_per_iteration",
            "time_per_iter",
            "elapsed_time_per_iteration",
        ),
    ),
    CellColumn("step_time_p95_ms", "step, p95", "ms", rank=34, shown="figure"),
    CellColumn("step_time_cv"),
    CellColumn("network_share", "network", "of step", rank=4, kind="share"),
    CellColumn(
        "peak_memory_gib",
        "memory",
        "GiB",
        rank=3,
        kind="measured",
        written="memory_gib",
        units={
            f"{name}_{unit}": scale / GIB
            for name in ("memory", "peak_memory", "gpu_memory")
            for unit, scale in (("mb", 1e6), ("mib", 1 << 20), ("gb", 1e9), ("gib", GIB))
        },
        bare=(
            *(
                "memory",
                "peak_memory",
                "gpu_memory",
                "max_memory",
                "memory_per_gpu",
                "mem_per_gpu",
                "gpu_mem",
                "peak_mem",
                "mem",
            ),
            *(
                "peak_gpu_memory",
                "memory_usage",
                "gpu_memory_usage",
                "peak_memory_usage",
                "memory_footprint",
                "memory_allocated",
                "max_memory_allocated",
                "vram",
                "peak_vram",
            ),
            *("max_mem", "max_gpu_memory", "max_gpu_mem", "peak_gpu_mem", "vram_usage"),
        ),
    ),
    CellColumn(
        "whole_s",
        "full run",
        rank=6,
        kind="clock",
        written="runtime",
        names=("runtime_s", "train_runtime", "duration", "duration_s"),
        units={"runtime_min": 60.0, "runtime_h": 3600.0},
        bare=(
            *("training_time", "train_time", "total_time", "total_training_time", "total_train_time", "wall_time"),
            *("elapsed", "elapsed_time", "wall_clock_time"),
            "full_run",
        ),
    ),
    CellColumn("energy_j_per_sample", "energy", "J per sample", rank=21, kind="measured"),
    CellColumn("price_per_hour", "price", f"{MONEY} an hour", rank=31, kind="price"),
    CellColumn("whole_cost", "job costs", MONEY, rank=7, shown="money"),
    CellColumn("samples_per_money", "samples", f"for 1 {MONEY}", rank=8, shown="figure"),
    CellColumn("cost_per_million_tokens", "1M tokens cost", MONEY, rank=32, shown="money"),
    CellColumn("price_purchase", "price", f"{MONEY} to buy", rank=35, kind="price"),
    CellColumn("samples_per_s_per_purchase", "samples/s", f"for {BOUGHT_WITH:,} {MONEY}", rank=9, shown="figure"),
    CellColumn("price_gpu_per_hour", kind="price"),
    CellColumn("price_purchase_gpu", kind="price"),
    CellColumn("currency", kind="text"),
)

COLUMNS = {column.name: column for column in _COLUMNS}
"""All values by name; those of tables in their order."""


def column_name(title: str) -> str:
    """A title as one word: lower case, without spaces and dashes, `/s` as `pers`; other characters stay."""
    text = re.sub(r"^#\s*of\b", "number of", plain_text(title).lower())
    text = re.sub(r"^#\s*gpu$", "gpus", text)
    return _SEPARATORS.sub("", text.replace("/", " per "))
