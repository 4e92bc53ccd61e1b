"""Batches: how many forward passes, samples and tokens a step had, by the inputs of the model that trains.

The outermost call that is given a batch counts it: the Trainer's training step, else that of the wrapped model
(`forward`). A bare model in a loop of one's own is not seen.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any, Callable, Deque, Dict, Iterator, List, NamedTuple, Optional, Tuple

from . import forward
from .guard import Guard, Hooks
from .phases import PhaseClock
from .steps import Steps

_DEEPEST = 3
# Masks that are all counted, of short trainings every one; and then of every how many steps.
_ALL_OF_FIRST = 10
_EACH = 8
# What a mask counts for beside the one after it, in what those between are taken for.
_KEPT = 0.75

Poll = Callable[[], Optional[int]]
"""Returns a count, or None while it is not known yet."""


def hooks(steps: Steps, guard: Guard) -> Hooks:
    """Count the batches of each step; the meter is added to those of `steps`."""
    batches = Batches(steps.phases)
    steps.meters.append(batches)

    def watch(call: Callable[..., Any]) -> Callable[..., Any]:
        return guard.around(call, batches.begin, batches.end)

    def watch_trainer(module: Any) -> None:
        trainer: Any = getattr(module, "Trainer", None)
        if hasattr(trainer, "training_step"):
            trainer.training_step = guard.around(trainer.training_step, batches.begin_trainer, batches.end)

    return [
        ("transformers.trainer", watch_trainer),
        *forward.hooks(watch),
    ]


class _Look(NamedTuple):
    """What is to be seen of one batch; None is unknown."""

    samples: Optional[int] = None
    tokens: Optional[int] = None
    # which of the tokens are no padding, and of which sequence of their row they are (1, 2, ... where packed).
    mask: Any = None
    positions: Any = None  # of each token in its sequence, where there is no such mask
    squares: Optional[int] = None  # of the lengths of sequences, summed up, where it takes no looking at either


def start_count(torch: Any, tensor: Any, count: Callable[[Any, Any], Any]) -> Optional[Poll]:
    """Begin to count something in an attention mask, or in positions; None where that cannot be had for nothing.

    A count on a GPU is asked for at once and known later: the host never waits for the device.

    More than a plain tensor (one spread over workers, as DTensor is) is left alone: to add it up could be a collective.

    Args:
        torch: the module.
        tensor: on a processor or a GPU.
        count: makes a tensor of one number of it, given `torch` as well.
    """
    if type(tensor) is not torch.Tensor:
        return None
    if tensor.device.type == "cpu":
        counted = int(count(torch, tensor))
        return lambda: counted
    if tensor.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        return _start_on_gpu(torch, count(torch, tensor), tensor.device)
    return None


def count_tokens(_torch: Any, mask: Any) -> Any:
    """The tokens that an attention mask does not hide."""
    return mask.ne(0).sum()


def count_squares(torch: Any, mask: Any) -> Any:
    """Squares of the lengths of sequences: runs of one value other than zero, in the rows of an attention mask."""
    places = torch.arange(mask.shape[-1], device=mask.device).expand(mask.shape)
    begins = torch.zeros_like(places)
    begins[..., 1:] = places[..., 1:] * mask[..., 1:].ne(mask[..., :-1])
    return (_odd(places - begins.cummax(-1).values) * mask.ne(0)).sum()


def count_squares_by_position(_torch: Any, positions: Any) -> Any:
    """Likewise of tokens at these positions of their sequences."""
    return _odd(positions).sum()


def _odd(positions: Any) -> Any:
    """What a token adds to the square of its sequence's length: 1 + 3 + 5 + ... + (2 l - 1) is l squared."""
    return 2 * positions + 1


class Batches:
    """Counts the batches of one model: that which was given one first, until it is gone or rests for a whole step.

    Samples are rows: of packed rows, each of which holds several texts, too. Tokens are those of `input_ids` alone,
    where the model has a decoder besides. Effective tokens are what the attention mask does not hide; without a mask of
    their shape they are unknown, as in packed batches, which tell their borders by other means. On a GPU they are
    counted there and known some steps later: `effective_tokens` of a step are those that have become known since the
    step before. Sums over many steps are right but for the last few steps. So it is with `squared_lengths`, of the
    sequences that attend to themselves alone: those that the mask tells apart, or else their positions; without either
    each row is one.

    To count takes the host as long as a small step may: after the first masks those of one step in `_EACH` are counted.
    The others are taken to be as those before; `estimated_tokens` of a step are the tokens of which this is so.

    Args:
        clock: knows whether the training is inside a backward pass, where forward passes recompute what was counted.
    """

    def __init__(self, clock: PhaseClock, start: Callable[..., Optional[Poll]] = start_count) -> None:
        self._clock = clock
        self._start = start
        self._inside = False
        self._model: Callable[[], Any] = lambda: None
        self._idle = True
        self._looks: List[_Look] = []
        self._steps = 0
        self._counted = 0
        self._estimated = 0
        self._effective, self._squares = _Sum(), _Sum()

    def begin(self, model: Any, *args: Any, **kwargs: Any) -> bool:
        """A model is called; False where the call belongs to one that is watched already, or is none of training."""
        torch = sys.modules.get("torch")
        # A compiled module of torch 2.4 trains for ever, by its own account.
        trained = getattr(model, "_orig_mod", model)
        if self._inside or torch is None or not (trained.training and torch.is_grad_enabled()):
            return False
        if self._clock.within("backward"):
            return False
        return self._begin(torch, model, args, kwargs)

    def begin_trainer(self, trainer: Any, _model: Any, inputs: Any = None, *_: Any, **__: Any) -> bool:
        """The Trainer has a batch to train on."""
        torch = sys.modules.get("torch")
        if self._inside or torch is None:
            return False
        return self._begin(torch, trainer, (inputs,), {})

    def end(self) -> None:
        """What began has ended."""
        self._inside = False

    def __call__(self, _step: int) -> Dict[str, Any]:
        """The fields of a step: what was counted since the step before; none where nothing was."""
        looks, self._looks = self._looks, []
        estimated, self._estimated = self._estimated, 0
        self._steps += 1
        self._idle = not looks
        effective, squares = self._effective.take(), self._squares.take()
        if not looks:
            return {}
        return {
            "micro_steps": len(looks),
            "samples": _sum(look.samples for look in looks),
            "tokens": _sum(look.tokens for look in looks),
            "effective_tokens": effective,
            "squared_lengths": squares,
            **({"estimated_tokens": estimated} if estimated else {}),
        }

    def _begin(self, torch: Any, model: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> bool:
        # One that cannot be counted has no end that would be told.
        self._count(torch, model, args, kwargs)
        self._inside = True
        return True

    def _count(self, torch: Any, model: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> None:
        ours = self._model()
        if ours is not model:
            if ours is not None and not self._idle:
                return
            self._model = weakref.ref(model)
        self._idle = False
        look = _look(torch, args, kwargs)
        self._looks.append(look)
        if look.tokens is not None and (look.mask is not None or look.positions is not None):
            self._count_tensor(torch, look, look.tokens)
            return
        self._effective.add(None)
        self._squares.add(None if look.squares is None else (lambda: look.squares))

    def _count_tensor(self, torch: Any, look: _Look, tokens: int) -> None:
        masked = look.mask is not None
        if self._counted >= _ALL_OF_FIRST and self._steps % _EACH:
            self._estimated += tokens
            self._squares.pass_over(tokens)
            if masked:
                self._effective.pass_over(tokens)
            else:
                self._effective.add(None)
            return
        self._counted += 1
        self._effective.add(self._start(torch, look.mask, count_tokens) if masked else None, tokens)
        count = count_squares if masked else count_squares_by_position
        self._squares.add(self._start(torch, look.mask if masked else look.positions, count), tokens)


class _Sum:
    """A sum whose parts may become known later, in their order, and of which some are estimated by those before."""

    def __init__(self) -> None:
        self._pending: Deque[Tuple[Poll, int]] = deque()
        self._unknown = False
        # Of the parts that are known, the later ones counting for more, and what they are parts of.
        self._known = self._of = 0.0
        self._passed_over = 0

    def add(self, part: Optional[Poll], of: int = 0) -> None:
        """A part of so many tokens; None is one that will never be known."""
        if part is None:
            self._unknown = True
        else:
            self._pending.append((part, of))

    def pass_over(self, of: int) -> None:
        """A part of so many tokens is to be estimated."""
        self._passed_over += of

    def take(self) -> Optional[int]:
        """What has become known since it was taken last; None where a part added since then is unknown."""
        total = 0
        while self._pending:
            poll, of = self._pending[0]
            part = poll()
            if part is None:
                break
            total += part
            self._known, self._of = self._known * _KEPT + part, self._of * _KEPT + of
            self._pending.popleft()
        if self._passed_over and self._of:
            total += round(self._passed_over * self._known / self._of)
            self._passed_over = 0
        unknown, self._unknown = self._unknown, False
        return None if unknown else total


def _look(torch: Any, args: Tuple[Any, ...], kwargs: Dict[str, Any]) -> _Look:
    named = next((each for each in (kwargs, *args) if isinstance(each, Mapping) and "input_ids" in each), None)
    if named is not None and isinstance(named["input_ids"], torch.Tensor):
        shape = tuple(named["input_ids"].shape)
        # Without rows (all texts of a batch in one line), nobody says how many samples it holds.
        rows = shape[0] if len(shape) > 1 else None
        tokens = named["input_ids"].numel()
        mask, positions = named.get("attention_mask"), named.get("position_ids")
        if _has_shape(torch, mask, shape):
            return _Look(rows, tokens, mask)
        if _has_shape(torch, positions, shape):
            return _Look(rows, tokens, positions=positions)
        plain = rows is not None and mask is None and positions is None
        return _Look(rows, tokens, squares=tokens * shape[-1] if plain else None)
    first = next(_tensors(torch, (args, kwargs), 0), None)
    if first is None or not first.ndim:
        return _Look()
    whole = not (first.is_floating_point() or first.is_complex() or first.dtype is torch.bool)
    if not whole or first.ndim != 2:  # noqa: PLR2004 - rows of ids
        return _Look(first.shape[0])
    return _Look(first.shape[0], first.numel(), squares=first.numel() * first.shape[1])


def _has_shape(torch: Any, value: Any, shape: Tuple[int, ...]) -> bool:
    return isinstance(value, torch.Tensor) and tuple(value.shape) == shape


def _tensors(torch: Any, value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif depth < _DEEPEST and isinstance(value, (tuple, list, Mapping)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(torch, each, depth + 1)


def _sum(numbers: Iterator[Optional[int]]) -> Optional[int]:
    total = 0
    for number in numbers:
        if number is None:
            return None
        total += number
    return total


def _start_on_gpu(torch: Any, count: Any, device: Any) -> Poll:
    # Pinned memory, for without it the copy would wait; torch keeps it for the next such count.
    host = torch.empty((), dtype=torch.int64, pin_memory=True)
    host.copy_(count, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(device))
    return lambda: int(host) if copied.query() else None
