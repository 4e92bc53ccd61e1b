"""COLUMNS: the figures that a foreign table may have, how their cells are read, and their names in other units. Pure.

Titles, aliases and forms are those of the figures; what only an import reads is declared here.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from multinode.figures.figure import Figure, name_of_title
from multinode.model.workload import (
    ACCUMULATION,
    DATASET,
    GLOBAL_BATCH,
    LORA_RANK,
    METHOD,
    MODEL,
    PER_DEVICE_BATCH,
    PRECISION,
    SEQUENCE_LENGTH,
    STAGE,
    STRATEGY,
)
from multinode.predict.published import plain_text
from multinode.profile.measured import (
    DATASET_SAMPLES,
    ENERGY,
    NODES,
    PRICE_PER_HOUR,
    WHOLE_TIME,
    WORKERS_PER_NODE,
    WORLD_SIZE,
)
from multinode.profile.throughput import (
    HARDWARE_TFLOPS,
    HFU,
    MFU,
    MODEL_TFLOPS,
    SAMPLES_PER_S,
    STEP_TIME,
    TGS,
    TOKENS_PER_S,
)
from multinode.sweep.figures import (
    CURRENCY,
    DEVICE,
    LABEL,
    NETWORK,
    NETWORK_SHARE,
    PARAMETERS,
    PEAK_MEMORY,
    PRICE_PURCHASE,
    RDMA,
    TOKENS_PER_SAMPLE,
    TRAINABLE_PARAMETERS,
)
from multinode.units import GIB

ColumnKind = Literal["text", "flag", "count", "number", "epochs", "measured", "clock", "share", "price", "link"]


class TableColumn(msgspec.Struct, frozen=True):
    """A figure of a foreign table.

    Attributes:
        figure: the figure.
        kind: how its cells are read.
        written: its name in messages, if different.
        units: further names in another unit, with the factor to ours.
        bare: further names without a unit: the cells must have one.
        about: what it means in such a table, if there is more to say than of the figure.
    """

    figure: Figure[Any]
    kind: ColumnKind
    written: str = ""
    units: dict[str, float] = {}
    bare: tuple[str, ...] = ()
    about: str = ""

    @property
    def meaning(self) -> str:
        """What it means, for the reference page."""
        return self.about or self.figure.about

    @property
    def name(self) -> str:
        """The figure's."""
        return self.figure.name

    @property
    def is_measured(self) -> bool:
        """Whether it is a result of the training, which may be OOM."""
        return self.kind in {"measured", "clock", "share"}


_COLUMNS = (
    TableColumn(
        LABEL,
        "text",
        written="name",
        about="name of the row. By default, multinode builds it from the columns in which the rows differ",
    ),
    TableColumn(MODEL, "text"),
    TableColumn(PARAMETERS, "number", about="parameters of the whole model: `7B`, `110M`"),
    TableColumn(TRAINABLE_PARAMETERS, "number", about="trainable parameters, for example of an adapter"),
    TableColumn(DATASET, "text"),
    TableColumn(DEVICE, "text"),
    TableColumn(WORLD_SIZE, "count", written="devices", about="total number of GPUs"),
    TableColumn(NODES, "count", about="number of nodes"),
    TableColumn(WORKERS_PER_NODE, "count"),
    TableColumn(
        NETWORK,
        "link",
        about="total rate of a node's NICs in bits per second: `10GbE`, `100 Gbit/s`, `8x400G InfiniBand`, `4x HDR`. "
        "InfiniBand, RoCE and EFA count as RDMA, unless the cell also has `TCP` or `IPoIB`",
        bare=(
            *("link", "link_rate", "link_speed", "network", "network_link", "network_bandwidth", "network_speed"),
            *("inter_node_network", "inter_node_link", "inter_node_bandwidth", "nic", "nic_speed", "nic_bandwidth"),
        ),
    ),
    TableColumn(RDMA, "flag", about="true if collectives use RDMA; required if the link does not tell"),
    TableColumn(METHOD, "text", about="training method, as free text"),
    TableColumn(LORA_RANK, "count"),
    TableColumn(STAGE, "text"),
    TableColumn(STRATEGY, "text"),
    TableColumn(PRECISION, "text"),
    TableColumn(Figure("fp16", about="true if the precision is fp16; if false, the precision is unknown"), "flag"),
    TableColumn(Figure("bf16", about="true if the precision is bf16; if false, the precision is unknown"), "flag"),
    TableColumn(SEQUENCE_LENGTH, "count"),
    TableColumn(PER_DEVICE_BATCH, "count"),
    TableColumn(ACCUMULATION, "count"),
    TableColumn(
        Figure("all_devices_batch", about="samples per micro-batch, of all workers", aliases=("train_bs",)), "count"
    ),
    TableColumn(GLOBAL_BATCH, "count"),
    TableColumn(DATASET_SAMPLES, "count", written="samples"),
    TableColumn(
        Figure("epochs", about="number of epochs", aliases=("num_train_epochs", "epoch", "num_epochs")), "epochs"
    ),
    TableColumn(Figure("tokens", about="number of tokens in the data set", aliases=("dataset_tokens",)), "count"),
    TableColumn(TOKENS_PER_SAMPLE, "number"),
    TableColumn(
        Figure(
            "steps",
            about="number of steps in the complete training run",
            aliases=("global_step", "optimizer_steps", "total_steps", "num_steps"),
        ),
        "count",
    ),
    TableColumn(SAMPLES_PER_S, "measured"),
    TableColumn(Figure("samples_per_s_per_gpu", about="samples per second of one worker", form="figure"), "measured"),
    TableColumn(TOKENS_PER_S, "measured"),
    TableColumn(
        Figure("steps_per_s", about="optimizer steps per second", form="figure", aliases=("train_steps_per_second",)),
        "measured",
    ),
    TableColumn(TGS, "measured"),
    TableColumn(MODEL_TFLOPS, "measured"),
    TableColumn(MFU, "share", about="model FLOPs utilization, as a share of the device's peak: `0.45` or `45%`"),
    TableColumn(HARDWARE_TFLOPS, "measured"),
    TableColumn(HFU, "share", about="hardware FLOPs utilization (including recomputation), as a share of the peak"),
    TableColumn(
        STEP_TIME,
        "measured",
        units={"step_time_s": 1e3},
        bare=(
            *("step_time", "iteration_time", "iter_time", "time_per_step", "time_per_iteration", "time_per_iter"),
            "elapsed_time_per_iteration",
        ),
    ),
    TableColumn(NETWORK_SHARE, "share", about="exposed communication as a share of the step: `0.12` or `12%`"),
    TableColumn(
        PEAK_MEMORY,
        "measured",
        about="peak memory of the worker that needed the most. MB is 1e6 bytes; `nvidia-smi` reports MiB",
        written="memory_gib",
        units={
            f"{name}_{unit}": scale / GIB
            for name in ("memory", "peak_memory", "gpu_memory")
            for unit, scale in (("mb", 1e6), ("mib", 1 << 20), ("gb", 1e9), ("gib", GIB))
        },
        bare=(
            *("memory", "peak_memory", "gpu_memory", "max_memory", "memory_per_gpu", "mem_per_gpu", "gpu_mem"),
            *("peak_mem", "mem", "peak_gpu_memory", "memory_usage", "gpu_memory_usage", "peak_memory_usage"),
            *("memory_footprint", "memory_allocated", "max_memory_allocated", "vram", "peak_vram", "max_mem"),
            *("max_gpu_memory", "max_gpu_mem", "peak_gpu_mem", "vram_usage"),
        ),
    ),
    TableColumn(
        WHOLE_TIME,
        "clock",
        about="time of the complete training run: seconds, `3:35:20`, or `28:04` (minutes and seconds)",
        written="runtime",
        units={"runtime_min": 60.0, "runtime_h": 3600.0},
        bare=(
            *("training_time", "train_time", "total_time", "total_training_time", "total_train_time", "wall_time"),
            *("elapsed", "elapsed_time", "wall_clock_time", "full_run"),
        ),
    ),
    TableColumn(ENERGY, "measured"),
    TableColumn(PRICE_PER_HOUR, "price", about="price per hour of all devices in the row"),
    TableColumn(PRICE_PURCHASE, "price", about="purchase price of all devices in the row"),
    TableColumn(Figure("price_gpu_per_hour", about="price per hour of one device"), "price"),
    TableColumn(Figure("price_purchase_gpu", about="purchase price of one device"), "price"),
    TableColumn(CURRENCY, "text", about="currency of the row's prices, as one word"),
)

COLUMNS = {column.name: column for column in _COLUMNS}
"""By the name of the figure."""


def column_name(title: str) -> str:
    """A title of a foreign table as one word, as `name_of_title` has it."""
    text = re.sub(r"^#\s*of\b", "number of", plain_text(title).lower())
    return name_of_title(re.sub(r"^#\s*gpu$", "gpus", text))
