"""CellRow and CellTable: a sweep's cells, or rows of an import; the figures of a row. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from multinode.cluster.accelerators import device_key, short_device_name
from multinode.figures.figure import MONEY, Figure, Row, plain
from multinode.findings.finding import Finding, message_of
from multinode.model.workload import (
    ACCUMULATION,
    COMMAND,
    DATASET,
    GLOBAL_BATCH,
    LEVERS,
    LORA_RANK,
    METHOD,
    MODEL,
    OVERLAP,
    PACKING,
    PER_DEVICE_BATCH,
    PRECISION,
    RECOMPUTE,
    SEQUENCE_LENGTH,
    STAGE,
    STRATEGY,
    JobSettings,
)
from multinode.profile.measured import (
    COST_PER_MILLION_TOKENS,
    DATASET_SAMPLES,
    ENERGY,
    NODES,
    PRICE_PER_HOUR,
    SPEEDS,
    WHOLE_COST,
    WHOLE_TIME,
    WORKERS_PER_NODE,
    WORLD_SIZE,
    Measured,
    measured_values,
)
from multinode.profile.step_split import KnownSteps
from multinode.profile.throughput import (
    HARDWARE_TFLOPS,
    HFU,
    MFU,
    MODEL_TFLOPS,
    SAMPLES_PER_S,
    STEP_TIME,
    STEP_TIME_CV,
    STEP_TIME_P95,
)
from multinode.stats.estimate import Estimate
from multinode.stats.unknown import UNMEASURED, Unknown, or_none
from multinode.sweep.contradictions import Contradiction
from multinode.units import UNKNOWN, format_rate, format_sig

MEASURED = "measured"


class CellRow(Measured, frozen=True, kw_only=True):
    """One cell; a state that has no figures says why."""

    label: str  # its name, unique in its table
    source: str = "measured"  # `measured` here, or `imported`
    state: str = "measured"  # `measured`, `out_of_memory`, `skipped`, `failed` or `waiting`
    # whose memory did not suffice, of the cell or of a repeat of one that was measured: `gpu` or `node`
    out_of: str | None = None
    why: Finding | None = None  # of a state that has no figures, or of repeats that failed
    # of each node how many workers compute on which device; empty where it is not known
    node_devices: tuple[dict[str, int], ...] = ()
    # what the sweep set in the job, by key; of an imported row, its labels, by the title of their column
    varied: dict[str, Any] = msgspec.field(default_factory=dict)
    # what a worker computes on: `NVIDIA GeForce RTX 4090` as NVML has it, a processor as the kernel has it, `CPU` where
    # that does not name it
    device: str | Unknown = UNMEASURED
    settings: JobSettings = JobSettings()
    # of the model and of those trained, as an imported table has them
    parameters: float | None = None
    trainable_parameters: float | None = None
    # the rate of all NICs of a node together, how many these are, and whether collectives use RDMA: imported
    network_gbit_per_s: float | None = None
    nics: int | None = None
    rdma: bool | None = None
    tokens_per_sample: float | Unknown = UNMEASURED  # padded length, on average
    # TFLOP/s of a worker that the model needs; `hardware_tflops` with what is computed again
    model_tflops: float | Unknown = UNMEASURED
    hardware_tflops: float | Unknown = UNMEASURED
    mfu: float | Unknown = UNMEASURED  # of the device's peak; `hfu` with what is computed again
    hfu: float | Unknown = UNMEASURED
    network_share: float | Unknown = UNMEASURED  # of the step, exposed communication
    exposed_steps: KnownSteps = KnownSteps()  # in which it is known
    peak_memory_gib: float | Unknown = (
        UNMEASURED  # of the worker that needed most, on its GPU, else resident in its process
    )
    price_purchase: float | Unknown = UNMEASURED  # of its nodes together, or of its GPUs
    currency: str | None = None  # of its prices, one word; None if unknown, as with prices in a hostfile
    # names of the prices that come from a prices file; another file replaces them
    filed_prices: tuple[str, ...] = ()
    samples_per_money: float | Unknown = UNMEASURED  # samples per unit of money at the hourly price
    samples_per_s_per_purchase: float | Unknown = UNMEASURED  # samples per second per unit of the purchase price
    relative: Estimate | None = None  # samples_per_s over the table's baseline's
    contradictions: tuple[Contradiction, ...] = ()  # figures of an imported row that contradict each other
    # of an imported row whose nodes were slower than their link allows; None if they were not
    shortfall: Finding | None = None
    unjudged: Unknown | None = None  # why that cannot be judged; None if it was, or was not asked


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """A cell whose full run is timed: how long it takes and what it costs, in words of a currency or in units."""

    label: str
    time_s: Estimate
    cost: float | None = None
    currency: str | None = None


class Cheapest(Finding, frozen=True, kw_only=True):
    """The cheapest cell that ends the full run in time: which, when it ends and what it costs; or why none.

    Its figures have the reason: in what the jobs of the cells differ (`other`, by `column`), or why their time is
    unknown.
    """

    deadline_s: float
    label: str | None = None  # the cell's; None where none ends in time or none has a price
    best: Offer | None = None  # that cell; if all are too late, the fastest one
    equal: tuple[str, ...] = ()  # labels of those that cost the same
    safe: Offer | None = None  # the cheapest whose interval does not reach beyond the deadline
    in_time: int = 0  # how many cells with a price are in time; `unpriced` without one
    unpriced: int = 0
    currencies: tuple[str | None, ...] = ()  # if they are several; None is unknown


class CellTable(msgspec.Struct, frozen=True, kw_only=True):
    """The cells of one or more sweeps, or of an import."""

    schema: str = "multinode.sweep/3"
    run_id: str  # of the sweep or import; several are separated by commas
    job: str
    rule: str = ""  # which steps are measured
    baseline: str | None = None  # label of the row that `relative` refers to; None if no row has a speed
    cells: tuple[CellRow, ...]
    cheapest: Cheapest | None = None  # None without a deadline
    notes: tuple[Finding, ...] = ()  # as in `table_notes`


def cell_row(cell: CellRow, keys: Iterable[str] = ()) -> Row:
    """The values of a cell, by the names of `CELL_FIGURES` and of what its sweep set."""
    own = {SPEED_RANGE.name: cell.samples_per_s, REASON.name: message_of(cell.why)}
    return Row(cell, dict.fromkeys(keys) | cell.varied | measured_values(cell) | own)


def state_word(cell: CellRow) -> str:
    """What stands in the place of the figures of a cell that has none; whose memory it was is told apart."""
    if cell.state == "out_of_memory":
        return "OOM (node)" if cell.out_of == "node" else "OOM"
    return cell.state if cell.state in STATES else UNKNOWN


STATES = ("out_of_memory", "skipped", "failed", "waiting")
"""Of cells without figures."""


def _speed(row: Row) -> str:
    speed = row[SAMPLES_PER_S]
    return state_word(row.item) if isinstance(speed, Unknown) else format_sig(speed.value)


def _speed_range(row: Row) -> str:
    speed = or_none(row[SAMPLES_PER_S])
    if speed is None or speed.repeats < 2:  # noqa: PLR2004 - of one run it is no range of repeats
        return UNKNOWN
    return f"{format_sig(speed.low)}-{format_sig(speed.high)}"


def _speed_bought(row: Row) -> str:
    speed = or_none(row[SPEED_PER_PURCHASE])
    return format_sig(speed * BOUGHT_WITH if speed is not None else None)


def _device(row: Row) -> str:
    device = row[DEVICE]
    return UNKNOWN if isinstance(device, Unknown) else short_device_name(device)


def _link(row: Row) -> str:
    """As people write it, and as an import reads it: `8x400 Gbit/s over RDMA`."""
    rate, nics, rdma = row[NETWORK], or_none(row[NICS]) or 1, or_none(row[RDMA])
    if isinstance(rate, Unknown):
        return UNKNOWN
    times = f"{nics}x" if nics > 1 else ""
    return f"{times}{format_rate(rate / nics)}{' over RDMA' if rdma else ''}"


def _in_billions(figure: Figure[float]) -> Callable[[Row], str]:
    def tell(row: Row) -> str:
        parameters = row[figure]
        if isinstance(parameters, Unknown):
            return UNKNOWN
        size, letter = (parameters / 1e9, "B") if parameters >= 1e9 else (parameters / 1e6, "M")  # noqa: PLR2004 - a billion
        return f"{format_sig(size)}{letter}"

    return tell


BOUGHT_WITH = 10_000
"""Units of money: the speed per single unit would be too small to read."""
LABEL = Figure[str](
    "label",
    "cell",
    about="unique name of the cell",
    aliases=("name", "cell", "config", "configuration", "setup", "experiment"),
)
SOURCE = Figure[str]("source", "source", about="`measured` here, or `imported`")
STATE = Figure[str]("state", about="`measured`, `out_of_memory`, `skipped`, `failed` or `waiting`")
OUT_OF = Figure[str]("out_of", about="whether a `gpu` or a `node` ran out of memory")
REASON = Figure[str]("reason", about="why the cell has no figures")
PARAMETERS = Figure[float](
    "parameters",
    "parameters",
    form="number",
    about="parameters of the model",
    aliases=(
        *("params", "num_params", "n_params", "num_parameters", "number_of_parameters", "total_params"),
        *("total_parameters", "model_params", "model_parameters", "model_size", "param_count", "parameter_count"),
    ),
)
TRAINABLE_PARAMETERS = Figure[float](
    "trainable_parameters",
    "trainable",
    form="number",
    about="trainable parameters",
    phrase="trainable parameters",
    aliases=("trainable_params", "num_trainable_params", "num_trainable_parameters"),
)
PARAMETERS, TRAINABLE_PARAMETERS = (
    msgspec.structs.replace(figure, cell=_in_billions(figure)) for figure in (PARAMETERS, TRAINABLE_PARAMETERS)
)
DEVICE = Figure[str](
    "device",
    "device",
    about="device on which a worker computes",
    aliases=("gpu", "gpu_name", "device_name", "gpu_type", "gpu_model", "accelerator"),
    cell=_device,
    alike=device_key,
)
NETWORK = Figure[float](
    "network_gbit_per_s",
    "link",
    form="number",
    about="total line rate of a node's NICs",
    aliases=("link_gbit_per_s",),
    cell=_link,
)
NICS = Figure[int]("nics", form="number", about="NICs of a node")
RDMA = Figure[bool]("rdma", about="whether collectives use RDMA", aliases=("use_rdma",))
TOKENS_PER_SAMPLE = Figure[float]("tokens_per_sample", form="number", about="mean tokens per sample, including padding")
SPEED = msgspec.structs.replace(SAMPLES_PER_S, cell=_speed)
SPEED_RANGE = Figure[Estimate](
    "samples_per_s_range",
    "from, to",
    form="range",
    about="confidence interval of samples/s over the repeats",
    cell=_speed_range,
)
RELATIVE = Figure[Estimate](
    "relative",
    "relative",
    form="figure",
    about="samples/s relative to the table's baseline",
    aliases=("speedup", "relative_speed"),
    has_range=True,
)
NETWORK_SHARE = Figure[float](
    "network_share", "network", "of step", form="share", about="exposed communication divided by step time"
)
PEAK_MEMORY = Figure[float](
    "peak_memory_gib",
    "memory",
    "GiB",
    form="figure",
    about="highest peak memory of all workers",
    aliases=("memory_gib", "gpu_memory_gib"),
)
SAMPLES_PER_MONEY = Figure[float](
    "samples_per_money",
    "samples",
    f"for 1 {MONEY}",
    form="figure",
    about="samples per unit of money at the hourly price",
)
PRICE_PURCHASE = Figure[float](
    "price_purchase", "price", f"{MONEY} to buy", form="money", about="purchase price of all nodes, or of their GPUs"
)
SPEED_PER_PURCHASE = Figure[float](
    "samples_per_s_per_purchase",
    "samples/s",
    f"for {BOUGHT_WITH:,} {MONEY}",
    form="figure",
    about="samples per second divided by the purchase price",
    cell=_speed_bought,
)
CURRENCY = Figure[str]("currency", about="currency of the prices")
CELL_FIGURES: tuple[Figure[Any], ...] = (
    *(LABEL, SOURCE, STATE, OUT_OF, REASON, MODEL, PARAMETERS, TRAINABLE_PARAMETERS, DATASET, DEVICE, WORLD_SIZE),
    *(NODES, WORKERS_PER_NODE, NETWORK, NICS, RDMA, METHOD, LORA_RANK, STAGE, STRATEGY, PRECISION, SEQUENCE_LENGTH),
    *(PACKING, RECOMPUTE, OVERLAP, *LEVERS, COMMAND, PER_DEVICE_BATCH, ACCUMULATION, GLOBAL_BATCH, DATASET_SAMPLES),
    *(TOKENS_PER_SAMPLE, SPEED, SPEED_RANGE, RELATIVE, *SPEEDS, MODEL_TFLOPS, MFU, HARDWARE_TFLOPS, HFU),
    *(STEP_TIME, STEP_TIME_P95, STEP_TIME_CV, NETWORK_SHARE, PEAK_MEMORY, WHOLE_TIME, ENERGY, PRICE_PER_HOUR),
    *(WHOLE_COST, SAMPLES_PER_MONEY, COST_PER_MILLION_TOKENS, PRICE_PURCHASE, SPEED_PER_PURCHASE, CURRENCY),
)
"""In the order of a table's columns."""
BY_NAME = {figure.name: figure for figure in CELL_FIGURES}
# Beside samples/s.
_MEASURED = (
    *(*SPEEDS, MODEL_TFLOPS, MFU, HARDWARE_TFLOPS, HFU, STEP_TIME, NETWORK_SHARE, PEAK_MEMORY, WHOLE_TIME),
    ENERGY,
)


def value_of(cell: CellRow, figure: Figure[Any]) -> Any:
    """A figure of a cell without its interval; None if it has none."""
    return plain(cell_row(cell)[figure])


def has_figures(row: CellRow) -> bool:
    """Whether anything was measured: a published table may have tokens/s or memory without samples/s."""
    return has_speed(row) or (row.state == MEASURED and any(value_of(row, figure) is not None for figure in _MEASURED))


def has_speed(row: CellRow) -> bool:
    """Whether there is a speed to compare; an imported row may have one and have run out of memory."""
    return row.state == MEASURED and not isinstance(row.samples_per_s, Unknown) and row.samples_per_s.low > 0
