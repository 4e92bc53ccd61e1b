from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from multinode.node.facts.software import (
    Installed,
    find_interpreter,
    parse_absent,
    parse_packages,
    parse_unknown,
    query_packages,
)
from multinode.node.facts.unknown import Unknown
from multinode.node.programs import QueryFailed
from tests.golden import Golden, raised

from .localnode import LocalNode

# torch/version.py of torch 2.13.0+cpu, and its line of wheels for CUDA: now annotated, up to torch 2.6 not.
CPU_BUILD = """from typing import Optional

__all__ = ['__version__', 'debug', 'cuda', 'git_version', 'hip', 'rocm', 'xpu']
__version__ = '2.13.0+cpu'
debug = False
cuda: Optional[str] = None
git_version = 'cf30153c4c131c8164ee7798e5022d810682e2cb'
hip: Optional[str] = None
"""
CUDA_BUILD = CPU_BUILD.replace("cuda: Optional[str] = None", "cuda: Optional[str] = '12.8'")
OLD_BUILD = CPU_BUILD.replace("cuda: Optional[str] = None", "cuda = '12.1'")
MARK = "multinode-answer:"
# Each ends whoever imports it.
SOURCES = {
    "llamafactory/__init__.py": "raise SystemExit",
    "llamafactory/hparams/model_args.py": """
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
""",
    "transformers/__init__.py": "raise SystemExit",
    "transformers/training_args.py": "class Arguments:\n    output_dir: str\n    per_device_train_batch_size: int\n",
    "transformers/training_args_seq2seq.py": "class Seq2Seq:\n    generation_max_length: int | None = None\n",
    "torch/__init__.py": "raise SystemExit('imported')\n",
    "torch/version.py": CUDA_BUILD,
    "torch-2.13.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n",
    # The version is that of the metadata, whatever the directory is called; once there are none, once a checkout's.
    "flash_attn-2.5.8.dist-info/METADATA": "Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.6.0\n\nVersion: 9\n",
    "peft-0.18.dist-info/RECORD": "",
    "bitsandbytes.egg-info/PKG-INFO": "Metadata-Version: 1.2\nName: bitsandbytes\nVersion: 0.45.0\n",
    "nvidia_nccl_cu12-2.27.5.dist-info/METADATA": "Metadata-Version: 2.1\nName: nvidia-nccl-cu12\nVersion: 2.27.5\n",
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """An environment with these sources."""
    for name, text in SOURCES.items():
        path = tmp_path / "site" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "site"


def answer(torch: str | None, **wheels: str) -> Installed:
    packages = {"torch": "2.13.0", **{f"nvidia-nccl-{name}": version for name, version in wheels.items()}}
    data = {"python_version": "3.11.7", "packages": packages, "torch": torch}
    return parse_packages(f"welcome\n{MARK}{json.dumps(data)}\n")


def unknown(monkeypatch: pytest.MonkeyPatch, site: Path, *keys: str) -> dict[str, str | None]:
    monkeypatch.setenv("PYTHONPATH", str(site))
    return parse_unknown(query_packages(sys.executable, None, keys).answer())


@pytest.mark.parametrize(
    ("torch", "wheels", "cuda", "nccl"),
    [
        (CUDA_BUILD, {"cu12": "2.27.5", "cu13": "2.29.7"}, "12.8", "2.27.5"),
        (OLD_BUILD, {"cu12": "2.27.5"}, "12.1", "2.27.5"),
        # A build for the CPU uses no NCCL, even where one is installed.
        (CPU_BUILD, {"cu12": "2.27.5"}, *[Unknown("torch was built without CUDA")] * 2),
        (None, {}, *[Unknown("torch is not installed")] * 2),
        (CUDA_BUILD, {"cu11": "2.20.5"}, "12.8", Unknown("torch was installed without an NCCL wheel")),
    ],
)
def test_the_cuda_of_torch_and_its_nccl_or_why_they_are_not_known(
    torch: str | None, wheels: dict[str, str], cuda: str | Unknown, nccl: str | Unknown
) -> None:
    found = answer(torch, **wheels)
    assert (found.cuda_version, found.nccl_version) == (cuda, nccl)
    assert found.packages["torch"] == "2.13.0"


def test_an_answer_that_is_none_is_told(golden: Golden) -> None:
    parsers = (parse_absent, parse_packages, parse_unknown)
    texts = ("", MARK, f"{MARK}[]", MARK + '{"a": 1}')
    errors = {
        f"{parse.__name__}, answer {number}": raised(QueryFailed, parse, text)
        for parse in parsers
        for number, text in enumerate(texts)
    }
    golden.check_errors("software_no_answer", errors)


def test_a_probe_finds_torch_and_unknown_keys_and_imports_nothing(node: LocalNode, site: Path) -> None:
    env = {"PYTHONPATH": str(site)}
    request = {"python": sys.executable, "packages": True, "arguments": ["cutof_len", "stage"]}
    code, (record,) = node.call("probe", request, env=env)
    assert (code, record["unknown_arguments"]) == (0, {"is": "entries", "values": {"cutof_len": "cutoff_len"}})
    packages = record["packages"]["values"]
    assert (packages["torch"], record["cuda_version"], record["nccl_version"]) == ("2.13.0", "12.8", "2.27.5")
    assert (packages["flash-attn"], packages["bitsandbytes"]) == ("2.6.0", "0.45.0")
    assert packages.get("peft") != "0.18"
    _, (record,) = node.call("probe", {"python": sys.executable}, env=env)
    assert record["unknown_arguments"] == Unknown("not asked for")


def test_a_module_is_found_as_python_finds_it_and_none_of_its_packages_runs(
    node: LocalNode, site: Path, tmp_path: Path
) -> None:
    for path in ("here/train.py", "pkg/__init__.py", "pkg/train.py", "pkg/__main__.py", "empty/__init__.py", "mine.py"):
        (tmp_path / "work" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "work" / path).write_text("raise SystemExit('run')")
    asked = {
        **dict.fromkeys(
            ("here.train", "pkg.train", "pkg", "mine", "json.tool", "llamafactory.hparams.model_args"), True
        ),
        **dict.fromkeys(("there.train", "pkg.other", "empty", "pkg.train.more", "mine.py", "transformers"), False),
    }
    request = {"python": sys.executable, "workdir": str(tmp_path / "work"), "modules": list(asked)}
    _, (record,) = node.call("probe", request, env={"PYTHONPATH": str(site)})
    assert record["absent_modules"] == [name for name, there in asked.items() if not there]
    _, (record,) = node.call("probe", {"python": sys.executable}, env={})
    assert record["absent_modules"] == Unknown("not asked for")


def test_keys_without_an_argument_come_with_what_may_have_been_meant(
    monkeypatch: pytest.MonkeyPatch, site: Path
) -> None:
    keys = ("model_name_or_path", "cutof_len", "output_dir", "generation_max_length", "stage", "hidden", "-c", "zzz")
    found = unknown(monkeypatch, site, *keys)
    assert found == {"cutof_len": "cutoff_len", "hidden": None, "-c": None, "zzz": None}


@pytest.mark.parametrize("name", ["ALLOW_EXTRA_ARGS", "USE_MCA"])
def test_where_other_keys_are_taken_none_is_unknown(monkeypatch: pytest.MonkeyPatch, site: Path, name: str) -> None:
    for value, found in (("0", {"zzz": None}), ("True", {})):
        monkeypatch.setenv(name, value)
        assert unknown(monkeypatch, site, "zzz") == found


def test_a_source_that_cannot_be_read_makes_no_key_unknown(
    monkeypatch: pytest.MonkeyPatch, site: Path, golden: Golden
) -> None:
    model = "llamafactory/hparams/model_args.py"
    errors = {}
    for case, path, text in (
        ("another class", model, "class ModelArguments: pass"),
        ("half a class", model, "class ModelArguments("),
        ("no file", "transformers/training_args.py", None),
    ):
        before = (site / path).read_text()
        (site / path).unlink()
        if text is not None:
            (site / path).write_text(text)
        errors[case] = raised(QueryFailed, unknown, monkeypatch, site, "zzz")
        (site / path).write_text(before)
    golden.check_errors("software_no_source", errors, site)


@pytest.mark.torch
def test_the_installed_llamafactory_knows_the_keys_of_our_own_examples() -> None:
    texts = [path.read_text() for path in Path("configs").glob("*.yaml")]
    files = [{line.partition(":")[0] for line in text.splitlines() if line[:1].isalpha()} for text in texts]
    trainings = [keys for keys in files if "stage" in keys]
    assert trainings == [keys for keys in files if "model_name_or_path" in keys]
    asked = sorted(set().union(*trainings))
    assert "cutoff_len" in asked
    found = query_packages(sys.executable, None, [*asked, "cutof_len"]).answer()
    assert parse_unknown(found) == {"cutof_len": "cutoff_len"}


def test_without_python_the_environment_of_the_directory_comes_first(tmp_path: Path) -> None:
    path = os.environ["PATH"]
    assert find_interpreter(None, path, str(tmp_path)) == find_interpreter(None, path)
    inside = tmp_path / ".venv/bin/python"
    inside.parent.mkdir(parents=True)
    inside.symlink_to(sys.executable)
    assert find_interpreter(None, path, str(tmp_path)) == str(inside)
    assert find_interpreter("python3", path, str(tmp_path)) == find_interpreter("python3", path)
