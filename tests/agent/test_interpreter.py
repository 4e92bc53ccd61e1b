from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from multinode.agent.facts.interpreter import Installed, parse_packages
from multinode.agent.queries import QueryFailed

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


def answer(torch: str | None, **wheels: str) -> Installed:
    packages = {"torch": "2.13.0", **{f"nvidia-nccl-{name}": version for name, version in wheels.items()}}
    data = {"python_version": "3.11.7", "packages": packages, "torch": torch}
    return parse_packages(f"welcome\nmultinode-packages:{json.dumps(data)}\n")


@pytest.mark.parametrize(("torch", "cuda"), [(CUDA_BUILD, "12.8"), (OLD_BUILD, "12.1")])
def test_the_cuda_of_torch_and_its_nccl(torch: str, cuda: str) -> None:
    found = answer(torch, cu12="2.27.5", cu13="2.29.7")
    assert (found.cuda_version, found.nccl_version, found.missing) == (cuda, "2.27.5", {})
    assert found.packages == {"torch": "2.13.0"}


def test_a_build_for_the_cpu_uses_no_nccl_even_where_one_is_installed() -> None:
    found = answer(CPU_BUILD, cu12="2.27.5")
    assert (found.cuda_version, found.nccl_version) == (None, None)
    assert found.missing == dict.fromkeys(("cuda_version", "nccl_version"), "torch was built without CUDA")


def test_why_a_version_is_not_known() -> None:
    assert answer(None).missing["nccl_version"] == "torch is not installed"
    other = answer(CUDA_BUILD, cu11="2.20.5")
    assert (other.cuda_version, other.nccl_version) == ("12.8", None)
    assert "wheel of NCCL" in other.missing["nccl_version"]


@pytest.mark.parametrize("text", ["", "multinode-packages:", "multinode-packages:[]", 'multinode-packages:{"a": 1}'])
def test_an_answer_that_is_none_is_told(text: str) -> None:
    with pytest.raises(QueryFailed, match="something else"):
        parse_packages(text)


def test_torch_is_found_and_not_imported(node: LocalNode) -> None:
    site = node.home / "site"
    (site / "torch").mkdir(parents=True)
    (site / "torch" / "__init__.py").write_text("raise SystemExit('imported')\n")
    (site / "torch" / "version.py").write_text(CUDA_BUILD)
    install(site, "torch", "2.13.0")
    install(site, "nvidia_nccl_cu12", "2.27.5")
    env = {"PYTHONPATH": str(site)}
    code, records = node.call("probe", {"python": sys.executable, "packages": True}, env=env)
    assert code == 0
    assert (records[0]["cuda_version"], records[0]["nccl_version"]) == ("12.8", "2.27.5")
    assert not {"cuda_version", "nccl_version"} & set(records[0]["missing"])


def install(site: Path, name: str, version: str) -> None:
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
