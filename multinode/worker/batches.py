"""Counts forward passes, samples and tokens of each step by the inputs of the trained model.

The outermost call with a batch counts: the Trainer's training step, or else the call of the wrapped model (`forward`).
A model without a wrapper in the user's own loop is not seen.
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
# This many masks are all counted, which covers short trainings; after that, the masks of one step in eight.
_ALL_OF_FIRST = 10
_EACH = 8
# Weight of a counted mask relative to the next one, in the estimate for masks that are not counted.
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
    """What is known of one batch; None is unknown."""

    samples: Optional[int] = None
    tokens: Optional[int] = None
    # attention mask: 0 for padding, else the number of the token's sequence in its row (1, 2, ... if packed)
    mask: Any = None
    positions: Any = None  # of each token in its sequence, if there is no such mask
    squares: Optional[int] = None  # sum of squared sequence lengths, if the shape alone determines it


def start_count(torch: Any, tensor: Any, count: Callable[[Any, Any], Any]) -> Optional[Poll]:
    """Start counting something in an attention mask or in positions; None if that would cost too much.

    A count on a GPU is launched at once and known later: the host never waits for the device.

    Subclasses of Tensor, such as DTensor, are not counted: a sum over them could be a collective.

    Args:
        torch: the module.
        tensor: a tensor on the CPU or a GPU.
        count: given `torch` and the tensor, returns a tensor of one number.
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
    """Number of tokens that an attention mask does not hide."""
    return mask.ne(0).sum()


def count_squares(torch: Any, mask: Any) -> Any:
    """Sum of squared sequence lengths; a sequence is a run of one value other than zero in a row of the mask."""
    places = torch.arange(mask.shape[-1], device=mask.device).expand(mask.shape)
    begins = torch.zeros_like(places)
    begins[..., 1:] = places[..., 1:] * mask[..., 1:].ne(mask[..., :-1])
    return (_odd(places - begins.cummax(-1).values) * mask.ne(0)).sum()


def count_squares_by_position(_torch: Any, positions: Any) -> Any:
    """Sum of squared sequence lengths, given the position of each token in its sequence."""
    return _odd(positions).sum()


def _odd(positions: Any) -> Any:
    """A token's part in the square of its sequence's length: 1 + 3 + 5 + ... + (2 l - 1) is l squared."""
    return 2 * positions + 1


class Batches:
    """Counts the batches of one model: the first that gets one, until it is gone or gets none for a whole step.

    A sample is a row, even if a packed row holds several texts. Tokens are those of `input_ids`, without a decoder's.
    Effective tokens are those that the attention mask does not hide. They are unknown without a mask of the same shape,
    as in packed batches that mark sequences in other ways. `squared_lengths` is the sum of squared lengths of the
    sequences that attend only to themselves; the mask separates them, or else the positions, or else each row is one.

    On a GPU, these counts become known some steps later: a step reports the counts that became known since the step
    before. Sums over many steps are right except for the last few steps.

    Counting may take the host as long as a small step. So after the first masks, only those of one step in `_EACH` are
    counted, and the others are estimated from earlier ones; `estimated_tokens` is the number of such tokens of a step.

    Args:
        clock: tells whether the training is inside a backward pass, where forward passes are recomputations.
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
        """A model is called; False if the call is inside another that counts, or does not train."""
        torch = sys.modules.get("torch")
        # In torch 2.4, a compiled module's own `training` is always True.
        trained = getattr(model, "_orig_mod", model)
        if self._inside or torch is None or not (trained.training and torch.is_grad_enabled()):
            return False
        if self._clock.within("backward"):
            return False
        return self._begin(torch, model, args, kwargs)

    def begin_trainer(self, trainer: Any, _model: Any, inputs: Any = None, *_: Any, **__: Any) -> bool:
        """The Trainer's training step begins with a batch."""
        torch = sys.modules.get("torch")
        if self._inside or torch is None:
            return False
        return self._begin(torch, trainer, (inputs,), {})

    def end(self) -> None:
        """The call that `begin` or `begin_trainer` accepted has ended."""
        self._inside = False

    def __call__(self, _step: int) -> Dict[str, Any]:
        """The fields of a step: counts since the previous step; empty if there was no batch."""
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
        # This order matters: if counting raises, `end` is not called.
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
    """A sum whose parts become known later, in order; some parts are estimated from earlier ones."""

    def __init__(self) -> None:
        self._pending: Deque[Tuple[Poll, int]] = deque()
        self._unknown = False
        # Weighted sums of the known parts and of their tokens; later parts have more weight.
        self._known = self._of = 0.0
        self._passed_over = 0

    def add(self, part: Optional[Poll], of: int = 0) -> None:
        """Add a part of `of` tokens; None is a part that will never be known."""
        if part is None:
            self._unknown = True
        else:
            self._pending.append((part, of))

    def pass_over(self, of: int) -> None:
        """Estimate a part of `of` tokens."""
        self._passed_over += of

    def take(self) -> Optional[int]:
        """The sum of parts that became known since the last call; None if a part added since then is unknown."""
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
        # Without rows (all texts of a batch in one line), the number of samples is unknown.
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
    # Without pinned memory the copy would wait; torch caches the memory for the next count.
    host = torch.empty((), dtype=torch.int64, pin_memory=True)
    host.copy_(count, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(device))
    return lambda: int(host) if copied.query() else None
