"""Order of calls of torch's and DeepSpeed's data-parallel trainings on a GPU, as in their sources, on the stand-in.

Each replay is a step. What it computes and sends is a length of time in ms; only the order, the streams and who waits
for whom are theirs: torch 2.13's reducer_cuda.cpp, fsdp/_runtime_utils.py and fsdp/_fully_shard, DeepSpeed 0.19.8's
stage_1_and_2.py, stage3.py and partitioned_param_coordinator.py.
"""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import optimizer

from tests.cuda_stand_in import gpu, tensor_of

Step = Callable[[], None]
# How far a host that never waits is ahead.
QUEUED_MS = 120.0


def ddp(
    backward_ms: Sequence[float], bucket_ms: Sequence[float], forward_ms: float = 10.0, *, looks: bool = True
) -> Step:
    """DDP, whose reducer is C++: a bucket is sent when its part of the backward pass is over.

    The host waits for the device where the loop looks at its loss, and else only where the driver's queue is full.
    """
    model = Ddp(backward_ms, bucket_ms, forward_ms)

    def step() -> None:
        model()
        model.backward()
        for hook in list(optimizer._global_optimizer_pre_hooks.values()):  # noqa: SLF001 - no optimizer steps
            hook(None, (), {})
        gpu.await_on_host(gpu.ends_ms[0] - (0.0 if looks else QUEUED_MS))

    return step


class Ddp:
    """As far as hooks see it: a module whose reducer has timers."""

    device_type = "cuda"
    device = None
    require_backward_grad_sync = True
    static_graph = find_unused_parameters = False
    _use_python_reducer = _delay_all_reduce_all_params = False
    _has_rebuilt_buckets = True

    def __init__(self, backward_ms: Sequence[float], bucket_ms: Sequence[float], forward_ms: float) -> None:
        self._backward_ms, self._bucket_ms, self._forward_ms = backward_ms, bucket_ms, forward_ms
        self.process_group = dist.group.WORLD
        self._iteration = 0
        self._rate = 100
        self._events: dict[str, float] = {}
        self._data = {
            "bucket_sizes": ", ".join(str(int(ms * 1000)) for ms in bucket_ms),
            "num_parameter_tensors": len(bucket_ms),
            "comm_hook": "",
            "iteration": 0,
        }

    def __call__(self) -> None:
        self._pre_forward()
        gpu.compute(self._forward_ms)

    def _pre_forward(self) -> None:
        # Logger::set_runtime_stats_and_log of the iteration before, which reads its timers and so waits for them; then
        # Reducer::prepare_for_forward.
        due = self._iteration <= 10 or self._iteration % self._rate == 0
        if self._iteration and due:
            gpu.await_on_host(max(self._events.values()))
            begun, comm, computed, sent = (self._events[name] for name in ("forward", "comm", "computed", "sent"))
            ns = 1_000_000
            self._data |= {
                "iteration": self._iteration,
                "forward_compute_time_start": int(begun * ns) + 1,
                "forward_compute_time": int(self._forward_ms * ns),
                "backward_compute_time": int((computed - self._events["backward"]) * ns),
                "backward_comm_time_start": int(comm * ns) + 2,
                "backward_comm_time": int((sent - comm) * ns),
                "backward_compute_comm_overlap_time": int(max(0.0, min(computed, sent) - comm) * ns),
            }
        self._iteration += 1
        self._events["forward"] = self._now_ms()

    def _set_ddp_runtime_logging_sample_rate(self, rate: int) -> None:
        self._rate = rate

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return self._data

    def backward(self) -> None:
        self._events["backward"] = self._now_ms()
        self._events.pop("comm", None)
        over_ms = 0.0
        for compute_ms, bucket_ms in zip(self._backward_ms, self._bucket_ms, strict=True):
            gpu.compute(compute_ms)
            self._events.setdefault("comm", self._now_ms())
            over_ms = gpu.transfer(bucket_ms)
        # Reducer::finalize_backward: computed, then the stream waits for every bucket, in C++.
        self._events["computed"] = self._now_ms()
        gpu.await_on(gpu.current, over_ms)
        self._events["sent"] = self._now_ms()

    @staticmethod
    def _now_ms() -> float:
        return max(gpu.ends_ms[0], gpu.now_ms)


def fsdp1(units: Sequence[tuple[float, float, float, float]]) -> Step:
    """FSDP 1, full shard, backward prefetch; of each unit: forward, backward, gather and reduce, in ms."""
    unshard, post_backward = torch.cuda.Stream(), torch.cuda.Stream()
    free_events: list[Any] = []

    def gather(unit: int) -> None:
        # _unshard, with limit_all_gathers: at most two are not yet freed.
        if len(free_events) >= 2:
            free_events.pop(0).synchronize()
        with torch.cuda.stream(unshard):
            dist.all_gather_into_tensor(tensor_of(units[unit][2]), tensor_of(units[unit][2]))

    def await_gather() -> None:
        torch.cuda.current_stream().wait_stream(unshard)

    def free() -> None:
        event = torch.cuda.Event()
        event.record()
        free_events.append(event)

    def step() -> None:
        unshard.wait_stream(torch.cuda.current_stream())
        for unit, (forward_ms, *_) in enumerate(units):
            gather(unit)
            await_gather()
            gpu.compute(forward_ms)
            free()
        gathered = set()
        for unit in reversed(range(len(units))):
            _, backward_ms, _, reduce_ms = units[unit]
            if unit not in gathered:
                gather(unit)
            await_gather()
            if unit:
                gather(unit - 1)
                gathered.add(unit - 1)
            gpu.compute(backward_ms)
            free()
            # _post_backward_hook, _reduce_grad.
            post_backward.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(post_backward):
                dist.reduce_scatter_tensor(tensor_of(reduce_ms), tensor_of(reduce_ms))
        # _post_backward_final_callback.
        torch.cuda.current_stream().wait_stream(post_backward)

    return step


def fsdp2(units: Sequence[tuple[float, float, float, float]]) -> Step:
    """FSDP 2 (fully_shard), implicit prefetch; of each unit: forward, backward, gather and reduce, in ms."""
    copy_in, gathering, reducing = (torch.cuda.Stream() for _ in range(3))

    def gather(unit: int) -> Any:
        # foreach_all_gather.
        with torch.cuda.stream(copy_in):
            gpu.compute(0.01)
        gathering.wait_stream(copy_in)
        with torch.cuda.stream(gathering):
            dist.all_gather_into_tensor(tensor_of(units[unit][2]), tensor_of(units[unit][2]))
            return gathering.record_event()

    def await_gather(event: Any) -> None:
        # foreach_all_gather_copy_out, then _wait_all_gather_streams_on_event.
        torch.cuda.current_stream().wait_event(event)
        gpu.compute(0.01)
        copied = torch.cuda.Event()
        copied.record()
        copy_in.wait_event(copied)
        gathering.wait_event(copied)

    def step() -> None:
        # _lazy_init's, of the root.
        copy_in.wait_stream(torch.cuda.current_stream())
        gathering.wait_stream(torch.cuda.current_stream())
        # In the forward pass the copies out of one unit wait for the gather of the next to have been called.
        for unit, (forward_ms, *_) in enumerate(units):
            await_gather(gather(unit))
            gpu.compute(forward_ms)
            torch.cuda.Event().record()
        prefetched: dict[int, Any] = {}
        reduced: list[Any] = []
        for unit in reversed(range(len(units))):
            _, backward_ms, _, reduce_ms = units[unit]
            await_gather(prefetched.pop(unit, None) or gather(unit))
            if unit:
                prefetched[unit - 1] = gather(unit - 1)
            gpu.compute(backward_ms)
            # FSDPParamGroup.post_backward: one reduce-scatter's input is kept, until it was read.
            if reduced:
                torch.cuda.current_stream().wait_event(reduced[-1])
            reducing.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(reducing):
                dist.reduce_scatter_tensor(tensor_of(reduce_ms), tensor_of(reduce_ms))
                reduced.append(reducing.record_event())
        # finalize_backward of each group, then of the root.
        for event in reduced:
            torch.cuda.current_stream().wait_event(event)

    return step


def zero12(
    backward_ms: Sequence[float],
    bucket_ms: Sequence[float],
    *,
    stage: int,
    overlap: bool,
    contiguous: bool = True,
    micro_batches: int = 1,
) -> Step:
    """ZeRO-1 and ZeRO-2: a bucket is reduced where its part of the backward pass is over, by ZeRO-1 of the last alone.

    Without overlap ZeRO-1 reduces all of them after that pass.
    """
    buckets = _Buckets(overlap=overlap, contiguous=contiguous)
    late = stage == 1 and not overlap

    def backward(*, reduces: bool) -> None:
        for compute_ms, ms in zip(backward_ms, bucket_ms, strict=True):
            gpu.compute(compute_ms)
            if reduces and not late:
                buckets.reduce(ms)
        if not reduces:
            return
        # reduce_gradients.
        for ms in bucket_ms if late else ():
            buckets.reduce(ms)
        buckets.end()

    def step() -> None:
        for number in range(1, micro_batches + 1):
            gpu.compute(10.0)
            backward(reduces=stage > 1 or number == micro_batches)
        # step: the overflow, of one flag, then the optimizer and the parameters.
        dist.all_reduce(tensor_of(0.02))
        gpu.await_on_host(gpu.ends_ms[0])
        gpu.compute(1.0)
        dist.all_gather_into_tensor(tensor_of(2.0), tensor_of(2.0))

    return step


class _Buckets:
    """DeepSpeedZeroOptimizer, as far as it reduces."""

    def __init__(self, *, overlap: bool, contiguous: bool) -> None:
        self._overlap, self._contiguous = overlap, contiguous
        self._reduction = torch.cuda.Stream()

    def reduce(self, ms: float) -> None:
        """average_tensor, or allreduce_and_copy; then reduce_ipg_grads."""
        stream = current = torch.cuda.current_stream()
        if self._overlap:
            stream = self._reduction
            if self._contiguous:
                stream.wait_stream(current)
                current.wait_stream(stream)
            else:
                torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            gpu.compute(0.01)
            dist.all_reduce(tensor_of(ms))
            gpu.compute(0.01)

    def end(self) -> None:
        """independent_gradient_partition_epilogue: the host waits, for all streams."""
        if self._overlap:
            torch.cuda.synchronize()


def zero3(
    units: Sequence[tuple[float, float, float]], reduce_ms: Sequence[float], *, overlap: bool, prefetch: int = 1
) -> Step:
    """ZeRO-3; of each unit: forward, backward and gather, in ms; gradients are reduced in so many buckets."""
    parameters = _Parameters([gather_ms for *_, gather_ms in units], prefetch, overlap=overlap)
    gradients = _Gradients(overlap=overlap)
    order = list(range(len(units)))
    each = max(1, len(units) // max(1, len(reduce_ms)))

    def step() -> None:
        for unit in order:
            parameters.fetch(unit, order[unit + 1 :])
            gpu.compute(units[unit][0])
        left = list(reduce_ms)
        for done, unit in enumerate(reversed(order), 1):
            parameters.fetch(unit, order[:unit][::-1])
            gpu.compute(units[unit][1])
            if left and (done == len(units) or (done % each == 0 and len(left) > 1)):
                gradients.reduce(left.pop(0))
        # independent_gradient_partition_epilogue.
        gradients.stream.synchronize()
        # has_overflow, then the optimizer.
        torch.cuda.default_stream().wait_stream(gradients.stream)
        dist.all_reduce(tensor_of(0.02))
        gpu.await_on_host(gpu.ends_ms[0])
        gpu.compute(1.0)

    return step


class _Parameters:
    """PartitionedParameterCoordinator."""

    def __init__(self, gather_ms: Sequence[float], prefetch: int, *, overlap: bool) -> None:
        self._gather_ms, self._prefetch = gather_ms, prefetch
        self._stream = torch.cuda.Stream() if overlap else torch.cuda.default_stream()
        self._inflight: dict[int, Any] = {}
        self._fetched: list[Any] = []

    def fetch(self, unit: int, following: Sequence[int]) -> None:
        """fetch_sub_module."""
        self._gather(unit)
        with torch.cuda.stream(self._stream):
            while self._fetched and self._fetched[0].query():
                self._fetched.pop(0)
            if len(self._fetched) > 2:
                self._fetched.pop(0).synchronize()
            self._inflight.pop(unit).wait()
            event = torch.cuda.Event()
            event.record()
            self._fetched.append(event)
        torch.cuda.current_stream().wait_stream(self._stream)
        for later in following[: self._prefetch]:
            self._gather(later)

    def _gather(self, unit: int) -> None:
        if unit not in self._inflight:
            with torch.cuda.stream(self._stream):
                tensor = tensor_of(self._gather_ms[unit])
                self._inflight[unit] = dist.all_gather_into_tensor(tensor, tensor, async_op=True)


class _Gradients:
    """DeepSpeedZeroOptimizer_Stage3, as far as it reduces."""

    def __init__(self, *, overlap: bool) -> None:
        self.stream = torch.cuda.Stream() if overlap else torch.cuda.default_stream()
        self._events: list[Any] = []

    def reduce(self, ms: float) -> None:
        """__add_grad_to_ipg_bucket, __reduce_and_partition_ipg_grads."""
        self.stream.wait_stream(torch.cuda.current_stream())
        while self._events and self._events[0].query():
            self._events.pop(0)
        if len(self._events) > 2:
            self._events.pop(0).synchronize()
        with torch.cuda.stream(self.stream):
            gpu.compute(0.01)
            dist.reduce_scatter_tensor(tensor_of(ms), tensor_of(ms))
            event = torch.cuda.Event()
            event.record()
            self._events.append(event)


def on_a_stream_of_its_own(compute_ms: float, send_ms: float, calls: int, awaits: str) -> Step:
    """A loop that computes on another stream, as before a capture: torch/cuda/graphs.py make_graphed_callables."""
    computing = torch.cuda.Stream()

    def step() -> None:
        computing.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(computing):
            for _ in range(calls):
                gpu.compute(compute_ms)
                dist.all_reduce(tensor_of(send_ms))
        if awaits == "stream":
            computing.synchronize()
        elif awaits == "device":
            torch.cuda.synchronize()
        else:
            torch.cuda.current_stream().wait_stream(computing)

    return step


def by_the_accelerator(compute_ms: float, send_ms: float) -> Step:
    """Waits of torch.accelerator's streams, as of fsdp/_fully_shard/_fsdp_param_group.py `wait_for_unshard`."""
    sending = torch.cuda.Stream()

    def step() -> None:
        gpu.compute(compute_ms)
        sending.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(sending):
            dist.all_gather_into_tensor(tensor_of(send_ms), tensor_of(send_ms))
            event = sending.record_event()
        torch.accelerator.current_stream().wait_event(event)
        gpu.await_on_host(gpu.ends_ms[0])

    return step


def accumulated(micro_step: Step, micro_batches: int) -> Step:
    """A step of several micro-batches, each of which sends."""

    def step() -> None:
        for _ in range(micro_batches):
            micro_step()

    return step


def tensor_parallel(layers: int, local_ms: float, between_ms: float) -> Step:
    """Tensor-parallel layers in a node, whose sums the next layer waits for, and gradients between the nodes."""
    group = dist.new_group([0])

    def step() -> None:
        for layer in range(layers):
            gpu.compute(3.0)
            if layer % 2:
                dist.all_reduce(tensor_of(local_ms), group=group)
            else:
                dist.all_reduce(tensor_of(local_ms), group=group, async_op=True).wait()
        dist.all_reduce(tensor_of(between_ms))
        gpu.await_on_host(gpu.ends_ms[0])

    return step


def unseen(compute_ms: float, send_ms: float) -> Step:
    """What C++ waits for: a collective on a stream of its own, for which no Python waits before the next step."""
    sending = torch.cuda.Stream()

    def step() -> None:
        torch.cuda.current_stream().wait_stream(sending)
        gpu.compute(compute_ms)
        sending.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(sending):
            for _ in range(20):
                dist.all_gather_into_tensor(tensor_of(0.1), tensor_of(0.1))
        torch.cuda.current_stream().wait_stream(sending)
        with torch.cuda.stream(sending):
            dist.all_reduce(tensor_of(send_ms))
        gpu.await_on(0, gpu.ends_ms[sending.cuda_stream])

    return step


def length_ms(step: Step, steps: int, *, network_speed: float) -> float:
    """Of one step, with the network as it is or infinitely fast, the first left out."""
    gpu.network_speed = network_speed
    begun = 0.0
    for number in range(steps):
        if number == 1:
            begun = end_ms()
        step()
    took = (end_ms() - begun) / (steps - 1)
    gpu.network_speed = 1.0
    return took


def end_ms() -> float:
    """When all is over."""
    return max(gpu.now_ms, *gpu.ends_ms.values())
