from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multinode.job.deepspeed import (
    DeepSpeedConfig,
    DeepSpeedEdit,
    diff_deepspeed,
    edit_deepspeed,
    fit_batch,
    fixed_edits,
    parse_deepspeed,
    parse_deepspeed_edits,
)
from multinode.job.job import override_job, parse_training
from tests.golden import Golden, error_of

SAMPLE = Path(__file__).parents[2] / "configs" / "deepspeed" / "ds_z2_config.json"


def parse(**data: Any) -> DeepSpeedConfig:
    config = parse_deepspeed(json.dumps(data))
    assert config is not None
    return config


def test_our_sample_leaves_everything_to_the_trainer() -> None:
    config = parse_deepspeed(SAMPLE.read_text())
    assert config == DeepSpeedConfig(stage=2, names_train_batch_size=True)


def test_what_is_fixed_is_told_by_its_place() -> None:
    config = parse(
        train_micro_batch_size_per_gpu=4,
        gradient_accumulation_steps="auto",
        bf16={"enabled": True},
        fp16={"enabled": "auto"},
        optimizer={"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": "auto"}},
    )
    assert config.fixed == {"train_micro_batch_size_per_gpu": 4, "bf16.enabled": True, "optimizer.params.lr": 1e-4}
    assert not config.names_train_batch_size


def test_stage_three_overlaps_unless_it_is_told_not_to() -> None:
    assert parse(zero_optimization={"stage": 3}).overlap_comm
    assert not parse(zero_optimization={"stage": 3, "overlap_comm": False}).overlap_comm
    assert not parse(zero_optimization={"stage": 2}).overlap_comm
    assert parse(zero_optimization={"stage": 2, "overlap_comm": True}).overlap_comm


def test_offload_buckets_and_the_wire_format() -> None:
    zero = {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "none"},
        "reduce_bucket_size": "auto",
        "allgather_bucket_size": 5e7,
    }
    config = parse(zero_optimization=zero, communication_data_type="fp32")
    assert (config.offload_optimizer, config.offload_parameters) == ("cpu", None)
    assert (config.reduce_bucket_elements, config.allgather_bucket_elements) == (None, 50_000_000)
    assert config.communication_bytes == 4


def test_what_stage_three_keeps_whole_and_gathers_at_once() -> None:
    config = parse(
        zero_optimization={
            "stage": 3,
            "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 3e7,
        }
    )
    assert (config.prefetch_elements, config.persistent_elements, config.reuse_elements) == (None, 0, 30_000_000)
    default = parse(zero_optimization={"stage": 3, "stage3_max_reuse_distance": "auto"})
    assert (default.prefetch_elements, default.persistent_elements) == (50_000_000, 100_000)
    assert default.reuse_elements == 1_000_000_000


def test_a_bucket_is_reduced_to_all_workers_unless_it_says_otherwise() -> None:
    assert parse(zero_optimization={"stage": 2}).multi_rank_allreduce
    assert not parse(zero_optimization={"stage": 2, "use_multi_rank_bucket_allreduce": False}).multi_rank_allreduce


@pytest.mark.parametrize("text", ["", "[]", "3", "{", '{"a":' * 100_000])
def test_what_is_no_configuration_is_none(text: str) -> None:
    assert parse_deepspeed(text) is None


@pytest.mark.parametrize(
    "data",
    [
        {"zero_optimization": {"stage": "3"}},
        {"zero_optimization": {"stage": 7}},
        {"zero_optimization": [3]},
        {"bf16": "yes", "optimizer": {"params": []}, "communication_data_type": ["fp16"]},
    ],
)
def test_a_value_of_the_wrong_kind_counts_as_absent(data: dict[str, Any]) -> None:
    assert parse(**data) == DeepSpeedConfig()


Z2_JSON = SAMPLE.read_text()
# Known at the top, so that any text under them may be written.
GROUPS = ("fp16", "bf16", "optimizer", "scheduler", "comms_logger")

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5)
documents = st.dictionaries(st.sampled_from(GROUPS) | st.text(), values | st.dictionaries(st.text(), values))


def edited(text: str, *edits: str) -> str:
    return edit_deepspeed(text, parse_deepspeed_edits(edits))


def test_keys_stay_in_their_order_and_new_ones_stand_behind_them() -> None:
    after = edited(Z2_JSON, "zero_optimization.overlap_comm=true", "fp16.enabled=false")
    expected = Z2_JSON.replace('"overlap_comm": false', '"overlap_comm": true')
    assert after == expected.replace('"enabled": "auto",', '"enabled": false,')
    after = edited(Z2_JSON, "zero_optimization.sub_group_size=1e8", "steps_per_print=10")
    assert '    "round_robin_gradients": true,\n    "sub_group_size": 100000000.0\n  },\n' in after
    assert after.endswith('  },\n  "steps_per_print": 10\n}\n')
    assert edited('{"a":1}') == '{"a":1}'


@pytest.mark.parametrize(
    ("before", "edit", "after"),
    [
        ("{}", "fp16.enabled=true", {"fp16": {"enabled": True}}),
        ('{"fp16":{"enabled":true}}', "fp16.loss_scale=0", {"fp16": {"enabled": True, "loss_scale": 0}}),
        ('{"fp16": null}', "fp16.enabled=true", {"fp16": {"enabled": True}}),
        ('{"fp16": {"enabled": true}}', "fp16=null", {"fp16": None}),
        ('{"fp16": {"enabled": true}}', 'fp16={"enabled": false}', {"fp16": {"enabled": False}}),
        ('{"a": {"b": 1}, "b": 2}', "a.b=auto", {"a": {"b": "auto"}, "b": 2}),
        # Keys of 0.16, which later releases no longer have.
        ("{}", "graph_harvesting=true", {"graph_harvesting": True}),
        (
            '{"zero_optimization": {}}',
            "zero_optimization.zeropp_loco_param={reset_T: 9}",
            {"zero_optimization": {"zeropp_loco_param": {"reset_T": 9}}},
        ),
        # DeepSpeed refuses a key that stands twice; JSON counts the last.
        ('{"a": 1, "a": 2}', "a=3", {"a": 3}),
    ],
)
def test_an_edit_makes_the_groups_that_it_needs(before: str, edit: str, after: dict[str, Any]) -> None:
    assert json.loads(edited(before, edit)) == after


def test_of_two_edits_of_a_key_the_last_counts() -> None:
    assert json.loads(edited("{}", "fp16.enabled=true", "fp16.enabled=false")) == {"fp16": {"enabled": False}}


@given(
    documents,
    st.sampled_from(GROUPS),
    st.from_regex(r"\w{1,5}", fullmatch=True),
    values,
    st.sampled_from([None, 2, "\t", 0]),
)
def test_an_edit_does_what_setting_it_in_the_data_would(
    document: dict[str, Any], group: str, key: str, value: Any, indent: int | str | None
) -> None:
    if not isinstance(document.get(group), dict | None):
        document[group] = {}
    if isinstance((document.get(group) or {}).get(key), dict):
        value = {"whole": value}
    text = json.dumps(document, indent=indent, ensure_ascii=False)
    after = edit_deepspeed(text, [DeepSpeedEdit(path=(group, key), value=value)])
    document[group] = (document.get(group) or {}) | {key: value}
    assert json.loads(after) == document


def test_a_wrong_edit_is_refused(golden: Golden) -> None:
    wrong = (
        *("zero_optimization.stage", "zero_optimization..stage=2", ".stage=2", "fp16.enabled="),
        *("gradient_clipping=.nan", "gradient_clipping=!!binary aGk=", "zero_optimization.stage=4"),
        *("zero_optimization.stage=true", "zero_optimization.stage.of=2", "zero_optimization=2"),
    )
    misspelt = ("zero_optimisation.stage=2", "zero_optimization.overlap_com=true", "gradient_accumulation_step=2")
    deep = '{"fp16": ' + "[" * 100_000 + "]" * 100_000 + "}"
    golden.check_errors(
        "refused_edits",
        {edit: error_of(edited, Z2_JSON, edit) for edit in (*wrong, *misspelt)}
        | {"a JSON with 100,000 levels": error_of(edited, deep, "fp16.enabled=true")},
    )


def test_a_key_that_the_user_has_is_known() -> None:
    after = edited('{"brand_new": {"depth": 1}}', "brand_new.depth=2", "brand_new.more=3")
    assert json.loads(after) == {"brand_new": {"depth": 2, "more": 3}}


def test_the_diff_has_only_what_was_edited_and_names_the_file() -> None:
    after = edited(Z2_JSON, "zero_optimization.overlap_comm=true")
    lines = diff_deepspeed(json.dumps(json.loads(Z2_JSON)), after, "ds.json").split("\n")
    assert lines[:2] == ["--- ds.json", "+++ ds.json\tfor this run only"]
    assert [line for line in lines[2:] if line[0] in "+-"] == [
        '-    "overlap_comm": false,',
        '+    "overlap_comm": true,',
    ]
    assert diff_deepspeed(Z2_JSON, edited(Z2_JSON, "zero_optimization.stage=2"), "ds.json") == ""


def test_only_what_is_fixed_otherwise_is_edited() -> None:
    fixed: dict[str, int | float | bool] = {"gradient_accumulation_steps": 2, "train_batch_size": 8}
    config = DeepSpeedConfig(fixed=fixed)
    assert fixed_edits(config, per_device_batch=2, accumulation=2, workers=2) == ()
    assert fixed_edits(config, per_device_batch=2, accumulation=2, workers=4) == ("train_batch_size=16",)
    assert fixed_edits(config, per_device_batch=1, accumulation=4, workers=2) == ("gradient_accumulation_steps=4",)
    assert fixed_edits(DeepSpeedConfig(), per_device_batch=1, accumulation=4, workers=2) == ()


def test_a_json_is_fitted_to_the_batch_of_its_job_on_so_many_workers() -> None:
    text = '{\n  "train_batch_size": 16,\n  "train_micro_batch_size_per_gpu": "auto"\n}\n'
    yaml = "model_name_or_path: m\nstage: sft\ndeepspeed: ds.json\nper_device_train_batch_size: 2\n"
    job = msgspec.structs.replace(parse_training(yaml, "job.yaml"), deepspeed_text=text)
    assert fit_batch(job, 8) is job
    assert fit_batch(job, 2).deepspeed_text == text.replace("16", "4")
    # Two workers of two samples make sixteen in four micro-batches.
    accumulated = override_job(job, {"gradient_accumulation_steps": 4})
    assert fit_batch(accumulated, 2) is accumulated
    unreadable = override_job(job, {"per_device_train_batch_size": "many"})
    assert fit_batch(unreadable, 2) is unreadable
    without = msgspec.structs.replace(job, deepspeed_text=None)
    assert fit_batch(without, 2) is without


# In a process of its own: importing DeepSpeed changes the environment.
DEEPSPEED = """
import json, sys
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
print(json.dumps([field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()]))
print(json.dumps([int(DeepSpeedZeroConfig(**zero).stage) for zero in json.load(sys.stdin)]))
"""
STAGE_3 = {
    "stage": 3,
    "stage3_prefetch_bucket_size": 1000,
    "stage3_param_persistence_threshold": 100,
    "stage3_max_live_parameters": 1000,
    "stage3_max_reuse_distance": 1000,
    "stage3_gather_16bit_weights_on_model_save": True,
    "stage3_module_granularity_threshold": "auto",
    "sub_group_size": 1000,
}


@pytest.mark.torch
def test_deepspeed_has_the_keys_that_are_known_and_takes_those_of_stage_three_at_every_stage() -> None:
    before = json.dumps({"zero_optimization": STAGE_3})
    lowered = [json.loads(edited(before, f"zero_optimization.stage={stage}")) for stage in range(3)]
    zeros = [one["zero_optimization"] for one in lowered]
    assert zeros == [STAGE_3 | {"stage": stage} for stage in range(3)]
    command = [sys.executable, "-c", DEEPSPEED]
    answer = subprocess.run(command, input=json.dumps(zeros).encode(), capture_output=True, check=True, timeout=600)
    keys, stages = (json.loads(line) for line in answer.stdout.splitlines()[-2:])
    assert stages == [0, 1, 2]
    for key in keys:
        assert edited("{}", f"zero_optimization.{key}=0")
