"""The device benchmark on this machine: a real worker under torchrun, on its processor."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from multinode.agent.machine import read_processor_name

pytestmark = [pytest.mark.torch, pytest.mark.timeout(240)]

RUN_ID = "r.0"
TINY = {"kinds": ["matmul"], "dtypes": ["fp32"], "sizes": [64], "seconds": 0.05, "repeats": 1, "turns": False}


class Workers:
    """Workers of a device benchmark, and what they wrote down."""

    def __init__(self, archive: Path, home: Path) -> None:
        self._archive = archive
        self._home = home
        self.run_dir = home / ".multinode" / "runs" / RUN_ID
        (self.run_dir / "samples").mkdir(parents=True)

    def run(self, count: int = 1, *, torch_path: Path | None = None, **request: Any) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        env = os.environ | {
            "HOME": str(self._home),
            "MULTINODE_RUN_ID": RUN_ID,
            "MULTINODE_REQUEST": json.dumps(TINY | request),
            "OMP_NUM_THREADS": "1",
        }
        if torch_path is not None:
            env["PYTHONPATH"] = str(torch_path)
        launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}"]
        command = [*launcher, f"--master-port={port}", str(self._archive), "devices"]
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            try:
                output, _ = process.communicate(timeout=200)
            except subprocess.TimeoutExpired:
                # torchrun ends its workers when it is asked to; killed, it would leave them.
                process.terminate()
                raise
        assert process.returncode == 0, output

    def run_bare(self, torch_path: Path, **request: Any) -> None:
        """One worker, without torchrun: for a torch that is none."""
        done = self.begin_bare({"PYTHONPATH": str(torch_path)}, **request)
        assert done.returncode == 0, done.stderr

    def begin_bare(self, variables: dict[str, str], **request: Any) -> subprocess.CompletedProcess[str]:
        """The same, however it ends."""
        env = os.environ | {
            "HOME": str(self._home),
            "MULTINODE_RUN_ID": RUN_ID,
            "MULTINODE_REQUEST": json.dumps(TINY | request),
            "RANK": "0",
            "LOCAL_RANK": "0",
        }
        command = [sys.executable, str(self._archive), "devices"]
        return subprocess.run(command, env=env | variables, capture_output=True, text=True, timeout=60, check=False)

    def records(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        lines = (self.run_dir / "samples" / f"rank-{rank}.jsonl").read_text().splitlines()
        return [record for line in lines if (record := json.loads(line))["kind"] == kind]


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
    workers.run(2, sizes=[32, 64], repeats=2, turns=True)
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
    assert re.fullmatch(r"one product would take about [\d.]+ s: it needs --seconds \d+", speeds[-1]["error"])


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
        done = workers.begin_bare({}, turns=True)
    assert done.returncode == 1
    assert "RuntimeError: worker 3 of this node has had no result for 240 s: its device hangs" in done.stderr


def test_an_operation_without_an_option_in_an_older_torch_is_told(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SPOILER.replace("RuntimeError(", "TypeError("))
    workers.run(kinds=["matmul", "memory"], torch_path=tmp_path)
    failed, *others = workers.records("speed")
    assert failed["error"] == "there is no kernel for 'mm' here"
    assert [speed["test"] for speed in others] == ["copy", "triad"]


def test_a_type_that_the_device_does_not_have_is_told(workers: Workers) -> None:
    workers.run(dtypes=["tf32", "fp32"], kinds=["matmul", "layers"])
    records = workers.records("speed")
    lacking = [record for record in records if record["dtype"] == "tf32"]
    assert {record["test"] for record in lacking} == {"matmul", "bert", "gpt2", "t5_encoder", "t5_decoder"}
    assert {record.get("error") for record in lacking} == {"this device does not compute with tf32"}
    assert all(record["times_us"] for record in records if record["dtype"] == "fp32")


def test_what_fails_says_why_and_the_rest_is_measured(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SPOILER)
    workers.run(kinds=["matmul", "memory"], torch_path=tmp_path)
    failed, *others = workers.records("speed")
    assert failed["error"] == "there is no kernel for 'mm' here"
    assert "times_us" not in failed
    assert [speed["test"] for speed in others] == ["copy", "triad"]
    assert all("error" not in speed for speed in others)


def test_a_gpu_is_timed_by_its_own_events_in_all_types_that_it_has(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(GPU)
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
        assert speed["times_us"] == pytest.approx([2000] * len(speed["times_us"]))
        assert len(speed["times_us"]) >= 3
    # A sixteenth of what is free.
    assert {speed["size"] * 4 for speed in speeds[4:]} == {1 << 29}
    log = (tmp_path / "calls").read_text().splitlines()
    # fp32 without tensor cores, tf32 with them, half precision whatever is set.
    products = [line for line in dict.fromkeys(log) if line.startswith("mm")]
    assert products == ["mm float32 highest", "mm float32 high", "mm float16 highest", "mm bfloat16 highest"]


# A torch whose GPU is a clock: every call puts it on by two milliseconds.
GPU = """
import os
import types

__version__ = "2.8.0"
precision, clock_ms = "highest", 0.0


class Tensor:
    def __init__(self, dtype="float32"):
        self.dtype = dtype

    def to(self, dtype):
        return Tensor(dtype)

    def copy_(self, source, non_blocking=False):
        _work(f"copy {non_blocking}")


def _work(what):
    global clock_ms
    clock_ms += 2.0
    with open(os.path.join(os.path.dirname(__file__), "calls"), "a") as file:
        file.write(what + "\\n")


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.ms = clock_ms

    def elapsed_time(self, other):
        return other.ms - self.ms


def device(kind, index=None):
    return types.SimpleNamespace(type=kind, index=index)


def set_float32_matmul_precision(wanted):
    global precision
    precision = wanted


def mm(left, right, out):
    _work(f"mm {left.dtype} {precision}")


def add(first, second, alpha, out):
    _work("add")


def randn(*sizes, device):
    return Tensor()


def empty(*sizes, device=None, pin_memory=False):
    return Tensor()


zeros = empty
float32, float16, bfloat16 = "float32", "float16", "bfloat16"


def empty_like(other):
    return Tensor(other.dtype)


def get_num_threads():
    return 1


version = types.SimpleNamespace(hip=None, cuda="12.8")
cuda = types.SimpleNamespace(
    Event=Event,
    is_available=lambda: True,
    device_count=lambda: 1,
    set_device=lambda device: None,
    get_device_capability=lambda device: (8, 0),
    get_device_properties=lambda device: types.SimpleNamespace(
        name="A GPU that is not there", major=8, minor=0, total_memory=40 << 30
    ),
    mem_get_info=lambda device: (8 << 30, 40 << 30),
    synchronize=lambda device: None,
    empty_cache=lambda: None,
)
"""

# This torch has no matrix product, and says so in two lines.
SPOILER = """
import os
if os.environ.get("LOCAL_RANK") is not None:
    import torch

    def refuse(*arguments, **options):
        raise RuntimeError("there is no kernel for 'mm' here\\nsecond line")

    torch.mm = refuse
"""
