"""Averaging between nodes: local SGD and DiLoCo for a script that trains under DistributedDataParallel.

DDP gets the process group of its node, so gradients are averaged inside the node at each step. After every H-th step of
an optimizer, the first workers of all nodes average its parameters in a group of their own (`averaging`).

Nothing here is under the guard: without the averages, each node would train its own model, so a failure ends the
worker. A training that cannot be averaged is refused before its first step. `sync_trainer` handles the Trainer.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import time
import weakref
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

from ..compiler import never_compiled
from ..guard import Hooks
from ..steps import Steps
from .averaging import AveragingSettings, OuterOptimizer, fp16_scale

_BUCKET_BYTES = 64 << 20
_MOST_WORDS = 500


class AveragingError(RuntimeError):
    """This training cannot be averaged between nodes."""


def hooks(steps: Steps, averaging: ParameterAveraging) -> Hooks:
    """Hooks of the averaging; the guard must not swallow their exceptions."""
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

    world: Any  # the default group at their creation
    node: Any  # group of this node's workers
    leader: int  # global rank of this node's first worker
    leaders: Any  # group of all nodes' first workers; None if this worker is not the first of its node
    size: int  # number of nodes
    share: float  # fraction of all workers that are on this node: its weight in the average


class _Bucket(NamedTuple):
    """Parameters of one dtype and device that are sent together."""

    parameters: List[Any]
    outer: Optional[OuterOptimizer]  # on a node's first worker only


class Round:
    """One optimizer's parameters, and the progress of its round."""

    def __init__(self) -> None:
        self.position = 0  # optimizer steps since all workers' parameters were equal
        self.buckets: List[_Bucket] = []
        self.known = 0

    def outer_state(self) -> List[Dict[str, Any]]:
        """State of a first worker's outer optimizers for a checkpoint."""
        return [bucket.outer.state() for bucket in self.buckets if bucket.outer is not None]

    def load_outer_state(self, state: List[Dict[str, Any]]) -> None:
        """Restore the state of `outer_state`.

        Raises:
            AveragingError: the state belongs to other parameters.
        """
        sizes = [sum(each.numel() for each in bucket.parameters) for bucket in self.buckets]
        kept = [next((each.numel() for each in tensors.values() if each is not None), None) for tensors in state]
        if len(sizes) != len(kept) or any(size not in {None, mine} for mine, size in zip(sizes, kept)):
            raise AveragingError("the checkpoint's outer state belongs to other parameters")
        for bucket, tensors in zip(self.buckets, state):
            if bucket.outer is not None:
                bucket.outer.load_state(tensors, bucket.parameters[0].device)


class ParameterAveraging:
    """Averages the parameters of this worker's optimizers, each in its own rounds."""

    def __init__(self, settings: AveragingSettings, steps: Steps) -> None:
        self.settings = settings
        self.rank = int(os.environ.get("RANK", "0"))
        self.stepped = False  # whether an optimizer has stepped since this was last set to False
        self.listeners: List[Callable[[], None]] = []  # called after each round
        self._steps = steps
        self._step = 0
        self._pending: List[Dict[str, Any]] = []
        self._groups: Optional[_Groups] = None
        # DDP modules in the order of their creation, which is equal on all workers; that of a set would differ.
        self._made: List[Callable[[], Any]] = []
        # Names of the parameters whose gradients each module averages: DDP ignores whether they are frozen later.
        self._trained: weakref.WeakKeyDictionary[Any, List[str]] = weakref.WeakKeyDictionary()
        self._rounds: weakref.WeakKeyDictionary[Any, Round] = weakref.WeakKeyDictionary()
        self._has_warned = False

    def hook_ddp(self, module: Any) -> None:
        """Restrict DDP to the workers of its node; all nodes start with the parameters of rank 0."""
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
        ddp.register_comm_hook = self._refusing("the training code registers its own communication hook")
        ddp.join = self._refusing("DistributedDataParallel.join lets workers make different numbers of steps")

    def hook_optimizers(self, module: Any) -> None:
        """Count the steps of each optimizer; the H-th ends a round."""

        def before(optimizer: Any, *_: Any) -> None:
            self._before_step(optimizer)

        def after(optimizer: Any, *_: Any) -> None:
            self._after_step(optimizer)

        module.register_optimizer_step_pre_hook(never_compiled(before))
        module.register_optimizer_step_post_hook(never_compiled(after))

    def hook_grad_scaler(self, module: Any) -> None:
        """Refuse a GradScaler: it skips a step if gradients overflow, and one node would skip it alone."""
        scaler = module.GradScaler
        step = vars(scaler).get("step")
        if step is None:
            return

        @functools.wraps(step)
        def refused(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            if scaler.is_enabled():
                raise self.refusal(
                    "fp16 with a GradScaler: one node could skip a step that the others take", "train in bf16"
                )
            return step(scaler, *args, **kwargs)

        scaler.step = refused

    def hook_zero_redundancy(self, module: Any) -> None:
        """Refuse ZeroRedundancyOptimizer, whose workers each update a part of the parameters for all others."""
        module.ZeroRedundancyOptimizer.__init__ = self._refusing(
            "ZeroRedundancyOptimizer shards its state over all nodes"
        )

    def hook_saving(self, module: Any, name: str) -> None:
        """Warn once if rank 0 saves inside a round, when it only has its own node's parameters."""
        save = getattr(module, name)

        @functools.wraps(save)
        def saved(*args: Any, **kwargs: Any) -> Any:
            self._warn_if_open()
            return save(*args, **kwargs)

        setattr(module, name, saved)

    def round_of(self, optimizer: Any) -> Round:
        """The round of an optimizer; creates it before its first step.

        Raises:
            AveragingError: its parameters cannot be averaged.
        """
        round_ = self._rounds.get(optimizer)
        if round_ is None:
            round_ = self._rounds[optimizer] = Round()
        listed = [each for group in optimizer.param_groups for each in group["params"]]
        # An optimizer may get more parameters later, as layers are unfrozen; until then these are equal on all workers.
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
        """End open rounds, so that all workers' parameters are equal; every worker must call this."""
        for round_ in list(self._rounds.values()):
            if round_.position:
                self._average(round_, reason)

    def end_step(self, step: int) -> Dict[str, Any]:
        """A meter: assigns the rounds that ended since the last step to this one."""
        self._step = step
        self.flush(step)
        return {}

    def flush(self, step: Optional[int] = None) -> None:
        """Record the rounds that ended since the last step as those of `step`; None is the next step."""
        for fields in self._pending:
            self._steps.note("sync", step=self._step + 1 if step is None else step, **fields)
        self._pending = []

    def refusal(self, why: str, instead: str = "remove the option") -> AveragingError:
        """The error for a training that cannot be averaged."""
        return AveragingError(("multinode: %s: %s; %s" % (self.settings.option, why, instead))[:_MOST_WORDS])

    def tell(self, message: str) -> None:
        """Report something that does not end the training."""
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
        """The process groups; all workers create them together with the first DDP module."""
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
            share=self.settings.shares[node],
        )

    def _make_buckets(self, parameters: List[Any]) -> List[_Bucket]:
        return [
            _Bucket(each, OuterOptimizer(self.settings, _flat(each)) if self.leads else None)
            for each in _in_buckets(parameters)
        ]

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
        # The time of a round does not include earlier computation on a GPU, but includes the transfers of the round.
        _wait_for_devices(round_)
        began, sent_bytes, squares = time.monotonic(), 0, []
        with torch.no_grad():
            for bucket in round_.buckets:
                flat = _flat(bucket.parameters)
                if bucket.outer is not None:
                    new, bytes_of, drift = _average(groups, bucket.outer, flat)
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

    def _modules(self) -> List[Any]:
        return [module for module in (made() for made in self._made) if module is not None]

    def _buffers(self) -> Iterator[List[Any]]:
        """Buffers of each module that DDP would broadcast from rank 0 before each forward pass."""
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


def _average(groups: _Groups, outer: OuterOptimizer, flat: Any) -> Tuple[Any, int, Any]:
    """On a node's first worker: the new parameters, bytes of the all-reduce, and the squared drift."""
    distributed, change, scale = sys.modules["torch"].distributed, outer.change(flat), None
    if outer.needs_scale:
        largest = change.abs().max()
        distributed.all_reduce(largest, op=distributed.ReduceOp.MAX, group=groups.leaders)
        scale = fp16_scale(largest)
    sent = outer.pack(change, groups.share, scale)
    distributed.all_reduce(sent, group=groups.leaders)
    mean = outer.unpack(sent, change, scale)
    drift = sys.modules["torch"].linalg.vector_norm(change - mean).double().square()
    return outer.step(mean), sent.nbytes, drift


def _wait_for_devices(round_: Round) -> None:
    torch = sys.modules["torch"]
    for device in {bucket.parameters[0].device for bucket in round_.buckets}:
        # torch.cuda, torch.cpu and the modules of other devices all have `synchronize`.
        getattr(torch, device.type).synchronize(device)


def _as_recorded(settings: AveragingSettings) -> Dict[str, Any]:
    fields = settings._asdict()
    del fields["workers"], fields["option"]
    return fields


def _broadcast_from_first(arguments: Dict[str, Any], world: Any) -> None:
    """Broadcast the parameters and buffers of rank 0 to all workers of all nodes, as DDP's `__init__` does."""
    module = arguments["module"]
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    sends_buffers = arguments.get("broadcast_buffers", arguments.get("forward_sync_buffers")) is not False
    named = [*module.named_parameters(), *(module.named_buffers() if sends_buffers else ())]
    states = [each.detach() for name, each in named if name not in ignored]
    sys.modules["torch"].distributed._broadcast_coalesced(world, states, _BUCKET_BYTES, 0)  # noqa: SLF001 - as DDP


def _trained_names(module: Any) -> List[str]:
    """Names of the parameters whose gradients DDP averages."""
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
    """Copy into the parameters in place, since optimizers and others hold references to them."""
    at = 0
    for each in parameters:
        each.detach().copy_(flat[at : at + each.numel()].view(each.shape))
        at += each.numel()


def _timeout(group: Any) -> Any:
    """Timeout of the default group, which new groups do not inherit; None if unknown."""
    torch = sys.modules["torch"]
    for device in ("cuda", "cpu"):
        with contextlib.suppress(AttributeError, RuntimeError):
            return group._get_backend(torch.device(device)).options._timeout  # noqa: SLF001 - torch has no other
    return None
