from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from multinode.job.engines.engine import Engine
from multinode.job.job import Job, ScriptJob, TrainingJob, parse_training
from multinode.job.launch_options import LaunchOptions
from multinode.launch.checkpoints import WHOLE, Checkpoint, CheckpointChoice, Layout
from multinode.launch.restart import (
    RestartOptions,
    Saved,
    Start,
    batch_words,
    global_batch,
    kept_accumulation,
    resume_job,
    script_variables,
    why_no_fewer_nodes,
    why_no_resume,
    why_not_restarted,
)
from multinode.launch.sharding import layout_of
from multinode.levers.averaging import Averaging
from multinode.levers.levers import Levers
from multinode.records.run import Attempt, Failure

TEXT = "model_name_or_path: m\nstage: sft\nfinetuning_type: lora\ndataset: d\noutput_dir: out/\n"
CRASH = Failure(node="b", node_rank=1, rank=1, message="rank 1 crashed", kind="crashed", exit_code=1)
OPTIONS = RestartOptions(restarts=2)


def job(**config: Any) -> TrainingJob:
    return parse_training(TEXT, "train.yaml", [f"{key}={value}" for key, value in config.items()])


def accelerate_fsdp(**settings: Any) -> Engine:
    return Engine(name="accelerate", accelerate={"distributed_type": "FSDP", "fsdp_config": settings})


def attempt(last_step: int = 30, failure: Failure | None = CRASH, **changed: Any) -> Attempt:
    values = {"run_id": "r", "status": "failed", "started_s": 0.0, "last_step": last_step, "first_failure": failure}
    return Attempt(**{**values, **changed})


def failure(**changed: Any) -> Failure:
    return msgspec.structs.replace(CRASH, **changed)


@pytest.mark.parametrize(
    ("attempts", "reason"),
    [
        ([attempt()], None),
        ([attempt(status="lost", failure=failure(kind="node_lost"))], None),
        ([attempt(0, failure(kind="node_lost"))], None),
        ([attempt(failure=failure(kind="hang"))], None),
        ([attempt(), attempt(40)], None),
        # The same step, another cause; and the other way round.
        ([attempt(), attempt(failure=failure(kind="killed"))], None),
        ([attempt(), attempt(31)], None),
        ([attempt(), attempt()], "it failed twice at step 30 with the same cause"),
        ([attempt(30), attempt(40), attempt(50)], "the limit of 2 restarts is reached"),
        ([attempt(0)], "it failed before its first step"),
        ([attempt(), attempt(20, first_step=20)], "it failed before its first step"),
        ([attempt(failure=failure(kind="out_of_memory"))], "it ran out of memory and would do so again"),
        ([attempt(failure=failure(kind="out_of_gpu_memory"))], "it ran out of memory and would do so again"),
        ([attempt(failure=failure(exit_code=78))], "exit code 78 means that a restart would not help"),
        ([attempt(status="stopped", failure=None)], "it ended with status stopped"),
        ([attempt(status="succeeded", failure=None)], "it ended with status succeeded"),
    ],
)
def test_which_failures_are_restarted(attempts: list[Attempt], reason: str | None) -> None:
    said = why_not_restarted(attempts, OPTIONS)
    assert said is None if reason is None else said is not None and said.startswith(reason)


def test_out_of_memory_is_restarted_when_that_is_asked_for() -> None:
    asked = RestartOptions(restarts=2, after_oom=True)
    assert why_not_restarted([attempt(failure=failure(kind="out_of_memory"))], asked) is None


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({}, None),
        ({"stage": "dpo", "finetuning_type": "full"}, None),
        ({"stage": "rm"}, "does not resume stage rm"),
        ({"stage": "rm", "finetuning_type": "full"}, "does not resume stage rm"),
        ({"stage": "kto"}, None),
        ({"stage": "ppo"}, "does not resume stage ppo"),
        ({"deepspeed": "{zero_optimization: {stage: 2}}"}, "its DeepSpeed settings are not in a JSON file"),
        ({"fsdp": "full_shard"}, "which checkpoint of FSDP 1"),
        ({"fsdp": "full_shard", "fsdp_config": "{version: 2}"}, None),
        ({"fsdp": "full_shard", "fsdp_config": "{fsdp_version: 2}"}, None),
        ({"fsdp": "hybrid_shard", "fsdp_config": "{version: 2}"}, "which rank saves which shard"),
        ({"fsdp": "full_shard", "fsdp_config": "fsdp.json"}, "its fsdp_config names a file"),
        ({"save_only_model": "true"}, "optimizer"),
        ({"save_strategy": "'no'"}, "saves no checkpoint"),
        ({"save_strategy": "no"}, "saves no checkpoint"),
        ({"output_dir": "null"}, "output_dir"),
    ],
)
def test_which_jobs_can_go_on(config: dict[str, str], reason: str | None) -> None:
    said = why_no_resume(job(**config))
    assert said is None if reason is None else said is not None and reason in said


def sharded(settings: dict[str, Any], **config: Any) -> TrainingJob:
    """A job with this DeepSpeed JSON."""
    return msgspec.structs.replace(job(deepspeed="ds.json", **config), deepspeed_text=json.dumps(settings))


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **settings}}


@pytest.mark.parametrize(
    ("settings", "layout"),
    [
        (zero(1), Layout(library="DeepSpeed", stage=1)),
        (zero(2), Layout(library="DeepSpeed", stage=2)),
        (zero(3, offload_optimizer={"device": "cpu"}), Layout(library="DeepSpeed", stage=3)),
        (
            {**zero(2), "scheduler": {"type": "WarmupLR"}},
            Layout(library="DeepSpeed", stage=2, saves_scheduler=False),
        ),
        ({}, "its DeepSpeed JSON has no ZeRO stage: it is unknown which checkpoint is complete"),
        (
            zero(3, offload_optimizer={"device": "nvme"}),
            "its optimizer state is on NVMe, whose files are not checked",
        ),
        (zero(3, mics_shard_size=2), "mics_shard_size: 2: it is unknown which rank saves which shard"),
    ],
)
def test_what_checkpoints_under_deepspeed_consist_of(settings: dict[str, Any], layout: Layout | str) -> None:
    assert layout_of(sharded(settings)) == layout
    assert why_no_resume(sharded(settings)) == (layout if isinstance(layout, str) else None)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"checkpoint": {"use_node_local_storage": True}}),
        (
            {"checkpoint": {"tag_validation": "Warn"}},
            {"checkpoint": {"tag_validation": "Warn", "use_node_local_storage": True}},
        ),
        # The user knows better.
        ({"checkpoint": {"use_node_local_storage": False}}, {"checkpoint": {"use_node_local_storage": False}}),
    ],
)
def test_deepspeed_saves_on_each_node_where_the_disk_is_local(before: dict[str, Any], after: dict[str, Any]) -> None:
    asked = sharded({**zero(2), **before})
    changed = resume_job(asked, Start(nodes=2))
    assert isinstance(changed, TrainingJob)
    assert json.loads(changed.deepspeed_text or "") == {**zero(2), **after}
    assert changed.config["save_on_each_node"] is True
    # Nodes that share the directory would write the same files.
    assert resume_job(asked, Start(nodes=2, shared=True)) == resume_job(asked, Start(nodes=1)) == asked


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        (accelerate_fsdp(), "which checkpoint of FSDP 1"),
        (accelerate_fsdp(fsdp_version=2), None),
        (accelerate_fsdp(fsdp_version=2, fsdp_state_dict_type="FULL_STATE_DICT"), "FULL_STATE_DICT"),
        (accelerate_fsdp(fsdp_version=2, fsdp_sharding_strategy="HYBRID_SHARD"), "which rank saves which shard"),
        (Engine(name="deepspeed"), "DeepSpeed"),
        (Engine(name="accelerate", accelerate={"distributed_type": "MULTI_CPU"}), None),
    ],
)
def test_an_engine_may_shard_what_the_yaml_does_not(engine: Engine, reason: str | None) -> None:
    said = why_no_resume(job(), engine)
    assert said is None if reason is None else said is not None and reason in said


@pytest.mark.parametrize(
    ("accumulation", "before", "now", "kept"),
    [(1, 2, 1, 2), (1, 4, 2, 2), (3, 2, 1, 6), (2, 3, 2, 3), (1, 3, 2, None), (1, 2, 2, 1), (3, 4, 3, 4)],
)
def test_which_accumulation_keeps_the_global_batch(accumulation: int, before: int, now: int, kept: int | None) -> None:
    asked = job(gradient_accumulation_steps=accumulation)
    assert kept_accumulation(asked, before, now) == kept
    changed = resume_job(asked, Start(nodes=now, workers=now, first_workers=before, shared=True))
    assert isinstance(changed, TrainingJob)
    assert changed.config["gradient_accumulation_steps"] == (kept or accumulation)
    if kept is not None:
        assert global_batch(changed, now) == global_batch(asked, before)


SCRIPT = ScriptJob(argv=("train.py",))


@pytest.mark.parametrize(
    ("options", "nodes", "what", "launch", "reason"),
    [
        ({}, 2, job(), {}, None),
        ({"min_nodes": 1}, 2, job(), {}, None),
        ({"min_nodes": 2}, 2, job(), {}, None),
        ({"min_nodes": 3}, 2, job(), {}, "there are only 2 nodes"),
        ({"min_nodes": 2}, 3, job(), {}, "fewer nodes cannot keep the global batch of 3 nodes"),
        ({"min_nodes": 2}, 3, job(gradient_accumulation_steps=2), {}, None),
        ({"min_nodes": 2, "scale_batch": True}, 3, job(), {}, None),
        ({"min_nodes": 1}, 3, SCRIPT, {}, None),
        # Without the node with one worker, or without that with two.
        ({"min_nodes": 1}, (2, 1), job(), {}, None),
        ({"min_nodes": 1}, (3, 2), job(gradient_accumulation_steps=3), {}, None),
        ({"min_nodes": 1}, (3, 2), job(gradient_accumulation_steps=4), {}, None),
        (
            {"min_nodes": 1},
            (3, 2),
            job(),
            {},
            "fewer nodes cannot keep the global batch of 2 nodes",
        ),
        ({"min_nodes": 2}, (3, 2, 1), job(), {}, None),
        (
            {"min_nodes": 2},
            (5, 3, 1),
            job(),
            {},
            "fewer nodes cannot keep the global batch of 3 nodes",
        ),
        ({"min_nodes": 2}, 3, SCRIPT, {}, "fewer nodes cannot keep"),
        (
            {"min_nodes": 1},
            2,
            SCRIPT,
            {"engine": Engine(name="deepspeed")},
            "a DeepSpeed checkpoint can only be loaded",
        ),
        ({"min_nodes": 1}, 2, job(deepspeed="z2.json"), {}, "a DeepSpeed checkpoint can only be loaded"),
        ({"min_nodes": 1}, 2, job(fsdp="full_shard", fsdp_config="{version: 2}"), {}, None),
        (
            {"min_nodes": 1},
            2,
            job(),
            {"levers": Levers(averaging=Averaging(every=4))},
            "with --average, each node trains on its own batches",
        ),
    ],
)
def test_which_runs_can_go_on_without_a_node(
    options: dict[str, Any], nodes: int | tuple[int, ...], what: Job, launch: dict[str, Any], reason: str | None
) -> None:
    workers = (2,) * nodes if isinstance(nodes, int) else nodes
    said = why_no_fewer_nodes(what, LaunchOptions(**launch), workers, RestartOptions(restarts=1, **options))
    assert said is None if reason is None else said is not None and said.startswith(reason)


@pytest.mark.parametrize(
    ("what", "start", "words"),
    [
        (job(), Start(nodes=2, workers=4, first_workers=4), None),
        (
            job(per_device_train_batch_size=4, gradient_accumulation_steps=3),
            Start(nodes=1, workers=2, first_workers=4, shared=True),
            "global batch 48 as before: gradient_accumulation_steps 6 instead of 3",
        ),
        (
            job(num_train_epochs=3, learning_rate=0.001),
            Start(
                nodes=2,
                workers=4,
                first_workers=6,
                choice=CheckpointChoice(name="checkpoint-20", step=20, max_steps=90),
            ),
            (
                "global batch 32 instead of 48: learning_rate stays at 0.001 and the schedule keeps 90 steps; a "
                "step has 2/3 of the samples"
            ),
        ),
        (
            job(),
            Start(nodes=2, workers=4, first_workers=6),
            (
                "global batch 32 instead of 48: learning_rate stays at 5e-05 and the schedule stays as in the YAML; a "
                "step has 2/3 of the samples"
            ),
        ),
        (
            job(gradient_accumulation_steps=2),
            Start(nodes=1, workers=2, first_workers=3),
            "global batch 48 as before: gradient_accumulation_steps 3 instead of 2",
        ),
        (
            job(),
            Start(nodes=1, workers=2, first_workers=3),
            (
                "global batch 16 instead of 24: learning_rate stays at 5e-05 and the schedule stays as in the YAML; a "
                "step has 2/3 of the samples"
            ),
        ),
        (
            SCRIPT,
            Start(nodes=1, workers=2, first_workers=4),
            "MULTINODE_ACCUMULATION=2: the global batch is then as before",
        ),
        (
            SCRIPT,
            Start(nodes=2, workers=4, first_workers=6),
            "MULTINODE_ACCUMULATION=1: the global batch is then 2/3 of the original",
        ),
    ],
)
def test_what_is_said_of_the_batch_on_fewer_nodes(what: Job, start: Start, words: str | None) -> None:
    assert batch_words(what, resume_job(what, start), start) == words


def test_a_smaller_batch_goes_on_with_the_checkpoints_schedule() -> None:
    chosen = CheckpointChoice(name="checkpoint-20", step=20, max_steps=90)
    changed = resume_job(
        job(num_train_epochs=3), Start(nodes=2, workers=4, first_workers=6, choice=chosen, shared=True)
    )
    assert isinstance(changed, TrainingJob)
    # As epochs the rest would be more steps, and the learning rate would jump back.
    assert changed.config["max_steps"] == 90
    assert "max_steps" not in resume_job(job(), Start(nodes=1, workers=2, first_workers=4, choice=chosen)).config  # type: ignore[union-attr]


def test_a_script_sees_to_its_own_checkpoints() -> None:
    script = ScriptJob(argv=("train.py",))
    assert why_no_resume(script) is None
    assert resume_job(script, Start(nodes=2, is_first=False)) is script


CHOSEN = CheckpointChoice(name="checkpoint-20", step=20)


def script(*words: str, settings: dict[str, Any] | None = None) -> ScriptJob:
    text = None if settings is None else json.dumps(settings)
    return ScriptJob(argv=("train.py", *words), deepspeed_text=text)


ON_EACH_NODE = {"MULTINODE_SAVE_ON_EACH_NODE": "1"}


@pytest.mark.parametrize(
    ("job", "start", "variables"),
    [
        (SCRIPT, Start(nodes=2, choice=CHOSEN), {}),
        (script("--output_dir", "out/"), Start(nodes=1), {}),
        (script("--output_dir", "out/"), Start(nodes=2), ON_EACH_NODE),
        (script("--output_dir=out"), Start(nodes=2, shared=True), {}),
        (script("--output-dir", "out", "--save_on_each_node", "false"), Start(nodes=2), {}),
        (
            script("--lr", "1", "--output_dir", "out/"),
            Start(nodes=2, choice=CHOSEN),
            {**ON_EACH_NODE, "MULTINODE_CHECKPOINT": "out/checkpoint-20"},
        ),
        (job(), Start(nodes=2, choice=CHOSEN), {}),
    ],
)
def test_what_a_script_with_the_trainer_is_told(job: Job, start: Start, variables: dict[str, str]) -> None:
    assert script_variables(job, start) == variables


@pytest.mark.parametrize(
    ("job", "engine", "layout"),
    [
        (script("--output_dir", "out"), None, WHOLE),
        (script("--deepspeed", "z.json", settings=zero(3)), None, Layout(library="DeepSpeed", stage=3)),
        (script(settings=zero(2)), Engine(name="deepspeed"), Layout(library="DeepSpeed", stage=2)),
        # It is on the nodes.
        (script("--deepspeed", "z.json"), None, "its DeepSpeed settings are not in a JSON file on this machine"),
        (script(), Engine(name="deepspeed"), "it is unknown which DeepSpeed checkpoint"),
        (script("--fsdp", "full_shard"), None, "it is unknown which checkpoint of FSDP 1"),
        (script("--fsdp", "full_shard", "--fsdp_config", '{"version": 2}'), None, Layout(library="FSDP")),
        (script("--fsdp=full_shard", "--fsdp_config=fsdp.json"), None, "its fsdp_config names a file"),
        (script(), accelerate_fsdp(fsdp_version=2), Layout(library="FSDP")),
    ],
)
def test_what_checkpoints_of_a_script_consist_of(job: Job, engine: Engine | None, layout: Layout | str) -> None:
    found = layout_of(job, engine)
    assert found == layout if isinstance(layout, Layout) else str(found).startswith(layout)


RESUMED = {"resume_from_checkpoint": "out/checkpoint-20", "overwrite_output_dir": False}
ANEW = {"resume_from_checkpoint": None, "overwrite_output_dir": True}


@pytest.mark.parametrize(
    ("config", "start", "changed"),
    [
        ({}, Start(nodes=1), {}),
        ({}, Start(nodes=2), {"save_on_each_node": True}),
        ({"save_on_each_node": "false"}, Start(nodes=2), {}),
        ({}, Start(nodes=2, shared=True), {}),
        ({}, Start(nodes=1, choice=CHOSEN, has_any=True), RESUMED),
        ({}, Start(nodes=1, choice=CHOSEN, has_any=True, is_first=False), RESUMED),
        # Checkpoints of which none is complete: LLaMA-Factory would go on from one of them by its name.
        ({}, Start(nodes=1, has_any=True), ANEW),
        ({}, Start(nodes=1, is_first=False), ANEW),
        ({"overwrite_output_dir": "true"}, Start(nodes=1, choice=CHOSEN, has_any=True), {}),
        ({"overwrite_output_dir": "true"}, Start(nodes=1, choice=CHOSEN, is_first=False), RESUMED),
        ({"resume_from_checkpoint": "mine"}, Start(nodes=1, choice=CHOSEN), {}),
        ({"resume_from_checkpoint": "mine"}, Start(nodes=1, choice=CHOSEN, is_first=False), RESUMED),
    ],
)
def test_where_an_attempt_begins(config: dict[str, str], start: Start, changed: dict[str, Any]) -> None:
    before = job(**config)
    after = resume_job(before, start)
    assert isinstance(after, TrainingJob)
    assert after.config == before.config | changed


def test_a_checkpoint_from_before_the_run_counts_once_it_is_saved_anew() -> None:
    def saved(saved_ns: int) -> Saved:
        return Saved(checkpoints=(Checkpoint(name="checkpoint-20", saved_ns=saved_ns),))

    assert saved(1).without(None) == saved(1)
    assert saved(1).without(saved(1)).checkpoints == ()
    assert saved(2).without(saved(1)) == saved(2)
