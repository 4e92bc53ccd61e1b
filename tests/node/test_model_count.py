"""A node counts the tensors of a job's model on the meta device: the same as a run records that builds it for real."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from multinode.job.job import parse_llamafactory
from multinode.model.model_count import COUNTED_KEYS, count_question
from multinode.model.tensors import counted_model
from multinode.node.facts import model_count
from multinode.node.facts.model_count import digest_config, parse_count, query_count
from multinode.node.programs import QueryFailed

from .localnode import LocalNode

DEADLINE_S = 300.0
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "pad_token_id": 0,
}
MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
VISION = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
EXPERTS = {"moe_intermediate_size": 32}
# Tiny configurations by model_type, as config.json has them.
MODELS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {
        "text_config": TEXT | MROPE,
        "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
    },
    "qwen2_5_vl": {
        "text_config": TEXT | MROPE,
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "out_hidden_size": 64,
            "intermediate_size": 64,
            "num_heads": 2,
        },
    },
    "qwen3_moe": TEXT | EXPERTS | {"num_experts": 8, "num_experts_per_tok": 2},
    "mixtral": TEXT | {"num_local_experts": 4},
    "gemma3": {"text_config": TEXT, "vision_config": VISION | {"image_size": 56, "patch_size": 14}},
    "gemma3_text": TEXT,
    "gpt_oss": TEXT | {"num_local_experts": 4},
    "glm": TEXT,
    "glm4": TEXT,
    "phi3": TEXT,
    "mistral": TEXT,
    "deepseek_v2": TEXT | EXPERTS | {"n_routed_experts": 8},
    "deepseek_v3": TEXT | EXPERTS | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1},
    "cohere": TEXT,
    "olmo2": TEXT,
    "starcoder2": TEXT,
}
LORA = {"finetuning_type": "lora", "lora_rank": 8, "lora_target": "all"}
JOBS: dict[str, dict[str, Any]] = {
    "full": {"finetuning_type": "full"},
    "lora": LORA,
    "dora": LORA | {"use_dora": True},
    "additional": LORA | {"additional_target": "embed_tokens"},
}


def question_of(arguments: dict[str, Any], kind: str) -> dict[str, Any] | None:
    """As a controller asks about a job."""
    config = {"model_name_or_path": "m", "stage": "sft", **arguments}
    return count_question(parse_llamafactory(json.dumps(config), "job.yaml"), {"model_type": kind})


def question(arguments: dict[str, Any]) -> dict[str, Any]:
    """About an architecture that the controller does not know."""
    asked = question_of(arguments, "other")
    assert asked is not None
    return asked


def write_model(folder: Path, kind: str) -> Path:
    """A directory with its config.json alone."""
    place = folder / kind
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"model_type": kind, **MODELS[kind]}))
    return place


BUILD = textwrap.dedent(
    """
    import json, os, sys
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    counting, source, folder, asked = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
    import torch
    exec(counting)
    exec(source)
    found = {}
    for kind, questions in asked.items():
        for name, arguments in questions.items():
            question = {"model": os.path.join(folder, kind), "arguments": arguments}
            model = attach(build(question), question)
            real = list(model.parameters())
            found[f"{kind} {name}"] = {
                "counted": counted(question),
                "parameters": sum(each.numel() for each in real),
                "trainable": sum(each.numel() for each in real if each.requires_grad),
            }
    print("\\nfound:" + json.dumps(found))
    """
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the meta device and a real model give, by model and job."""
    folder = tmp_path_factory.mktemp("models")
    for kind in MODELS:
        write_model(folder, kind)
    asked = {kind: {name: question(job)["arguments"] for name, job in JOBS.items()} for kind in MODELS}
    argv = [sys.executable, "-c", BUILD, model_count.COUNTING, question({})["source"], str(folder), json.dumps(asked)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("found:"))
    result: dict[str, Any] = json.loads(line.removeprefix("found:"))
    return result


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("kind", MODELS)
def test_every_architecture_is_counted_as_a_run_records_it(found: dict[str, Any], kind: str, job: str) -> None:
    told = found[f"{kind} {job}"]
    counted = counted_model({"counted": told["counted"]})
    assert counted is not None
    tensors = counted.tensors()
    assert tensors.parameters + tensors.adapters == told["parameters"]
    assert tensors.trainable == told["trainable"]
    assert sum(layer.all for layer in tensors.layers) + tensors.outside.all == told["parameters"]
    assert len(tensors.layers) >= TEXT["num_hidden_layers"]


def test_a_node_answers_for_a_directory_with_a_config_alone(tmp_path: Path) -> None:
    asked, model = question({"finetuning_type": "full"}), write_model(tmp_path, "qwen2_vl")
    answer = parse_count(query_count(sys.executable, str(model), asked, DEADLINE_S).answer())
    counted = counted_model({"counted": answer})
    assert counted is not None
    assert counted.hidden == TEXT["hidden_size"]
    # LLaMA-Factory freezes the vision tower; an adapter of rank 8 would train less.
    assert counted.tensors().trainable < counted.tensors().parameters
    assert counted.small is not None
    assert counted.small < counted.tensors().trainable


def test_a_model_that_cannot_be_built_says_why(tmp_path: Path) -> None:
    folder = tmp_path / "unheard"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(QueryFailed, match="unheard_of"):
        parse_count(query_count(sys.executable, str(folder), question({}), DEADLINE_S).answer())


def test_code_of_the_models_directory_does_not_run_unless_the_job_trusts_it(tmp_path: Path) -> None:
    folder, marker = tmp_path / "theirs", tmp_path / "ran"
    folder.mkdir()
    (folder / "theirs.py").write_text(
        f"open({str(marker)!r}, 'w').close()\n"
        "from transformers import PretrainedConfig\n"
        "class Theirs(PretrainedConfig):\n    model_type = 'theirs'\n"
    )
    (folder / "config.json").write_text(
        json.dumps({"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Theirs"}})
    )
    with pytest.raises(QueryFailed):
        parse_count(query_count(sys.executable, str(folder), question({}), DEADLINE_S).answer())
    assert not marker.exists()


def test_known_architectures_are_left_to_the_controller_unless_the_job_changes_what_they_train() -> None:
    assert question_of(LORA, "qwen2") is None
    assert question_of(LORA, "gpt_oss") is not None
    assert question_of({"finetuning_type": "freeze"}, "qwen2") is not None
    for key in COUNTED_KEYS:
        assert question_of(LORA | {key: 4 if key == "quantization_bit" else True}, "qwen2") is not None


def test_no_path_or_token_of_the_job_is_in_the_question() -> None:
    asked = question({"hf_hub_token": "hf_secret", "output_dir": "out", "adapter_name_or_path": "there"})
    assert not {"hf_hub_token", "output_dir", "adapter_name_or_path"} & set(asked["arguments"])


def test_the_digest_is_of_the_config(tmp_path: Path) -> None:
    first, second = (digest_config(str(write_model(tmp_path, kind))) for kind in ("glm", "phi3"))
    assert None not in {first, second}
    assert first != second
    assert digest_config(str(tmp_path)) is None


def test_the_count_is_made_once_for_each_config_and_job(node: LocalNode) -> None:
    model, asked = write_model(node.home, "glm"), question(LORA)

    def counted(question_: dict[str, Any] | None) -> Any:
        request = {"python": sys.executable, "packages": False, "model": str(model), "count": question_}
        code, (facts,) = node.call("probe", request, deadline_s=DEADLINE_S)
        assert code == 0
        return facts["model"]["values"].get("counted")

    assert counted(None) is None
    first = counted(asked)
    kept = node.home / ".multinode" / "model-counts.json"
    answers = json.loads(kept.read_text())
    assert [*answers.values()] == [first]
    # What is kept is what is told.
    kept.write_text(json.dumps({key: {**value, "hidden": 65} for key, value in answers.items()}))
    assert counted(asked)["hidden"] == 65
    assert counted(question(LORA | {"lora_rank": 4}))["hidden"] == TEXT["hidden_size"]
    (model / "config.json").write_text(json.dumps({"model_type": "glm", **TEXT, "hidden_size": 128}))
    assert counted(asked)["hidden"] == 128
