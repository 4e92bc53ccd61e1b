from __future__ import annotations

from pathlib import Path

import msgspec

from multinode.core.run.plan import LaunchPlan, NodePlan
from multinode.core.run.quoting import Command
from multinode.core.run.samples import SpeedSample
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
