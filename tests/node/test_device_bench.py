"""The device benchmark on this machine: a real worker on its processor; once under torchrun."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from multinode.node.facts.software import read_processor_name
from tests.torch_stand_in import put_torch

from .bench_workers import records_of, run_workers

pytestmark = [pytest.mark.torch]

RUN_ID = "r.0"
TINY = {"kinds": ["matmul"], "dtypes": ["fp32"], "sizes": [64], "seconds": 0.05, "repeats": 1, "turns": False}


class Workers:
    """Workers of a device benchmark, and what they wrote down."""

    def __init__(self, archive: Path, home: Path) -> None:
        self._archive = archive
        self._home = home
        self.run_dir = home / ".multinode" / "runs" / RUN_ID
        (self.run_dir / "samples").mkdir(parents=True)

    def run(self, count: int = 1, *, torch_path: Path | None = None, torchrun: bool = False, **request: Any) -> None:
        env = self._environ(request) | {"OMP_NUM_THREADS": "1"}
        if torch_path is not None:
            env["PYTHONPATH"] = str(torch_path)
        done = run_workers(self._archive, "devices", count, env, torchrun=torchrun)
        assert done.returncode == 0, done.stdout + done.stderr

    def run_bare(self, torch_path: Path, gpu: dict[str, str] | None = None, **request: Any) -> None:
        """One worker with a torch that is none."""
        env = self._environ(request) | {"PYTHONPATH": str(torch_path), "RANK": "0", "LOCAL_RANK": "0"} | (gpu or {})
        command = [sys.executable, str(self._archive), "devices"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr

    def fail(self, **request: Any) -> str:
        """One worker, which must fail; what it said."""
        done = run_workers(self._archive, "devices", 1, self._environ(request))
        assert done.returncode == 1
        return done.stderr

    def _environ(self, request: dict[str, Any]) -> dict[str, str]:
        return os.environ | {
            "HOME": str(self._home),
            "MULTINODE_RUN_ID": RUN_ID,
            "MULTINODE_REQUEST": json.dumps(TINY | request),
        }

    def records(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        return records_of(self.run_dir, kind, rank)


@pytest.fixture
def workers(archive: Path, tmp_path: Path) -> Workers:
    return Workers(archive, tmp_path)


def test_all_kinds_of_tests_are_timed_and_say_what_was_computed(workers: Workers) -> None:
    workers.run(kinds=["matmul", "memory", "layers"], sizes=[32, 64])
    (device,) = workers.records("device")
    assert (device["device"], device["threads"], device["local_rank"]) == ("cpu", 1, 0)
    assert device["name"] == read_processor_name()
    assert device["cores"] == len(os.sched_getaffinity(0))
    assert device["node_cores"] >= device["cores"]
    speeds = workers.records("speed")
    assert [speed["index"] for speed in speeds] == list(range(len(speeds)))
    assert [(speed["test"], speed.get("backward")) for speed in speeds] == [
        ("matmul", None),
        ("matmul", None),
        ("copy", None),
        ("triad", None),
        *((name, way) for name in ("bert", "gpt2", "t5_encoder", "t5_decoder") for way in (False, True)),
    ]
    for speed in speeds:
        assert len(speed["times_us"]) >= 3
        assert min(speed["times_us"]) > 0
        assert speed["began_mono_ns"] < speed["ended_mono_ns"]
        # Long enough for a control group's tenths of a second to be seen; what a call takes may have changed since.
        assert speed["calls"] * max(speed["times_us"]) >= 0.05e6
    memory = [speed for speed in speeds if speed["test"] in {"copy", "triad"}]
    # Far beyond any cache.
    assert all(speed["size"] * speed["width_bytes"] >= 100 << 20 for speed in memory)
    decoder = speeds[-1]
    assert (decoder["batch"], decoder["sequence"], decoder["attentions"]) == (1, 128, 2)


def test_repeats_go_through_all_tests_again_and_workers_take_turns(workers: Workers) -> None:
    workers.run(2, torchrun=True, sizes=[32, 64], repeats=2, turns=True)
    spans = []
    for rank in range(2):
        speeds = workers.records("speed", rank)
        assert [speed["size"] for speed in speeds] == [32, 64, 32, 64]
        spans.append((speeds[0]["began_mono_ns"], speeds[-1]["ended_mono_ns"]))
    first, second = sorted(spans)
    assert first[1] <= second[0]


def test_sizes_that_nobody_asked_for_stop_where_the_time_does(workers: Workers) -> None:
    workers.run(sizes=[])
    speeds = workers.records("speed")
    assert [speed["size"] for speed in speeds] == [256, 512, 1024, 2048]
    assert "error" not in speeds[0]
    # A product of 2048 rows takes more than a fifth of 0.05 s on any one core there is.
    assert re.fullmatch(r"one product would take about [\d.]+ s; to measure it, use --seconds \d+", speeds[-1]["error"])


def test_a_size_that_would_take_minutes_is_left_out_though_it_was_asked_for(workers: Workers) -> None:
    # Hours of a core; the smaller ones that tell so are not recorded.
    workers.run(sizes=[32, 65536])
    small, large = workers.records("speed")
    assert small["times_us"]
    assert large["error"].startswith("one product would take about ")
    assert "times_us" not in large


def test_who_waits_for_a_turn_gives_up_on_a_worker_that_has_had_no_result_for_minutes(workers: Workers) -> None:
    turn = workers.run_dir / "turn"
    turn.write_text("3")
    os.utime(turn, (0, 0))
    with turn.open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        said = workers.fail(turns=True)
    assert "RuntimeError: worker 3 of this node returned no result for 240 s: its device hangs" in said


def test_a_type_that_the_device_does_not_have_is_told(workers: Workers) -> None:
    workers.run(dtypes=["tf32", "fp32"], kinds=["matmul", "layers"])
    records = workers.records("speed")
    lacking = [record for record in records if record["dtype"] == "tf32"]
    assert {record["test"] for record in lacking} == {"matmul", "bert", "gpt2", "t5_encoder", "t5_decoder"}
    assert {record.get("error") for record in lacking} == {"this device does not support tf32"}
    assert all(record["times_us"] for record in records if record["dtype"] == "fp32")


@pytest.mark.parametrize("error", ["RuntimeError", "TypeError"])
def test_what_fails_says_why_and_the_rest_is_measured(workers: Workers, tmp_path: Path, error: str) -> None:
    """As an older torch does, whose operation has not every option: that is a TypeError."""
    (tmp_path / "sitecustomize.py").write_text(SPOILER.replace("RuntimeError(", f"{error}("))
    workers.run(kinds=["matmul", "memory"], torch_path=tmp_path)
    failed, *others = workers.records("speed")
    assert failed["error"] == "there is no kernel for 'mm' here"
    assert "times_us" not in failed
    assert [speed["test"] for speed in others] == ["copy", "triad"]
    assert all("error" not in speed for speed in others)


def test_a_gpu_is_timed_by_its_own_events_in_all_types_that_it_has(workers: Workers, tmp_path: Path) -> None:
    put_torch(tmp_path)
    workers.run_bare(tmp_path, kinds=["matmul", "memory"], dtypes=[])
    (device,) = workers.records("device")
    assert (device["device"], device["name"], device["capability"]) == ("cuda", "A GPU that is not there", "sm_80")
    assert device["memory_gib"] == 40
    speeds = workers.records("speed")
    assert [(speed["test"], speed["dtype"]) for speed in speeds] == [
        *(("matmul", dtype) for dtype in ("fp32", "tf32", "fp16", "bf16")),
        *((test, "fp32") for test in ("copy", "triad", "to_device", "from_device")),
    ]
    # Each call takes two milliseconds by the GPU's clock, whatever the processor's says.
    for speed in speeds:
        assert not speed["graph"]
        assert speed["times_us"] == pytest.approx([2000] * len(speed["times_us"]))
        assert len(speed["times_us"]) >= 3
    # A sixteenth of what is free.
    assert {speed["size"] * 4 for speed in speeds[4:]} == {1 << 29}
    log = (tmp_path / "calls").read_text().splitlines()
    # fp32 without tensor cores, tf32 with them, half precision whatever is set.
    products = [line for line in dict.fromkeys(log) if line.startswith("mm")]
    assert products == ["mm float32 highest", "mm float32 high", "mm float16 highest", "mm bfloat16 highest"]


@pytest.mark.parametrize(("gpu", "time_us"), [({}, 4), ({"NO_GRAPHS": "1"}, 10)])
def test_a_product_that_is_shorter_than_its_launch_is_replayed_as_a_graph(
    workers: Workers, tmp_path: Path, gpu: dict[str, str], time_us: float
) -> None:
    """Computed in 4 us and launched in 6; where graphs cannot be had, the launch is in the figure."""
    put_torch(tmp_path)
    workers.run_bare(tmp_path, {"GPU_CALL_MS": "0.004 0.006", **gpu}, kinds=["matmul"], dtypes=["bf16"])
    (speed,) = workers.records("speed")
    assert speed["graph"] is not bool(gpu)
    assert speed["times_us"] == pytest.approx([time_us] * len(speed["times_us"]))


# This torch has no matrix product, and says so in two lines.
SPOILER = """
import os
if os.environ.get("LOCAL_RANK") is not None:
    import torch

    def refuse(*arguments, **options):
        raise RuntimeError("there is no kernel for 'mm' here\\nsecond line")

    torch.mm = refuse
"""
