"""A cluster that is not there, for tests of a tuning: two nodes at 100 Mbit/s, and what a change makes of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from multinode.cluster.hostfile import parse_hostfile
from multinode.job.job import TrainingJob, parse_training, render_job
from multinode.launch.context import ExecuteOptions, Launch, Launched, RunContext, StopRequest
from multinode.profile.summary import Summary
from multinode.records.plan import LaunchPlan, PlanFile
from multinode.records.run import Failure
from multinode.records.run_directory import RunDirectory
from multinode.series.series import Resume
from multinode.stats.estimate import exactly
from multinode.sweep.measure import CellRun
from multinode.transport.fake import FakeTransport
from multinode.tune.measure import Tuned, tune
from multinode.tune.request import TuningRequest
from tests import make
from tests.predict.test_recommendations import keep

__all__ = ["Elsewhere", "steps_of", "tuning_request"]

HOSTS = "a slots=1\nb slots=1\n"
YAML = "model_name_or_path: tiny\nstage: sft\nfinetuning_type: full\nper_device_train_batch_size: 2\nseed: 7\n"
# A step of DDP waits so long for the network.
EXPOSED_MS, COMPUTE_MS = 1181.0, 166.0
# Of a batch of two samples.
BEST_RATE = 1e-3
# Of a run, by the clock of this cluster.
AROUND_S = 10.0

changed = msgspec.structs.replace
# What a run comes to beside its usual figures: the kind of a failure, or an error.
End = str | Exception | None


def tuning_request(**fields: Any) -> TuningRequest:
    """Of the small model, for 20 minutes."""
    job = parse_training(fields.pop("yaml", YAML), "job.yaml")
    launch = Launch(
        cluster=parse_hostfile(HOSTS, "hosts"), hostfile=HOSTS, job=job, execute=ExecuteOptions(kind="tuning")
    )
    usual: dict[str, Any] = {
        "launch": launch,
        "steps": 64,
        "seeds": 2,
        "budget_s": 1e6,
        "most": 3,
        "evaluation_samples": 8,
    }
    return TuningRequest(**(usual | fields))


def steps_of(what: Launch) -> int:
    """What a run was asked to make."""
    assert isinstance(what.job, TrainingJob)
    steps: int = what.job.config["max_steps"]
    return steps


class Elsewhere:
    """The nodes."""

    def __init__(
        self,
        runs: Path,
        ends: Callable[[str], End] = lambda _: None,
        *,
        evaluates: bool = True,
        loss_by_round: float = 1 / 16,
    ) -> None:
        self.runs = runs
        self.ends = ends  # what a run comes to, by the label of its cell and its seed
        self.evaluates = evaluates  # whether they record losses of evaluations, or those of the training alone
        self.loss_by_round = loss_by_round  # how much slower a training learns for each step between two averages
        self.stop = StopRequest()
        self.order: list[str] = []  # the runs that were begun, without the tuning's id
        self.launches: list[Launch] = []  # what they were; `said` every stage
        self.said: list[str] = []

    @property
    def context(self) -> RunContext:
        return RunContext(FakeTransport(lambda *_: ()), self.runs, stop=self.stop, say=self.said.append)

    def tune(self, asked: TuningRequest, **resume: bool) -> Tuned:
        return tune(asked, self.context, Resume(**resume), self.measure)

    def measure(self, what: Launch, context: RunContext, minutes: float | None) -> CellRun:
        assert (context.runs, minutes) == (self.runs, None)
        name = (what.run_id or "").split("-", 3)[3]
        self.order.append(name)
        self.launches.append(what)
        end = self.ends(name)
        if isinstance(end, Exception):
            raise end
        return CellRun(launched=self._keep(what, end))

    def _keep(self, what: Launch, kind: str | None) -> Launched:
        assert isinstance(what.job, TrainingJob)
        nodes, job = len(what.cluster.nodes), what.job
        every = what.levers.round_steps
        accumulation = job.config.get("gradient_accumulation_steps", 1)
        sent = 0.0 if nodes == 1 else EXPOSED_MS / every * (0.5 if what.levers.compression else 1.0)
        directory = keep(self.runs, what.run_id or "", nodes, sent)
        step_ms = COMPUTE_MS * accumulation + sent
        plan = directory.read("plan.json", LaunchPlan)
        assert plan is not None
        file = PlanFile(path="job.yaml", text=render_job(job))
        first = changed(plan.nodes[0], files=(file,))
        plan = changed(
            plan,
            nodes=(first, *plan.nodes[1:]),
            levers=what.levers,
        )
        directory.write("plan.json", plan)
        summary = directory.read("summary.json", Summary)
        workload = directory.read("workload.json", dict[str, Any])
        assert workload is not None
        assert summary is not None
        workload["settings"]["accumulation"] = accumulation
        directory.write("workload.json", workload)
        batch = 2 * nodes * accumulation
        summary = changed(summary, samples_per_s=exactly(batch / step_ms * 1e3))
        directory.write("summary.json", summary)
        self._keep_losses(directory, job, every, batch)
        failure = Failure(node="a", node_rank=0, message=f"{kind} happened", kind=kind) if kind is not None else None
        run = make.run(
            *(node.name for node in what.cluster.nodes),
            run_id=plan.run_id,
            job="job.yaml",
            engine="llamafactory",
            status="succeeded" if kind is None else "failed",
            started_s=0.0,
            ended_s=AROUND_S + steps_of(what) * step_ms / 1e3,
            world_size=nodes,
            first_failure=failure,
            kind="tuning",
        )
        directory.write("run.json", run)
        return Launched(run=run, summary=summary, plan=plan, directory=directory)

    def _keep_losses(self, directory: RunDirectory, job: TrainingJob, every: int, batch: int) -> None:
        """A loss that falls with the samples; averaging seldom costs a part of that, and larger steps too."""
        folder = directory.path / "samples" / "node-0"
        folder.mkdir(parents=True)
        steps, between = job.config["max_steps"], job.config.get("eval_steps", 8)
        slower = (1 + batch / 16) * (1 + self.loss_by_round * every)
        rate = job.config.get("learning_rate")
        if rate is not None:
            # The best one is larger for a larger batch.
            slower *= 1 + abs(math.log2(rate / (BEST_RATE * batch / 2)))
        losses = [
            (step, 4.0 / (1 + step * batch / 64 / slower) + 0.001 * job.config["seed"])
            for step in range(between, steps + 1, between)
        ]
        kind = "evaluation" if self.evaluates else "loss"
        lines = [json.dumps({"kind": kind, "rank": 0, "step": step, "loss": loss}) for step, loss in losses]
        (folder / "rank-0.jsonl").write_text("".join(f"{line}\n" for line in lines))
