"""Run selection: stored runs as Records, and which of them predictions start from."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import msgspec

from multinode.decoding import parse_option
from multinode.errors import JobError, UsageError
from multinode.job.engines.place import JOB_FILE
from multinode.job.job import TrainingCommand, TrainingJob, parse_training
from multinode.model.workload import JobSettings, differing_setting, read_settings
from multinode.network.measure import load_scan
from multinode.network.size_scan import ScanReport
from multinode.records.plan import LaunchPlan
from multinode.runs.stored_run import StoredRun
from multinode.stats.estimate import value_of
from multinode.stats.unknown import Unknown, reason_of
from multinode.traffic.algorithms import Layout
from multinode.traffic.step_calls import Strategy
from multinode.units import format_rate, is_link_rate, parse_rate


class Record(StoredRun):
    """A stored run that launched something, with what predictions ask of it.

    Raises:
        UsageError: of `plan` and what follows from it, for a run that launched nothing itself.
    """

    @functools.cached_property
    def plan(self) -> LaunchPlan:
        """What was launched."""
        plan = super().plan
        if plan is None:
            raise UsageError(f"run {self.run_id} consists of other runs", hint="list them: multinode runs --all")
        return plan

    @property
    def sweep(self) -> ScanReport | None:
        """Of an nccl-test."""
        return self.result(load_scan)

    @property
    def layout(self) -> Layout:
        """Its workers."""
        return Layout.of(self.plan.workers)

    @property
    def samples_per_s(self) -> float:
        """Of all workers; 0 where it tells none."""
        return (value_of(self.summary.samples_per_s) if self.summary is not None else None) or 0.0

    @property
    def is_training(self) -> bool:
        """Whether it tells how fast a training is whose workers average at every step."""
        has_speed = self.summary is not None and not isinstance(self.summary.samples_per_s, Unknown)
        return self.sweep is None and has_speed and self.plan.levers.algorithm is None

    @functools.cached_property
    def job(self) -> TrainingJob | None:
        """The training as it went to the nodes; None of a script."""
        files = {file.path: file.text for node in self.plan.nodes[:1] for file in node.files}
        if not self.plan.framework or JOB_FILE not in files:
            return None
        try:
            like = TrainingCommand(framework=self.plan.framework, verb=self.plan.verb)
            job = parse_training(files[JOB_FILE], self.plan.config_path, like=like)
        except JobError:
            return None
        deepspeed = next((text for path, text in files.items() if path.endswith(".json")), None)
        return msgspec.structs.replace(job, deepspeed_text=deepspeed)

    @functools.cached_property
    def settings(self) -> JobSettings:
        """By its workload, without one by the job's own file. A hook that stepped aside has compressed nothing."""
        if self.workload is not None:
            settings = self.workload.settings
        elif self.job is not None:
            settings = read_settings(self.job)
        else:
            settings = JobSettings(method="script", command=self.plan.job)
        levers = settings.levers
        for name in self.summary.unused_levers if self.summary is not None else ():
            levers = levers.without(name)
        return msgspec.structs.replace(settings, levers=levers)

    @property
    def strategy(self) -> Strategy | None:
        """As it was configured; else as its calls were recognised; None is neither."""
        if self.settings.strategy:
            return next((strategy for strategy in Strategy if strategy.value == self.settings.strategy), None)
        return self.summary.recognised if self.summary is not None else None


def read_rate(option: str, text: str | None) -> float | None:
    """The rate of a link in Gbit/s, from the text of an option; None without one.

    Raises:
        UsageError: it is none, or no link can be that fast.
    """
    rate = parse_option(option, text, parse_rate) if text is not None else None
    if rate is not None and not is_link_rate(rate):
        raise UsageError(f"{option} {text}: not a possible link rate", hint="for example 10gbit")
    return rate


def is_alike(record: Record, other: Record) -> bool:
    """Whether they are of one training, however it is laid out and shared out."""
    return not difference(record, other)


def difference(record: Record, other: Record) -> str:
    """The first setting that differs though one training has one of it; what is not known differs in nothing."""
    return differing_setting(record.settings, other.settings)


CONTRAST = "multinode contrast --hosts H JOB.yaml"
"""What measures a training on one node and on several."""


class RunSelection(msgspec.Struct, frozen=True, kw_only=True):
    """The records that are used."""

    newest: Record  # the run that says what is trained, and how it is laid out today
    single: Record | None = None  # on one node; None where none is known
    several: tuple[Record, ...] = ()  # on several nodes, oldest first, the newest last
    sweep: Record | None = None  # an nccl-test of the same nodes; None where none is stored

    @property
    def sources(self) -> tuple[str, ...]:
        """Which they are, a sentence each."""
        sentences = [f"one node: run {self.single.run_id}"] if self.single is not None else []
        sentences += [f"{run.layout.nodes} nodes: run {run.run_id}" for run in self.several]
        if self.sweep is None:
            return (*sentences, "network: only the nominal link rate")
        rate = self.sweep.link_gbit_per_s
        return (*sentences, f"network: nccl-test {self.sweep.run_id}" + (f" at {format_rate(rate)}" if rate else ""))


def select_runs(named: Sequence[Record], others: Sequence[Record]) -> RunSelection:
    """Sort them.

    Args:
        named: by the user, oldest first.
        others: all others that are stored, oldest first.

    Raises:
        UsageError: there is no training among them, or there are several, or one trained by another algorithm.
    """
    for record in named:
        if record.plan.levers.algorithm is not None:
            raise UsageError(
                f"run {record.run_id} cannot be used: {record.plan.levers.algorithm}",
                hint=f"measure without this option: {CONTRAST}",
            )
    trainings = [record for record in named if record.is_training]
    sweeps = [record for record in named if record.sweep is not None]
    if not trainings and sweeps:
        # An nccl-test alone: the newest training on its nodes is meant.
        trainings = _newest_on(others, sweeps[-1])
    if not trainings:
        raise _nothing_to_use(named)
    last = trainings[-1]
    stranger = next((training for training in trainings if not is_alike(training, last)), None)
    if stranger is not None:
        raise UsageError(
            f"runs {stranger.run_id} and {last.run_id} trained differently ({difference(stranger, last)})",
            hint="name runs of the same training job",
        )
    singles, several = (
        [training for training in trainings if (training.layout.nodes > 1) is many] for many in (False, True)
    )
    if not singles and not tells_exposed(several[-1]):
        singles = [other for other in others if could_be_single(other, several[-1])][-1:]
    single = _usual(singles) if singles else None
    newest = _usual(several) if several else single or last
    ordered = (*(run for run in several if run.run_id != newest.run_id), newest) if several else ()
    sweep = sweeps[-1] if sweeps else _sweep_for(newest, others)
    return RunSelection(newest=newest, single=single, several=ordered, sweep=sweep)


def tells_exposed(record: Record) -> bool:
    """Whether its exposed communication is known."""
    return record.summary is not None and not isinstance(record.summary.split.exposed_ms, Unknown)


def _usual(runs: Sequence[Record]) -> Record:
    repeats = repeats_of(runs[-1], runs)
    return sorted(repeats, key=lambda run: run.samples_per_s)[(len(repeats) - 1) // 2]


def repeats_of(run: Record, stored: Sequence[Record]) -> list[Record]:
    """Runs of the same job on the same nodes, itself among them; one node alone uses no link."""

    def ran_as(record: Record) -> tuple[object, ...]:
        link = record.link_gbit_per_s if record.layout.nodes > 1 else None
        return record.layout, record.settings, record.node_names, link

    return [
        record for record in stored if record.is_training and is_alike(record, run) and ran_as(record) == ran_as(run)
    ]


def _newest_on(others: Sequence[Record], sweep: Record) -> list[Record]:
    fitting = [other for other in others if other.is_training and set(other.node_names) <= set(sweep.node_names)]
    if not fitting:
        return []
    alike = [record for record in fitting if is_alike(record, fitting[-1])]
    sides = [[record for record in alike if (record.layout.nodes > 1) is many][-1:] for many in (False, True)]
    return [*sides[0], *sides[1]]


def _nothing_to_use(named: Sequence[Record]) -> UsageError:
    for record in named:
        if record.sweep is not None:
            return UsageError(
                f"run {record.run_id} is an nccl-test, but no training run on its nodes is stored",
                hint=f"measure one: {CONTRAST}",
            )
        reason = reason_of(record.summary.samples_per_s) if record.summary is not None else "it has no summary"
        cause = f": {reason}" if reason else ""
        return UsageError(
            f"run {record.run_id} has no samples/s for a prediction{cause}",
            hint="use a run with more steps, or a training whose batches multinode can count",
        )
    return UsageError("no run was named", hint=f"measure one: {CONTRAST}")


def could_be_single(record: Record, several: Record) -> bool:
    """Whether it ran the training of a run on several nodes on one of them."""
    return (
        record.is_training
        and record.layout.nodes == 1
        and set(record.node_names) <= set(several.node_names)
        and is_alike(record, several)
    )


def _sweep_for(training: Record, others: Sequence[Record]) -> Record | None:
    ours = set(training.node_names)
    fitting = [
        other
        for other in others
        if other.sweep is not None and len(other.node_names) > 1 and ours <= set(other.node_names)
    ]

    def fit(record: Record) -> tuple[bool, bool, bool]:
        same_link = training.link_gbit_per_s in {None, record.link_gbit_per_s}
        return record.node_names == training.node_names, same_link, record.layout == training.layout

    # Of equal ones the first is taken.
    return max(reversed(fitting), key=fit, default=None)
