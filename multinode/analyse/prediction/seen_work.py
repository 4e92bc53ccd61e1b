"""work_of_calls: what a training was seen to call in its steps -> Work, where its files do not tell. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from multinode.analyse.collectives.algorithms import Layout
from multinode.analyse.collectives.traffic import GroupScope, Strategy, TrafficInputs
from multinode.analyse.job.step_calls import StepCall, Work, with_gradients
from multinode.analyse.steps.summary import Summary
from multinode.analyse.traffic.step_bytes import SeenCall
from multinode.core.measure.benchmark import COLLECTIVES

__all__ = ["work_of_calls"]

# A loss, a norm, a flag.
_SMALL_BYTES = 1 << 10
# A file may hold anything.
_ABSURD_BYTES, _ABSURD_COUNT = 1 << 44, 1 << 24
_WIDTHS = (4, 2)
_ONCE_A_STEP = frozenset({Strategy.DDP, Strategy.ZERO1})
_GATHERS_UPDATED = frozenset({Strategy.ZERO1, Strategy.ZERO2})


def work_of_calls(summary: Summary, layout: Layout, *, compressed: bool = False) -> Work | None:
    """What a step communicates; None where no call between workers was seen.

    What DDP sends, and ZeRO-1, does not grow with accumulation; all else is taken to be of every micro-batch.

    Args:
        summary: of the run.
        layout: of its workers.
        compressed: whether a hook sent its gradients as two bytes an element; without it they are taken to have four.
    """
    seen = [call for call in summary.comm.calls if _counts(call)]
    if not seen:
        return None
    strategy = _strategy(summary, seen)
    accumulation = float(max(1, round(summary.micro_steps or 1)))
    calls = tuple(_step_call(call, strategy, layout, accumulation) for call in seen)
    if compressed:
        calls = with_gradients(calls, _WIDTHS[0] / _WIDTHS[1])
    reduced = sum(call.size_bytes * call.times for call in calls if call.collective in {"all_reduce", "reduce_scatter"})
    trainable = max(summary.trainable or round(reduced / _WIDTHS[0]), 1)
    width = min(_WIDTHS, key=lambda one: abs(one * trainable - reduced))
    load = TrafficInputs(
        parameters=summary.parameters, trainable=trainable, parameter_bytes=_WIDTHS[0], gradient_bytes=width
    )
    return Work(strategy=strategy, load=load, calls={strategy: calls})


def _counts(call: SeenCall) -> bool:
    known = call.op in COLLECTIVES and call.ranks > 1
    return known and _SMALL_BYTES <= call.size_bytes < _ABSURD_BYTES and 0 < call.count < _ABSURD_COUNT


def _strategy(summary: Summary, seen: Sequence[SeenCall]) -> Strategy:
    """As it was recognised; else by whether parameters are gathered."""
    told = next((one for one in Strategy if summary.strategy == one.value), None)
    if told is not None:
        return told
    gathers = any(call.op == "all_gather" for call in seen)
    return Strategy.FSDP if gathers and any(call.op == "reduce_scatter" for call in seen) else Strategy.DDP


def _step_call(call: SeenCall, strategy: Strategy, layout: Layout, accumulation: float) -> StepCall:
    gathered_after = call.op == "all_gather" and strategy in _GATHERS_UPDATED
    grows = call.source != "ddp" and strategy not in _ONCE_A_STEP and not gathered_after
    return StepCall(
        collective=call.op,
        size_bytes=call.size_bytes,
        times=call.count / accumulation if grows else call.count,
        per_micro_batch=grows,
        hideable=not gathered_after,
        reach=_reach(call, layout),
    )


def _reach(call: SeenCall, layout: Layout) -> GroupScope:
    if call.ranks >= layout.workers:
        return GroupScope.WORLD
    return GroupScope.NODE if call.nodes <= 1 else GroupScope.ACROSS
