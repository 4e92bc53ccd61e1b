"""What a tuning would try, as far as stored runs tell; no node is asked, and nothing is started. Reads disk."""

from __future__ import annotations

from pathlib import Path

import msgspec

from multinode.experiment.asked_tuning import (
    FIRST,
    AskedTuning,
    fingerprint_of,
    first_two,
    global_batch_of,
    job_of,
    load_tuning,
    require_tunable,
    samples_of,
    with_expected,
    with_seeds,
)
from multinode.experiment.budget import spent_s, time_needed_s
from multinode.experiment.grid_state import due_turns
from multinode.experiment.sweep import Resume
from multinode.experiment.sweep_store import find_sweep
from multinode.experiment.tuned_runs import find_runs_alike, list_candidates, run_s, trial_of
from multinode.experiment.tuning import Tuning, judge
from multinode.job.job import describe_job
from multinode.job.planning import workers_per_node
from multinode.traffic.algorithms import Layout


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
    found = None if resume.anew else find_sweep(runs, fingerprint_of(asked))
    if found is not None:
        directory, record = found
        tuning = load_tuning(directory, record)
        if tuning is not None and len(record.cells) > FIRST:
            record = with_seeds(record, asked)
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
    samples, candidates = samples_of(asked, layout), first_two(layout)
    planned = Tuning(
        run_id="",
        job=describe_job(job_of(asked)),
        samples=samples,
        steps=asked.steps,
        seeds=asked.seeds,
        learning_rates=asked.learning_rates,
        budget_s=asked.budget_s,
    )
    alike = find_runs_alike(runs, job_of(asked), layout.nodes, layout.workers_per_node)
    known = alike.get(layout.nodes)
    if known is None:
        trials = [trial_of(runs, one, None) for one in candidates]
        return judge(planned, trials)
    names = [record.run_id for record in alike.values()]
    changes, left_out = list_candidates(runs, names, steps=asked.steps, most=asked.most)
    took_s, steps = run_s(runs, known.run_id), known.summary.steps if known.summary is not None else 0
    # What a run takes beside its samples: start-up, checks, and what it leaves.
    around_s = (
        None if took_s is None else max(0.0, took_s - steps * global_batch_of(asked, layout) / known.samples_per_s)
    )
    measured = [alike[one.nodes].samples_per_s if one.nodes in alike else None for one in candidates]
    first = [
        msgspec.structs.replace(one, predicted_samples_per_s=rate)
        for one, rate in zip(candidates, measured, strict=True)
    ]
    listed = [with_expected(one, samples, around_s) for one in (*first, *changes)]
    needed = [one.expected_s for one in listed]
    planned = msgspec.structs.replace(
        planned,
        left_out=left_out,
        needed_s=None if None in needed else asked.runs_of_each * sum(one for one in needed if one is not None),
        waiting=asked.runs_of_each * len(listed),
        notes=(f"from {', '.join(names)}",),
    )
    return judge(planned, [trial_of(runs, one, None) for one in listed])
