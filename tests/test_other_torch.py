"""What workers import, under the oldest torch that is supported and under a CUDA build, neither with a GPU.

The environments are made by `scripts/setup --thorough`, where there is room for them. Their tests run in processes of
their own, which need pytest and this package's few other dependencies there.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = {"oldest": "2.4.0", "cuda": "2.11.0"}
# As scripts/setup has it.
NEEDED_GB = 12
DEADLINE_S = 800.0
# What waits for what, on torch.cuda's stand-in; the rest in real trainings over gloo. Left out are trainings of
# DeepSpeed, which these environments are without, and what is compared with torch's profiler
# (test_ddp.py), which loses events of gloo now and then in both.
TESTS = (
    "tests/worker/test_hooks.py",
    "tests/worker/test_batches.py",
    "tests/worker/test_nics.py",
    "tests/worker/test_timing.py",
    "tests/worker/test_traffic.py",
    "tests/worker/test_exposed.py",
    "tests/worker/test_compress.py",
    "tests/worker/test_power_sgd.py",
    "tests/worker/test_sync.py",
    "tests/worker/test_sequence.py",
    "tests/worker/test_robust.py",
)
# fully_shard of torch 2.4 needs a GPU, whatever its mesh is of: its order of calls is replayed. Beside the CUDA build
# stands no transformers.
CHOSEN = {"oldest": "not fully_shard", "cuda": "not the_trainer_counts"}
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default")

pytestmark = [pytest.mark.torch, pytest.mark.thorough, pytest.mark.long]


@pytest.fixture(params=ENVIRONMENTS)
def python(request: pytest.FixtureRequest) -> Path | None:
    """The environment's interpreter; None where there is no room for one."""
    name: str = request.param
    if (ROOT / ".venv" / name / "ready").exists():
        return ROOT / ".venv" / name / "bin" / "python"
    assert shutil.disk_usage(ROOT).free < NEEDED_GB << 30, "scripts/setup --thorough"
    return None


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": f"{python.parent}:{os.environ['PATH']}", "HOME": os.environ["HOME"]}
    return subprocess.run(
        [python, *arguments], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


@pytest.mark.parametrize("tests", TESTS)
def test_hooks_do_the_same_there(python: Path | None, tests: str) -> None:
    if python is None:
        return
    done = run(python, *PYTEST, tests, "-k", CHOSEN[python.parents[1].name])
    assert done.returncode == 0, done.stdout


def test_tests_on_a_gpu_are_collected_there(python: Path | None) -> None:
    if python is None:
        return
    done = run(python, *PYTEST, "--collect-only", "-m", "gpu", "tests/gpu")
    assert done.returncode == 0, done.stdout + done.stderr


def test_devices_are_read_there_as_they_are_planned(python: Path | None) -> None:
    if python is None:
        return
    script = "import torch; print(torch.__version__, torch.cuda._parse_visible_devices())"
    environ = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "CUDA_VISIBLE_DEVICES": "6,7"}
    done = subprocess.run([python, "-c", script], env=environ, capture_output=True, text=True, timeout=600, check=True)
    version, devices = done.stdout.strip().split(" ", 1)
    assert (version.partition("+")[0], devices) == (ENVIRONMENTS[python.parents[1].name], "[6, 7]")
