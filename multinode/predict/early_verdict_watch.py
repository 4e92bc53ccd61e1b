"""EarlyVerdict from the records of a run so far. Reads disk; prints nothing."""

from __future__ import annotations

import msgspec

from multinode.errors import MultinodeError
from multinode.job.step_calls import passing_bytes
from multinode.launch.runs import observe_run
from multinode.predict.advise import training_state
from multinode.predict.early_verdict import early_verdict
from multinode.predict.evidence import gather, work_of_calls
from multinode.predict.request import read_record
from multinode.predict.run_selection import Record
from multinode.profile.observed import Observed
from multinode.profile.summary import Summary, summarise
from multinode.records.run import CERTAIN_STEPS, LEAST_STEPS, EarlyVerdict, RunSteps, unknown_verdict
from multinode.records.run_directory import RunDirectory

_BITS_PER_BYTE, _BYTES_PER_MS = 8, 1e6


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """The judgement of a run so far."""

    # None if not possible yet, or never: on one node, or for a run without training
    verdict: EarlyVerdict | None = None
    lacking: int = 0  # steps until a verdict, or until it may end the run; 0 if it is final


def judge(directory: RunDirectory) -> Judged:
    """The verdict on a run from all its records so far."""
    record = read_record(directory)
    if record is None or record.plan.test is not None or record.layout.nodes == 1:
        return Judged()
    observed = observe_run(directory, record.plan)
    recorded = _by_all(observed)
    if len(recorded) < LEAST_STEPS:
        return Judged(lacking=LEAST_STEPS - len(recorded))
    totals = [one.total_steps for one in observed.steps[recorded[-1]].values() if one.total_steps]
    steps = RunSteps(
        run_id=directory.run_id,
        node=record.node_names[0],
        nodes=record.layout.nodes,
        workers_per_node=record.layout.on(1).workers,
        step=recorded[-1],
        total_steps=max(totals, default=None),
        recorded=len(recorded),
        measured=len(observed.counted),
    )
    verdict = _judged(directory, record, steps, _by_step(summarise(observed)))
    return Judged(verdict=verdict, lacking=max(0, CERTAIN_STEPS - verdict.measured) if verdict.one_node else 0)


def _judged(directory: RunDirectory, record: Record, steps: RunSteps, summary: Summary) -> EarlyVerdict:
    record, averaging = msgspec.structs.replace(record, summary=summary), record.plan.averaging
    if averaging is not None:
        return unknown_verdict(steps, f"nodes average {averaging.words}: the first steps do not show its cost")
    mean = summary.split.mean
    if mean is None or mean.exposed_ms is None:
        reason = summary.split.missing.get("exposed_ms", "it was not recorded")
        return unknown_verdict(steps, f"exposed communication is unknown: {reason}")
    try:
        evidence = gather([record], link_measured=_carried_gbit_per_s(record, summary))
        today = training_state(evidence, [directory], [summary])
        return early_verdict(steps, today, summary)
    except MultinodeError as error:
        return unknown_verdict(steps, error.message)
    except ValueError as error:
        return unknown_verdict(steps, str(error))


def _by_all(observed: Observed) -> list[int]:
    return [number for number, workers in observed.steps.items() if len(workers) == observed.world_size]


def _by_step(summary: Summary) -> Summary:
    step_ms = summary.step_time_ms
    if summary.samples_per_s is not None or step_ms is None:
        return summary
    mean = summary.split.mean.step_ms if summary.split.mean is not None else step_ms.median
    per_s = summary.world_size * max(1, round(summary.micro_steps or 1)) / mean * 1e3
    return msgspec.structs.replace(summary, samples_per_s=per_s, per_device_batch=1.0)


def _carried_gbit_per_s(record: Record, summary: Summary) -> float | None:
    """Rate carried during communication, used as the link rate if the NIC reports none.

    The comparison with one node does not depend on it; gains of changes do.
    """
    comm_ms = summary.split.comm_ms or (summary.split.mean.exposed_ms if summary.split.mean is not None else None)
    known = record.workload.work if record.workload is not None else None
    work = known or work_of_calls(summary, record.layout)
    if not comm_ms or work is None:
        return None
    calls = work.calls_of(work.strategy, record.layout)
    sent = passing_bytes(calls, max(1, round(summary.micro_steps or 1)), record.layout)
    return sent / comm_ms / _BYTES_PER_MS * _BITS_PER_BYTE
