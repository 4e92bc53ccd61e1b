from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from multinode.agent.facts.arguments import parse_unknown, query_unknown
from multinode.agent.queries import QueryFailed

from .localnode import LocalNode

OWN = """
from dataclasses import dataclass, field
raise SystemExit("imported")

@dataclass
class ModelArguments:
    model_name_or_path: str = None
    cutoff_len: int = field(default=2048)

class Finetuning:
    stage: str = "sft"
    def method(self):
        hidden: int = 3
"""
TRAINER = "class TrainingArguments:\n    output_dir: str\n    per_device_train_batch_size: int = 8\n"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An environment whose LLaMA-Factory and transformers end whoever imports them."""
    for name, files in {
        "llamafactory": {"__init__.py": "raise SystemExit", "hparams/model_args.py": OWN},
        "transformers": {
            "__init__.py": "raise SystemExit",
            "training_args.py": TRAINER,
            "training_args_seq2seq.py": "class Seq2Seq:\n    generation_max_length: int | None = None\n",
        },
    }.items():
        for path, text in files.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_text(text)
    return tmp_path


def ask(monkeypatch: pytest.MonkeyPatch, site: Path, *keys: str) -> dict[str, str | None]:
    monkeypatch.setenv("PYTHONPATH", str(site))
    return parse_unknown(query_unknown(sys.executable, list(keys), None).answer())


def test_keys_without_an_argument_come_with_what_may_have_been_meant(
    monkeypatch: pytest.MonkeyPatch, site: Path
) -> None:
    keys = ("model_name_or_path", "cutof_len", "output_dir", "generation_max_length", "stage", "hidden", "-c", "zzz")
    unknown = ask(monkeypatch, site, *keys)
    assert unknown == {"cutof_len": "cutoff_len", "hidden": None, "-c": None, "zzz": None}


@pytest.mark.parametrize("name", ["ALLOW_EXTRA_ARGS", "USE_MCA"])
def test_where_other_keys_are_taken_none_is_unknown(monkeypatch: pytest.MonkeyPatch, site: Path, name: str) -> None:
    monkeypatch.setenv(name, "0")
    assert ask(monkeypatch, site, "zzz") == {"zzz": None}
    monkeypatch.setenv(name, "True")
    assert ask(monkeypatch, site, "zzz") == {}


@pytest.mark.parametrize(
    ("path", "text", "reason"),
    [
        ("llamafactory/hparams/model_args.py", "class ModelArguments: pass", "not found in its source"),
        ("llamafactory/hparams/model_args.py", "class ModelArguments(", "cannot be read: SyntaxError"),
        ("transformers/training_args.py", None, "cannot be read: FileNotFoundError"),
    ],
)
def test_a_source_that_cannot_be_read_makes_no_key_unknown(
    monkeypatch: pytest.MonkeyPatch, site: Path, path: str, text: str | None, reason: str
) -> None:
    if text is None:
        (site / path).unlink()
    else:
        (site / path).write_text(text)
    with pytest.raises(QueryFailed, match=reason):
        ask(monkeypatch, site, "zzz")


@pytest.mark.parametrize("text", ["", "multinode-arguments:", "multinode-arguments:[]", 'multinode-arguments:{"a": 1}'])
def test_an_answer_that_is_none_is_told(text: str) -> None:
    with pytest.raises(QueryFailed, match="something else"):
        parse_unknown(text)


def test_a_probe_tells_them_and_only_where_it_was_asked(node: LocalNode, site: Path) -> None:
    request = {"python": sys.executable, "arguments": ["cutof_len", "stage"]}
    code, (record,) = node.call("probe", request, env={"PYTHONPATH": str(site)})
    assert (code, record["unknown_arguments"]) == (0, {"cutof_len": "cutoff_len"})
    assert "unknown_arguments" not in record["missing"]
    _, (record,) = node.call("probe", {"python": sys.executable}, env={"PYTHONPATH": str(site)})
    assert (record["unknown_arguments"], record["missing"]["unknown_arguments"]) == ({}, "not asked for")
    json.dumps(record)


@pytest.mark.torch
@pytest.mark.parametrize("name", sorted(Path("configs").glob("*.yaml")), ids=lambda path: path.name)
def test_the_installed_llamafactory_knows_the_keys_of_our_own_examples(name: Path) -> None:
    keys = [line.partition(":")[0] for line in name.read_text().splitlines() if line and line[0].isalpha()]
    if "stage" not in keys:
        assert "model_name_or_path" not in keys
        return
    assert parse_unknown(query_unknown(sys.executable, [*keys, "cutof_len"], None).answer()) == {
        "cutof_len": "cutoff_len"
    }
