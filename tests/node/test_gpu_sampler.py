from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from multinode.records.samples import GpuSample, parse_samples

from .localnode import LocalNode

# NVML as one card answers it: NVIDIA's names, in NVIDIA's units (bytes, milliwatts, millijoules, KB/s).
PYNVML = """
import types
NVML_CLOCK_SM, NVML_TEMPERATURE_GPU, NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 1, 0, 0, 1
NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
class NVMLError(Exception):
    pass
def nvmlInit():
    pass
def nvmlDeviceGetHandleByIndex(index):
    return index
nvmlMemory_v2 = 0x02000028
def nvmlDeviceGetMemoryInfo(handle, version=None):
    # The first version counts 600 MiB that the driver keeps for itself as used.
    used = 3 << 30
    if version is None:
        return types.SimpleNamespace(total=24 << 30, used=used + (600 << 20))
    return types.SimpleNamespace(version=version, total=24 << 30, reserved=600 << 20, used=used)
def nvmlDeviceGetPowerUsage(handle):
    return 301500
def nvmlDeviceGetEnforcedPowerLimit(handle):
    return 450000
def nvmlDeviceGetUtilizationRates(handle):
    return types.SimpleNamespace(gpu=97, memory=40)
def nvmlDeviceGetClockInfo(handle, which):
    return 2520
def nvmlDeviceGetMaxClockInfo(handle, which):
    return 3105
def nvmlDeviceGetTemperature(handle, which):
    raise NVMLError("Not Supported")
def nvmlDeviceGetCurrPcieLinkGeneration(handle):
    return 3
def nvmlDeviceGetMaxPcieLinkGeneration(handle):
    return 4
def nvmlDeviceGetCurrPcieLinkWidth(handle):
    return 8
def nvmlDeviceGetMaxPcieLinkWidth(handle):
    return 16
def nvmlDeviceGetPcieThroughput(handle, counter):
    return 2500000 if counter == NVML_PCIE_UTIL_RX_BYTES else 1000000
def nvmlDeviceGetCurrentClocksThrottleReasons(handle):
    return 0x4 | 0x40
def nvmlDeviceGetTotalEnergyConsumption(handle):
    return 12345678
def nvmlDeviceGetTotalEccErrors(handle, kind, since):
    assert (kind, since) == (NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC)
    return 2
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
def with_pynvml(tmp_path: Path, archive: Path) -> Iterator[Callable[[str], LocalNode]]:
    """Makes a node whose archive has this pynvml; no process may be left on it."""
    home = tmp_path / "home"
    home.mkdir()

    def make(source: str) -> LocalNode:
        return LocalNode(home, put_pynvml(archive, source, home / "agent.pyz"))

    yield make
    LocalNode(home, archive).expect_empty()


def test_cards_are_sampled_in_our_units(with_pynvml: Callable[[str], LocalNode]) -> None:
    node = with_pynvml(PYNVML)
    talk = node.run(["sleep", "1"], gpus=[6, 7], sample_interval_s=0.2)
    end = talk.records[-1]
    assert (end["cause"], end["exit_code"], end["processes_left"]) == ("exited", 0, 0)
    records = [json.loads(line) for line in talk.data("samples/gpu.jsonl").splitlines()]
    assert [record["index"] for record in records[:4]] == [6, 7, 6, 7]
    wanted = {"kind": "gpu", "sm_percent": 97, "memory_used_gib": 3.0, "power_w": 301.5, "sm_clock_mhz": 2520}
    assert wanted.items() <= records[0].items()
    assert records[0]["temperature_c"] is None
    assert {"power_limit_w": 450, "sm_clock_max_mhz": 3105, "energy_j": 12345.678}.items() <= records[0].items()
    assert records[0]["ecc_uncorrected"] == 2
    link = {"pcie_gen": 3, "pcie_gen_max": 4, "pcie_width": 8, "pcie_width_max": 16}
    assert link.items() <= records[0].items()
    assert records[0]["throttle"] == ["sw_power_cap", "hw_thermal_slowdown"]
    samples = list(parse_samples(talk.data("samples/gpu.jsonl").splitlines()))
    assert len(samples) == len(records)
    assert all(isinstance(sample, GpuSample) for sample in samples)


def test_a_sensor_that_is_missing_leaves_the_others(with_pynvml: Callable[[str], LocalNode]) -> None:
    asked = set(re.findall(r"nvmlDeviceGet(\w+)", PYNVML)) - {"HandleByIndex", "PowerUsage"}
    lacking = "".join(f"def nvmlDeviceGet{name}(*_):\n    raise NVMLError('Not Supported')\n" for name in sorted(asked))
    node = with_pynvml(PYNVML + lacking)
    record = node.samples("gpu.jsonl", ["sleep", "0.5"], gpus=[0], sample_interval_s=0.2)[0]
    told = {name for name, value in record.items() if value not in (None, [])}
    assert told == {"schema", "kind", "time_s", "mono_ns", "index", "power_w"}


def test_what_nvml_counts_for_all_parts_of_a_gpu_is_left_out_where_mig_divides_it(
    with_pynvml: Callable[[str], LocalNode],
) -> None:
    divided = "def nvmlDeviceGetMigMode(handle):\n    return [handle == 1, True]\n"
    node = with_pynvml(PYNVML + divided)
    records = node.samples("gpu.jsonl", ["sleep", "0.5"], gpus=[0, 1], sample_interval_s=0.2)
    whole, part = parse_samples(json.dumps(record).encode() for record in records[:2])
    assert isinstance(whole, GpuSample)
    assert isinstance(part, GpuSample)
    assert (whole.mig, whole.sm_percent, whole.power_w) == (False, 97, 301.5)
    assert (part.mig, part.sm_percent, part.memory_used_gib, part.memory_total_gib) == (True, None, None, None)
    assert (part.power_w, part.energy_j, part.sm_clock_mhz) == (None, None, 2520)


OLD_DRIVER = "nvmlMemory_v2 = 0x02000028\ndef nvmlDeviceGetMemoryInfo(handle, version=None):\n"
OLD_DRIVER += "    if version: raise NVMLError('Function Not Found')\n"
OLD_MODULE = "del nvmlMemory_v2\ndef nvmlDeviceGetMemoryInfo(handle):\n"
ANSWER = "    return types.SimpleNamespace(total=24 << 30, used=5 << 30)\n"


@pytest.mark.parametrize("lacking", [OLD_DRIVER, OLD_MODULE])
def test_memory_of_a_driver_that_tells_it_in_one_way_alone(
    with_pynvml: Callable[[str], LocalNode], lacking: str
) -> None:
    node = with_pynvml(PYNVML + lacking + ANSWER)
    record = node.samples("gpu.jsonl", ["sleep", "0.5"], gpus=[0], sample_interval_s=0.2)[0]
    assert (record["memory_used_gib"], record["memory_total_gib"]) == (5.0, 24.0)


def test_what_passes_pcie_is_asked_once_a_second_as_it_takes_its_time(with_pynvml: Callable[[str], LocalNode]) -> None:
    source = PYNVML.replace("    return 2500000", "    import time; time.sleep(0.02)\n    return 2500000")
    node = with_pynvml(source)
    records = node.samples("gpu.jsonl", ["sleep", "1.6"], gpus=[0, 1], sample_interval_s=0.1)
    for index in (0, 1):
        asked = [one for one in records if one["index"] == index and one.get("pcie_rx_gb_per_s") is not None]
        assert (asked[0]["pcie_rx_gb_per_s"], asked[0]["pcie_tx_gb_per_s"]) == (2.5, 1.0)
        assert len(asked) <= 2
        spans = [later["mono_ns"] - one["mono_ns"] for one, later in pairwise(asked)]
        assert all(span >= 0.9e9 for span in spans)


def test_a_driver_that_never_answers_does_not_hold_up_the_run(with_pynvml: Callable[[str], LocalNode]) -> None:
    source = PYNVML.replace("return 301500", "import time; time.sleep(600)")
    node = with_pynvml(source)
    end = node.run(["sleep", "0.5"], gpus=[0]).records[-1]
    assert (end["cause"], end["exit_code"], end["processes_left"]) == ("exited", 0, 0)


def test_without_a_driver_one_note_says_so(with_pynvml: Callable[[str], LocalNode]) -> None:
    source = PYNVML.replace(
        "    pass\ndef nvmlDeviceGetHandle", "    raise NVMLError('no driver')\ndef nvmlDeviceGetHandle"
    )
    node = with_pynvml(source)
    records = node.samples("gpu.jsonl", ["sleep", "1"], gpus=[0], sample_interval_s=0.2)
    assert [(record["kind"], record["lacks"], record["message"]) for record in records] == [
        ("note", "gpus", "no driver")
    ]


def test_a_gpu_that_fell_off_the_bus_leaves_the_samples_of_the_others(
    with_pynvml: Callable[[str], LocalNode],
) -> None:
    refusing = "HandleByIndex(index):\n    if index == 5:\n        raise NVMLError('GPU is lost')"
    node = with_pynvml(PYNVML.replace("HandleByIndex(index):", refusing))
    records = node.samples("gpu.jsonl", ["sleep", "0.5"], gpus=[5, 6], sample_interval_s=0.2)
    assert records[0]["message"] == "GPU 5: GPU is lost"
    assert {record["index"] for record in records[1:]} == {6}
