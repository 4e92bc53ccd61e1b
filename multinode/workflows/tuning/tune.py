"""tune: a training as it stands, on one node, and with the best changes, in interleaved runs, judged by their loss.

A tuning is a grid whose cells are changes: the same series of runs as a sweep's, which goes on where it stopped. The
first two cells say which changes are worth a run. Prints nothing.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from multinode.analyse.collectives.traffic import Layout
from multinode.analyse.job.workload import global_batch, read_settings
from multinode.analyse.tuning.budget import fits, spent_s, time_needed_s
from multinode.analyse.tuning.losses import PARTS
from multinode.analyse.tuning.shortlist import Candidate
from multinode.analyse.tuning.tuning import Tuning, judge
from multinode.core.grid.grid import Cell, CellRecord, Grid, GridRecord
from multinode.core.grid.grid_fingerprint import fingerprint
from multinode.core.grid.grid_plan import Turn
from multinode.core.grid.grid_state import due_turns, retry_failed
from multinode.core.job.job import LlamaFactoryJob, describe_job
from multinode.core.job.trial_job import DEFAULT_SEED, TrialTraining, trial_job
from multinode.core.run.change import Change, change_text
from multinode.core.run.engine_commands import choose_engine
from multinode.core.run.planning import workers_per_node
from multinode.errors import Interrupted, MultinodeError, RunFailed, UsageError
from multinode.report.grid.grid_progress import state_line
from multinode.report.tuning.tuning_words import with_words
from multinode.store.run_directory import RunDirectory
from multinode.store.text_file import write_text
from multinode.workflows.advice.try_advice import changed_launch
from multinode.workflows.grid.series import Measure, Series
from multinode.workflows.grid.sweep import Resume
from multinode.workflows.grid.sweep_cell import measure_cell
from multinode.workflows.grid.sweep_store import create_grid, find_sweep, keep_status
from multinode.workflows.run.context import Launch, RunContext
from multinode.workflows.run.launch import benchmark_mode, probe_nodes
from multinode.workflows.tuning.tuned_runs import find_runs_alike, list_candidates, run_s, trial_of

__all__ = ["TUNING_FILE", "AskedTuning", "Tuned", "find_tuned", "plan_tuning", "require_tunable", "tune"]

TUNING_FILE = "tuning.json"
_WINNER = "tuned.yaml"
_KIND = "tuning"
BASELINE, ONE_NODE = "baseline", "one-node"
_FIRST = 2


class AskedTuning(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be tuned.

    Attributes:
        launch: the job as it stands, on all nodes.
        steps: of a run of the training as it stands; the others train on as many samples.
        seeds: runs of each candidate.
        budget_s: for all runs, those of earlier calls included.
        most: candidates that are tried, beside the training as it stands and one node alone.
        evaluation_samples: that are held out.
        output: where the winner is written; None is the tuning's directory.
    """

    launch: Launch
    steps: int
    seeds: int
    budget_s: float
    most: int
    evaluation_samples: int
    output: Path | None = None


class Tuned(msgspec.Struct, frozen=True, kw_only=True):
    """A tuning that has come to its end.

    Attributes:
        directory: where it lies; its runs lie beside it.
    """

    tuning: Tuning
    directory: Path

    def document(self) -> Tuning:
        """What `tune --json` prints."""
        return self.tuning


def require_tunable(asked: AskedTuning) -> None:
    """Refuse what cannot be tuned, before any node is asked.

    Raises:
        UsageError: a script, a single node, or a job that does not say how many samples a step has.
    """
    if len(asked.launch.cluster.nodes) == 1:
        raise UsageError("tune compares several nodes with one, and this is one", hint="a hostfile with two nodes")
    _batch(asked, Layout(nodes=1))


def find_tuned(asked: AskedTuning, runs: Path, resume: Resume) -> Tuned | None:
    """The newest tuning of the same command, if nothing of it is left that fits the budget; it needs no node."""
    found = None if resume.anew else find_sweep(runs, _fingerprint(asked))
    if found is None or found[0].is_locked:
        return None
    directory, record = found
    record = _with_seeds(retry_failed(record) if resume.retry_failed else record, asked)
    tuning = _load(directory, record)
    if tuning is None or any(cell.state == "running" for cell in record.cells):
        return None
    expected, due = [row.candidate.expected_s for row in tuning.rows], due_turns(record)
    # Of the first two alone nobody knows whether what comes after them was chosen.
    is_chosen = len(record.cells) > _FIRST or not due or due[0].number == 1
    if not is_chosen or any(fits(record, turn, expected, asked.budget_s) for turn in due):
        return None
    return _conclude(asked, directory, record, tuning)


def tune(asked: AskedTuning, context: RunContext, resume: Resume, measure: Measure = measure_cell) -> Tuned:
    """Measure what is left, in turns over the seeds, and judge it.

    Args:
        asked: the job, and what is to be measured.
        context: the nodes.
        resume: what becomes of an earlier tuning of the same command.
        measure: makes one run.

    Raises:
        UsageError: the job cannot be tuned so, or another process makes this very tuning.
        RunFailed: the training as it stands fails.
        NodeError: a node cannot be reached; what was measured is kept.
        Interrupted: the user stopped it; likewise.
    """
    finished = find_tuned(asked, context.runs, resume)
    if finished is not None:
        return finished
    layout = _layout(asked, context)
    directory = _take_up(asked, context, resume, layout)
    with directory.lock():
        tuner = _Tuner(asked, context, directory, layout, measure)
        try:
            tuner.run(retries_failed=resume.retry_failed)
        except BaseException as error:
            tuner.conclude("stopped" if isinstance(error, Interrupted) else "failed")
            raise
        return tuner.conclude("succeeded")


def plan_tuning(asked: AskedTuning, runs: Path, resume: Resume) -> Tuning:
    """What would be tried, as far as stored runs tell: of this very tuning, or of the same training.

    Raises:
        UsageError: the hostfile does not say how many workers a node has, or the job cannot be tuned so.
    """
    require_tunable(asked)
    cluster = asked.launch.cluster
    layout = Layout(
        nodes=len(cluster.nodes),
        workers_per_node=workers_per_node(cluster, {}, asked.launch.options.workers_per_node),
    )
    found = None if resume.anew else find_sweep(runs, _fingerprint(asked))
    if found is not None:
        directory, record = found
        tuning = _load(directory, record)
        if tuning is not None and len(record.cells) > _FIRST:
            record = _with_seeds(record, asked)
            expected = [row.candidate.expected_s for row in tuning.rows]
            due = due_turns(record)
            return msgspec.structs.replace(
                judge(tuning, [trial_of(runs, row.candidate, None) for row in tuning.rows]),
                seeds=asked.seeds,
                budget_s=asked.budget_s,
                spent_s=spent_s(record),
                needed_s=time_needed_s(record, due, expected),
                waiting=len(due),
            )
    return _plan_from_others(asked, runs, layout)


def _plan_from_others(asked: AskedTuning, runs: Path, layout: Layout) -> Tuning:
    samples, candidates = _samples(asked, layout), _first_two(layout)
    planned = Tuning(
        run_id="", job=describe_job(_job(asked)), samples=samples, steps=asked.steps, seeds=asked.seeds,
        budget_s=asked.budget_s,
    )  # fmt: skip
    alike = find_runs_alike(runs, _job(asked), layout.nodes, layout.workers_per_node)
    known = alike.get(layout.nodes)
    if known is None:
        trials = [trial_of(runs, one, None) for one in candidates]
        return judge(planned, trials)
    names = [record.run_id for record in alike.values()]
    changes, left_out = list_candidates(runs, names, steps=asked.steps, most=asked.most)
    took_s, steps = run_s(runs, known.run_id), known.summary.steps if known.summary is not None else 0
    # What a run takes beside its samples: start-up, checks, and what it leaves.
    around_s = None if took_s is None else max(0.0, took_s - steps * _batch(asked, layout) / known.samples_per_s)
    measured = [alike[one.nodes].samples_per_s if one.nodes in alike else None for one in candidates]
    first = [
        msgspec.structs.replace(one, predicted_samples_per_s=rate)
        for one, rate in zip(candidates, measured, strict=True)
    ]
    listed = [_expecting(one, samples, around_s) for one in (*first, *changes)]
    needed = [one.expected_s for one in listed]
    planned = msgspec.structs.replace(
        planned,
        left_out=left_out,
        needed_s=None if None in needed else asked.seeds * sum(one for one in needed if one is not None),
        waiting=asked.seeds * len(listed),
        notes=(f"from {', '.join(names)}",),
    )
    return judge(planned, [trial_of(runs, one, None) for one in listed])


class _Tuner:
    """A tuning under way; its directory is this process's."""

    def __init__(
        self, asked: AskedTuning, context: RunContext, directory: RunDirectory, layout: Layout, measure: Measure
    ) -> None:
        self._asked = asked
        self._context = context
        self._directory = directory
        self._layout = layout
        self._series = Series(context, directory, self._launch_of, measure)
        self._series.keep(_with_seeds(self._series.record, asked))
        stored = _load(directory, self._series.record)
        self._tuning = stored if stored is not None else self._begin()

    def run(self, *, retries_failed: bool) -> None:
        """The first two, what is tried after them, and all of it for every seed."""
        if retries_failed:
            self._series.keep(retry_failed(self._series.record))
        if len(self._candidates) == _FIRST:
            self._series.run(lambda record, turn: turn.number == 1 and self._fits(record, turn))
            if any(turn.number == 1 for turn in due_turns(self._series.record)):
                # The budget has no room for both, and without them nothing is predicted.
                return
            self._list()
        self._series.run(self._fits)

    def conclude(self, status: str) -> Tuned:
        """Judge and store what there is; what keeps it from being stored is no word against what was measured."""
        record = self._series.record
        tuned = Tuned(tuning=self._tuning, directory=self._directory.path)
        try:
            tuned = _conclude(self._asked, self._directory, record, self._tuning)
        except MultinodeError as error:
            if status == "succeeded":
                raise
            self._context.say(f"what was measured cannot be judged yet: {error}")
        finally:
            with contextlib.suppress(MultinodeError):
                keep_status(self._directory, status)
        return tuned

    @property
    def _candidates(self) -> tuple[Candidate, ...]:
        return tuple(row.candidate for row in self._tuning.rows)

    def _begin(self) -> Tuning:
        asked, first, record = self._asked, _first_two(self._layout), self._series.record
        # What was chosen is not stored any more, and is chosen anew.
        self._series.keep(msgspec.structs.replace(record, cells=record.cells[:_FIRST]))
        tuning = Tuning(
            run_id=self._directory.run_id,
            job=describe_job(_job(asked)),
            samples=_samples(asked, self._layout),
            steps=asked.steps,
        )
        tuning = judge(tuning, [trial_of(self._context.runs, one, None) for one in first])
        self._directory.write(TUNING_FILE, tuning)
        return tuning

    def _list(self) -> None:
        """Choose what is tried, by the first runs."""
        record, runs = self._series.record, self._context.runs
        baseline, alone = record.cells
        if not baseline.run_ids:
            raise RunFailed(
                f"the training as it stands has no figures: {baseline.reason or 'its run did not fit the budget'}",
                hint=f"all of it lies in {self._directory.path}",
            )
        names = [baseline.run_ids[0], *alone.run_ids[:1]]
        changes, left_out = list_candidates(runs, names, steps=self._asked.steps, most=self._asked.most)
        rate = trial_of(runs, self._candidates[0], baseline).runs[0].samples_per_s
        around_s = max(0.0, baseline.took_s[0] - self._tuning.samples / rate) if baseline.took_s else None
        listed = [_expecting(one, self._tuning.samples, around_s) for one in changes]
        candidates = (*self._candidates, *listed)
        tuning = msgspec.structs.replace(self._tuning, left_out=left_out)
        self._tuning = judge(tuning, [trial_of(runs, one, None) for one in candidates])
        # In this order: a grid that is stored has its candidates.
        self._directory.write(TUNING_FILE, self._tuning)
        cells = tuple(CellRecord(cell=_cell(one)) for one in listed)
        self._series.keep(msgspec.structs.replace(record, cells=(*record.cells, *cells)))
        names_listed = ", ".join(one.name for one in listed) or "no change"
        self._context.say(f"worth a run beside one node alone: {names_listed}")

    def _fits(self, record: GridRecord, turn: Turn) -> bool:
        return fits(record, turn, [one.expected_s for one in self._candidates], self._asked.budget_s)

    def _launch_of(self, cell: Cell, number: int) -> Launch:
        candidate = next(one for one in self._candidates if one.label == cell.label)
        what = benchmark_mode(self._asked.launch)
        changed = changed_launch(what, candidate.change, self._layout)
        job = changed.job
        if not isinstance(job, LlamaFactoryJob):
            raise UsageError("only a LLaMA-Factory YAML can be tuned")
        workers = len(changed.cluster.nodes) * (changed.options.workers_per_node or 1)
        batch = global_batch(read_settings(job), workers)
        seed = job.config.get("seed", DEFAULT_SEED)
        training = TrialTraining(
            steps=max(1, round(self._tuning.samples / (batch or 1))),
            seed=(seed if type(seed) is int else DEFAULT_SEED) + number - 1,
            every=candidate.change.averaging.every if candidate.change.averaging is not None else 1,
            parts=PARTS,
            evaluation_samples=self._asked.evaluation_samples,
        )
        return msgspec.structs.replace(changed, job=trial_job(job, training))


def _conclude(asked: AskedTuning, directory: RunDirectory, record: GridRecord, tuning: Tuning) -> Tuned:
    """Judge what there is, and write it, with the winner."""
    cells = {one.cell.label: one for one in record.cells}
    runs = directory.path.parent
    judged = judge(
        msgspec.structs.replace(
            tuning,
            seeds=asked.seeds,
            budget_s=asked.budget_s,
            spent_s=spent_s(record),
            waiting=len(due_turns(record)),
            file="",
        ),
        [trial_of(runs, row.candidate, cells.get(row.candidate.label)) for row in tuning.rows],
    )
    winner = judged.row(judged.recommended)
    if winner is not None and winner.candidate.label != BASELINE:
        path = asked.output or directory.path / _WINNER
        said = f"By multinode tune {directory.run_id}: {winner.candidate.name}. multinode launch --with {path.name}"
        write_text(path, change_text(_whole_change(winner.candidate), said))
        judged = msgspec.structs.replace(judged, file=str(path))
    judged = with_words(judged)
    directory.write(TUNING_FILE, judged)
    return Tuned(tuning=judged, directory=directory.path)


def _whole_change(candidate: Candidate) -> Change:
    """With the nodes and workers that it was measured on: on others it is another one."""
    return msgspec.structs.replace(candidate.change, nodes=candidate.nodes, workers_per_node=candidate.workers_per_node)


def _load(directory: RunDirectory, record: GridRecord) -> Tuning | None:
    """The tuning of a grid; None where it lacks candidates of it, as after a crash between two files."""
    tuning = directory.read(TUNING_FILE, Tuning)
    if tuning is None or len(tuning.rows) < len(record.cells):
        return None
    return msgspec.structs.replace(tuning, rows=tuning.rows[: len(record.cells)])


def _take_up(asked: AskedTuning, context: RunContext, resume: Resume, layout: Layout) -> RunDirectory:
    """The directory of the tuning that goes on, or of a new one."""
    wanted = _fingerprint(asked)
    found = None if resume.anew else find_sweep(context.runs, wanted)
    if found is not None:
        directory, record = found
        if directory.is_locked:
            raise UsageError(
                f"this very tuning is under way already: {directory.run_id}",
                hint="wait for its end; --fresh begins another one, and each would disturb the other",
            )
        context.say(f"going on with tuning {directory.run_id} ({state_line(record)}); --fresh begins anew")
        return directory
    record = GridRecord(
        fingerprint=wanted,
        command=describe_job(_job(asked)),
        grid=Grid(nodes=(layout.nodes, 1), repeats=asked.seeds),
        cells=tuple(CellRecord(cell=_cell(one)) for one in _first_two(layout)),
        steps=asked.steps,
    )
    engine = asked.launch.options.engine or choose_engine(_job(asked))
    directory = create_grid(context.runs, asked.launch, record, layout.workers, engine.name)
    context.say(f"tuning {directory.run_id}")
    return directory


def _first_two(layout: Layout) -> tuple[Candidate, ...]:
    """The training as it stands, and on one node alone with as many workers on it."""
    workers, one = layout.workers_per_node, Change(nodes=1)
    name = f"as it stands, {layout.nodes} nodes"
    return (
        Candidate(label=BASELINE, name=name, nodes=layout.nodes, workers_per_node=workers),
        Candidate(label=ONE_NODE, name="one node alone", kind="nodes", change=one, nodes=1, workers_per_node=workers),
    )


def _cell(candidate: Candidate) -> Cell:
    return Cell(label=candidate.label, nodes=candidate.nodes, workers_per_node=candidate.workers_per_node)


def _expecting(one: Candidate, samples: int, around_s: float | None) -> Candidate:
    """With what one run takes, as far as that is known."""
    rate = one.predicted_samples_per_s
    expected_s = None if around_s is None or not rate else around_s + samples / rate
    return msgspec.structs.replace(one, expected_s=expected_s)


def _with_seeds(record: GridRecord, asked: AskedTuning) -> GridRecord:
    return msgspec.structs.replace(record, grid=msgspec.structs.replace(record.grid, repeats=asked.seeds))


def _layout(asked: AskedTuning, context: RunContext) -> Layout:
    """The workers as they are today."""
    cluster, options = asked.launch.cluster, asked.launch.options
    told = options.workers_per_node is not None or all(node.slots or node.gpus for node in cluster.nodes)
    facts = {} if told else probe_nodes(asked.launch, context.agent)
    return Layout(nodes=len(cluster.nodes), workers_per_node=workers_per_node(cluster, facts, options.workers_per_node))


def _job(asked: AskedTuning) -> LlamaFactoryJob:
    """The job.

    Raises:
        UsageError: it is a script.
    """
    if not isinstance(asked.launch.job, LlamaFactoryJob):
        raise UsageError(
            "tune sets the seed, the steps and evaluations of a LLaMA-Factory YAML, and this is a script",
            hint="of a script: multinode advise last --try 3 -- train.py",
        )
    return asked.launch.job


def _batch(asked: AskedTuning, layout: Layout) -> int:
    batch = global_batch(read_settings(_job(asked)), layout.workers)
    if batch is None:
        raise UsageError("the job does not say how many samples a step has", hint="--set per_device_train_batch_size=1")
    return batch


def _samples(asked: AskedTuning, layout: Layout) -> int:
    return asked.steps * _batch(asked, layout)


def _fingerprint(asked: AskedTuning) -> str:
    """Of all that decides the figures: more seeds or a larger budget go on with what there is."""
    measured = {"tuning": _KIND, "steps": asked.steps, "most": asked.most, "held_out": asked.evaluation_samples}
    measured["workers"] = asked.launch.options.workers_per_node or 0
    return fingerprint({BASELINE: _job(asked)}, asked.launch.cluster.nodes, asked.launch.options, measured)
