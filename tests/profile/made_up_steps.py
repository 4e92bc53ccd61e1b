"""A data-parallel training that is made up: workers compute, wait for the slowest, and exchange; all in ms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from multinode.profile.observed import Observed, ObservedNode, observe
from multinode.records.samples import DdpSample, DeviceWaitSample, ModelSample, Sample, StepSample, parse_samples

Duration = Callable[[int, int], float]
"""Of a rank in a step."""


def always(time_ms: float, **of_ranks: float) -> Duration:
    """The same in every step; `r1=3.0` is rank 1's."""
    return lambda rank, _: of_ranks.get(f"r{rank}", time_ms)


class MadeUp(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers do."""

    nodes: tuple[tuple[int, ...], ...] = ((0,), (1,))  # the ranks on each, `node0` first
    steps: int = 20
    compute_ms: Duration = always(100.0)  # forward and backward, by rank and step; likewise `data_ms`, `transfer_ms`
    data_ms: Duration = always(2.0)
    transfer_ms: Duration = always(10.0)
    optimizer_ms: float = 5.0
    host_ms: float = 1.0
    hidden_ms: float = 20.0  # communication that passes beside computing
    # of what is done outside of the backward pass, in which others had the worker's core; None is not counted
    core_wait_ms: Duration | None = None
    device: str = "cpu"
    told_by: str = "ddp"  # `ddp`, `device`, `host` or `nothing`
    micro_steps: int = 1
    tokens: Callable[[int], int] = lambda _: 1000
    lost: frozenset[tuple[int, int]] = frozenset()  # (rank, step) of which no record came home

    def observed(self) -> Observed:
        """What the nodes recorded of it."""
        samples: dict[int, list[Sample]] = {rank: [self._model(rank)] for node in self.nodes for rank in node}
        for step in range(1, self.steps + 1):
            ready = {rank: self.data_ms(rank, step) + self.compute_ms(rank, step) for rank in samples}
            for rank, records in samples.items():
                if (rank, step) not in self.lost:
                    transfer = max(self.transfer_ms(other, step) for other in samples)
                    exposed = max(ready.values()) - ready[rank] + transfer if len(samples) > 1 else 0.0
                    records.extend(self._records(rank, step, ready[rank], exposed))
        nodes = [
            ObservedNode(
                name=f"node{number}",
                node_rank=number,
                ranks=ranks,
                samples=tuple(sample for rank in ranks for sample in samples[rank]),
            )
            for number, ranks in enumerate(self.nodes)
        ]
        return observe("r", nodes)

    def _model(self, rank: int) -> ModelSample:
        wrapper = "ddp" if self.told_by == "ddp" else "deepspeed"
        return ModelSample(rank=rank, wrapper=wrapper, parameters=10, trainable=10, device=self.device)

    def _records(self, rank: int, step: int, ready: float, exposed: float) -> list[Sample]:
        compute = self.compute_ms(rank, step)
        forward, backward = compute / 3 * 1000, compute * 2 / 3 * 1000
        # DDP waits for its last bucket inside of the backward pass.
        waited_inside = exposed * 1000 if self.told_by == "ddp" else 0.0
        phases = {
            "data": self.data_ms(rank, step) * 1000,
            "forward": forward,
            "backward": backward + waited_inside,
            "optimizer": self.optimizer_ms * 1000,
            "comm": exposed * 1000 if self.told_by == "host" else 0.0,
        }
        record = StepSample(
            rank=rank,
            step=step,
            time_s=0.0,
            mono_ns=0,
            step_time_us=(ready + exposed + self.optimizer_ms + self.host_ms) * 1000,
            samples=8,
            micro_steps=self.micro_steps,
            tokens=self.tokens(rank),
            phases_us=phases,
            core_wait_us=None
            if self.core_wait_ms is None
            else {"forward": self.core_wait_ms(rank, step) * 1000, "backward": 9e9, "comm": 9e9},
        )
        told: list[Sample] = []
        if self.told_by == "ddp":
            told.append(
                DdpSample(
                    rank=rank,
                    step=step,
                    iteration=step,
                    bucket_sizes_bytes=(1000,),
                    forward_us=forward / self.micro_steps,
                    backward_us=backward / self.micro_steps,
                    comm_us=(self.hidden_ms + exposed) * 1000,
                    overlap_us=self.hidden_ms * 1000,
                )
            )
        if self.told_by == "device":
            told.append(DeviceWaitSample(rank=rank, step=step, wait_us=exposed * 1000, calls=9, of_calls=9))
        return [record, *told]


def changed(observed: Observed, change: Callable[[Sample], Sample | None]) -> Observed:
    """The same with every sample as `change` makes it, as far as it can be read back; None is lost."""
    nodes: Sequence[ObservedNode] = [
        msgspec.structs.replace(
            node,
            samples=tuple(
                parse_samples(msgspec.json.encode(new) for sample in node.samples if (new := change(sample)))
            ),
        )
        for node in observed.nodes
    ]
    return observe("r", nodes)
