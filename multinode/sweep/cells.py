"""CellRow and CellTable: a sweep's cells in figures, and imported ones with their contradictions. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from multinode.cluster.accelerators import device_key, short_device_name
from multinode.figures.figure import MONEY, Figure, Row, plain
from multinode.figures.frame import Frame
from multinode.findings.finding import Finding, message_of
from multinode.findings.rule import RuleGroup
from multinode.model.workload import (
    ACCUMULATION,
    COMMAND,
    DATASET,
    GLOBAL_BATCH,
    JOB_SETTINGS,
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
from multinode.predict.rounded import product
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
from multinode.stats.estimate import Estimate, exactly
from multinode.stats.unknown import UNMEASURED, Unknown, or_none
from multinode.units import UNKNOWN, format_figure, format_list, format_rate, format_sig

# Tolerance between two ways to one figure, beyond the rounding of published digits.
_TOLERANCE = 0.02

Figures = Mapping[str, Estimate]


class Contradiction(Finding, frozen=True, kw_only=True):
    """Figures of one row that contradict each other."""

    # two ways to one figure, as formulas of the names of figures: `samples_per_s*whole_s`,
    # `dataset_samples*epochs`; or `out_of_memory` and the names of figures that such a row has
    sides: tuple[str, ...]
    values: tuple[float, ...] = ()  # of both ways; empty for a row out of memory


CONTRADICTIONS = RuleGroup("Contradictions of an imported row")
_TWO_WAYS = CONTRADICTIONS.rule(
    "two-ways",
    about="a figure that differs from the value that other figures of the row imply",
    message="{first} is {value}, but {other} is {other_value}: {size}",
)
OUT_OF_MEMORY_WITH_FIGURES = CONTRADICTIONS.rule(
    "out-of-memory-with-figures",
    about="a row that ran out of memory but has a speed or a runtime",
    message="it ran out of memory but has {figures}",
)


class _Way(NamedTuple):
    """One way to a figure: a product over another, or a function."""

    words: str
    names: tuple[str, ...]
    under: tuple[str, ...] = ()
    compute: Callable[[Figures], Estimate] | None = None
    computed: str = ""

    @property
    def formula(self) -> str:
        """Its name."""
        return self.computed or "/".join("*".join(names) for names in (self.names, self.under) if names)

    def of(self, figures: Figures) -> Estimate:
        """The figure."""
        if self.compute is not None:
            return self.compute(figures)
        return product((figures[name] for name in self.names), (figures[name] for name in self.under))


def find_contradictions(figures: Figures) -> tuple[Contradiction, ...]:
    """Contradictions beyond the tolerance.

    Args:
        figures: of one row as published, by the names of figures.
    """
    return tuple(_breaches(figures))


def _breaches(figures: Figures) -> Iterator[Contradiction]:
    for first, other in _SAME:
        needed = {*first.names, *first.under, *other.names, *other.under}
        # Samples/s predict the runtime better than tokens/s.
        if not needed <= figures.keys() or (first is _TOKENS_OF_RUNTIME and "samples_per_s" in figures):
            continue
        left, right = first.of(figures), other.of(figures)
        if max(left.low / right.high, right.low / left.high) > 1 + _TOLERANCE:
            apart = left.value / right.value - 1 if right.value else math.inf
            size = f"{100 * abs(apart):.1f}% {'more' if apart > 0 else 'less'}"
            words = {
                "first": first.words,
                "value": _number(left.value),
                "other": other.words,
                "other_value": _number(right.value),
                "size": size,
            }
            yield Contradiction(
                **_TWO_WAYS.fields(None, words),
                sides=(first.formula, other.formula),
                values=(left.value, right.value),
            )


def _number(value: float) -> str:
    return format_figure(value, digits=6)


def _steps_for_samples(figures: Figures) -> Estimate:
    """The last step of an epoch may be partial, or its samples may be dropped."""
    whole = figures["dataset_samples"] / figures["global_batch"]
    epochs = figures["epochs"]
    least, most = max(1, math.floor(whole.low)) * epochs.low, max(1, math.ceil(whole.high)) * epochs.high
    return Estimate(value=(whole * epochs).value, low=max(1, math.floor(least)), high=max(1, math.ceil(most)))


def _samples_of_step(figures: Figures) -> Estimate:
    batch = figures["global_batch"]
    if not {"dataset_samples", "epochs", "steps"} <= figures.keys():
        return batch
    average = figures["dataset_samples"] * figures["epochs"] / figures["steps"]
    expected = _steps_for_samples(figures)
    if not expected.low <= figures["steps"].value <= expected.high:
        return batch
    return Estimate(value=batch.value, low=min(batch.low, average.low), high=max(batch.high, average.high))


_GLOBAL_BATCH = _Way("the global batch", ("global_batch",))
_STEPS = _Way("the number of steps", ("steps",))
_TOKENS_PER_S = _Way("tokens/s", ("tokens_per_s",))
_TOKENS_OF_RUNTIME = _Way("tokens/s x runtime", ("tokens_per_s", "whole_s"))
# Pairs of ways to one figure.
_SAME = (
    (
        _GLOBAL_BATCH,
        _Way("GPUs x accumulation x batch per GPU", ("world_size", "accumulation", "per_device_batch")),
    ),
    (
        _Way("the batch of all GPUs", ("all_devices_batch",)),
        _Way("GPUs x batch per GPU", ("world_size", "per_device_batch")),
    ),
    (_GLOBAL_BATCH, _Way("batch of all GPUs x accumulation", ("all_devices_batch", "accumulation"))),
    (_Way("the number of GPUs", ("world_size",)), _Way("nodes x workers per node", ("nodes", "workers_per_node"))),
    (
        _Way("samples/s x runtime", ("samples_per_s", "whole_s")),
        _Way("samples x epochs", ("dataset_samples", "epochs")),
    ),
    (_TOKENS_OF_RUNTIME, _Way("tokens x epochs", ("tokens", "epochs"))),
    (_Way("steps/s x runtime", ("steps_per_s", "whole_s")), _STEPS),
    (
        _STEPS,
        _Way(
            "samples x epochs / global batch",
            ("dataset_samples", "epochs", "global_batch"),
            compute=_steps_for_samples,
            computed="dataset_samples*epochs/global_batch",
        ),
    ),
    (
        _Way("samples/s divided by steps/s", ("samples_per_s",), ("steps_per_s",)),
        _Way("the global batch", ("global_batch",), compute=_samples_of_step),
    ),
    (
        _Way("samples/s x step time in ms", ("samples_per_s", "step_time_ms")),
        _Way(
            "1000 x the global batch",
            ("global_batch",),
            compute=lambda figures: _samples_of_step(figures) * exactly(1e3),
            computed="1000*global_batch",
        ),
    ),
    (_TOKENS_PER_S, _Way("samples/s x tokens / samples", ("samples_per_s", "tokens"), ("dataset_samples",))),
    (_TOKENS_PER_S, _Way("samples/s x tokens per sample", ("samples_per_s", "tokens_per_sample"))),
    (
        _Way("tokens per sample", ("tokens_per_sample",)),
        _Way("tokens / samples", ("tokens",), ("dataset_samples",)),
    ),
    (_Way("tokens/s per GPU x GPUs", ("tgs", "world_size")), _TOKENS_PER_S),
    (
        _Way("samples_per_s_per_gpu*world_size", ("samples_per_s_per_gpu", "world_size")),
        _Way("samples_per_s", ("samples_per_s",)),
    ),
    (
        _Way("MFU x the hardware's TFLOP/s", ("mfu", "hardware_tflops")),
        _Way("HFU x the model's TFLOP/s", ("hfu", "model_tflops")),
    ),
)


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
OUT_OF = Figure[str]("out_of", about="`gpu` or `node`, whichever ran out of memory")
REASON = Figure[str]("reason", about="why there are no figures")
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
    about="total rate of a node's NICs",
    aliases=("link_gbit_per_s",),
    cell=_link,
)
NICS = Figure[int]("nics", form="number", about="NICs of a node")
RDMA = Figure[bool]("rdma", about="whether collectives use RDMA", aliases=("use_rdma",))
TOKENS_PER_SAMPLE = Figure[float]("tokens_per_sample", form="number", about="mean tokens per sample, including padding")
SPEED = msgspec.structs.replace(SAMPLES_PER_S, cell=_speed)
SPEED_RANGE = Figure[Estimate](
    "samples_per_s_range", "from, to", form="range", about="interval of samples/s over repeats", cell=_speed_range
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
    about="peak memory of the worker that used the most",
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


def cell_frame(cells: Sequence[CellRow], title: str = "", notes: tuple[Finding, ...] = ()) -> Frame:
    """The cells as a frame, with a figure for each key that the sweep set; without a title if one of ours tells it."""
    shown = {setting.keys[0] for setting in JOB_SETTINGS if setting.keys}
    titles = {key: "" if key in shown and cell.source != "imported" else key for cell in cells for key in cell.varied}
    varied = [Figure[Any](key, title) for key, title in titles.items() if key not in BY_NAME]
    identities = [figure for figure in CELL_FIGURES if not figure.is_measured]
    measured = [figure for figure in CELL_FIGURES if figure.is_measured]
    rows = [cell_row(cell, titles) for cell in cells]
    return Frame(rows=tuple(rows), figures=(*identities, *varied, *measured), title=title, notes=notes)


def value_of(cell: CellRow, figure: Figure[Any]) -> Any:
    """A figure of a cell without its interval; None if it has none."""
    return plain(cell_row(cell)[figure])


def has_figures(row: CellRow) -> bool:
    """Whether anything was measured: a published table may have tokens/s or memory without samples/s."""
    return has_speed(row) or (row.state == MEASURED and any(value_of(row, figure) is not None for figure in _MEASURED))


def has_speed(row: CellRow) -> bool:
    """Whether there is a speed to compare; an imported row may have one and have run out of memory."""
    return row.state == MEASURED and not isinstance(row.samples_per_s, Unknown) and row.samples_per_s.low > 0


# Settings that change the work per sample.
_WORK = ("model", "dataset", "stage", "sequence_length")
# Published figures are inconsistent by some percent; another number of epochs differs more.
_SAME_AMOUNT = 1.1


def differing(rows: Sequence[CellRow]) -> tuple[str, ...]:
    """Settings for which two of the rows have different values."""
    return tuple(name for name in _WORK if len(_told(rows, name) - {None}) > 1)


def untold(rows: Sequence[CellRow]) -> tuple[str, ...]:
    """Settings that only some of the rows have, with equal values."""
    return tuple(name for name in _WORK if len(values := _told(rows, name)) > 1 and len(values - {None}) == 1)


def differing_labels(rows: Sequence[CellRow]) -> tuple[str, ...]:
    """Labels of imported rows that differ, and do not tell every row from every other as a date may do."""
    imported = [row for row in rows if row.source == "imported"]
    values = {name: [row.varied.get(name) for row in imported] for row in imported for name in row.varied}
    return tuple(name for name, found in values.items() if 1 < len(set(found)) < len(found))


def other_work(rows: Sequence[CellRow]) -> str:
    """How the samples of the rows differ: `differ in model and stage`; empty if they do not."""
    differ, unknown = ([BY_NAME[name].words for name in names] for names in (differing(rows), untold(rows)))
    parts = [f"differ in {format_list(differ)}"] if differ else []
    return " and ".join([*parts, f"do not all have {format_list(unknown)}"] if unknown else parts)


def other_job(rows: Sequence[CellRow]) -> str:
    """How the full runs of the rows differ in their samples or number of samples; empty if they do not.

    Args:
        rows: rows with a time of the full run.
    """
    work = other_work(rows)
    if work:
        return work
    by_packing: dict[bool | None, list[float]] = {}
    for row in rows:
        if not isinstance(row.whole_s, Unknown) and not isinstance(row.samples_per_s, Unknown):
            # Packing changes the number of samples, but not the data.
            by_packing.setdefault(row.settings.packing, []).append(row.whole_s.value * row.samples_per_s.value)
    alike = all(max(amounts) <= _SAME_AMOUNT * min(amounts) for amounts in by_packing.values())
    return "" if alike else "train different numbers of samples"


def currency_unit(paid: Sequence[str | None], *, one: bool = False) -> str:
    """What stands behind an amount: the one currency, else `units`, of `one` amount of 1 `unit`."""
    if len(paid) == 1 and paid[0] is not None:
        return paid[0]
    return "unit" if one else "units"


def list_currencies(paid: Sequence[str | None]) -> str:
    """Several currencies, in a sentence."""
    return format_list(sorted(currency or "an unknown currency" for currency in paid))


def currencies(rows: Sequence[CellRow]) -> tuple[str | None, ...]:
    """The distinct currencies of the rows' prices; None is an unknown one."""
    priced = (
        row for row in rows if value_of(row, PRICE_PER_HOUR) is not None or value_of(row, PRICE_PURCHASE) is not None
    )
    return tuple(dict.fromkeys(row.currency for row in priced))


def _told(rows: Sequence[CellRow], name: str) -> set[str | int | None]:
    return {getattr(row.settings, name) for row in rows}
