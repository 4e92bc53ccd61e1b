"""Compression: DDP sends its gradients in fp16 or bf16, which halves the traffic of fp32, or by PowerSGD.

It registers a DDP communication hook, as late as torch allows, so that the user's own hook finds the place free. If it
cannot compress, it reports the reason, and the training continues with uncompressed gradients.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import sys
import weakref
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple

from ..ddp import around_preparation, sends_gradients
from ..guard import Guard, Hooks
from ..steps import Steps
from .checkpoint import around_checkpoints, read_state, write_state

_NAME = "powersgd"
# torch's default of min_compression_rate: a gradient that would not become half as large is not compressed.
_LEAST_RATE = 2


class Choice(NamedTuple):
    """Parameters of `powersgd[:RANK[:START]]`."""

    rank: int = 4  # columns of the low-rank factors
    start: int = 10  # iterations with uncompressed gradients before it begins


def read_choice(kind: str) -> Optional[Choice]:
    """Parse the value of `--grad-compress`; None if it is not PowerSGD."""
    name, *numbers = kind.split(":")
    return Choice(*map(int, numbers)) if name == _NAME else None


def is_worth_it(parameter: Any, rank: int) -> bool:
    """Whether a gradient is a matrix that becomes less than half as large."""
    if parameter.dim() < 2 or not parameter.is_floating_point():  # noqa: PLR2004 - a matrix has two
        return False
    rows = parameter.shape[0]
    columns = parameter.numel() // max(1, rows)
    return bool(rows * columns > (rows + columns) * rank * _LEAST_RATE)


class PowerSgd:
    """Compresses the gradients of one DDP module by PowerSGD.

    Args:
        module: the DDP module; no reference to it is kept.
        choice: rank and start.
        count: called for each all-reduce as `count(op, group, size_bytes, source="ddp")`.
    """

    def __init__(self, module: Any, choice: Choice, count: Callable[..., None]) -> None:
        self._is_cpu = module.device_type == "cpu"
        self._group = _own_group(module.process_group) if self._is_cpu else module.process_group
        self._choice = choice
        self._count = count
        self._numbers = {id(each): number for number, each in enumerate(module.parameters())}
        self._thread: Optional[concurrent.futures.ThreadPoolExecutor] = None
        self._errors: Dict[int, Any] = {}
        self._queries: Dict[int, Any] = {}
        self.iteration = 0  # number of reduced backward passes

    def send(self, bucket: Any) -> Any:
        """The communication hook: returns a future of the bucket's approximate mean over the workers."""
        futures = sys.modules["torch"].futures
        buffer, gradients = bucket.buffer(), bucket.gradients()
        numbers = [self._numbers[id(each)] for each in bucket.parameters()]
        compresses = self.iteration >= self._choice.start
        self.iteration += bucket.is_last()
        future = futures.Future() if self._is_cpu else futures.Future(devices=[buffer.device])
        if not self._is_cpu:
            # With NCCL, waits do not block the host: the stream waits.
            future.set_result(self._reduce(buffer, gradients, numbers, compresses=compresses))
            return future
        if self._thread is None:
            self._thread = concurrent.futures.ThreadPoolExecutor(1, "multinode-powersgd")
        self._thread.submit(self._fulfil, future, buffer, gradients, numbers, compresses)
        return future

    def state(self) -> Dict[str, Any]:
        """State for a checkpoint."""
        return {"iteration": self.iteration, "errors": dict(self._errors), "queries": dict(self._queries)}

    def load(self, state: Dict[str, Any], device: Any) -> None:
        """Restore the state of `state`."""
        self.iteration = state["iteration"]
        self._errors = {number: each.to(device) for number, each in state["errors"].items()}
        self._queries = {number: each.to(device) for number, each in state["queries"].items()}

    def _fulfil(self, future: Any, buffer: Any, gradients: List[Any], numbers: List[int], compresses: bool) -> None:  # noqa: FBT001 - handed on by a thread pool
        try:
            future.set_result(self._reduce(buffer, gradients, numbers, compresses=compresses))
        except Exception as error:  # noqa: BLE001 - it ends the training where DDP waits for the future
            future.set_exception(error)

    def _reduce(self, buffer: Any, gradients: List[Any], numbers: List[int], *, compresses: bool) -> Any:
        with sys.modules["torch"].no_grad():
            pairs = list(zip(numbers, gradients))
            thin = [pair for pair in pairs if compresses and is_worth_it(pair[1], self._choice.rank)]
            if not thin:
                return self._mean(buffer)
            named = {number for number, _ in thin}
            self._mean_of([gradient for number, gradient in pairs if number not in named])
            self._approximate(thin)
            return buffer

    def _approximate(self, thin: List[Tuple[int, Any]]) -> None:
        """Replace gradients by the mean of their approximations; the error is added in the next step."""
        torch = sys.modules["torch"]
        wholes = []
        for number, gradient in thin:
            whole = gradient.float().reshape(gradient.shape[0], -1)
            if number in self._errors:
                whole = whole + self._errors[number]
            wholes.append(whole)
        queries = [self._query(number, whole) for (number, _), whole in zip(thin, wholes)]
        left = [whole @ query for whole, query in zip(wholes, queries)]
        self._mean_of(left)
        left = [torch.linalg.qr(each)[0] for each in left]
        right = [whole.t() @ each for whole, each in zip(wholes, left)]
        self._mean_of(right)
        for (number, gradient), whole, sent, other in zip(thin, wholes, left, right):
            mean = sent @ other.t()
            self._errors[number] = whole - mean
            self._queries[number] = other.clone()
            gradient.copy_(mean.view(gradient.shape))

    def _query(self, number: int, whole: Any) -> Any:
        """The right factor of the previous step; initially a random one that is equal on all workers."""
        torch = sys.modules["torch"]
        if number not in self._queries:
            generator = torch.Generator().manual_seed(number)
            self._queries[number] = torch.randn(whole.shape[1], self._choice.rank, generator=generator).to(whole.device)
        return torch.linalg.qr(self._queries[number])[0]

    def _mean_of(self, tensors: List[Any]) -> None:
        """Replace each tensor by its mean over the workers, all in one call; no call if there is nothing to send."""
        torch = sys.modules["torch"]
        if sum(each.numel() for each in tensors):
            flat = self._mean(torch.cat([each.reshape(-1) for each in tensors]))
            for each, part in zip(tensors, flat.split([each.numel() for each in tensors])):
                each.copy_(part.view(each.shape))

    def _mean(self, tensor: Any) -> Any:
        tensor.div_(self._group.size())
        self._group.allreduce([tensor]).wait()
        self._count("all_reduce", self._group, tensor.nbytes, source="ddp")
        return tensor


def _own_group(group: Any) -> Any:
    """Create another group of the same workers; all of them must call this."""
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    return c10d.new_group(c10d.get_process_group_ranks(group), use_local_synchronization=True)


VARIABLE = "MULTINODE_GRAD_COMPRESS"
"""Environment variable with the kind of compression: `fp16`, `bf16` or `powersgd[:RANK[:START]]`."""

_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
_HALF_BYTES = 2
_ALONE = "a single worker sends none"
_NO_DDP = (
    "the first step had no DistributedDataParallel; DeepSpeed and FSDP set their dtypes in their own configurations"
)
_MOST_WORDS = 300
# File in a checkpoint's directory, by the global rank: PowerSGD's errors differ between ranks.
_STATE_FILE = "multinode_powersgd_%d.pt"


def hooks(steps: Steps, guard: Guard, traffic: Any, kind: str) -> Hooks:
    """Hooks that make DDP compress to `kind`; they call `traffic.add(op, group, size_bytes, source="ddp")`."""
    compression = _Compression(steps, guard.quietly(traffic.add), kind)
    if kind not in _DTYPES and compression.choice is None:
        compression.tell("%r is neither of %s" % (kind, ", ".join(_DTYPES)))
        return []
    steps.meters.append(compression.end_step)
    all_hooks: Hooks = [("torch.nn.parallel.distributed", functools.partial(_hook_ddp, compression, guard))]
    if compression.choice is not None:
        all_hooks.append(("transformers.trainer", functools.partial(_hook_trainer, compression)))
    return all_hooks


def _hook_trainer(compression: _Compression, module: Any) -> None:
    around_checkpoints(module, compression.save, compression.load)


def _hook_ddp(compression: _Compression, guard: Guard, module: Any) -> None:
    around_preparation(module, guard.quietly(compression.before_forward))
    ddp = module.DistributedDataParallel
    ddp.register_comm_hook = _giving_way(compression, ddp.register_comm_hook, compression.give_way)
    builtin = ddp._register_builtin_comm_hook  # noqa: SLF001 - torch has no public way to its built-in hooks
    ddp._register_builtin_comm_hook = _giving_way(  # noqa: SLF001 - torch has no public one
        compression, builtin, compression.give_way_to_builtin
    )


def _giving_way(
    compression: _Compression, register: Callable[..., Any], give_way: Callable[..., None]
) -> Callable[..., Any]:
    """Wrap DDP's function that registers a hook: instead of raising, the user's hook replaces ours."""

    @functools.wraps(register)
    def registered(self: Any, *args: Any, **kwargs: Any) -> Any:
        if compression.has_place_of(self):
            return give_way(self, *args, **kwargs)
        return register(self, *args, **kwargs)

    return registered


class _Sender:
    """State of one DDP module's communication hook. Neither keeps the other alive, nor is it saved with the module."""

    def __init__(self, group: Any, dtype: Any, count: Callable[..., None]) -> None:
        self.group = group
        self.dtype = dtype  # type in which gradients are sent; None sends them unchanged
        self.count = count  # called for each all-reduce, see `hooks`
        # the user's own hook and its state, if it has replaced ours
        self.other: Optional[Tuple[Callable[..., Any], Any]] = None
        self.is_ours = True  # whether the user's code has not registered another hook
        self.low_rank: Optional[PowerSgd] = None  # set if PowerSGD was requested


class _Compression:
    """Compresses the gradients of all DDP modules of this worker, to which it keeps weak references."""

    def __init__(self, steps: Steps, count: Callable[..., None], kind: str) -> None:
        self._steps = steps
        self._count = count
        self._kind = kind
        self.choice = read_choice(kind)
        self._loaded: Optional[Dict[str, Any]] = None
        self._senders: weakref.WeakKeyDictionary[Any, _Sender] = weakref.WeakKeyDictionary()
        self._met: weakref.WeakSet[Any] = weakref.WeakSet()
        self._is_first_step = True
        self._told: Set[str] = set()

    def before_forward(self, module: Any) -> None:
        """A forward pass begins. Just before the first one that sends gradients, the hook is registered."""
        if module in self._met or not sends_gradients(module):
            return
        self._met.add(module)
        why = _why_not(module, self.choice)
        if why is None:
            try:
                self._senders[module] = self._register(module)
            except Exception as error:  # noqa: BLE001 - a training does not stop where compression fails
                why = "%s %s" % (type(error).__name__, error)
        if why is not None:
            self.tell(why)

    def end_step(self, _step: int) -> Dict[str, Any]:
        """A meter: after the first step, reports if there was nothing to compress."""
        if self._is_first_step and not self._met:
            self.tell(_ALONE if os.environ.get("WORLD_SIZE", "1") == "1" else _NO_DDP)
        self._is_first_step = False
        return {}

    def save(self, trainer: Any, folder: str) -> None:
        """Write PowerSGD's state of this rank into a checkpoint."""
        states = [sender.low_rank.state() for sender in self._senders.values() if sender.low_rank is not None]
        if states:
            write_state(trainer, folder, _STATE_FILE % int(os.environ.get("RANK", "0")), states[0])

    def load(self, trainer: Any, folder: str) -> None:
        """Read PowerSGD's state of this rank; it is restored when DDP gets its hook."""
        device = next(trainer.model.parameters()).device
        self._loaded = read_state(folder, _STATE_FILE % int(os.environ.get("RANK", "0")), device)

    def has_place_of(self, module: Any) -> bool:
        """Whether our hook is in the place where the user's code is about to register one."""
        sender = self._senders.get(module)
        return sender is not None and sender.is_ours

    def give_way(self, module: Any, state: Any, hook: Callable[..., Any]) -> None:
        """Replaces DDP's `register_comm_hook`: from now on the user's hook is called instead of ours."""
        module._check_comm_hook(hook)  # noqa: SLF001 - what torch itself asks of a hook
        sender = self._senders[module]
        sender.other = (hook, state)
        self._lose(module, sender, hook.__qualname__)

    def give_way_to_builtin(self, module: Any, comm_hook_type: Any) -> None:
        """Replaces DDP's `_register_builtin_comm_hook`; our hook can do what both built-in hooks do."""
        sender = self._senders[module]
        halves = comm_hook_type.name == "FP16_COMPRESS"
        sender.dtype = sys.modules["torch"].float16 if halves else None
        # With torch's own name, `ddp` would assume that the reducer's C++ sends the buckets, and count them twice.
        self._lose(module, sender, "multinode_fp16" if halves else "allreduce")

    def tell(self, why: str) -> None:
        """Report, once for each reason, that gradients are not compressed."""
        if why in self._told:
            return
        self._told.add(why)
        message = "gradients were NOT compressed to %s: %s" % (self._kind, why[:_MOST_WORDS])
        self._steps.note("note", message=message, lacks="compression")
        # stderr may be closed; the note has the message, too.
        with contextlib.suppress(Exception):
            sys.stderr.write("multinode: %s\n" % message)

    def _register(self, module: Any) -> _Sender:
        torch = sys.modules["torch"]
        dtype = getattr(torch, _DTYPES[self._kind]) if self.choice is None else None
        sender = _Sender(module.process_group, dtype, self._count)
        if self.choice is not None:
            sender.low_rank = PowerSgd(module, self.choice, self._count)
            if self._loaded is not None:
                sender.low_rank.load(self._loaded, module.device)
        # If the backend cannot sum this dtype, this raises now, while DDP can still do without the hook.
        sender.group.allreduce([torch.zeros(1, dtype=dtype, device=module.device)]).wait()
        # The module's own method would store hook and state in the module, and they would be saved with it.
        torch.distributed._register_comm_hook(module.reducer, sender, _send)  # noqa: SLF001 - stores nothing in the module
        module.logger._set_comm_hook_name("multinode_%s" % self._kind.partition(":")[0])  # noqa: SLF001 - as torch does
        return sender

    def _lose(self, module: Any, sender: _Sender, name: str) -> None:
        sender.is_ours = False
        module.logger._set_comm_hook_name(name)  # noqa: SLF001 - as torch does for whoever registers
        self.tell("the training code registered its own communication hook later, %s" % name)


def _send(sender: _Sender, bucket: Any) -> Any:
    """DDP's communication hook: returns a future of the bucket's mean over the workers.

    It divides before it casts: if the parts fit into the narrow dtype, their sum fits as well. An exception ends the
    training, as in a reduction of DDP itself: a worker that alone fell back to uncompressed gradients would send
    another size than its peers.
    """
    if sender.other is not None:
        hook, state = sender.other
        return hook(state, bucket)
    if sender.low_rank is not None and sender.is_ours:
        return sender.low_rank.send(bucket)
    gradients = bucket.buffer()
    gradients.div_(sender.group.size())
    is_narrowed = sender.dtype is not None and _is_wide(gradients)
    sent = gradients.to(sender.dtype) if is_narrowed else gradients
    # Bypass torch.distributed, as DDP's reducer does: it would time the call again, which DDP's timers already include.
    work = sender.group.allreduce([sent])
    sender.count("all_reduce", sender.group, sent.nbytes, source="ddp")

    def take(reduced: Any) -> Any:
        (mean,) = reduced.value()
        return gradients.copy_(mean) if is_narrowed else mean

    return work.get_future().then(take)


def _is_wide(tensor: Any) -> bool:
    """Whether a tensor is wider than 16 bits; a sparse gradient is never narrowed."""
    return bool(tensor.is_floating_point() and tensor.element_size() > _HALF_BYTES and not tensor.is_sparse)


def _why_not(module: Any, choice: Any) -> Optional[str]:
    """Why the gradients of this module cannot be compressed, or need not be; None if they can."""
    if module.process_group.size() == 1:
        return _ALONE
    if module._use_python_reducer or module._delay_all_reduce_all_params:  # noqa: SLF001 - torch has no other
        return "this DistributedDataParallel bypasses its reducer, so no hook sees them"
    name = module._get_ddp_logging_data().get("comm_hook")  # noqa: SLF001 - names what torch has built in, too
    if name:
        return "DistributedDataParallel already has a communication hook, %s" % name
    trained = [each for each in module.parameters() if each.requires_grad]
    if choice is not None:
        worth = any(is_worth_it(each, choice.rank) for each in trained)
        return None if worth else "no gradient is a matrix that rank %d would reduce to less than half" % choice.rank
    if not any(map(_is_wide, trained)):
        return "they are %s, which is no larger" % ", ".join(sorted({str(each.dtype) for each in trained}))
    return None
