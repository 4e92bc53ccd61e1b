from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from multinode.cli.main import build_app
from multinode.cluster.hostfile import parse_hostfile
from multinode.model.workload import JobSettings, Workload
from multinode.predict.advice import Recommendations, shortlist
from multinode.predict.recommendations import advise_runs, measured_job
from multinode.profile.figures import Straggler
from multinode.profile.machine_use import GpuUse, NodeUse
from multinode.profile.step_split import StepSplit
from multinode.profile.summary import Summary
from multinode.records.invocation import Invocation
from multinode.records.plan import LaunchPlan, PlanFile
from multinode.records.run import Run, new_run
from multinode.records.run_directory import RunDirectory
from multinode.traffic.step_calls import Strategy, TrafficInputs, Work
from tests import make
from tests.golden import Golden, error_of
from tests.predict.stored import on_four

NAMES = ("a", "b")
G = 14_767_104
changed = msgspec.structs.replace


def keep(root: Path, run_id: str, nodes: int, exposed_ms: float, straggler: Straggler | None = None) -> RunDirectory:
    """A stored run of the small model in fp32 under DDP: 166 ms of compute per step of 2 samples per worker."""
    step_ms = 166 + exposed_ms
    directory = RunDirectory.create(root, run_id)
    plan = make.plan(*NAMES[:nodes], link_gbit_per_s=0.1, run_id=run_id, engine="llamafactory", job="job.yaml")
    gpu = GpuUse(index=0, memory_total_gib=24.0)
    summary = make.summary(
        2 * nodes / step_ms * 1e3,
        step_ms,
        run_id=run_id,
        strategy="DDP",
        recognised=Strategy.DDP,
        world_size=nodes,
        steps=20,
        steady_steps=15,
        micro_steps=1,
        split=StepSplit(
            source="",
            mean=make.split(step_ms, compute_ms=166, exposed_ms=exposed_ms, data_ms=0, wait_ms=0),
        ),
        stragglers=(straggler,) if straggler is not None else (),
        nodes=tuple(
            NodeUse(node=name, node_rank=rank, ranks=(rank,), gpus=(gpu,), peak_worker_memory_gib={rank: 3.0})
            for rank, name in enumerate(NAMES[:nodes])
        ),
    )
    work = Work(
        strategy=Strategy.DDP,
        load=TrafficInputs(parameters=G // 4, trainable=G // 4, parameter_bytes=4, gradient_bytes=4),
    )
    settings = JobSettings(
        model="tiny", method="full", strategy="DDP", per_device_batch=2, accumulation=1, precision="fp32", overlap=True
    )
    directory.write("plan.json", plan)
    directory.write("summary.json", summary)
    directory.write("workload.json", Workload(settings=settings, work=work))
    directory.write("cluster.json", parse_hostfile("a\nb\nc\n", "hosts"))
    directory.write(
        "run.json",
        make.run(run_id=run_id, job="job.yaml", engine="llamafactory", world_size=nodes),
    )
    return directory


JOB = """\
model_name_or_path: tiny
stage: sft
finetuning_type: full
per_device_train_batch_size: 2
output_dir: /home/u/.multinode/runs/two.0/output
max_steps: 35
"""


def keep_job(directory: RunDirectory, text: str = JOB) -> None:
    """The files that went to the nodes with a stored run, and what a probe looked at there."""
    plan = directory.read("plan.json", LaunchPlan)
    assert plan is not None
    first = changed(plan.nodes[0], files=(PlanFile(path="job.yaml", text=text),))
    directory.write("plan.json", changed(plan, nodes=(first, *plan.nodes[1:])))
    directory.write("facts.json", [{"node": "a", "paths": [{"path": "tiny", "kind": "directory"}]}])


LATE = Straggler(node="b", ranks=(1,), late_ms=60, share=0.05, message="b is slower", hint="look at b")


def advise_on_the_command_line(root: Path, *args: str, verb: str = "advise") -> str:
    result = CliRunner(env={"MULTINODE_RUNS": str(root)}).invoke(
        build_app(), [verb, *args], catch_exceptions=False, standalone_mode=False
    )
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_two_stored_runs_become_ranked_advice(tmp_path: Path) -> None:
    keep(tmp_path, "one", 1, 0)
    keep(
        tmp_path,
        "two",
        2,
        1181,
        LATE,
    )
    recommendations = advise_runs(tmp_path, ["one", "two"])
    found = {one.name: one for one in recommendations.advice}
    assert recommendations.runs == ("one", "two")
    assert recommendations.measured_samples_per_s == pytest.approx(4 / 1.347)
    # The NIC takes 1.255 s for the gradients. 1.181 s of it were exposed, 1.142 s are by the timeline of two buckets.
    # Part of the difference is the overlap's, part the network's; for half the gradients it takes 0.627 s.
    hidden_s = (1.255 - 1.181, 1.255 - 1.142)
    slow, fast = (1.347 / (0.166 + 0.627 - one) for one in hidden_s)
    assert slow < found["gradients in fp16"].gain.value < fast
    assert found["one node"].outlook.samples_per_s.value == pytest.approx(2 / 0.166, rel=0.01)
    # The hostfile has a third node.
    assert found["3 nodes"].command == "--nodes 3"
    assert [note.code for note in recommendations.notes] == ["nominal-rate", "straggler"]
    assert (recommendations.notes[-1].node, recommendations.notes[-1].hint) == ("b", "look at b")


def test_a_contrast_and_a_tuning_stand_for_the_runs_that_they_were_made_from(tmp_path: Path) -> None:
    keep(tmp_path, "one", 1, 0)
    keep(tmp_path, "two", 2, 1181)
    both = advise_runs(tmp_path, ["one", "two"])
    contrast = make.store(
        tmp_path, "against", contrast={"baseline": {"run_ids": ["one"]}, "candidate": {"run_ids": ["two"]}}
    )
    run = RunDirectory(tmp_path / "one").read("run.json", Run)
    contrast.write("run.json", run)
    assert advise_runs(tmp_path, ["against"]) == both
    # Chosen by runs that were stored before, or by its own first two.
    rows = [{"run_ids": [name, "repeat"]} for name in ("two", "one", "change")]
    for sources in (["one", "two"], []):
        tuning = make.store(tmp_path, f"tuning-{len(sources)}", tuning={"sources": sources, "rows": rows}, run=run)
        advised = advise_runs(tmp_path, [tuning.run_id])
        assert (sorted(advised.runs), advised.advice) == (["one", "two"], both.advice)


def test_room_and_stragglers_are_those_of_today_in_whichever_order_the_runs_are_named(tmp_path: Path) -> None:
    one = keep(tmp_path, "one", 1, 0)
    keep(
        tmp_path,
        "two",
        2,
        1181,
        LATE,
    )
    # A GPU that was nearly full in another layout says nothing of this one.
    summary = one.read("summary.json", Summary)
    assert summary is not None
    full = changed(summary.nodes[0], peak_worker_memory_gib={0: 23.9})
    one.write("summary.json", changed(summary, nodes=(full,)))
    for names in (["one", "two"], ["two", "one"]):
        recommendations = advise_runs(tmp_path, names)
        assert next(found for found in recommendations.advice if found.name == "gradients in fp16").fits is True
        assert [note.node for note in recommendations.notes if note.code == "straggler"] == ["b"]


def test_one_node_that_was_measured_on_other_gpus_is_no_option_for_the_hostfile_as_it_is(tmp_path: Path) -> None:
    one, two = keep(tmp_path, "one", 1, 0), keep(tmp_path, "two", 2, 1181)
    plan = one.read("plan.json", LaunchPlan)
    assert plan is not None
    one.write("plan.json", on_four(plan))
    one.write("cluster.json", parse_hostfile("a gpus=1,2,3,5\n", "hosts"))
    two.write("cluster.json", parse_hostfile("a gpus=6,7\nb gpus=1,6\n", "hosts"))
    found = {advice.name: advice for advice in advise_runs(tmp_path, ["one", "two"]).advice}
    assert found["one node"].change is None
    assert found["one node"].command.startswith("set 4 ids in gpus=")
    assert found["4 workers on each node"].change is None


def test_the_job_that_was_measured_is_taken_from_its_run(tmp_path: Path, golden: Golden) -> None:
    keep(tmp_path, "one", 1, 0)
    two = keep(tmp_path, "two", 2, 1181)
    recommendations = advise_runs(tmp_path, ["one", "two"])
    script = error_of(measured_job, tmp_path, ["one", "two"], recommendations.settings)
    keep_job(two)
    job = measured_job(tmp_path, ["one", "two"], recommendations.settings)
    assert (job.config["max_steps"], job.config_path) == (35, "job.yaml")
    plan = two.read("plan.json", LaunchPlan)
    assert plan is not None
    two.write("plan.json", changed(plan, config_path="my configs/job.yaml"))
    command = advise_runs(tmp_path, ["one", "two"]).command
    assert command is not None
    assert command.job == ("my configs/job.yaml",)
    # A name that could be the hub's is a directory, as it was found to be.
    assert job.local_paths == ("tiny",)
    workload = two.read("workload.json", Workload)
    assert workload is not None
    error_of(measured_job, tmp_path, ["one", "two"], changed(workload.settings, accumulation=4))
    golden.check_errors("refused_jobs", {"a script": script})


@pytest.mark.parametrize("judge", ["speed", "loss"])
def test_a_tuning_from_runs_takes_their_job_and_refuses_another(tmp_path: Path, judge: str, golden: Golden) -> None:
    keep(tmp_path, "one", 1, 0)
    keep_job(keep(tmp_path, "two", 2, 1181))
    hosts, other = tmp_path / "hosts", tmp_path / "other.yaml"
    hosts.write_text("a slots=1\nb slots=1\n")
    other.write_text(JOB + "gradient_accumulation_steps: 4\n")

    def tune(*more: str) -> None:
        words = ("--from", "one", "--from", "two", "--judge", judge, "--hosts", str(hosts), "--dry-run", *more)
        advise_on_the_command_line(tmp_path, *words, verb="tune")

    cases = (
        (str(other),),
        ("--set", "model_name_or_path=other"),
        ("--workers-per-node", "2"),
    )
    golden.check_errors(
        "refused_tune",
        {" ".join(words).replace(str(tmp_path), "DIR"): error_of(tune, *words) for words in cases},
        tmp_path,
    )


def test_another_link_has_other_advice(tmp_path: Path) -> None:
    keep(tmp_path, "one", 1, 0)
    keep(tmp_path, "two", 2, 1181)
    fast = advise_runs(tmp_path, ["one", "two"], link_gbit_per_s=10)
    assert fast.today.link_gbit_per_s == 10
    assert fast.measured_samples_per_s is None
    assert next(one for one in fast.advice if one.name == "gradients in fp16").gain.value < 1.2


def test_the_command_prints_a_table_or_one_document(tmp_path: Path) -> None:
    keep(tmp_path, "one", 1, 0)
    two = keep(tmp_path, "two", 2, 1181)
    best = [one.name for one in shortlist(advise_runs(tmp_path, ["one", "two"]).advice, 3)]
    shown = advise_on_the_command_line(tmp_path, "one", "two")
    rows = [line[3:].split("  ")[0] for line in shown.splitlines() if line[:1].isdigit()]
    assert rows == best
    # Of a script nobody knows how it was started, unless its command line was kept.
    assert "multinode tune" not in shown
    typed = Invocation(verb="launch", options=(("--hosts", "h"), ("--detach",)), job=("--", "train.py", "--lr", "1"))
    plan = two.read("plan.json", LaunchPlan)
    assert plan is not None
    two.write("run.json", changed(new_run(plan, 0.0), command=typed))
    assert (
        "Next        multinode tune --judge speed --from one --from two --candidates 2 --hosts h -- train.py --lr 1\n"
        in advise_on_the_command_line(tmp_path, "one", "two")
    )
    shown = advise_on_the_command_line(tmp_path, "one", "two", "--top", "50")
    assert "--set gradient_accumulation_steps=8" in shown
    document = json.loads(advise_on_the_command_line(tmp_path, "one", "two", "--json"))
    assert document["schema"] == "multinode.advise/3"
    recommendations = msgspec.convert(document, Recommendations)
    assert recommendations == advise_runs(tmp_path, ["one", "two"])
    names = [
        one["name"]
        for one in json.loads(advise_on_the_command_line(tmp_path, "one", "two", "--json", "--top", "2"))["advice"]
    ]
    assert names == [one.name for one in recommendations.advice[:2]]


def test_what_cannot_be_asked_is_refused(tmp_path: Path, golden: Golden) -> None:
    keep(tmp_path, "one", 1, 0)
    lines = ("--link fast", "--link 1000tbit", "--job job.yaml", "nothing")
    refused = {line: error_of(advise_on_the_command_line, tmp_path, *line.split()) for line in lines}
    golden.check_errors("refused_advise", refused, tmp_path)
