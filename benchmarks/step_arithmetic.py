"""What a step of known_truth.py takes by arithmetic: passes of known length, and bytes over the rate of the link. Pure.

A step is two queues, each in the order in which the training issues its work: the GPU computes one piece at a time, and
one communicator carries one collective at a time. Two workers on two nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from multinode.units import goodput_gb_per_s


class Layers(NamedTuple):
    """Equal layers, one after another."""

    number: int = 4
    size_bytes: int = 2_000_000
    forward_ms: float = 5.0
    backward_ms: float = 10.0


class Known(NamedTuple):
    """Known parts of a step, in ms."""

    compute_ms: float
    exposed_ms: float  # the rest: what computation does not hide of the communication

    @property
    def step_ms(self) -> float:
        """All of it."""
        return self.compute_ms + self.exposed_ms


class _Step:
    """A step as it is issued; a number stands for the end of a piece, in ms."""

    def __init__(self) -> None:
        self.compute_ms = 0.0
        self._computed, self._sent = 0.0, 0.0

    def compute(self, ms: float, after: Sequence[float] = ()) -> float:
        self.compute_ms += ms
        self._computed = max([self._computed, *after]) + ms
        return self._computed

    def send(self, ms: float, after: Sequence[float] = ()) -> float:
        self._sent = max([self._sent, *after]) + ms
        return self._sent

    @property
    def known(self) -> Known:
        return Known(self.compute_ms, max(self._computed, self._sent) - self.compute_ms)


def size_at(layers: Layers, rate_gbit_per_s: float) -> Layers:
    """Layers that take as long to send at this rate as the given ones do at 1 Gbit/s."""
    return layers._replace(size_bytes=round(layers.size_bytes * rate_gbit_per_s))


def known_step(strategy: str, rate_gbit_per_s: float, layers: Layers, *, streams: bool = True) -> Known:
    """A step of a strategy of known_truth.py between two workers.

    Args:
        strategy: its name there.
        rate_gbit_per_s: line rate of each node's link, in each direction.
        layers: of the model.
        streams: whether the host issues work and goes on, as on a GPU. A host that computes by itself waits for each
            collective of FSDP and DeepSpeed.
    """
    # An all-reduce of a ring of two sends all bytes once, a gather or a scatter half of them.
    whole_ms = layers.size_bytes / 1e6 / goodput_gb_per_s(rate_gbit_per_s)
    step = _Step()
    if strategy.startswith("ddp"):
        micro_batches = 8 if strategy.endswith("-8") else 1
        for number in range(micro_batches):
            _forward(step, layers)
            for _ in range(layers.number):
                end = step.compute(layers.backward_ms)
                if number == micro_batches - 1:
                    step.send(whole_ms, [end])
    elif strategy == "own-stream":
        _forward(step, layers)
        step.send(layers.number * whole_ms, [_backward(step, layers)])
    elif strategy.startswith("zero2"):
        _zero2(step, layers, whole_ms, overlap=strategy.endswith("-overlap") and streams)
    else:
        _sharded(step, layers, whole_ms / 2, prefetch=strategy == "fsdp2" and streams)
    return step.known


def _forward(step: _Step, layers: Layers) -> None:
    for _ in range(layers.number):
        step.compute(layers.forward_ms)


def _backward(step: _Step, layers: Layers) -> float:
    return max(step.compute(layers.backward_ms) for _ in range(layers.number))


def _zero2(step: _Step, layers: Layers, whole_ms: float, *, overlap: bool) -> None:
    """A bucket of a layer is reduced when the gradient of the next one is there, then all parameters are gathered."""
    _forward(step, layers)
    sent = 0.0
    for number in range(layers.number):
        computed = step.compute(layers.backward_ms, () if overlap else [sent])
        if number:
            sent = step.send(whole_ms, [computed])
    sent = step.send(whole_ms, [computed])
    step.send(layers.number * whole_ms / 2, [sent])


def _sharded(step: _Step, layers: Layers, half_ms: float, *, prefetch: bool) -> None:
    """Each layer is gathered before each of its passes, and its gradients are scattered after the backward pass.

    With prefetching a gather is issued before the computation of the layer before it (FSDP 2 in the forward pass by a
    host that runs ahead, in the backward pass by its own order). Otherwise a layer waits for its gather, and that for
    the scatter of the layer before: overlap_comm of ZeRO-3 hides nothing then, as both pass the same link.
    """
    computed = 0.0
    for _ in range(layers.number):
        gathered = step.send(half_ms, () if prefetch else [computed])
        computed = step.compute(layers.forward_ms, [gathered])
    issued = step.send(half_ms, () if prefetch else [computed])
    for rank in range(layers.number):
        gathered, is_last = issued, rank == layers.number - 1
        if prefetch and not is_last:
            issued = step.send(half_ms)
        computed = step.compute(layers.backward_ms, [gathered])
        step.send(half_ms, [computed])
        if not prefetch and not is_last:
            issued = step.send(half_ms)
