"""The collective benchmark on this machine: real workers, gloo over loopback; once under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from multinode.node.bench.collective_bench import join_group, read_nccl_log

from .bench_workers import records_of, run_workers

pytestmark = [pytest.mark.torch]

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "sendrecv")
SIZES = (8, 1000, 1 << 20)
DEFAULTS = {
    "dtype": "float",
    "redop": "sum",
    "iters": 3,
    "min_iters": 2,
    "max_seconds": 5.0,
    "warmup_iters": 1,
    "check": 1,
    "backend": "gloo",
    "addr": "127.0.0.1",
}


class Workers:
    """Workers of a collective benchmark, and what they wrote down."""

    def __init__(self, archive: Path, directory: Path) -> None:
        self._archive = archive
        self._directory = directory
        (directory / "samples").mkdir()

    def run(
        self,
        count: int,
        *,
        python_path: Path | None = None,
        torchrun: bool = False,
        first_of_nodes: bool = False,
        **request: Any,
    ) -> subprocess.CompletedProcess[str]:
        wanted: dict[str, Any] = (
            {
                "messages": [{"collective": name, "size_bytes": size} for name in COLLECTIVES for size in SIZES],
            }
            | DEFAULTS
            | request
        )
        wanted["messages"] = [{"turns": 0} | message for message in wanted["messages"]]
        env = os.environ | {
            "MULTINODE_REQUEST": json.dumps(wanted),
            "MULTINODE_RUN_DIR": str(self._directory),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        if python_path is not None:
            env["PYTHONPATH"] = str(python_path)
        return run_workers(self._archive, "collectives", count, env, torchrun=torchrun, first_of_nodes=first_of_nodes)

    def records(self, kind: str, rank: int = 0) -> list[dict[str, Any]]:
        return records_of(self._directory, kind, rank)


@pytest.fixture
def workers(archive: Path, tmp_path: Path) -> Workers:
    return Workers(archive, tmp_path)


@pytest.mark.parametrize(
    ("count", "dtype", "redop"), [(3, "bfloat16", "sum"), (4, "half", "prod"), (2, "uint8", "min")]
)
def test_every_collective_gives_exact_values(workers: Workers, count: int, dtype: str, redop: str) -> None:
    done = workers.run(count, dtype=dtype, redop=redop)
    assert done.returncode == 0, done.stderr
    for rank in range(count):
        records = workers.records("collective", rank)
        assert [record["collective"] for record in records] == [name for name in COLLECTIVES for _ in SIZES]
        assert all(record["num_wrong"] == 0 for record in records)
        assert all(len(record["times_us"]) == 3 and min(record["times_us"]) > 0 for record in records)
        assert all((record["nics"] is not None) == (rank == 0) for record in records)
    assert workers.records("benchmark")[0]["backend"] == "gloo"


def test_sizes_and_counts_are_those_of_nccl_tests(workers: Workers) -> None:
    assert workers.run(3, torchrun=True).returncode == 0
    sizes = {(one["collective"], one["size_bytes"], one["count"]) for one in workers.records("collective")}
    assert ("all_reduce", 1000, 250) in sizes
    # Of shares: count is one worker's, the size is that of all; they begin at multiples of 16 bytes.
    assert ("all_gather", 960, 80) in sizes
    assert ("all_to_all", 1048560, 87380) in sizes
    # Too small for that: each worker has one element.
    assert ("reduce_scatter", 12, 1) in sizes


@pytest.mark.parametrize(("backend", "options"), [("nccl", {"device_id": "cuda:1"}), ("gloo", {})])
def test_nccl_gets_the_workers_gpu(backend: str, options: dict[str, str]) -> None:
    said: list[tuple[str, dict[str, str]]] = []
    dist = SimpleNamespace(init_process_group=lambda backend, **options: said.append((backend, options)))
    join_group(dist, backend, "cuda:1")
    assert said == [(backend, options)]


@pytest.mark.timing  # whatever else uses loopback is counted, too
def test_loopback_carried_what_workers_of_one_node_exchanged(workers: Workers) -> None:
    assert workers.run(2, messages=[{"collective": "all_reduce", "size_bytes": 4 << 20}]).returncode == 0
    (record,) = workers.records("collective")
    # Two workers send S each; headers, acknowledgements and barriers come on top.
    assert record["nics"]["lo"]["tx_bytes"] / record["nic_iters"] == pytest.approx(8 << 20, rel=0.1)


def test_values_that_are_corrupted_on_the_way_are_caught(workers: Workers, tmp_path: Path) -> None:
    (tmp_path / "torch_spoiler.py").write_text(SPOILER)
    (tmp_path / "sitecustomize.py").write_text("import torch_spoiler\n")
    messages = [{"collective": name, "size_bytes": 4096} for name in COLLECTIVES]
    done = workers.run(2, python_path=tmp_path, messages=messages, check=2)
    assert done.returncode == 0, done.stderr
    wrong = {
        name: [workers.records("collective", rank)[index]["num_wrong"] for rank in range(2)]
        for index, name in enumerate(COLLECTIVES)
    }
    # One element of rank 1, each of the two times that values are verified.
    assert wrong == {name: [0, 2] for name in COLLECTIVES}


def test_long_iterations_are_fewer_and_what_is_not_verified_is_not_called_right(workers: Workers) -> None:
    message = {"collective": "all_reduce", "size_bytes": 8 << 20}
    assert workers.run(2, messages=[message], iters=50, min_iters=4, max_seconds=0.001, check=0).returncode == 0
    for rank in range(2):
        (record,) = workers.records("collective", rank)
        assert (len(record["times_us"]), record["num_wrong"]) == (4, None)


def test_iterations_take_turns_with_raw_tcp_between_the_first_workers_of_nodes(workers: Workers) -> None:
    """Two workers that each believe to be the first of a node of its own."""
    messages = [
        {"collective": "all_reduce", "size_bytes": 4096},
        {"collective": "all_reduce", "size_bytes": 1 << 20, "turns": 3},
    ]
    assert workers.run(2, messages=messages, iters=8, first_of_nodes=True).returncode == 0
    for rank in range(2):
        (pinged,) = workers.records("ping", rank)
        assert (pinged["error"], len(pinged["times_us"])) == (None, 50)
        streams = workers.records("stream", rank)
        assert [(one["index"], len(one["results"])) for one in streams] == [(1, 1), (1, 4)] * 3
        for result in (result for one in streams for result in one["results"]):
            assert result["error"] is None
            assert result["size_bytes"] > 0
            assert 0 < result["time_s"] < 10
        first, last = workers.records("collective", rank)
        assert (len(first["times_us"]), first["nic_iters"]) == (8, 9)
        # Each turn has one iteration that is not timed.
        assert (len(last["times_us"]), last["nic_iters"]) == (8, 11)


@pytest.mark.timing  # whatever else uses loopback is counted, too
def test_raw_tcp_is_not_counted_as_the_collective_s(workers: Workers) -> None:
    messages = [{"collective": "all_reduce", "size_bytes": 4 << 20, "turns": 3}]
    assert workers.run(2, messages=messages, first_of_nodes=True).returncode == 0
    (record,) = workers.records("collective")
    assert record["nics"]["lo"]["tx_bytes"] / record["nic_iters"] == pytest.approx(8 << 20, rel=0.1)


def test_workers_of_one_node_have_nobody_to_stream_to(workers: Workers) -> None:
    messages = [{"collective": "all_reduce", "size_bytes": 1 << 20, "turns": 3}]
    assert workers.run(2, messages=messages).returncode == 0
    assert (workers.records("ping"), workers.records("stream")) == ([], [])


def test_nccl_without_a_gpu_ends_and_says_why(workers: Workers) -> None:
    done = workers.run(2, backend="nccl")
    assert done.returncode != 0
    assert "needs a GPU for each worker" in done.stderr


def test_only_the_telling_lines_of_that_process_are_given(tmp_path: Path) -> None:
    (tmp_path / "nccl.node0.42.log").write_text(
        "node0:42:42 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to =ens1f0\n"
        "node0:42:42 [0] NCCL INFO Using network Socket\n"
        "node0:42:99 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\n"
    )
    (tmp_path / "nccl.node0.43.log").write_text("node0:43:43 [1] NCCL INFO Using network IB\n")
    lines = read_nccl_log(str(tmp_path), 42)
    assert [line.partition("NCCL INFO ")[2] for line in lines] == [
        "Using network Socket",
        "Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0",
    ]


def test_a_run_without_such_a_log_gives_nothing(tmp_path: Path) -> None:
    assert read_nccl_log(str(tmp_path / "[no such]"), 1) == []


def test_a_log_without_end_is_cut(tmp_path: Path) -> None:
    (tmp_path / "nccl.a.1.log").write_text("NCCL INFO Using network Socket\n" * 5000)
    assert len(read_nccl_log(str(tmp_path), 1)) == 400


# Rank 1's memory flips a bit in what it has received.
SPOILER = """
import os, sys
if os.environ.get("LOCAL_RANK") == "1":
    import torch.distributed as dist

    def spoil(name, received):
        real = getattr(dist, name)

        def call(*arguments, **options):
            result = real(*arguments, **options)
            received(arguments, result)
            return result

        setattr(dist, name, call)

    def flip(buffer):
        if buffer.numel() > 1 and buffer.any():
            buffer[buffer.numel() // 2] += 1

    first = lambda arguments, result: flip(arguments[0])
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "all_to_all_single"):
        spoil(name, first)

    def received_last(arguments, result):
        while result:
            result.pop().wait()
        flip(arguments[0][1].tensor)

    spoil("batch_isend_irecv", received_last)
"""
