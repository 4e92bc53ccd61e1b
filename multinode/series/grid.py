"""Cells of a series of runs, and what becomes of them: the order of the runs, due ones, the effect of each. Pure.

Running out of memory is a result; every other error is a failure.
"""

from __future__ import annotations

import hashlib
import itertools
import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from multinode.cluster.cluster import REACHING, Node
from multinode.findings.finding import Finding, message_of
from multinode.findings.rule import RuleGroup
from multinode.job.job import Job
from multinode.job.launch_options import LaunchOptions
from multinode.records.benchmark import Benchmark
from multinode.records.run import Failure, NodeRun, Run
from multinode.secret_values import is_secret
from multinode.units import about, format_count, format_figure

ENDS = RuleGroup("Why a cell or a repeat has no figures")
NO_FIGURES = ENDS.rule("no-figures", about="a run without figures", message="{lacks}")
_TOO_SHORT = ENDS.rule(
    "too-short",
    about=("a run that reached its time limit before it had figures"),
    message="{lacks}: use a larger --minutes",
)
_FAILED = ENDS.rule("failed", about="the first failure of a run", message="{node}: {failure}")
_KILLED = ENDS.rule(
    "killed",
    about="processes that the kernel killed",
    message="{node}: the kernel killed {processes} because memory ran out",
    figures=("oom_kills",),
)
_ENDED = ENDS.rule(
    "ended",
    about="a run that did not succeed, but has no failure",
    message="the run ended with status {status}",
    figures=("status",),
)
_STOPPED = ENDS.rule("stopped", about="a run that was stopped", message="it was stopped")
BY_ANOTHER = ENDS.rule(
    "stopped-by-another", about="a run that another command stopped", message="another multinode command stopped it"
)
CUT_OFF = ENDS.rule("cut-off", about="a run whose controller was killed", message="the run's controller was killed")
REFUSED = ENDS.rule("refused", about="a run that could not be started", message="{error}")
NO_NODES = ENDS.rule("no-nodes", about="a part of `bench` whose nodes have all failed", message="its nodes have failed")
_REPEAT = ENDS.rule(
    "repeat", about=("a failed repeat of a cell; the other repeats keep their figures"), message="a repeat {how}: {why}"
)
_LARGER = ENDS.rule(
    "larger-batch",
    about="a cell with a larger batch than a cell that ran out of memory",
    message="{small} already ran out of {memory}",
    figures=("small",),
)

BATCH = "per_device_train_batch_size"
"""The setting whose larger values need more memory."""
_BATCHES = frozenset({BATCH, "batch", "batch_size", "train_batch_size", "micro_batch_size", "per_device_batch_size"})


def is_batch(key: str) -> bool:
    """Whether a setting or script argument of this name is a batch."""
    return key in _BATCHES


class Grid(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep: every combination of these."""

    # values by key of the job, or by name of a script argument, in the given order
    settings: dict[str, tuple[Any, ...]] = {}
    # the spelling of a script argument by its name in `settings`: `--batch-size` by `batch_size`; empty for a YAML job
    arguments: dict[str, str] = {}
    nodes: tuple[int, ...]  # numbers of nodes, from the top of the hostfile
    workers_per_node: tuple[int | None, ...] = (None,)  # on each; None uses the hostfile
    repeats: int = 1  # measurements per cell
    # whether repeats are interleaved, every second round in reverse, so that drift affects all; otherwise the
    # repeats of a cell are consecutive
    interleave: bool = True


class GridCell(msgspec.Struct, frozen=True, kw_only=True):
    """One combination."""

    label: str  # its name, unique in its grid and valid in file names: `2x1-lora-batch4`
    settings: dict[str, Any] = {}  # set in the job, by key
    nodes: int  # from the top of the hostfile
    workers_per_node: int | None = None  # on each; None uses the hostfile


class CellRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a cell."""

    cell: GridCell
    # `waiting`, `running`, `measured`, `out_of_memory`, `skipped` or `failed`; a cell with a successful run is
    # `measured`, even if repeats are due
    state: str = "waiting"
    run_ids: tuple[str, ...] = ()  # successful runs, one per repeat
    current: str | None = None  # the run in progress, not yet judged, if any
    attempts: int = 0  # number of started runs
    failed_runs: int = 0  # failed runs that are not repeated
    took_s: tuple[float, ...] = ()  # wall time of every judged run, including overhead
    out_of: str | None = None  # whose memory ran out: `gpu`, or `node` (kernel OOM killer); None in other states
    why: Finding | None = None  # it or a repeat was skipped or failed, or what ran out where
    failure: Failure | None = None  # the first failure of its runs, if any
    last_run: str | None = None  # the last started run, whatever became of it
    values: tuple[float, ...] = ()  # of each of `run_ids`: samples/s, or what its series measures


class GridRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`grid.json` of a series of runs: rewritten at every change of a cell, so that it can resume after a crash."""

    schema: str = "multinode.grid/3"
    fingerprint: str  # of everything that decides the figures; equal for the same command
    command: str  # the job, for people
    grid: Grid
    cells: tuple[CellRecord, ...]  # in the order of the grid
    # samples per optimizer step of a worker in the job's own file (batch x accumulation), before the grid's settings;
    # None if unknown
    worker_batch: int | None = None
    steps: int | None = None  # measured per run; None uses the job's, or `minutes`
    minutes: float | None = None  # training time per run; None trains its steps
    synthetic: bool = False  # whether data are synthetic
    noun: str = "cell"  # what people call a cell: `side`, `setting`
    is_over: bool = False  # whether the same command measures anew; a sweep adds to its cells instead

    @property
    def limit_s(self) -> float | None:
        """Training time per run, in seconds; None trains its steps."""
        return None if self.minutes is None else 60 * self.minutes


_LENGTH = 32
_NO_MATTER = REACHING | {"price", "price_gpu", "price_purchase", "price_purchase_gpu"}


def fingerprint(
    jobs: Mapping[str, Job | Benchmark], nodes: tuple[Node, ...], options: LaunchOptions, measured: Mapping[str, Any]
) -> str:
    """Equal for the same jobs, nodes, options and measurement; its inputs cannot be recovered from it.

    Prices, SSH ports and secrets do not change it.

    Args:
        jobs: of every cell, by its label.
        nodes: of the grid.
        options: layout of each cell.
        measured: the grid and how its cells are measured, as plain data.
    """
    environment = options.environment
    document = {
        "jobs": {label: _trained(job) for label, job in jobs.items()},
        "nodes": [_placed(node) for node in nodes],
        "engine": options.engine,
        "levers": options.levers,
        "env": _without_secrets(environment.env),
        "prelude": environment.prelude,
        "code": options.code.digest if options.code is not None else None,
        "measured": _with_texts(dict(measured)),
    }
    return hashlib.sha256(msgspec.json.encode(document, order="sorted")).hexdigest()[:_LENGTH]


def _trained(job: Job | Benchmark) -> Any:
    return job if isinstance(job, Benchmark) else (*map(_with_texts, job.identity), *_digests(job.program))


def _digests(words: Sequence[str]) -> tuple[dict[str, str], ...]:
    """Of the scripts among the words: a changed script is another training. Empty without words."""
    paths = [Path(word) for word in words if word.endswith((".py", ".sh"))]
    found = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()}
    return (found,) if words else ()


def _with_texts(value: Any) -> Any:
    """Turn all keys into text: YAML allows any, as in `max_memory: {0: 20GiB}`, JSON does not."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, dict):
        return {
            key if isinstance(key, str) else f"{type(key).__name__} {key!r}": _with_texts(item)
            for key, item in value.items()
        }
    return [_with_texts(item) for item in value] if isinstance(value, list | tuple) else value


def _placed(node: Node) -> dict[str, Any]:
    """Everything on a line of the hostfile except prices and SSH settings."""
    fields = {name: value for name, value in msgspec.structs.asdict(node).items() if name not in _NO_MATTER}
    return fields | {"env": _without_secrets(node.env)}


def _without_secrets(env: Mapping[str, str]) -> dict[str, str | None]:
    return {name: None if is_secret(name) else value for name, value in env.items()}


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One run to make."""

    cell: int  # index of the cell in the grid
    number: int  # of the repeat, from 1


def in_turns(cells: Sequence[int], repeats: int) -> Iterator[Turn]:
    """Every cell this many times, each round in the reverse order of the one before, so that drift affects all."""
    for number in range(1, repeats + 1):
        yield from (Turn(cell=index, number=number) for index in (cells if number % 2 else reversed(cells)))


def measuring_order(grid: Grid, cells: Sequence[GridCell]) -> Iterator[Turn]:
    """All runs, with smaller batches of otherwise equal cells first, so that out-of-memory is found early."""
    order = _ascending(cells)
    if grid.interleave:
        yield from in_turns(order, grid.repeats)
    else:
        yield from (Turn(cell=index, number=number) for index in order for number in range(1, grid.repeats + 1))


def batch_of(cell: GridCell) -> float | None:
    """The batch that the grid sets in a cell; None if it sets none, or it is not a number."""
    value = next((value for key, value in cell.settings.items() if is_batch(key)), None)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def batch_group(cell: GridCell) -> tuple[int, int | None, str]:
    """Equal for cells that differ only in their batch."""
    others = {key: value for key, value in cell.settings.items() if not is_batch(key)}
    # As text, because 1 equals true, and a list has no hash.
    return cell.nodes, cell.workers_per_node, repr(others)


def _ascending(cells: Sequence[GridCell]) -> list[int]:
    groups: dict[tuple[int, int | None, str], list[int]] = {}
    for index, cell in enumerate(cells):
        groups.setdefault(batch_group(cell), []).append(index)
    ordered = (sorted(group, key=lambda index: batch_of(cells[index]) or 0.0) for group in groups.values())
    return list(itertools.chain.from_iterable(ordered))


_MEMORY = {"gpu": "GPU memory", "node": "the node's memory"}


def is_due(record: GridRecord, turn: Turn) -> bool:
    """Whether this run is still to be made."""
    cell = record.cells[turn.cell]
    if cell.state not in {"waiting", "measured"} or cell.out_of is not None:
        return False
    return len(cell.run_ids) + cell.failed_runs < turn.number


def due_turns(record: GridRecord) -> tuple[Turn, ...]:
    """The runs still to be made, in order."""
    cells = [recorded.cell for recorded in record.cells]
    return tuple(turn for turn in measuring_order(record.grid, cells) if is_due(record, turn))


def is_finished(record: GridRecord) -> bool:
    """Whether nothing is left to measure."""
    return all(cell.state != "running" for cell in record.cells) and not due_turns(record)


def begin(record: GridRecord, index: int, run_id: str) -> GridRecord:
    """The record with a run of this cell in progress."""
    attempts = record.cells[index].attempts + 1
    return _change(record, index, state="running", current=run_id, last_run=run_id, attempts=attempts)


def give_up(record: GridRecord, index: int) -> GridRecord:
    """The record without the run in progress, which says nothing about the cell and is repeated."""
    return _change(record, index, state=_resting(record.cells[index]), current=None)


def settle(record: GridRecord, index: int, outcome: CellOutcome, *, took_s: float | None = None) -> GridRecord:
    """The record after the run in progress has ended.

    Args:
        record: the grid.
        index: of the cell.
        outcome: of the run.
        took_s: its wall time; None excludes it from the estimate of the time left.
    """
    if outcome.state == "stopped":
        return give_up(record, index)
    took = () if took_s is None else (took_s,)
    return _change(record, index, **_settled(record.cells[index], outcome, took))


def skip_larger(record: GridRecord, index: int) -> tuple[GridRecord, tuple[str, ...]]:
    """Skip cells that equal one out of memory except for a larger batch.

    A cell that was measured earlier keeps its figures.

    Returns:
        The record, and the labels of the skipped cells.
    """
    small = record.cells[index]
    why = _LARGER.found(None, small=small.cell.label, memory=_MEMORY.get(small.out_of or "", "memory"))
    cells = enumerate(record.cells)
    larger = [other for other, cell in cells if cell.state == "waiting" and _needs_more(cell.cell, small.cell)]
    for other in larger:
        record = _change(record, other, state="skipped", why=why)
    return record, tuple(record.cells[other].cell.label for other in larger)


def without_runs(record: GridRecord, gone: Collection[str]) -> GridRecord:
    """The record without these runs, which are no longer stored and are repeated."""
    for index, cell in enumerate(record.cells):
        kept = tuple(run_id for run_id in cell.run_ids if run_id not in gone)
        if kept != cell.run_ids:
            # One value for each run, or none.
            pairs = zip(cell.run_ids, cell.values, strict=False)
            values = tuple(value for run_id, value in pairs if run_id not in gone)
            record = _change(record, index, run_ids=kept, values=values)
            if cell.state != "running":
                record = _change(record, index, state=_resting(record.cells[index]))
    return record


def retry_failed(record: GridRecord, indices: Collection[int] | None = None) -> GridRecord:
    """The record with failed cells due again, of these or of all; not those out of memory."""
    for index, cell in enumerate(record.cells):
        is_chosen = indices is None or index in indices
        if is_chosen and cell.failed_runs and cell.state in {"failed", "measured"}:
            record = _change(record, index, state=_resting(cell), failed_runs=0, why=None, failure=None)
    return record


def _settled(cell: CellRecord, outcome: CellOutcome, took_s: tuple[float, ...]) -> dict[str, Any]:
    changes: dict[str, Any] = {"state": outcome.state, "current": None, "took_s": cell.took_s + took_s}
    if outcome.state == "measured" and cell.current is not None:
        values = () if outcome.value is None else (outcome.value,)
        run_ids = (*cell.run_ids, *(outcome.run_ids or (cell.current,)))
        return changes | {"run_ids": run_ids, "values": (*cell.values, *values)}
    is_oom = outcome.state == "out_of_memory"
    changes |= {"why": outcome.why, "failure": outcome.failure, "out_of": outcome.out_of}
    if not is_oom:
        changes["failed_runs"] = cell.failed_runs + 1
    if cell.run_ids:
        # The end of one repeat does not affect those already measured.
        how = "ran out of memory" if is_oom else "failed"
        changes |= {"state": "measured", "why": _REPEAT.found(None, how=how, why=message_of(outcome.why))}
    return changes


def _needs_more(cell: GridCell, small: GridCell) -> bool:
    ours, theirs = batch_of(cell), batch_of(small)
    return ours is not None and theirs is not None and ours > theirs and batch_group(cell) == batch_group(small)


def _resting(cell: CellRecord) -> str:
    return "measured" if cell.run_ids else "waiting"


def _change(record: GridRecord, index: int, **changes: Any) -> GridRecord:
    cells = list(record.cells)
    cells[index] = msgspec.structs.replace(cells[index], **changes)
    return msgspec.structs.replace(record, cells=tuple(cells))


_STATES = ("measured", "out_of_memory", "skipped", "failed", "waiting", "running")
_OUT_OF = {"gpu": "out of GPU memory", "node": "out of the node's memory"}


def left_s(record: GridRecord, runs: int) -> float | None:
    """Estimated time of so many runs, from the mean of the finished ones; None before anything is known.

    With a time limit per run, only runs that reached it count; until one has, the limit itself is used.
    """
    took = [one_s for cell in record.cells for one_s in cell.took_s]
    limit_s = record.limit_s
    if limit_s is not None:
        took = [one_s for one_s in took if one_s >= limit_s] or [limit_s]
    return statistics.fmean(took) * runs if took else None


def cell_line(number: int, total: int, name: str, remaining_s: float | None) -> str:
    """The cell that is measured next: `[3/16] 2x1-lora-batch4, about 4 min left`."""
    left = "" if remaining_s is None else f", {about(remaining_s)} left"
    return f"[{number}/{total}] {name}{left}"


def end_line(name: str, cell: CellRecord, samples_per_s: float | None) -> str:
    """The outcome of a cell's run."""
    if cell.state == "measured" and cell.why is None:
        speed = f": {format_figure(samples_per_s, digits=4)} samples/s" if samples_per_s is not None else ""
        return f"{name}: measured{speed}"
    state = _OUT_OF.get(cell.out_of or "", _words(cell.state))
    return f"{name}: {state}" + (f": {cell.why.message}" if cell.why is not None else "")


def state_line(record: GridRecord) -> str:
    """Number of cells by state: `16 cells: 12 measured, 1 out of memory, 3 skipped`."""
    counts = Counter(cell.state for cell in record.cells)
    states = ", ".join(f"{counts[state]} {_words(state)}" for state in _STATES if counts[state])
    return f"{format_count(len(record.cells), record.noun)}: {states}"


def _words(state: str) -> str:
    return state.replace("_", " ")


_OUT_OF_MEMORY = {"out_of_gpu_memory": "gpu", "out_of_memory": "node"}


# What the others see when the kernel kills one of them, its data loader or its launcher.
_OF_KILLED_PEERS = frozenset({"killed", "connection", "timeout", "crashed"})


class CellOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one run of a cell."""

    state: str  # `measured`, `out_of_memory`, `failed`, or `stopped`: it was given up and says nothing
    out_of: str | None = None  # whose memory did not suffice: `gpu` or `node`
    why: Finding | None = None  # of all but `measured`
    failure: Failure | None = None  # the run's first
    unreachable: bool = False  # a node could not be reached, or was lost
    held: bool = False  # somebody else computes on a GPU; like a node that is lost, it says nothing about the cell
    value: float | None = None  # as in CellRecord.values, of `measured`
    run_ids: tuple[str, ...] = ()  # its runs, if they are not the one that was begun


def judge_run(run: Run, *, in_time: bool, lacks: str | None) -> CellOutcome:
    """What a run that has ended says about its cell.

    Args:
        run: what happened.
        in_time: whether it was stopped because its time was over, and so ended as it should.
        lacks: why it has no figures; None where it has.
    """
    if run.status == "succeeded" or (run.status == "stopped" and in_time):
        if lacks is None:
            return CellOutcome(state="measured")
        return CellOutcome(state="failed", why=(_TOO_SHORT if in_time else NO_FIGURES).found(None, lacks=lacks))
    if run.status in {"stopped", "running"}:
        return CellOutcome(state="stopped", why=_STOPPED.found(None))
    failure = run.first_failure
    kind = failure.kind if failure is not None else None
    killed = _killed_by_kernel(run)
    if killed is not None and _may_be_killed(failure):
        count = killed.status.oom_kills
        why = _KILLED.found(killed.name, processes=_processes(killed), oom_kills=count)
        return CellOutcome(state="out_of_memory", out_of="node", why=why, failure=failure)
    if kind in _OUT_OF_MEMORY and failure is not None:
        return CellOutcome(state="out_of_memory", out_of=_OUT_OF_MEMORY[kind], why=_failed(failure), failure=failure)
    why = _failed(failure) if failure is not None else _ENDED.found(None, status=run.status)
    return CellOutcome(
        state="failed", why=why, failure=failure, unreachable=run.status == "lost", held=kind == "gpu_held"
    )


def _killed_by_kernel(run: Run) -> NodeRun | None:
    return next((node for node in run.nodes if node.status.oom_kills), None)


def _may_be_killed(failure: Failure | None) -> bool:
    """Whether a kill by the kernel can have caused it: an exception that tells another cause has that cause.

    The kernel's count may be of the whole machine, where others run out of memory, too.
    """
    if failure is None or failure.kind in _OF_KILLED_PEERS or failure.signal == "SIGKILL":
        return True
    return failure.kind is None and failure.signal is not None


def _processes(node: NodeRun) -> str:
    return "a process" if node.status.oom_kills == 1 else f"{node.status.oom_kills} processes"


def _failed(failure: Failure) -> Finding:
    first = failure.message.strip().splitlines()
    return _FAILED.found(failure.node, failure=first[0] if first else "it failed")
