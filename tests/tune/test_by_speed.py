from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from multinode.cluster.cluster import Cluster
from multinode.cluster.hostfile import parse_hostfile
from multinode.errors import Interrupted, NodeFailed, RunFailed, UsageError
from multinode.job.job import Job, LlamaFactoryJob, ScriptJob, parse_llamafactory
from multinode.job.job_files import Change
from multinode.launch.context import Launch, Launched, RunContext, StopRequest
from multinode.levers.averaging import Averaging
from multinode.levers.levers import NONE, Levers
from multinode.model.workload import JobSettings
from multinode.predict.advice import Advice, Recommendations
from multinode.predict.cost_model import StepParts
from multinode.predict.forecast import PredictedScenario
from multinode.profile.bottleneck import Bottleneck
from multinode.profile.summary import Summary
from multinode.records.plan import LaunchPlan, Rendezvous
from multinode.records.run import Failure, NodeRun, Run
from multinode.records.run_directory import RunDirectory
from multinode.series.grid import GridRecord
from multinode.stats.estimate import Estimate, exactly
from multinode.stats.unknown import Unknown
from multinode.transport.fake import FakeTransport
from multinode.tune.by_speed import Trials, changed_launch, try_advice
from tests.levers.compressed import compressed

HOSTS = "a slots=1\nb slots=1\n"
CLUSTER: Cluster = msgspec.structs.replace(parse_hostfile(HOSTS, "hosts"), hosts="new.txt")
JOB = msgspec.structs.replace(
    parse_llamafactory("model_name_or_path: m\nstage: sft\ndeepspeed: ds.json\n", "job.yaml"),
    deepspeed_text='{"zero_optimization": {"stage": 3}}',
)
OUTLOOK = PredictedScenario(
    link_gbit_per_s=0.1,
    nodes=2,
    workers_per_node=1,
    per_device_batch=2,
    accumulation=1,
    strategy="DDP",
    step_time_ms=1000,
    samples_per_s=Estimate(value=4, low=3, high=5),
    speedup=exactly(1),
    efficiency=0.5,
    parts=StepParts(compute_ms=1, optimizer_ms=0, host_ms=0, data_ms=0, comm_ms=0, beyond_ms=0, exposed_ms=0),
    bottleneck=Bottleneck(kind="network", message=""),
)
FOUR = Change(overrides=("gradient_accumulation_steps=4",))
changed = msgspec.structs.replace


def advised(name: str, gain: float, change: Change | None) -> Advice:
    return Advice(
        name=name,
        kind="accumulation",
        gain=Estimate(value=gain, low=gain * 0.9, high=gain * 1.1),
        outlook=OUTLOOK,
        meaning="nothing",
        change=change,
        command="by hand",
    )


COUNSEL = Recommendations(
    runs=("before",),
    today=OUTLOOK,
    advice=(
        advised("a link of 10 Gbit/s", 9.0, None),
        advised("gradient accumulation 4", 3.0, FOUR),
        advised("gradients in fp16", 1.8, Change(levers=compressed("fp16"))),
        advised("one node", 1.5, Change(nodes=1)),
    ),
)


class Elsewhere:
    """A cluster that is not there: each launch has the samples/s that `rates` says, by what was changed."""

    def __init__(self, runs: Path, rates: Callable[[Launch], float | Exception]) -> None:
        self.stop = StopRequest()
        self.said: list[str] = []
        self.context = RunContext(FakeTransport(lambda *_: ()), runs, stop=self.stop, say=self.said.append)
        self.rates = rates
        self.launches: list[Launch] = []

    def run(self, what: Launch, context: RunContext) -> Launched:
        assert context.agent is self.context.agent
        self.launches.append(what)
        rate = self.rates(what)
        if isinstance(rate, Exception):
            raise rate
        nodes = tuple(NodeRun(name=node.name, node_rank=rank) for rank, node in enumerate(what.cluster.nodes))
        failed = rate < 0
        run = Run(
            run_id=what.run_id or "",
            job="job.yaml",
            engine="llamafactory",
            status="failed" if failed else "succeeded",
            started_s=1.0,
            ended_s=2.0,
            world_size=len(nodes),
            nodes=nodes,
            first_failure=Failure(node="a", node_rank=0, message="out of memory") if failed else None,
        )
        if failed:
            RunDirectory.create(context.runs, run.run_id).write("run.json", run)
        return Launched(
            run=run,
            summary=Summary(
                run_id=what.run_id or "",
                steps=20,
                steady_steps=15,
                rule="",
                samples_per_s=exactly(rate) if rate else Unknown("no batch was counted"),
            ),
            plan=LaunchPlan(
                rendezvous=Rendezvous(addr="", port=1, workers=(1, 1)),
                run_id="",
                engine="",
                job="",
                nodes=(),
            ),
            directory=RunDirectory(context.runs / (what.run_id or "")),
        )

    @property
    def order(self) -> list[str]:
        return [(what.run_id or "").removeprefix("try-") for what in self.launches]


def what(job: Job = JOB) -> Launch:
    return Launch(cluster=CLUSTER, hostfile=HOSTS, job=job, run_id="try")


def rate_of(launch: Launch) -> float:
    """4 samples/s as it stands; accumulation gives 2.9 times as much, fp16 1.5 times."""
    assert isinstance(launch.job, LlamaFactoryJob)
    accumulated = launch.job.config.get("gradient_accumulation_steps") == 4
    return 4.0 * (2.9 if accumulated else 1.0) * (1.5 if launch.levers.compression else 1.0)


def test_predicted_stands_beside_measured_and_is_kept(tmp_path: Path) -> None:
    fake = Elsewhere(tmp_path, rate_of)
    attempt = try_advice(what(), fake.context, COUNSEL, Trials(count=2), fake.run)
    assert fake.order == ["today", "1", "2"]
    assert fake.said == [
        "trial try: 3 changes: 3 waiting",
        "[1/3] unchanged",
        "unchanged: measured: 4 samples/s",
        "[2/3] gradient accumulation 4, about 10 s left",
        "gradient accumulation 4: measured: 11.6 samples/s",
        "[3/3] gradients in fp16, about 10 s left",
        "gradients in fp16: measured: 6 samples/s",
    ]
    link, four, halved, alone = attempt.recommendations.advice
    assert link.tried is None
    assert alone.tried is None
    assert four.tried is not None
    assert four.tried.gain == pytest.approx(2.9)
    assert four.tried.error == pytest.approx(3.0 / 2.9 - 1)
    assert four.tried.is_covered is True
    assert halved.tried is not None
    assert halved.tried.gain == pytest.approx(1.5)
    assert halved.tried.is_covered is False
    assert attempt.recommendations.today_tried is not None
    assert attempt.recommendations.today_tried.samples_per_s == 4
    assert (COUNSEL.hosts, attempt.recommendations.hosts) == ("", "new.txt")
    stored = RunDirectory.open(tmp_path, "last")
    assert stored.read("advice.json", Recommendations) == attempt.recommendations
    run = stored.read("run.json", Run)
    assert run is not None
    assert (run.run_id, run.kind, run.status) == ("try", "advise", "succeeded")
    assert attempt.directory == stored.path


def test_repeats_are_taken_in_the_opposite_order_and_the_median_counts(tmp_path: Path) -> None:
    drift = iter((4.0, 12.0, 5.0, 16.0, 8.0, 6.0))
    fake = Elsewhere(tmp_path, lambda _: next(drift))
    attempt = try_advice(what(), fake.context, COUNSEL, Trials(count=2, repeats=2), fake.run)
    assert fake.order == ["today-1", "1-1", "2-1", "2-2", "1-2", "today-2"]
    four = attempt.recommendations.advice[1].tried
    assert four is not None
    assert four.gain == pytest.approx(((12 + 8) / 2) / ((4 + 6) / 2))
    assert four.run_id == "try-1-2"


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (-1.0, "a: out of memory"),
        (NodeFailed("disk full", node="b"), "b: disk full"),
        (0.0, "no batch was counted"),
    ],
)
def test_a_change_that_fails_has_its_reason_and_the_others_go_on(
    tmp_path: Path, failure: float | Exception, reason: str
) -> None:
    def rates(launch: Launch) -> float | Exception:
        return failure if (launch.run_id or "").endswith("-1") else 4.0

    fake = Elsewhere(tmp_path, rates)
    attempt = try_advice(what(), fake.context, COUNSEL, Trials(count=2), fake.run)
    _, four, halved, _ = attempt.recommendations.advice
    assert four.tried is not None
    assert (four.tried.gain, four.tried.reason) == (None, reason)
    assert halved.tried is not None
    assert halved.tried.gain == 1


def test_a_training_that_fails_as_it_stands_is_no_trial(tmp_path: Path) -> None:
    fake = Elsewhere(tmp_path, lambda _: -1.0)
    with pytest.raises(RunFailed, match="out of memory"):
        try_advice(what(), fake.context, COUNSEL, Trials(), fake.run)
    assert len(fake.launches) == 1


def test_a_training_that_fails_later_leaves_what_was_measured_and_no_run_that_runs_for_ever(tmp_path: Path) -> None:
    fake = Elsewhere(tmp_path, lambda launch: -1.0 if (launch.run_id or "").endswith("today-2") else 4.0)
    with pytest.raises(RunFailed, match="out of memory") as caught:
        try_advice(what(), fake.context, COUNSEL, Trials(repeats=2), fake.run)
    assert caught.value.run_id == "try"
    assert fake.order == ["today-1", "1-1", "1-2", "today-2"]
    run = RunDirectory.open(tmp_path, "try").read("run.json", Run)
    assert run is not None
    assert run.status == "failed"
    assert run.first_failure is not None
    assert (run.first_failure.message, run.first_failure.run_id) == ("out of memory", "try-today-2")
    recommendations = RunDirectory.open(tmp_path, "try").read("advice.json", Recommendations)
    assert recommendations is not None
    assert recommendations.advice[1].tried is not None
    assert recommendations.advice[1].tried.gain == 1


def test_what_was_measured_before_a_stop_is_kept(tmp_path: Path) -> None:
    def rates(launch: Launch) -> float:
        if (launch.run_id or "").endswith("-2"):
            fake.stop.ask("SIGINT")
        return 4.0

    fake = Elsewhere(tmp_path, rates)
    with pytest.raises(Interrupted) as caught:
        try_advice(what(), fake.context, COUNSEL, Trials(count=3), fake.run)
    assert caught.value.hint == "run the same command to resume; results so far: multinode show try"
    assert fake.order == ["today", "1", "2"]
    recommendations = RunDirectory.open(tmp_path, "try").read("advice.json", Recommendations)
    assert recommendations is not None
    assert recommendations.advice[1].tried is not None
    assert recommendations.advice[1].tried.gain == 1
    run = RunDirectory.open(tmp_path, "try").read("run.json", Run)
    assert run is not None
    assert run.status == "stopped"


class KilledError(BaseException):
    """What ends the process at once."""


def test_a_trial_that_is_killed_resumes_and_repeats_nothing(tmp_path: Path) -> None:
    def rates(launch: Launch) -> float:
        if (launch.run_id or "").endswith("-1"):
            raise KilledError
        return measured(launch)

    def measured(launch: Launch) -> float:
        directory = RunDirectory.create(tmp_path, launch.run_id or "")
        directory.write("summary.json", {})
        return rate_of(launch)

    fake = Elsewhere(tmp_path, rates)
    with pytest.raises(KilledError):
        try_advice(what(), fake.context, COUNSEL, Trials(count=2), fake.run)
    # The state as a killed process leaves it.
    record = RunDirectory(tmp_path / "try").read("grid.json", GridRecord)
    assert record is not None
    assert [cell.state for cell in record.cells] == ["measured", "running", "waiting"]
    again = Elsewhere(tmp_path, measured)
    later = changed(what(), run_id="later")
    attempt = try_advice(later, again.context, COUNSEL, Trials(count=2), again.run)
    assert again.order == ["1", "2"]
    assert again.said[0].startswith("resuming trial try (3 changes: 1 measured, 1 waiting, 1 running)")
    assert attempt.directory.name == "try"
    assert attempt.recommendations.advice[1].tried is not None
    assert attempt.recommendations.advice[1].tried.gain == pytest.approx(2.9)
    # What is complete is measured anew.
    assert try_advice(later, again.context, COUNSEL, Trials(count=2), again.run).directory.name == "later"
    assert again.order == ["1", "2", "later-today", "later-1", "later-2"]


def test_only_what_is_picked_is_tried(tmp_path: Path) -> None:
    fake = Elsewhere(tmp_path, rate_of)
    try_advice(what(), fake.context, COUNSEL, Trials(count=3, picks=("fp16",)), fake.run)
    assert [launch.levers for launch in fake.launches] == [NONE, compressed("fp16")]
    fake.launches.clear()
    both = advised("gradients in fp16 + gradient accumulation 4", 4.0, Change(levers=compressed("fp16")))
    recommendations = changed(COUNSEL, advice=(both, *COUNSEL.advice))
    again = changed(what(), run_id="again")
    try_advice(again, fake.context, recommendations, Trials(count=3, picks=("accumulation",)), fake.run)
    assert [launch.levers for launch in fake.launches] == [NONE, NONE]
    with pytest.raises(UsageError, match="none of the advised changes can be tried") as caught:
        try_advice(what(), fake.context, COUNSEL, Trials(picks=("10 Gbit",)), fake.run)
    assert "'gradients in fp16'" in (caught.value.hint or "")


def test_what_the_gpus_have_no_room_for_is_never_tried(tmp_path: Path) -> None:
    large = changed(advised("DDP instead of ZeRO-3", 40.0, Change(overrides=("deepspeed=null",))), fits=False)
    recommendations = changed(COUNSEL, advice=(*COUNSEL.advice, large))
    fake = Elsewhere(tmp_path, rate_of)
    attempt = try_advice(what(), fake.context, recommendations, Trials(count=9), fake.run)
    assert [one.name for one in attempt.recommendations.advice if one.tried] == [one.name for one in COUNSEL.advice[1:]]
    with pytest.raises(UsageError, match="none of the advised changes can be tried") as caught:
        try_advice(what(), fake.context, recommendations, Trials(picks=("DDP",)), fake.run)
    assert "too large for the GPUs: 'DDP instead of ZeRO-3'" in (caught.value.hint or "")


def test_a_try_keeps_away_from_the_output_of_the_job(tmp_path: Path) -> None:
    fake = Elsewhere(tmp_path, rate_of)
    try_advice(what(), fake.context, COUNSEL, Trials(), fake.run)
    for launch in fake.launches:
        assert isinstance(launch.job, LlamaFactoryJob)
        assert not launch.job.keeps_output
        assert launch.job.config["save_strategy"] == "no"


def test_only_the_training_that_was_measured_is_tried(tmp_path: Path) -> None:
    fake = Elsewhere(tmp_path, rate_of)
    measured = JobSettings(model="m", method="lora", strategy="ZeRO-3", accumulation=2, levers=compressed("fp16"))
    with pytest.raises(UsageError) as caught:
        try_advice(what(), fake.context, changed(COUNSEL, settings=measured), Trials(), fake.run)
    assert caught.value.message == (
        "this is not the measured job: accumulation is 1, but 2 was measured; gradient compression is 'none', "
        "but 'fp16' was measured"
    )
    script = changed(COUNSEL, settings=JobSettings(method="script", command="train.py --lr 1"))
    with pytest.raises(UsageError, match=r"command is 'train.py', but 'train.py --lr 1' was measured"):
        try_advice(what(ScriptJob(argv=("train.py",))), fake.context, script, Trials(), fake.run)
    assert not fake.launches


def test_a_json_that_fixes_the_global_batch_fits_each_try() -> None:
    job = changed(JOB, deepspeed_text='{"train_batch_size": 16, "zero_optimization": {"stage": 3}}')
    fixed = [
        made.deepspeed_text
        for change in (Change(), Change(nodes=1), Change(overrides=("gradient_accumulation_steps=4",)))
        if isinstance(made := changed_launch(what(job), change, OUTLOOK.layout).job, LlamaFactoryJob)
    ]
    assert [json.loads(text)["train_batch_size"] for text in fixed if text] == [16, 8, 64]


def test_a_change_is_made_as_its_options_would_make_it() -> None:
    alone = changed_launch(what(), Change(nodes=1, workers_per_node=2), OUTLOOK.layout)
    assert [node.name for node in alone.cluster.nodes] == ["a"]
    assert alone.workers_per_node == 2
    stage = changed_launch(what(), Change(deepspeed=("zero_optimization.stage=2",)), OUTLOOK.layout).job
    assert isinstance(stage, LlamaFactoryJob)
    assert json.loads(stage.deepspeed_text or "") == {"zero_optimization": {"stage": 2}}
    ddp = changed_launch(
        what(),
        Change(overrides=("deepspeed=null",), levers=compressed("bf16")),
        OUTLOOK.layout,
    )
    assert isinstance(ddp.job, LlamaFactoryJob)
    assert ddp.job.deepspeed_text is None
    assert ddp.job.config["deepspeed"] is None
    assert ddp.levers == compressed("bf16")
    assert ddp.cluster == CLUSTER
    rounds = Averaging(every=16, dtype="fp16")
    short = changed(JOB, config=JOB.config | {"max_steps": 25})
    for steps, job in ((48, short), (None, JOB)):
        local = changed_launch(what(job), Change(levers=Levers(averaging=rounds)), OUTLOOK.layout)
        assert isinstance(local.job, LlamaFactoryJob)
        assert local.levers.averaging == rounds
        # A round that warms up and two that are measured.
        assert local.job.config.get("max_steps") == steps
    # As many workers as today, whatever the hostfile's slots are.
    assert ddp.workers_per_node == OUTLOOK.workers_per_node


def test_what_cannot_be_changed_is_one_clear_error() -> None:
    with pytest.raises(UsageError, match="only settings of a LLaMA-Factory YAML"):
        changed_launch(what(ScriptJob(argv=("train.py",))), FOUR, OUTLOOK.layout)
    with pytest.raises(UsageError, match="3 nodes are requested; the hostfile has 2"):
        changed_launch(what(), Change(nodes=3), OUTLOOK.layout)
    plain = parse_llamafactory("model_name_or_path: m\nstage: sft\ndeepspeed:\n  a: 1\n", "job.yaml")
    with pytest.raises(UsageError, match="no editable DeepSpeed JSON"):
        changed_launch(what(plain), Change(deepspeed=("zero_optimization.stage=2",)), OUTLOOK.layout)
