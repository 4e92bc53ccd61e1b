"""What holds a training up, in one sentence, and why stragglers are late; `with_words` puts it into a summary, once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from multinode.profile.bottleneck import WORTH, Bottleneck, is_bound
from multinode.profile.cause_words import cause_with_words
from multinode.profile.in_training_words import in_training_words
from multinode.profile.step_split import StepSplit, WorkerSplit
from multinode.profile.stragglers import Straggler
from multinode.profile.summary import Summary
from multinode.profile.trace_view import compare_window
from multinode.profile.trace_words import agreement_words

_TAKES = {
    "network": "exposed communication takes {share}",
    "data": "waiting for batches takes {share}",
    "host": "time outside compute, communication, data and optimizer takes {share}",
}
_TURNS = "waiting for slower workers takes {share}; they take turns: no single one is to blame"
_NO_ONE = "waiting for other workers takes {share}; none of them stands out as the slow one"
_THREE_DIGITS = 100


def with_words(
    summary: Summary, write_hint: Callable[[str], str] = str, devices: Mapping[int, str] | None = None
) -> Summary:
    """The summary with the sentences of its stragglers, its bandwidth, its traces and its bottleneck.

    Args:
        summary: by codes.
        write_hint: a hint as the nodes are reached.
        devices: of the traced workers, by rank, as their traces have them.
    """
    stragglers = tuple(straggler_with_words(one, write_hint) for one in summary.stragglers)
    training = summary.comm.in_training
    training = msgspec.structs.replace(training, sentence=in_training_words(training))
    comm = msgspec.structs.replace(summary.comm, in_training=training)
    trace = summary.trace
    if trace is not None:
        agreement = agreement_words(compare_window(trace, summary.split, devices or {}))
        trace = msgspec.structs.replace(trace, agreement=agreement)
    summary = msgspec.structs.replace(summary, stragglers=stragglers, comm=comm, trace=trace)
    found = summary.bottleneck
    if found is None:
        return summary
    sentence = (
        summary.strategy.replace("no communication", "no gradient synchronisation detected", 1)
        if found.kind == "no_communication"
        else bottleneck_words(found, summary.split, summary.stragglers)
    )
    return msgspec.structs.replace(summary, bottleneck=msgspec.structs.replace(found, sentence=sentence))


def straggler_with_words(one: Straggler, write_hint: Callable[[str], str] = str) -> Straggler:
    """The straggler with its evidence and its hint; as it is, where an earlier release has worded it."""
    causes = tuple(cause_with_words(cause, write_hint) for cause in one.causes)
    if not causes:
        return one
    evidence = tuple(cause.sentence for cause in causes)
    return msgspec.structs.replace(one, causes=causes, evidence=evidence, hint=causes[0].hint)


def bottleneck_words(found: Bottleneck, split: StepSplit, stragglers: Sequence[Straggler] = ()) -> str:
    """What holds the training up most, with its figures.

    Args:
        found: in the split.
        split: where a step's time goes.
        stragglers: nodes that the others wait for.
    """
    mean = split.mean
    if found.kind == "unknown" or mean is None:
        return f"bottleneck unknown: {split.missing.get('exposed_ms', 'no measured step was recorded')}"
    if found.kind == "compute":
        return _compute_bound(found, split, mean)
    if found.kind != "straggler":
        words = _TAKES[found.kind]
    elif stragglers:
        worst = max(stragglers, key=lambda straggler: straggler.late_ms)
        evidence = f": {worst.evidence[0]}" if worst.evidence else ""
        return f"waiting for {worst.node} takes {_share(found, mean)}{evidence}"
    else:
        words = _TURNS if found.take_turns else _NO_ONE
    return words.format(share=_share(found, mean))


def _compute_bound(found: Bottleneck, split: StepSplit, mean: WorkerSplit) -> str:
    threshold = f"{WORTH:.0%}"
    if found.share is not None:
        own = f"compute and optimizer take {_share(found, mean)}"
        return f"compute-bound: {own}; nothing else takes more than {threshold}"
    unknown = [name.removesuffix("_ms") for name in ("data_ms", "host_ms") if name in split.missing]
    sentence = f"nothing that was measured takes more than {threshold} of {_ms(mean.step_ms)} per step"
    if unknown:
        sentence += f"; not measured: {', '.join(unknown)}"
    if is_bound(split) and mean.data_ms is not None and mean.data_ms > WORTH * mean.step_ms:
        waited = f"{_ms(mean.data_ms)} ({mean.data_ms / mean.step_ms:.0%})"
        sentence += f"; the host waited {waited} for batches, during which the GPU may have computed"
    return sentence


def _share(found: Bottleneck, mean: WorkerSplit) -> str:
    share = found.share or 0.0
    return f"{_ms(share * mean.step_ms)} of {_ms(mean.step_ms)} per step ({share:.0%})"


def _ms(time_ms: float) -> str:
    """`512 ms`, `4.2 ms`: three significant digits."""
    return f"{time_ms:.0f} ms" if time_ms >= _THREE_DIGITS else f"{time_ms:.3g} ms"
