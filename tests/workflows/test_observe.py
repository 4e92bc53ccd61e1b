from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from multinode.core.run.plan import LaunchPlan, NodePlan
from multinode.core.run.quoting import Command
from multinode.core.run.samples import SpeedSample, StepSample, TrafficSample
from multinode.store.run_directory import RunDirectory
from multinode.workflows.run.observe import observe_run

# Of one worker; two of them are more than is kept of one.
RECORDS = 26_000


def test_records_of_the_first_worker_take_no_place_of_anothers(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "r")
    for rank, index in ((0, 1), (1, 0)):
        sample = SpeedSample(rank=rank, index=index, test="copy", dtype="bf16")
        directory.append_samples(0, f"rank-{rank}.jsonl", (msgspec.json.encode(sample) + b"\n") * RECORDS)
    node = NodePlan(
        node="a", node_rank=0, ranks=(0, 1), addr=None, ifname=None, run_dir="/r", command=Command(argv=("true",))
    )
    plan = LaunchPlan(
        run_id="r", engine="torchrun", job="j", master_addr="::1", master_port=1, nproc_per_node=2, world_size=2,
        nodes=(node,),
    )  # fmt: skip
    samples = [sample for one in observe_run(directory, plan).nodes for sample in one.samples]
    assert [sum(getattr(sample, "rank", None) == rank for sample in samples) for rank in (0, 1)] == [RECORDS] * 2


def step_lines(steps: range, rank: int) -> bytes:
    samples = (StepSample(rank=rank, step=step, time_s=step / 10, mono_ns=step) for step in steps)
    return b"".join(msgspec.json.encode(sample) + b"\n" for sample in samples)


def test_of_many_workers_fewer_steps_are_held_and_the_rest_is_counted(tmp_path: Path) -> None:
    directory = RunDirectory.create(tmp_path, "r")
    ranks, kept = (0, 1), 40
    traffic = msgspec.json.encode(TrafficSample(rank=0, traffic=0, calls=())) + b"\n"
    for rank in ranks:
        lines = step_lines(range(1, 5001), rank)
        directory.append_samples(0, f"rank-{rank}.jsonl", traffic + lines if rank == 0 else lines)
    node = NodePlan(
        node="a", node_rank=0, ranks=ranks, addr=None, ifname=None, run_dir="/r", command=Command(argv=("true",))
    )
    plan = LaunchPlan(
        run_id="r", engine="torchrun", job="j", master_addr="::1", master_port=1, nproc_per_node=2, world_size=10_000,
        nodes=(node,),
    )  # fmt: skip
    (seen,) = observe_run(directory, plan).nodes
    for rank in ranks:
        steps = [one.step for one in seen.samples if isinstance(one, StepSample) and one.rank == rank]
        assert steps == list(range(5001 - kept, 5001))
    assert seen.left_out == 5000 - kept
    # What is rare is kept from the beginning.
    assert [one.traffic for one in seen.samples if isinstance(one, TrafficSample)] == [0]


@pytest.mark.parametrize("count", [1, 2, 99, 9_999, 10_000, 10_001, 20_000])
def test_the_last_steps_of_a_file_are_found_from_its_end(tmp_path: Path, count: int) -> None:
    """Over the ends of the blocks in which it is read."""
    directory = RunDirectory.create(tmp_path, "r")
    data = step_lines(range(1, 30_001), 0)
    directory.append_samples(0, "rank-0.jsonl", data)
    lines = list(directory.sample_lines(0, count))
    whole = data.splitlines(keepends=True)
    held = [line for line in lines if line]
    assert len(lines) == len(whole)
    assert held == whole[-len(held) :]
    assert len(held) in {count, count + 1}
