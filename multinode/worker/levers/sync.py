"""Averaging between nodes: local SGD and DiLoCo for a script that trains under DistributedDataParallel.

DDP gets the process group of its node, so that gradients are averaged inside the node at each step; after every H-th
step of an optimizer its parameters are averaged between nodes, by one worker of each, in a group of their own. With an
outer optimizer (DiLoCo, arXiv:2311.08105) the mean change of a round is its pseudo-gradient.

Nothing here is under the guard: a training that is not averaged where it should be is two trainings, so what fails in
here ends the worker. What cannot be averaged is refused before the first step. The Trainer is `sync_trainer`'s.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import sys
import time
import weakref
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

from ..compiler import never_compiled
from ..guard import Hooks
from ..steps import Steps

VARIABLE = "MULTINODE_SYNC"
"""Environment variable with the fields of AveragingSettings, as JSON."""

_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}
# Of fp16's largest number, 65504, a power of two that a sum stays below.
_FP16_ROOM = 32768.0
_LEAST = 1e-30
_BUCKET_BYTES = 64 << 20
_MOST_WORDS = 500
_OUTER_NAMES = ("anchor", "momentum")


class AveragingError(RuntimeError):
    """This training cannot be averaged between nodes."""


class AveragingSettings(NamedTuple):
    """What is averaged, and when."""

    every: int  # optimizer steps of a round
    workers: Tuple[int, ...]  # ranks of each node, which follow one another
    # `fp16` or `bf16`, in which changes travel between nodes; None sends the parameters as they are
    dtype: Optional[str] = None
    outer_lr: Optional[float] = None  # of the outer optimizer, SGD with Nesterov momentum; None averages alone
    momentum: float = 0.0  # of the outer optimizer
    option: str = "--sync-every"  # as the user typed it

    @property
    def firsts(self) -> Tuple[int, ...]:
        """The global rank of each node's first worker."""
        return tuple(sum(self.workers[:node]) for node in range(len(self.workers)))

    @property
    def keeps_anchor(self) -> bool:
        """Whether the parameters of the last round are kept, of which the changes are sent."""
        return self.dtype is not None or self.outer_lr is not None


def read_settings(text: str) -> AveragingSettings:
    """The value of VARIABLE."""
    fields = json.loads(text)
    return AveragingSettings(**{**fields, "workers": tuple(fields["workers"])})


def hooks(steps: Steps, averaging: ParameterAveraging) -> Hooks:
    """Put the averaging in place; none of them may be swallowed by the guard."""
    steps.meters.append(averaging.end_step)
    return [
        ("torch.nn.parallel.distributed", averaging.hook_ddp),
        ("torch.optim.optimizer", averaging.hook_optimizers),
        ("torch.amp.grad_scaler", averaging.hook_grad_scaler),
        ("torch.cuda.amp.grad_scaler", averaging.hook_grad_scaler),
        ("torch.distributed.optim.zero_redundancy_optimizer", averaging.hook_zero_redundancy),
        ("torch.serialization", functools.partial(averaging.hook_saving, name="save")),
        ("safetensors.torch", functools.partial(averaging.hook_saving, name="save_file")),
    ]


class _Groups(NamedTuple):
    """Process groups of this worker."""

    world: Any  # the default group that they were made in
    node: Any  # of this node's workers; `leader` the global rank of its first
    leader: int
    leaders: Any  # of each node's first worker; None where this one is not among them
    size: int  # nodes
    share: float  # of all workers, those of this node: its weight in the average


class _Bucket:
    """Parameters of one dtype and device that are sent together."""

    def __init__(self, parameters: List[Any], anchor: Any) -> None:
        self.parameters = parameters
        self.anchor = anchor  # what they were after the last round, flat; of a node's first worker, where it is kept
        self.momentum: Any = None  # of the outer optimizer, likewise; None before its first step


class Round:
    """One optimizer's parameters, and how far its round has come."""

    def __init__(self) -> None:
        self.position = 0  # optimizer steps since all workers' parameters were equal
        self.buckets: List[_Bucket] = []
        self.known = 0

    def outer_state(self) -> List[Dict[str, Any]]:
        """What a checkpoint keeps of it."""
        return [{name: getattr(bucket, name) for name in _OUTER_NAMES} for bucket in self.buckets]

    def load_outer_state(self, state: List[Dict[str, Any]]) -> None:
        """Take up what `outer_state` gave.

        Raises:
            AveragingError: it is of other parameters.
        """
        sizes = [sum(each.numel() for each in bucket.parameters) for bucket in self.buckets]
        kept = [
            next((buffers[name].numel() for name in _OUTER_NAMES if buffers[name] is not None), None)
            for buffers in state
        ]
        if len(sizes) != len(kept) or any(size not in {None, mine} for mine, size in zip(sizes, kept)):
            raise AveragingError("the checkpoint's outer state belongs to other parameters")
        for bucket, count in zip(self.buckets, state):
            for name in _OUTER_NAMES:
                # Without an anchor there, all has been sent as it is so far: what was loaded is the anchor.
                if count[name] is not None and (name != "anchor" or bucket.anchor is not None):
                    setattr(bucket, name, count[name].to(bucket.parameters[0].device))


class ParameterAveraging:
    """All rounds of this worker."""

    def __init__(self, settings: AveragingSettings, steps: Steps) -> None:
        self.settings = settings
        self.rank = int(os.environ.get("RANK", "0"))
        self.stepped = False  # whether an optimizer has stepped since this was last set to False
        self.listeners: List[Callable[[], None]] = []  # called when a round has ended
        self._steps = steps
        self._step = 0
        self._pending: List[Dict[str, Any]] = []
        self._groups: Optional[_Groups] = None
        # In the order in which all workers made them; a set would have another order in each.
        self._made: List[Callable[[], Any]] = []
        # By name, what each of them averages the gradients of: DDP does not look again when it is frozen.
        self._trained: weakref.WeakKeyDictionary[Any, List[str]] = weakref.WeakKeyDictionary()
        self._rounds: weakref.WeakKeyDictionary[Any, Round] = weakref.WeakKeyDictionary()
        self._has_warned = False

    def hook_ddp(self, module: Any) -> None:
        """DDP trains inside its node, from parameters that are rank 0's on all nodes."""
        ddp = module.DistributedDataParallel
        init, signature = ddp.__init__, inspect.signature(ddp.__init__)

        @functools.wraps(init)
        def initialised(*args: Any, **kwargs: Any) -> None:
            bound = signature.bind(*args, **kwargs)
            groups = self._meet()
            given = bound.arguments.get("process_group")
            if bound.arguments.get("device_mesh") is not None or (given is not None and given is not groups.world):
                raise self.refusal("DistributedDataParallel uses its own process group")
            _broadcast_from_first(bound.arguments, groups.world)
            bound.arguments["process_group"] = groups.node
            init(*bound.args, **bound.kwargs)
            made = bound.arguments["self"]
            if made._use_python_reducer or made._delay_all_reduce_all_params:  # noqa: SLF001 - torch has no other
                raise self.refusal("this DistributedDataParallel bypasses its reducer")
            self._made.append(weakref.ref(made))
            self._trained[made] = _trained_names(made)

        ddp.__init__ = initialised
        ddp.register_comm_hook = self._refusing("the training registers its own communication hook")
        ddp.join = self._refusing("DistributedDataParallel.join lets workers make different numbers of steps")

    def hook_optimizers(self, module: Any) -> None:
        """Each optimizer's steps are counted; the H-th ends a round."""

        def before(optimizer: Any, *_: Any) -> None:
            self._before_step(optimizer)

        def after(optimizer: Any, *_: Any) -> None:
            self._after_step(optimizer)

        module.register_optimizer_step_pre_hook(never_compiled(before))
        module.register_optimizer_step_post_hook(never_compiled(after))

    def hook_grad_scaler(self, module: Any) -> None:
        """A scaler leaves out a step where gradients overflow, and a node would leave it out alone."""
        scaler = module.GradScaler
        step = vars(scaler).get("step")
        if step is None:
            return

        @functools.wraps(step)
        def refused(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if scaler.is_enabled():
                raise self.refusal("fp16 with a GradScaler: a node would skip a step alone", "train in bf16")
            return step(scaler, *args, **kwargs)

        scaler.step = refused

    def hook_zero_redundancy(self, module: Any) -> None:
        """Its workers step a part of the parameters each, and send it to all others."""
        module.ZeroRedundancyOptimizer.__init__ = self._refusing(
            "ZeroRedundancyOptimizer shards its state over all nodes"
        )

    def hook_saving(self, module: Any, name: str) -> None:
        """What rank 0 saves inside a round is its own node's, and is told once."""
        save = getattr(module, name)

        @functools.wraps(save)
        def saved(*args: Any, **kwargs: Any) -> Any:
            self._warn_if_open()
            return save(*args, **kwargs)

        setattr(module, name, saved)

    def round_of(self, optimizer: Any) -> Round:
        """The round of an optimizer, which begins with its first step.

        Raises:
            AveragingError: its parameters cannot be averaged.
        """
        round_ = self._rounds.get(optimizer)
        if round_ is None:
            round_ = self._rounds[optimizer] = Round()
        listed = [each for group in optimizer.param_groups for each in group["params"]]
        # An optimizer may be given more later, as layers are unfrozen; until then these are equal everywhere.
        if len(listed) > round_.known:
            new, round_.known = listed[round_.known :], len(listed)
            trained = {
                id(each)
                for module in self._modules()
                for name, each in module.module.named_parameters()
                if name in self._trained[module]
            }
            round_.buckets += self._make_buckets([each for each in new if id(each) in trained])
        if not round_.buckets:
            raise self.refusal(
                "an optimizer updates parameters outside DistributedDataParallel, as with FSDP and DeepSpeed",
                "train with DDP, or remove the option",
            )
        return round_

    def close(self, reason: str) -> None:
        """End the rounds that are open, so that all workers' parameters are equal; every worker has to call this."""
        for round_ in list(self._rounds.values()):
            if round_.position:
                self._average(round_, reason)

    def end_step(self, step: int) -> Dict[str, Any]:
        """A meter: rounds that ended since the last step are of this one."""
        self._step = step
        self.flush(step)
        return {}

    def flush(self, step: Optional[int] = None) -> None:
        """Record the rounds that ended since the last step, as of the next one without a number."""
        for fields in self._pending:
            self._steps.note("sync", step=self._step + 1 if step is None else step, **fields)
        self._pending = []

    def refusal(self, why: str, instead: str = "remove the option") -> AveragingError:
        """The error of what cannot be averaged."""
        return AveragingError(("multinode: %s: %s; %s" % (self.settings.option, why, instead))[:_MOST_WORDS])

    def tell(self, message: str) -> None:
        """Say something that does not end the training."""
        self._steps.note("note", message=message[:_MOST_WORDS])
        sys.stderr.write("multinode: %s\n" % message[:_MOST_WORDS])

    @property
    def leads(self) -> bool:
        """Whether this worker is the first of its node."""
        return self.leader == self.rank

    @property
    def leader(self) -> int:
        """The global rank of this node's first worker."""
        return max(first for first in self.settings.firsts if first <= self.rank)

    def _refusing(self, why: str) -> Callable[..., Any]:
        def refused(*_: Any, **__: Any) -> Any:
            raise self.refusal(why)

        return refused

    def _meet(self) -> _Groups:
        """The groups, made by all workers when the first DDP module is."""
        c10d = sys.modules["torch.distributed.distributed_c10d"]
        world = c10d._get_default_group()  # noqa: SLF001 - DDP asks so
        if self._groups is None or self._groups.world is not world:
            self._groups = self._make_groups(c10d, world)
            self._steps.note("averaging", nodes=self._groups.size, **_as_recorded(self.settings))
        return self._groups

    def _make_groups(self, c10d: Any, world: Any) -> _Groups:
        workers, firsts, timeout = self.settings.workers, self.settings.firsts, _timeout(world)
        if world.size() != sum(workers) or world.rank() != self.rank:
            raise self.refusal("the world size is %d, but the nodes have %s" % (world.size(), list(workers)))
        nodes = [
            c10d.new_group(list(range(first, first + count)), timeout=timeout) for first, count in zip(firsts, workers)
        ]
        leaders = c10d.new_group(list(firsts), timeout=timeout)
        node = firsts.index(self.leader)
        return _Groups(
            world=world,
            node=nodes[node],
            leader=self.leader,
            leaders=leaders if self.leads else None,
            size=len(firsts),
            share=workers[node] / sum(workers),
        )

    def _make_buckets(self, parameters: List[Any]) -> List[_Bucket]:
        keeps = self.settings.keeps_anchor and self.leads
        return [_Bucket(each, _wide(_flat(each)) if keeps else None) for each in _in_buckets(parameters)]

    def _before_step(self, optimizer: Any) -> None:
        torch = sys.modules["torch"]
        if torch._C._current_graph_task_id() != -1:  # noqa: SLF001 - torch asks itself so
            raise self.refusal("an optimizer updates each parameter inside the backward pass")
        if not self._modules():
            raise self.refusal(
                "the model is not wrapped in DistributedDataParallel; FSDP, DeepSpeed and models with their own "
                "synchronization cannot be averaged",
                "train with DDP, or remove the option",
            )
        self.round_of(optimizer)

    def _after_step(self, optimizer: Any) -> None:
        round_ = self._rounds[optimizer]
        round_.position += 1
        self.stepped = True
        if round_.position >= self.settings.every:
            self._average(round_, "round")

    def _average(self, round_: Round, reason: str) -> None:
        torch, groups = sys.modules["torch"], self._meet()
        # What a GPU has yet to compute is none of the round's time, and what it has yet to send is.
        _wait_for_devices(round_)
        began, sent_bytes, squares = time.monotonic(), 0, []
        with torch.no_grad():
            for bucket in round_.buckets:
                flat = _flat(bucket.parameters)
                if groups.leaders is not None:
                    new, bytes_of, drift = self._average_bucket(groups, bucket, flat)
                    sent_bytes += bytes_of
                    squares.append(drift)
                    flat.copy_(new)
                if groups.node.size() > 1:
                    torch.distributed.broadcast(flat, groups.leader, group=groups.node)
                _unflatten(flat, bucket.parameters)
            for buffers in self._buffers():
                for group in filter(None, (groups.leaders, groups.node)):
                    torch.distributed._broadcast_coalesced(group, buffers, _BUCKET_BYTES, 0)  # noqa: SLF001 - as DDP
        _wait_for_devices(round_)
        took_s = time.monotonic() - began
        self._pending.append(
            {
                "steps": round_.position,
                "reason": reason,
                "size_bytes": sent_bytes,
                "drift": sum(map(float, squares)) ** 0.5 if self.leads else None,
                "sync_us": took_s * 1e6,
            }
        )
        round_.position = 0
        for listener in self.listeners:
            listener()

    def _average_bucket(self, groups: _Groups, bucket: _Bucket, flat: Any) -> Any:
        """Of a node's first worker: the new parameters, bytes of the all-reduce, the square of the drift."""
        torch = sys.modules["torch"]
        own = flat if bucket.anchor is None else flat.to(bucket.anchor.dtype) - bucket.anchor
        scale, sent = 1.0, own * groups.share
        if self.settings.dtype is not None:
            if self.settings.dtype == "fp16":
                scale = _fp16_scale(own, groups.leaders)
                sent *= scale
            sent = sent.to(getattr(torch, _DTYPES[self.settings.dtype]))
        torch.distributed.all_reduce(sent, group=groups.leaders)
        mean = sent.to(own.dtype)
        if self.settings.dtype == "fp16":
            mean /= scale
        drift = torch.linalg.vector_norm(own - mean).double().square()
        return self._step_outer(bucket, mean), sent.nbytes, drift

    def _step_outer(self, bucket: _Bucket, mean: Any) -> Any:
        """The parameters after the round, of the mean of parameters or of their change."""
        if bucket.anchor is None:
            return mean
        if self.settings.outer_lr is None:
            bucket.anchor += mean
        else:
            # torch.optim.SGD with nesterov, of the pseudo-gradient -mean.
            bucket.momentum = mean if bucket.momentum is None else bucket.momentum * self.settings.momentum + mean
            bucket.anchor += self.settings.outer_lr * (mean + self.settings.momentum * bucket.momentum)
        return bucket.anchor

    def _modules(self) -> List[Any]:
        return [module for module in (made() for made in self._made) if module is not None]

    def _buffers(self) -> Iterator[List[Any]]:
        """Of each module the buffers that DDP would have sent from rank 0 before each forward pass."""
        for module in self._modules():
            ignored = module.parameters_to_ignore
            buffers = [each for name, each in module.module.named_buffers() if name not in ignored]
            if buffers and module.broadcast_buffers:
                yield [each.detach() for each in buffers]

    def _warn_if_open(self) -> None:
        if self.rank == 0 and not self._has_warned and any(round_.position for round_ in self._rounds.values()):
            self._has_warned = True
            self.tell(
                "WARNING: a checkpoint was saved inside a round of %s: it "
                "has the parameters of node 0 only; save after a multiple of "
                "%d optimizer steps" % (self.settings.option, self.settings.every)
            )


def _wait_for_devices(round_: Round) -> None:
    torch = sys.modules["torch"]
    for device in {bucket.parameters[0].device for bucket in round_.buckets}:
        # torch.cuda, and likewise of every other kind, torch.cpu too.
        getattr(torch, device.type).synchronize(device)


def _as_recorded(settings: AveragingSettings) -> Dict[str, Any]:
    fields = settings._asdict()
    del fields["workers"], fields["option"]
    return fields


def _broadcast_from_first(arguments: Dict[str, Any], world: Any) -> None:
    """All workers of all nodes take the parameters and buffers of rank 0, as DDP's own `__init__` has it."""
    module = arguments["module"]
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    sends_buffers = arguments.get("broadcast_buffers", arguments.get("forward_sync_buffers")) is not False
    named = [*module.named_parameters(), *(module.named_buffers() if sends_buffers else ())]
    states = [each.detach() for name, each in named if name not in ignored]
    sys.modules["torch"].distributed._broadcast_coalesced(world, states, _BUCKET_BYTES, 0)  # noqa: SLF001 - as DDP


def _trained_names(module: Any) -> List[str]:
    """The parameters whose gradients DDP averages."""
    ignored = module.parameters_to_ignore
    return [name for name, each in module.module.named_parameters() if each.requires_grad and name not in ignored]


def _in_buckets(parameters: List[Any]) -> Iterator[List[Any]]:
    kinds: Dict[Any, List[Any]] = {}
    for each in parameters:
        if each.numel():
            kinds.setdefault((each.dtype, each.device), []).append(each)
    for same in kinds.values():
        bucket: List[Any] = []
        for each in same:
            if bucket and sum(tensor.nbytes for tensor in bucket) + each.nbytes > _BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(each)
        yield bucket


def _flat(parameters: List[Any]) -> Any:
    return sys.modules["torch"].cat([each.detach().reshape(-1) for each in parameters])


def _unflatten(flat: Any, parameters: List[Any]) -> None:
    """Copy in place: optimizers, and whoever else holds a parameter, hold it still."""
    at = 0
    for each in parameters:
        each.detach().copy_(flat[at : at + each.numel()].view(each.shape))
        at += each.numel()


def _wide(flat: Any) -> Any:
    """In at least fp32: what is added to it, round by round, may be less than its last bit."""
    return flat.float() if flat.element_size() < 4 else flat  # noqa: PLR2004 - bytes of fp32


def _fp16_scale(own: Any, leaders: Any) -> Any:
    """A power of two, equal on all nodes, that brings changes as small as 1e-8 to where fp16 has all of its digits."""
    torch = sys.modules["torch"]
    most = own.abs().max()
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=leaders)
    return torch.exp2(torch.floor(torch.log2(_FP16_ROOM / most.clamp(min=_LEAST))))


def _timeout(group: Any) -> Any:
    """That of the default group, which new ones do not take over; None where this torch does not tell."""
    torch = sys.modules["torch"]
    for device in ("cuda", "cpu"):
        with contextlib.suppress(AttributeError, RuntimeError):
            return group._get_backend(torch.device(device)).options._timeout  # noqa: SLF001 - torch has no other
    return None
