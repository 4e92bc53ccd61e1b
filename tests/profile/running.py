"""A run that is still running: a made-up training's records in a run directory, as they came home so far."""

from __future__ import annotations

from pathlib import Path

import msgspec

from multinode.cluster.hostfile import parse_hostfile
from multinode.decoding import decode_json
from multinode.levers.levers import NONE, Levers
from multinode.model.workload import JobSettings, Workload
from multinode.profile.observed import Observed, ObservedNode, observe
from multinode.records.run import new_run
from multinode.records.run_directory import RunDirectory
from multinode.records.samples import DdpSample, Sample, StepSample, parse_samples
from multinode.traffic.step_calls import Strategy, TrafficInputs, Work
from tests import make
from tests.profile.made_up_steps import MadeUp

__all__ = ["TOTAL_STEPS", "Recorded", "keep_running", "recorded"]

TOTAL_STEPS = 1000


# configs/tiny_sft.yaml under LLaMA-Factory 0.9.5, torch 2.13.0 and gloo, on virtual nodes of a core each.
_RECORDED = Path(__file__).with_name("recorded_steps.json")


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """A training as its workers recorded it."""

    nodes: tuple[tuple[int, ...], ...]  # the ranks on each, `node0` first
    samples: tuple[tuple[Sample, ...], ...]  # of each node

    def observed(self) -> Observed:
        """As it came home."""
        told = enumerate(zip(self.nodes, self.samples, strict=True))
        return observe(
            "r",
            [
                ObservedNode(name=f"node{rank}", node_rank=rank, ranks=ranks, samples=samples)
                for rank, (ranks, samples) in told
            ],
        )

    def first(self, steps: int) -> Recorded:
        """So far."""
        left = (
            tuple(one for one in node if not isinstance(one, StepSample | DdpSample) or one.step <= steps)
            for node in self.samples
        )
        return msgspec.structs.replace(self, samples=tuple(left))


def recorded(name: str) -> Recorded:
    """The training of that name; a worker on each node."""
    found = decode_json(_RECORDED.read_bytes(), dict[str, list[list[msgspec.Raw]]])[name]
    nodes = tuple((rank,) for rank in range(len(found)))
    return Recorded(nodes=nodes, samples=tuple(tuple(parse_samples(bytes(one) for one in node)) for node in found))


def keep_running(
    root: Path,
    made_up: MadeUp | Recorded,
    *,
    link_gbit_per_s: float | None = 0.1,
    strategy: Strategy = Strategy.DDP,
    trainable: int = 3_000_000,
    counts_samples: bool = True,
    levers: Levers = NONE,
) -> RunDirectory:
    """Its plan, workload, record and samples; no summary, as a run has none before it ends."""
    directory = RunDirectory.create(root, "r")
    workers = len(made_up.nodes[0])
    plan = make.plan(
        *(f"node{rank}" for rank in range(len(made_up.nodes))),
        workers=workers,
        link_gbit_per_s=link_gbit_per_s,
        levers=levers,
    )
    load = TrafficInputs(parameters=trainable, trainable=trainable, parameter_bytes=4, gradient_bytes=4)
    settings = JobSettings(method="script", command="train.py", strategy=str(strategy))
    hostfile = "".join(f"{node.place.node}\n" for node in plan.nodes)
    directory.write_cluster(parse_hostfile(hostfile, "hosts"), hostfile)
    directory.write("plan.json", plan)
    directory.write("workload.json", Workload(settings=settings, work=Work(strategy=strategy, load=load)))
    directory.write("run.json", new_run(plan, 1.0))

    def told(sample: Sample) -> Sample:
        if not isinstance(sample, StepSample):
            return sample
        samples = sample.samples if counts_samples else None
        return msgspec.structs.replace(sample, total_steps=TOTAL_STEPS, samples=samples)

    for node in made_up.observed().nodes:
        lines = b"".join(msgspec.json.encode(told(sample)) + b"\n" for sample in node.samples)
        directory.append_samples(node.node_rank, "ranks.jsonl", lines)
    return directory
