"""Compression: DDP sends its gradients as fp16 or bf16, half of what fp32 ones take on the wire, or by PowerSGD.

It asks DDP to: a communication hook, registered as late as torch allows, so that one of the user's own finds the place
free. Whatever stands against it is told, and the training goes on with its gradients as they are.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import weakref
from typing import Any, Callable, Dict, Optional, Set, Tuple

from .checkpoint import around_checkpoints, read_state, write_state
from .ddp import around_preparation, sends_gradients
from .guard import Guard, Hooks
from .power_sgd import PowerSgd, is_worth_it, read_choice
from .steps import Steps

VARIABLE = "MULTINODE_GRAD_COMPRESS"
"""Environment variable that says how: `fp16`, `bf16` or `powersgd[:RANK[:START]]`."""

_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
_HALF_BYTES = 2
_ALONE = "a single worker sends none"
_NO_DDP = (
    "the first step had no DistributedDataParallel; DeepSpeed and FSDP set their dtypes in their own configurations"
)
_MOST_WORDS = 300
# In a checkpoint's directory, by the global rank: what PowerSGD lost is another thing on each.
_STATE_FILE = "multinode_powersgd_%d.pt"


def hooks(steps: Steps, guard: Guard, traffic: Any, kind: str) -> Hooks:
    """Have DDP compress to `kind`; `traffic` is told by `add(op, group, size_bytes, source="ddp")` what is sent."""
    compression = _Compression(steps, guard.quietly(traffic.add), kind)
    if kind not in _DTYPES and compression.choice is None:
        compression.tell("%r is neither of %s" % (kind, ", ".join(_DTYPES)))
        return []
    steps.meters.append(compression.end_step)
    found: Hooks = [("torch.nn.parallel.distributed", functools.partial(_hook_ddp, compression, guard))]
    if compression.choice is not None:
        found.append(("transformers.trainer", functools.partial(_hook_trainer, compression)))
    return found


def _hook_trainer(compression: _Compression, module: Any) -> None:
    around_checkpoints(module, compression.save, compression.load)


def _hook_ddp(compression: _Compression, guard: Guard, module: Any) -> None:
    around_preparation(module, guard.quietly(compression.before_forward))
    ddp = module.DistributedDataParallel
    ddp.register_comm_hook = _giving_way(compression, ddp.register_comm_hook, compression.give_way)
    builtin = ddp._register_builtin_comm_hook  # noqa: SLF001 - torch has no public way to its built-in hooks
    ddp._register_builtin_comm_hook = _giving_way(  # noqa: SLF001 - see above
        compression, builtin, compression.give_way_to_builtin
    )


def _giving_way(
    compression: _Compression, register: Callable[..., Any], give_way: Callable[..., None]
) -> Callable[..., Any]:
    """DDP's function that registers a hook, which would raise where ours stands: the user's takes its place."""

    @functools.wraps(register)
    def registered(self: Any, *args: Any, **kwargs: Any) -> Any:
        if compression.has_place_of(self):
            return give_way(self, *args, **kwargs)
        return register(self, *args, **kwargs)

    return registered


class _Sender:
    """What the reducer of one DDP module is given: it keeps no module alive, and none of them keeps it when saved."""

    def __init__(self, group: Any, dtype: Any, count: Callable[..., None]) -> None:
        self.group = group
        self.dtype = dtype  # in which they travel; None leaves them as they are
        self.count = count  # told what is sent, as `hooks` has it
        # the user's own hook with its state, once that has taken the place
        self.other: Optional[Tuple[Callable[..., Any], Any]] = None
        self.is_ours = True  # whether the user's code has not asked for another one
        self.low_rank: Optional[PowerSgd] = None  # PowerSGD's state, where that was asked for


class _Compression:
    """Follows all DDP modules of this worker, which it does not keep alive."""

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
        """A forward pass begins. Before the first one whose gradients will be sent is the last moment for a hook."""
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
        """A meter: after the first step, tells where nothing was there to be compressed."""
        if self._is_first_step and not self._met:
            self.tell(_ALONE if os.environ.get("WORLD_SIZE", "1") == "1" else _NO_DDP)
        self._is_first_step = False
        return {}

    def save(self, trainer: Any, folder: str) -> None:
        """Write what PowerSGD keeps of this rank beside a checkpoint."""
        states = [sender.low_rank.state() for sender in self._senders.values() if sender.low_rank is not None]
        if states:
            write_state(trainer, folder, _STATE_FILE % int(os.environ.get("RANK", "0")), states[0])

    def load(self, trainer: Any, folder: str) -> None:
        """Take that up, once DDP has been given its hook."""
        device = next(trainer.model.parameters()).device
        self._loaded = read_state(folder, _STATE_FILE % int(os.environ.get("RANK", "0")), device)

    def has_place_of(self, module: Any) -> bool:
        """Whether our hook stands where the user's code is about to register one."""
        sender = self._senders.get(module)
        return sender is not None and sender.is_ours

    def give_way(self, module: Any, state: Any, hook: Callable[..., Any]) -> None:
        """As `register_comm_hook`: from now on the user's hook is called in place of ours."""
        module._check_comm_hook(hook)  # noqa: SLF001 - what torch itself asks of a hook
        sender = self._senders[module]
        sender.other = (hook, state)
        self._lose(module, sender, hook.__qualname__)

    def give_way_to_builtin(self, module: Any, comm_hook_type: Any) -> None:
        """As `_register_builtin_comm_hook`; those are two, and ours can do both."""
        sender = self._senders[module]
        halves = comm_hook_type.name == "FP16_COMPRESS"
        sender.dtype = sys.modules["torch"].float16 if halves else None
        # Not torch's name for it, by which its C++ would be taken to send the buckets.
        self._lose(module, sender, "multinode_fp16" if halves else "allreduce")

    def tell(self, why: str) -> None:
        """Say, once for each reason, that gradients travel as they are."""
        if why in self._told:
            return
        self._told.add(why)
        message = "gradients were NOT compressed to %s: %s" % (self._kind, why[:_MOST_WORDS])
        self._steps.note("note", message=message)
        # stderr may be closed; the note says it all the same.
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
        # A backend that cannot add up this dtype says so here, where DDP can still do without: later it is too late.
        sender.group.allreduce([torch.zeros(1, dtype=dtype, device=module.device)]).wait()
        # Not by the module's own method: that keeps hook and state in the module, with which they would be saved.
        torch.distributed._register_comm_hook(module.reducer, sender, _send)  # noqa: SLF001 - see above
        module.logger._set_comm_hook_name("multinode_%s" % self._kind.partition(":")[0])  # noqa: SLF001 - see above
        return sender

    def _lose(self, module: Any, sender: _Sender, name: str) -> None:
        sender.is_ours = False
        module.logger._set_comm_hook_name(name)  # noqa: SLF001 - as torch does for whoever registers
        self.tell("the training registered its own communication hook later, %s" % name)


def _send(sender: _Sender, bucket: Any) -> Any:
    """DDP's communication hook: returns a future of the bucket's mean over the workers.

    It divides before it casts: of parts that fit into the narrow dtype the sum then fits as well. What fails in here
    fails the training, as a failed reduction of DDP's own does: a worker that turned back alone would send another size
    than its peers.
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
    # Past torch.distributed, as DDP's reducer does: there the call would be timed, and DDP's timers have it already.
    work = sender.group.allreduce([sent])
    sender.count("all_reduce", sender.group, sent.nbytes, source="ddp")

    def take(reduced: Any) -> Any:
        (mean,) = reduced.value()
        return gradients.copy_(mean) if is_narrowed else mean

    return work.get_future().then(take)


def _is_wide(tensor: Any) -> bool:
    """Whether half the bytes would do; a sparse gradient is sent by its indices and stays as it is."""
    return bool(tensor.is_floating_point() and tensor.element_size() > _HALF_BYTES and not tensor.is_sparse)


def _why_not(module: Any, choice: Any) -> Optional[str]:
    """Why the gradients of this module cannot be compressed, or need not be; None where they can."""
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
        return None if worth else "no gradient is a matrix that rank %d reduces to less than half" % choice.rank
    if not any(map(_is_wide, trained)):
        return "they are %s, which is as small" % ", ".join(sorted({str(each.dtype) for each in trained}))
    return None
