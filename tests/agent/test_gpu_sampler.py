from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from .localnode import LocalNode

# NVML as one card answers it: NVIDIA's names, in NVIDIA's units (bytes, milliwatts).
PYNVML = """
import types
NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0
class NVMLError(Exception):
    pass
def nvmlInit():
    pass
def nvmlDeviceGetHandleByIndex(index):
    return index
def nvmlDeviceGetMemoryInfo(handle):
    return types.SimpleNamespace(total=24 << 30, used=3 << 30)
def nvmlDeviceGetPowerUsage(handle):
    return 301500
def nvmlDeviceGetUtilizationRates(handle):
    return types.SimpleNamespace(gpu=97, memory=40)
def nvmlDeviceGetClockInfo(handle, which):
    return 2520
def nvmlDeviceGetTemperature(handle, which):
    raise NVMLError("Not Supported")
"""


def put_pynvml(archive: Path, source: str, target: Path) -> Path:
    """A copy of the archive with another pynvml in it."""
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            if name != "pynvml.py":
                new.writestr(name, old.read(name))
        new.writestr("pynvml.py", source)
    return target


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "gpu-home"
    path.mkdir()
    return path


def test_cards_are_sampled_in_our_units(home: Path, archive: Path) -> None:
    node = LocalNode(home, put_pynvml(archive, PYNVML, home / "agent.pyz"))
    with node.talk("supervise", node.request("r", ["sleep", "1"], sample_gpus=[6, 7], sample_interval_s=0.2)) as talk:
        end = talk.read_all()[-1]
    assert (end["cause"], end["exit_code"], end["processes_left"]) == ("exited", 0, 0)
    records = [json.loads(line) for line in talk.data("samples/gpu.jsonl").splitlines()]
    assert [record["index"] for record in records[:4]] == [6, 7, 6, 7]
    wanted = {"kind": "gpu", "sm_percent": 97, "memory_used_gib": 3.0, "power_w": 301.5, "sm_clock_mhz": 2520}
    assert wanted.items() <= records[0].items()
    assert records[0]["temperature_c"] is None
    node.expect_empty()


def test_a_driver_that_never_answers_does_not_hold_up_the_run(home: Path, archive: Path) -> None:
    source = PYNVML.replace("return 301500", "import time; time.sleep(600)")
    node = LocalNode(home, put_pynvml(archive, source, home / "agent.pyz"))
    with node.talk("supervise", node.request("r", ["sleep", "0.5"], sample_gpus=[0])) as talk:
        end = talk.read_all()[-1]
    assert (end["cause"], end["exit_code"], end["processes_left"]) == ("exited", 0, 0)
    node.expect_empty()


def test_without_a_driver_one_note_says_so(home: Path, archive: Path) -> None:
    source = PYNVML.replace(
        "    pass\ndef nvmlDeviceGetHandle", "    raise NVMLError('no driver')\ndef nvmlDeviceGetHandle"
    )
    node = LocalNode(home, put_pynvml(archive, source, home / "agent.pyz"))
    with node.talk("supervise", node.request("r", ["sleep", "1"], sample_gpus=[0], sample_interval_s=0.2)) as talk:
        talk.read_all()
    records = [json.loads(line) for line in talk.data("samples/gpu.jsonl").splitlines()]
    assert [(record["kind"], record["message"]) for record in records] == [("note", "no GPU samples: no driver")]
    node.expect_empty()
