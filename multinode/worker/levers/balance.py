"""Balance: under DistributedDataParallel a faster worker gets more samples of each step, and a slower one fewer.

A step trains on the same samples as without balance, but they are dealt out differently: torch's and accelerate's
samplers give each worker another part of the same global batch, so steps and epochs stay the same. A mean loss is then
a mean of different numbers of samples, but DDP would weight all workers equally. So the gradient of a mean is weighted
by the worker's count over the count of all workers (ADR 0041). A loss that is divided by the count of all workers needs
no weight.

Nothing here is under the guard: with wrong weights it would be another training, so a failure ends the worker. All
workers refuse a training that cannot be balanced in its first backward pass.
"""

from __future__ import annotations

import copy
import functools
import heapq
import inspect
import itertools
import json
import os
import sys
import weakref
from typing import Any, Callable, Dict, FrozenSet, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from .. import compiler
from ..ddp import around_preparation
from ..guard import Hooks
from ..steps import Steps

VARIABLE = "MULTINODE_BALANCE"
"""Environment variable with the fields of BalanceSettings in JSON."""

_MOST_WORDS = 500
_NO_LOADER = "no DataLoader with a DistributedSampler or from accelerate was read before the first backward pass"
_ELSEWHERE = "another worker cannot be balanced; its log says why"


class BalanceError(RuntimeError):
    """This training cannot be balanced."""


class BalanceSettings(NamedTuple):
    """Speeds of the workers, and how to deal by them."""

    speeds: Tuple[float, ...]  # of each rank, in any unit
    accumulation: int = 1  # micro-batches of a step, over which shares are rounded; a Trainer's own number wins
    option: str = "--balance"  # as the user typed it


def read_settings(text: str) -> BalanceSettings:
    """Parse the value of VARIABLE."""
    fields = json.loads(text)
    return BalanceSettings(**{**fields, "speeds": tuple(fields["speeds"])})


def hooks(steps: Steps) -> Hooks:
    """Hooks of the balance, if requested; the guard must not swallow their exceptions."""
    text = os.environ.get(VARIABLE)
    if not text:
        return []
    balance = BatchBalance(read_settings(text), steps)
    return [
        ("torch.utils.data.dataloader", balance.hook_loaders),
        ("accelerate.data_loader", balance.hook_shards),
        ("transformers.trainer", balance.hook_trainer),
        ("torch.nn.functional", balance.hook_losses),
        ("torch.nn.parallel.distributed", balance.hook_ddp),
        ("torch.autograd", balance.hook_backward),
        ("torch.optim.optimizer", balance.hook_optimizers),
    ]


def deal(samples: int, speeds: Sequence[float], dealt: Sequence[int]) -> List[int]:
    """Samples of each worker in a micro-batch, at least one; each goes to the worker that would finish it first.

    Args:
        samples: samples of all workers, at least one per worker.
        speeds: speed of each worker.
        dealt: samples of each worker in earlier micro-batches of the step.
    """
    sizes = [1] * len(speeds)
    due = [((dealt[rank] + 2) / speed, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(due)
    for _ in range(samples - len(speeds)):
        rank = due[0][1]
        sizes[rank] += 1
        heapq.heapreplace(due, ((dealt[rank] + sizes[rank] + 1) / speeds[rank], rank))
    return sizes


class BatchBalance:
    """Changes the samples and gradients of this worker."""

    def __init__(self, settings: BalanceSettings, steps: Steps) -> None:
        self.settings = settings
        self.rank = int(os.environ.get("RANK", "0"))  # global rank of this worker
        self._steps = steps
        self._accumulation = settings.accumulation
        self._has_dealt = False
        self._has_told = False
        # Why the last loader is left unchanged, and why a loss cannot be weighted.
        self._why_no_loader = _NO_LOADER
        self._why_no_weight = ""
        self._of_trainer: weakref.WeakSet[Any] = weakref.WeakSet()
        self._makes_training_loader = False
        # The Trainer's divisor of losses: "all" is the count of all workers, a number is that of this worker.
        self._divisor: Any = None
        # DDP modules whose forward passes came since the last backward pass, and the number of mean losses since.
        self._forward: List[Any] = []
        self._means = 0
        # Expected number of mean losses, by the last of these modules and the set of them: a training may have several.
        self._expected: weakref.WeakKeyDictionary[Any, Dict[FrozenSet[int], int]] = weakref.WeakKeyDictionary()

    # Samples of each worker.

    def hook_loaders(self, module: Any) -> None:
        """Deal out the batches of a DataLoader with a shuffling DistributedSampler; others may be for evaluation."""
        init, iterate = module.DataLoader.__init__, module.DataLoader.__iter__

        @functools.wraps(init)
        def initialised(loader: Any, *args: Any, **kwargs: Any) -> None:
            init(loader, *args, **kwargs)
            if self._why_no_loading(loader) is None:
                # DataLoader's own __setattr__ refuses this. Its length and its iterator read the new attribute.
                object.__setattr__(loader, "batch_sampler", _Dealt(self, loader.batch_sampler))

        @functools.wraps(iterate)
        def iterated(loader: Any) -> Any:
            # `hook_shards` handles accelerate's loaders.
            if not hasattr(loader.batch_sampler, "batch_sampler"):
                self._why_no_loader = self._why_no_loading(loader) or _NO_LOADER
            return iterate(loader)

        module.DataLoader.__init__, module.DataLoader.__iter__ = initialised, iterated

    def hook_shards(self, module: Any) -> None:
        """Deal out the batches of accelerate's loaders that shuffle or belong to a Trainer's training."""
        shard_type = module.BatchSamplerShard
        init, iterate = shard_type.__init__, shard_type.__iter__

        @functools.wraps(init)
        def initialised(shard: Any, *args: Any, **kwargs: Any) -> None:
            init(shard, *args, **kwargs)
            if self._makes_training_loader:
                self._of_trainer.add(shard)

        @functools.wraps(iterate)
        def dealt(shard: Any) -> Iterator[List[int]]:
            shuffles = hasattr(getattr(shard.batch_sampler, "sampler", None), "replacement")
            if shard not in self._of_trainer and not shuffles:
                return iter(iterate(shard))
            why = self._why_no_shard(shard)
            if why is not None:
                self._why_no_loader = why
                return iter(iterate(shard))
            return self.deal_out(_shard_batches(shard))

        shard_type.__init__, shard_type.__iter__ = initialised, dealt

    def hook_trainer(self, module: Any) -> None:
        """Learn from the Trainer which loader it trains with, and its divisor of losses."""
        trainer_type = module.Trainer
        make_loader, train_step = trainer_type.get_train_dataloader, trainer_type.training_step

        @functools.wraps(make_loader)
        def made(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            self._accumulation = int(trainer.args.gradient_accumulation_steps)
            self._makes_training_loader = True
            try:
                return make_loader(trainer, *args, **kwargs)
            finally:
                self._makes_training_loader = False

        @functools.wraps(train_step)
        def stepped(trainer: Any, model: Any, inputs: Any, num_items_in_batch: Any = None, **kwargs: Any) -> Any:
            self._divisor = _divisor(trainer, num_items_in_batch)
            given = () if num_items_in_batch is None else (num_items_in_batch,)
            return train_step(trainer, model, inputs, *given, **kwargs)

        trainer_type.get_train_dataloader, trainer_type.training_step = made, stepped

    def deal_out(self, batches: Iterator[List[int]]) -> Iterator[List[int]]:
        """This worker's part of each micro-batch of all workers; shares are rounded over each step."""
        self._has_dealt = True
        speeds, dealt = self.settings.speeds, [0] * len(self.settings.speeds)
        for place, batch in enumerate(batches):
            if place % self._accumulation == 0:
                dealt = [0] * len(speeds)
            if len(batch) < len(speeds):
                raise self.refusal("a micro-batch of all workers has %d samples" % len(batch))
            sizes = deal(len(batch), speeds, dealt)
            dealt = [before + size for before, size in zip(dealt, sizes)]
            if place + 1 == self._accumulation and len(set(dealt)) == 1:
                self._tell_equal(dealt[0])
            first = sum(sizes[: self.rank])
            yield batch[first : first + sizes[self.rank]]

    # Weights of gradients.

    def hook_losses(self, module: Any) -> None:
        """Weight the gradients of torch's mean losses."""
        for name, count in _COUNTS.items():
            function = getattr(module, name)
            setattr(module, name, self._weighted(name, function, count))

    def hook_ddp(self, module: Any) -> None:
        """Watch forward passes of DDP modules: losses between a forward and its backward pass belong to it."""
        around_preparation(module, self._before_forward)

        def refused(*_: Any, **__: Any) -> Any:
            raise self.refusal("DistributedDataParallel.join lets workers make different numbers of steps")

        module.DistributedDataParallel.join = refused

    def hook_backward(self, module: Any) -> None:
        """Check each backward pass; in the first one, all workers agree whether they can be balanced."""
        backward = module.backward

        @functools.wraps(backward)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if not compiler.is_compiling() and self._forward:
                self._before_backward()
            return backward(*args, **kwargs)

        module.backward = checked

    def hook_optimizers(self, module: Any) -> None:
        """Refuse a step without DDP, which belongs to another strategy."""

        def before(*_: Any) -> None:
            if not self._expected:
                raise self.refusal(
                    "the first step had no DistributedDataParallel; ZeRO and FSDP communicate in every micro-batch"
                )

        module.register_optimizer_step_pre_hook(compiler.never_compiled(before))

    def refusal(self, why: str) -> BalanceError:
        """The error for a training that cannot be balanced."""
        message = "multinode: %s: %s; remove the option" % (self.settings.option, why)
        return BalanceError(message[:_MOST_WORDS])

    def _before_forward(self, module: Any) -> None:
        if sys.modules["torch"].is_grad_enabled() and module.training:
            self._forward.append(module)

    def _before_backward(self) -> None:
        """Check the losses of a micro-batch; every worker calls this once per micro-batch."""
        (*_, last), together = self._forward, frozenset(map(id, self._forward))
        means, self._means, self._forward = self._means, 0, []
        expected = self._expected.setdefault(last, {})
        if together not in expected:
            self._agree(last, means)
            expected[together] = means
        elif self._why_no_weight:
            raise self.refusal(self._why_no_weight)
        elif means != expected[together]:
            # The other workers would wait in an all-reduce that this one does not call.
            message = "loss functions were called %d times, compared with %d times in the first step"
            raise self.refusal(message % (means, expected[together]))

    def _agree(self, module: Any, means: int) -> None:
        """Refuse on all workers if one of them cannot be balanced; all of them call this at the same point."""
        torch = sys.modules["torch"]
        why = self._why_no_weight
        if not why and not self._has_dealt:
            why = self._why_no_loader
        if not why and module.process_group.size() != len(self.settings.speeds):
            why = "DistributedDataParallel has a process group of %d workers" % module.process_group.size()
        if not why and not means and self._divisor != "all":
            why = "no loss function of torch.nn.functional was called, so it is unknown what the loss is averaged over"
        refused = torch.tensor(1.0 if why else 0.0, device=module.device)
        torch.distributed.all_reduce(refused, op=torch.distributed.ReduceOp.MAX, group=module.process_group)
        if refused.item():
            raise self.refusal(why or _ELSEWHERE)

    def _weighted(self, name: str, function: Callable[..., Any], count: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def weighted(*args: Any, **kwargs: Any) -> Any:
            loss = function(*args, **kwargs)
            if not compiler.is_compiling() and self._forward and loss.requires_grad:
                bound = signature.bind(*args, **kwargs)
                bound.apply_defaults()
                self._weigh(name, loss, bound.arguments, count)
            return loss

        return weighted

    def _weigh(self, name: str, loss: Any, arguments: Dict[str, Any], count: Callable[..., Any]) -> None:
        """Scale the gradient of a loss: DDP averages over workers, whose parts of the global mean are unequal."""
        torch = sys.modules["torch"]
        reduction = arguments.get("reduction")
        if arguments.get("size_average") is not None or arguments.get("reduce") is not None:
            reduction = "unknown"
        if reduction in ("mean", "batchmean"):
            mine = count(torch, arguments)
        elif self._divisor == "all":
            return
        else:
            mine = self._divisor
        if mine is None:
            self._why_no_weight = (
                "it is unknown whether the script divides %s(reduction=%r) by the total of all workers"
                % (name, reduction)
            )
            return
        self._means += 1
        mine = torch.as_tensor(mine, dtype=torch.float32).detach().to(loss.device)
        total, group = mine.clone(), self._forward[-1].process_group
        work = torch.distributed.all_reduce(total, group=group, async_op=True)
        workers = group.size()

        def scale(gradient: Any) -> Any:
            work.wait()
            return (gradient * (workers * mine / total)).to(gradient.dtype)

        loss.register_hook(scale)

    def _why_no_loading(self, loader: Any) -> Optional[str]:
        sampler, batches, dataset = loader.sampler, loader.batch_sampler, type(loader.dataset)
        if any(base.__name__ == "IterableDataset" for base in dataset.__mro__):
            return "the data set is an IterableDataset (%s), whose samples cannot be distributed" % dataset.__name__
        if not self._is_torchs(batches, "torch.utils.data.sampler", "BatchSampler"):
            return "the DataLoader uses a custom batch sampler (%s)" % type(batches).__name__
        if not self._is_torchs(sampler, "torch.utils.data.distributed", "DistributedSampler"):
            return "the DataLoader uses %s instead of a DistributedSampler" % type(sampler).__name__
        if sampler.num_replicas != len(self.settings.speeds):
            return "the DistributedSampler is for %d workers" % sampler.num_replicas
        return None if sampler.shuffle else "the DistributedSampler does not shuffle, so it may belong to an evaluation"

    def _why_no_shard(self, shard: Any) -> Optional[str]:
        if not self._is_torchs(shard.batch_sampler, "torch.utils.data.sampler", "BatchSampler"):
            return "the DataLoader uses a custom batch sampler (%s)" % type(shard.batch_sampler).__name__
        if shard.num_processes != len(self.settings.speeds):
            return "accelerate distributes samples to %d workers" % shard.num_processes
        if not getattr(shard, "even_batches", True) and not shard.drop_last:
            return "even_batches=False lets workers make different numbers of steps"
        return None

    @staticmethod
    def _is_torchs(value: Any, module: str, name: str) -> bool:
        """Whether the value has exactly torch's class: a subclass may yield anything."""
        return type(value) is getattr(sys.modules.get(module), name, None)

    def _tell_equal(self, samples: int) -> None:
        if self._has_told or self.rank:
            return
        self._has_told = True
        message = (
            "%s changes nothing: each worker gets the same number of samples per step (%d); only larger micro-batches "
            "could be split further"
            % (
                self.settings.option,
                samples,
            )
        )
        self._steps.note("note", message=message)
        sys.stderr.write("multinode: %s\n" % message)


class _Dealt:
    """Replaces torch's batch sampler over a DistributedSampler; as many batches, with this worker's share of each."""

    def __init__(self, balance: BatchBalance, batches: Any) -> None:
        self._balance = balance
        self.sampler, self.batch_size, self.drop_last = batches.sampler, batches.batch_size, batches.drop_last

    def __len__(self) -> int:
        samples, size = len(self.sampler), int(self.batch_size)
        return samples // size if self.drop_last else -(-samples // size)

    def __iter__(self) -> Iterator[List[int]]:
        # The order of all workers' samples, padded or truncated by the sampler itself, in the epoch that the user set.
        whole = copy.copy(self.sampler)
        whole.num_replicas, whole.rank, whole.num_samples = 1, 0, whole.total_size
        size = self.batch_size * self.sampler.num_replicas
        return self._balance.deal_out(_chunks(iter(whole), size, drop_last=self.drop_last))


def _chunks(samples: Iterator[int], size: int, *, drop_last: bool) -> Iterator[List[int]]:
    while True:
        chunk = list(itertools.islice(samples, size))
        if not chunk or (drop_last and len(chunk) < size):
            return
        yield chunk


def _shard_batches(shard: Any) -> Iterator[List[int]]:
    """Each micro-batch of all workers; the last one is padded from the first, as in accelerate."""
    size = shard.batch_size * (1 if shard.split_batches else shard.num_processes)
    first: List[int] = []
    samples: List[int] = []
    for batch in shard.batch_sampler:
        samples = samples + list(batch)
        if len(samples) == size:
            first = first or samples
            yield samples
            samples = []
    if samples and not shard.drop_last:
        yield samples + list(itertools.islice(itertools.cycle(first or samples), size - len(samples)))


def _divisor(trainer: Any, num_items: Any) -> Any:
    """The Trainer's divisor of a loss: "all", or this worker's items; None if each batch has its own mean.

    A loss divided by all workers' items is then multiplied by their number (transformers 5.6, Trainer.compute_loss).
    """
    takes = trainer.model_accepts_loss_kwargs or getattr(trainer, "compute_loss_func", None) is not None
    if num_items is None or not takes or trainer.label_smoother is not None:
        return None
    return "all" if getattr(trainer.args, "average_tokens_across_devices", False) else num_items


def _targets(torch: Any, arguments: Dict[str, Any]) -> Any:
    """Divisor of a mean cross entropy: the class weights of targets that are not ignored; rows for probabilities."""
    target, weight, inputs = arguments["target"], arguments.get("weight"), arguments["input"]
    if target.is_floating_point():
        return inputs.numel() / inputs.shape[1 if inputs.ndim > 1 else 0]
    valid = target.ne(arguments["ignore_index"])
    return valid.sum() if weight is None else weight[torch.where(valid, target, 0)].mul(valid).sum()


def _elements(torch: Any, arguments: Dict[str, Any]) -> Any:
    # With a weight, these losses take the mean sum(w l) / sum(w), whose divisor is unknown here.
    if arguments.get("weight") is not None:
        return None
    return torch.broadcast_shapes(arguments["input"].shape, arguments["target"].shape).numel()


def _unweighted_elements(torch: Any, arguments: Dict[str, Any]) -> Any:
    return _elements(torch, {**arguments, "weight": None})


def _rows(torch: Any, arguments: Dict[str, Any]) -> Any:
    return arguments["input"].shape[0] if arguments["reduction"] == "batchmean" else _elements(torch, arguments)


_COUNTS: Dict[str, Callable[..., Any]] = {
    "cross_entropy": _targets,
    "nll_loss": _targets,
    "mse_loss": _elements,
    "l1_loss": _elements,
    "smooth_l1_loss": _elements,
    "huber_loss": _elements,
    "kl_div": _rows,
    "binary_cross_entropy": _unweighted_elements,
    "binary_cross_entropy_with_logits": _unweighted_elements,
}
