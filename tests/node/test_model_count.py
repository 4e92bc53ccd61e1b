"""A node counts the tensors of a job's model on the meta device: the same as a run records that builds it for real."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from multinode.job.job import parse_training
from multinode.model.model_count import COUNTED_KEYS, count_question
from multinode.model.tensors import counted_model
from multinode.node.facts import model_count
from multinode.node.facts.model_count import digest_config, parse_count, query_count
from multinode.node.programs import QueryFailed
from multinode.records.samples import TokenWork
from multinode.stats.unknown import Unknown
from tests.golden import raised

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
    "lora of rank 4": LORA | {"lora_rank": 4},
    "dora": LORA | {"use_dora": True},
    "additional": LORA | {"additional_target": "embed_tokens"},
}


def question_of(arguments: dict[str, Any], kind: str) -> dict[str, Any] | None:
    """As a controller asks about a job."""
    config = {"model_name_or_path": "m", "stage": "sft", **arguments}
    return count_question(parse_training(json.dumps(config), "job.yaml"), {"model_type": kind})


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
    counting, work, source, folder, asked = *sys.argv[1:5], json.loads(sys.argv[5])
    import torch
    exec(work)
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
                "work": token_work(weights_of(model), [model]),
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
    sources = [model_count.COUNTING, *(question({})[name] for name in ("work", "source"))]
    argv = [sys.executable, "-c", BUILD, *sources, str(folder), json.dumps(asked)]
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
    # As the workers record it.
    assert counted.work == msgspec.convert(told["work"], TokenWork | Unknown)


@pytest.mark.parametrize("kind", MODELS)
def test_a_count_tells_those_of_the_other_methods(found: dict[str, Any], kind: str) -> None:
    full, lora, small = (
        counted_model({"counted": found[f"{kind} {job}"]["counted"]}) for job in ("full", "lora", "lora of rank 4")
    )
    assert full is not None
    assert lora is not None
    assert small is not None
    assert lora.with_method(4, 8) == small
    assert replace(full, adapted=lora).with_method(4, None) == small
    assert full.with_method(4, None) is None
    # What else a framework freezes only a count of the whole training shows.
    is_whole_known = isinstance(lora.work, TokenWork) and not lora.work.left_out
    assert lora.with_method(None, 8) == (full if is_whole_known else None)
    assert full.with_method(None, None) == full


# Per token: of three layers attention's four matrices, the router and the experts that it is sent to; the output layer.
ATTENTION, HEAD = 64 * 64 * 2 + 64 * 32 * 2, 64 * 1000


@pytest.mark.parametrize(
    ("kind", "active", "words"),
    [
        ("qwen3_moe", 3 * (ATTENTION + 64 * 8 + 2 * 3 * 64 * 32) + HEAD, "2 of 8"),
        ("mixtral", 3 * (ATTENTION + 64 * 4 + 2 * 3 * 64 * 128) + HEAD, "2 of 4"),
    ],
)
def test_of_a_mixture_of_experts_a_node_counts_what_is_active(
    kind: str, active: int, words: str, tmp_path: Path
) -> None:
    asked, model = question({"finetuning_type": "full"}), write_model(tmp_path, kind)
    answer = parse_count(query_count(sys.executable, str(model), asked, DEADLINE_S).answer())
    counted = counted_model({"counted": answer})
    assert counted is not None
    assert isinstance(counted.work, TokenWork)
    assert (counted.work.active, counted.work.experts) == (active, words)
    assert counted.work.active < counted.tensors().parameters


def test_a_node_answers_for_a_directory_with_a_config_alone(tmp_path: Path) -> None:
    asked, model = question({"finetuning_type": "full"}), write_model(tmp_path, "qwen2_vl")
    answer = parse_count(query_count(sys.executable, str(model), asked, DEADLINE_S).answer())
    counted = counted_model({"counted": answer})
    assert counted is not None
    assert counted.hidden == TEXT["hidden_size"]
    # LLaMA-Factory freezes the vision tower; an adapter of rank 8 would train less.
    assert counted.tensors().trainable < counted.tensors().parameters
    assert counted.adapted is not None
    assert counted.adapted.has_adapter
    assert counted.adapted.tensors().trainable < counted.tensors().trainable


def test_a_model_that_cannot_be_built_says_why(tmp_path: Path) -> None:
    folder = tmp_path / "unheard"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "unheard_of"}')
    answer = query_count(sys.executable, str(folder), question({}), DEADLINE_S).answer()
    assert "unheard_of" in str(raised(QueryFailed, parse_count, answer))


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
