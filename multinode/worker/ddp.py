"""Traffic and timing of DDP's reducer, which is C++ and bypasses torch.distributed.

Its own timers (`_get_ddp_logging_data`) give times, and its buckets give sizes. Buffers and Python communication hooks
call torch.distributed, so `traffic` counts them.
"""

from __future__ import annotations

import functools
import sys
import weakref
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set

from . import compiler
from .collectives import CudaStream
from .guard import Guard, Hooks
from .steps import Steps

# In the first iterations, torch uses its timers at any sample rate.
_ALWAYS_COLLECTED = 10
# If the device always lags behind the host, one iteration of this many is read all the same: waiting for the device
# then costs one bubble.
_READ_EVERY = 64
_INT32_BYTES = 4
# Torch's names of Python hooks that let the reducer's C++ send the bucket, so that `traffic` does not see the call.
_OPTIMIZER_IN_BACKWARD = "_apply_optim_in_backward_hook.<locals>.apply_optim_in_backward_hook"
_MIXED_PRECISION = "_reducer_allreduce_and_upcast_hook"
_FP16 = "BuiltinCommHookType.FP16_COMPRESS"
_AS_IT_IS = ("", "BuiltinCommHookType.ALLREDUCE", _OPTIMIZER_IN_BACKWARD)


def hooks(steps: Steps, guard: Guard, traffic: Any) -> Hooks:
    """Follow the reducers of all DDP modules, and report what they send to `traffic`.

    It calls `traffic.add(op, group, size_bytes, count=1, source="ddp")`.
    """
    reductions = _Reductions(steps, guard, traffic)
    # This meter comes first, so that the meter of traffic includes the step's last reduction.
    steps.meters.insert(0, reductions.end_step)
    before, after = guard.quietly(reductions.before_forward), guard.quietly(reductions.after_preparation)
    return [("torch.nn.parallel.distributed", functools.partial(around_preparation, before=before, after=after))]


def around_preparation(
    module: Any, before: Callable[[Any], None], after: Optional[Callable[[Any], None]] = None
) -> None:
    """Call functions before and after a DDP module prepares itself for a forward pass; neither may raise.

    Args:
        module: torch.nn.parallel.distributed.
        before: called with the DDP module before.
        after: called with the DDP module after.
    """
    # The class is wrapped, because torch.save would save a hook on the module together with the module.
    prepare = module.DistributedDataParallel._pre_forward  # noqa: SLF001 - nothing public lies between the timers

    @functools.wraps(prepare)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        before(self)
        result = prepare(self, *args, **kwargs)
        if after is not None:
            after(self)
        return result

    module.DistributedDataParallel._pre_forward = compiler.run_by_python(watched)  # noqa: SLF001 - no public function lies there


def sends_gradients(module: Any) -> bool:
    """Whether the backward pass of this forward pass will send gradients."""
    return bool(sys.modules["torch"].is_grad_enabled() and module.require_backward_grad_sync)


class _Reduced:
    """One module's reductions. An iteration is a synchronised forward pass and its backward pass."""

    def __init__(self) -> None:
        self.iterations = 0  # iterations begun, as DDP counts them
        self.is_open = False  # whether the traffic of the last iteration has yet to be added
        self.is_rebuilt = False
        self.ended = 0  # iterations begun by the end of the last step that had any; `step` is its number
        self.step = 0
        self.samples: List[Dict[str, Any]] = []
        self.started = 0  # start of the last measured iteration, by torch's clock
        self.done: Any = None  # CUDA event after the backward pass of iteration `done_iteration`
        self.done_iteration = 0
        self.is_awaited = False  # whether the host waits for that iteration in order to read it


class _Reductions:
    """Follows all DDP modules of this worker, by weak references."""

    def __init__(self, steps: Steps, guard: Guard, traffic: Any) -> None:
        self._steps = steps
        self._guard = guard
        self._traffic = traffic
        self._is_marking = False
        self._stream = CudaStream()
        self._modules: weakref.WeakKeyDictionary[Any, _Reduced] = weakref.WeakKeyDictionary()

    def before_forward(self, module: Any) -> None:
        """A forward pass begins, and torch is about to read the timers of the last iteration."""
        if not _is_synchronised(module):
            return
        reduced = self._modules.get(module)
        if reduced is None:
            reduced = self._modules[module] = _Reduced()
            self._begin_marking(module)
        rate = _sample_rate(module, reduced)
        if rate is not None:
            module._set_ddp_runtime_logging_sample_rate(rate)  # noqa: SLF001 - torch has no other

    def after_preparation(self, module: Any) -> None:
        """The next iteration has begun, and torch has read the timers of the last one if the sample rate says so."""
        reduced = self._modules.get(module)
        if reduced is None or not _is_synchronised(module):
            return
        data = module._get_ddp_logging_data()  # noqa: SLF001 - torch has no other
        timing = _read_timing(data, reduced)
        if timing is None or timing.is_reduced:
            self._add_sent(module, reduced, data)
        if timing is not None and timing.is_reduced:
            self._record(reduced, timing, data)
        self._add_rebuilding(module, reduced, data)
        reduced.iterations += 1
        reduced.is_open = True

    def _begin_marking(self, module: Any) -> None:
        if module.device_type == "cuda" and not self._is_marking:
            self._is_marking = True
            optimizers = sys.modules["torch.optim.optimizer"]
            optimizers.register_optimizer_step_pre_hook(self._guard.quietly(self._mark))

    def _mark(self, *_: Any) -> None:
        """An optimizer is about to step, so the backward passes before it have been launched."""
        cuda = sys.modules["torch"].cuda
        if cuda.is_current_stream_capturing():
            return
        for module, reduced in list(self._modules.items()):
            if module.device_type == "cuda" and reduced.done_iteration != reduced.iterations:
                reduced.done = reduced.done or cuda.Event()
                reduced.done.record(self._stream.here(module.device))
                reduced.done_iteration = reduced.iterations

    def end_step(self, step: int) -> Dict[str, Any]:
        """A meter: assigns the reductions since the last step to this one."""
        for module, reduced in list(self._modules.items()):
            if reduced.is_open:
                self._add_sent(module, reduced, module._get_ddp_logging_data())  # noqa: SLF001 - torch has no other
            for sample in reduced.samples:
                self._steps.note("ddp", step=step, **sample)
            reduced.samples = []
            if reduced.iterations > reduced.ended:
                reduced.ended, reduced.step = reduced.iterations, step
        return {}

    def _record(self, reduced: _Reduced, timing: _Timing, data: Dict[str, Any]) -> None:
        sample = {"bucket_sizes_bytes": _bucket_sizes(data), **timing.fields}
        if reduced.is_awaited:
            sample["awaited"] = True
        if reduced.iterations <= reduced.ended:
            self._steps.note("ddp", step=reduced.step, **sample)
        else:
            reduced.samples.append(sample)

    def _add_sent(self, module: Any, reduced: _Reduced, data: Dict[str, Any]) -> None:
        """Add the traffic of an iteration, once.

        In the iteration after buckets were rebuilt, torch does not report their sizes yet. The old sizes are used,
        whose sum is equal.
        """
        if not reduced.is_open:
            return
        reduced.is_open = False
        part = _sent_part(module, data)
        sizes = _bucket_sizes(data) if part is not None else []
        for size in sorted(set(sizes)):
            self._add(module, "all_reduce", size * (part or 0), sizes.count(size))
        if _finds_unused(module, reduced):
            self._add(module, "all_reduce", _INT32_BYTES * data["num_parameter_tensors"])

    def _add_rebuilding(self, module: Any, reduced: _Reduced, data: Dict[str, Any]) -> None:
        """Add the agreement on rebuilt buckets: the order of the parameters and a count, then a size per bucket.

        Torch reports the number of buckets only later, so one is assumed.
        """
        if module._has_rebuilt_buckets and not reduced.is_rebuilt:  # noqa: SLF001 - torch has no other
            self._add(module, "broadcast", _INT32_BYTES * (data["num_parameter_tensors"] + 1))
            self._add(module, "broadcast", _INT32_BYTES)
        reduced.is_rebuilt = module._has_rebuilt_buckets  # noqa: SLF001 - torch has no other

    def _add(self, module: Any, op: str, size_bytes: float, count: int = 1) -> None:
        self._traffic.add(op, module.process_group, size_bytes, count=count, source="ddp")


class _Timing(NamedTuple):
    """Torch's timing of one iteration."""

    is_reduced: bool  # whether it had a backward pass; otherwise the fields are those of an earlier iteration
    fields: Dict[str, Any]


def _read_timing(data: Dict[str, Any], reduced: _Reduced) -> Optional[_Timing]:
    """The timing of the last iteration; None if torch has not measured it."""
    iteration, started = reduced.iterations, data.get("forward_compute_time_start", 0)
    if iteration == 0 or data.get("iteration") != iteration or started <= reduced.started:
        return None
    reduced.started = started
    return _Timing(
        is_reduced=data["backward_comm_time_start"] > started,
        fields={
            "iteration": iteration,
            "forward_us": data["forward_compute_time"] / 1000,
            "backward_us": data["backward_compute_time"] / 1000,
            "comm_us": data["backward_comm_time"] / 1000,
            "overlap_us": data["backward_compute_comm_overlap_time"] / 1000,
        },
    )


def _is_synchronised(module: Any) -> bool:
    """Whether DDP counts this forward pass as an iteration, because the reducer will send its gradients."""
    # Both options bypass the reducer; the second calls torch.distributed itself.
    if module._use_python_reducer or module._delay_all_reduce_all_params:  # noqa: SLF001 - torch has no other
        return False
    return sends_gradients(module)


def _sample_rate(module: Any, reduced: _Reduced) -> Optional[int]:
    """The sample rate of torch's timers from now on, in iterations; None keeps the current one (100 by default).

    Torch reads the timers of iteration i if the rate divides i, and starts those of i + 1 if it divides i + 1. On a
    CPU both cost nothing. On a GPU, starting records an event, but reading waits for the last event of the iteration
    (reducer_cuda.cpp), so the host could no longer run ahead of the device. So on a GPU every iteration is timed, and
    it is read if the device is past it already, as in a loop that reads its loss, or else once in a while. An iteration
    that was captured in a CUDA graph cannot be read at all.
    """
    begun = reduced.iterations
    if module.device_type == "cpu":
        return 1 if begun == 0 else None
    if module.device_type != "cuda" or begun < _ALWAYS_COLLECTED:
        return None
    if sys.modules["torch"].cuda.is_current_stream_capturing():
        return begun + 2
    reduced.is_awaited = False
    if reduced.done_iteration == begun:
        is_over = reduced.done.query()
        reduced.is_awaited = not is_over and begun % _READ_EVERY == 0
        if is_over or reduced.is_awaited:
            return 1
    return begun + 1


def _bucket_sizes(data: Dict[str, Any]) -> List[int]:
    text = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
    return [int(size) for size in text.split(", ")]


def _sent_part(module: Any, data: Dict[str, Any]) -> Optional[float]:
    """Fraction of a bucket's bytes that the reducer sends; None if a hook sends it through torch.distributed."""
    name = data.get("comm_hook", "")
    if name in _AS_IT_IS:
        return 1.0
    if name == _FP16:
        item_bytes = 2
    elif name == _MIXED_PRECISION:
        item_bytes = module.mixed_precision.reduce_dtype.itemsize
    else:
        return None
    # A bucket has one dtype, but torch does not say which. With several dtypes, the sum over all buckets is right.
    ignored: Set[str] = module.parameters_to_ignore
    sent = [each for name, each in module.module.named_parameters() if each.requires_grad and name not in ignored]
    sent_bytes = sum(each.numel() * each.element_size() for each in sent)
    return float(item_bytes * sum(each.numel() for each in sent) / sent_bytes)


def _finds_unused(module: Any, reduced: _Reduced) -> bool:
    """Whether workers exchange which parameters had gradients, as one int32 per parameter."""
    if module.static_graph:
        return reduced.iterations == 1
    return bool(module.find_unused_parameters)
