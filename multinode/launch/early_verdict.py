"""EarlyVerdict: of a run on several nodes, after its first steps, whether one node alone would be faster.

Pure data; `predict.early_verdict` judges.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from multinode.units import format_count

LEAST_STEPS = 15
"""Recorded steps from which on there is a verdict; the first of them are warm-up, as of any run."""
CERTAIN_STEPS = 120
"""Measured steps from which on a verdict may end a run: with fewer, intervals cover less often than they say.

Of steps with an autocorrelation of 0.6, the 95 % interval of 10 covers in 87 of 100 runs, of 120 in 95 (ADR 0035).
"""
VERDICT_FILE = "early-verdict.json"
"""Where it is kept with a run."""
Interval = tuple[float, float]


class Projection(msgspec.Struct, frozen=True, kw_only=True):
    """One way to train the rest.

    Attributes:
        speedup: its samples/s over those of the run as it is.
        speedup_interval: low, high.
        left_s: time that the rest takes, of the step of the verdict; None where nothing tells how many steps there are.
        left_interval_s: low, high; None likewise.
    """

    speedup: float
    speedup_interval: Interval
    left_s: float | None = None
    left_interval_s: Interval | None = None


class BestChange(Projection, frozen=True, kw_only=True):
    """The setting that would make these nodes fastest.

    Attributes:
        name: in a few words: `gradients as fp16`.
        options: of `multinode launch`; empty where it takes a person.
        samples_ratio: samples of a step over those of today: a larger global batch is another optimisation.
    """

    name: str
    options: str = ""
    samples_ratio: float = 1.0


class RunSteps(msgspec.Struct, frozen=True, kw_only=True):
    """How far the run is, and where it runs.

    Attributes:
        node: the first one, which would train alone with its `workers_per_node`.
        step: the last one that all workers have ended; `total_steps` of the training, None is unknown.
        recorded: steps that were recorded by all workers; `measured` of them those that count.
    """

    run_id: str
    node: str
    nodes: int
    workers_per_node: int
    step: int
    total_steps: int | None = None
    recorded: int
    measured: int


class EarlyVerdict(RunSteps, frozen=True, kw_only=True):
    """Whether one node alone would be faster than the run; `early-verdict.json` of a run.

    Attributes:
        now: the run as it is; its speed-up is 1 by definition.
        one_node: the first node alone with its workers of this run, predicted; None with a reason in `reason`.
        best: None where no setting pays, or none could be predicted.
        memory: whether the training fits one node's memory: `fits`, `too_small` or `unknown`.
        needed_gib: that a worker would have allocated on one node, where `too_small`; `gpu_gib` what its GPU has.
        core_wait_ms: of a step, what the first node's workers waited for cores that others had, where it matters.
        reason: why there is no prediction; else empty.
        sentence: the verdict in one line.
    """

    schema: str = "multinode.early-verdict/1"
    now: Projection | None = None
    one_node: Projection | None = None
    best: BestChange | None = None
    memory: Literal["fits", "too_small", "unknown"] = "unknown"
    needed_gib: float | None = None
    gpu_gib: float | None = None
    core_wait_ms: float | None = None
    reason: str = ""
    sentence: str = ""

    @property
    def is_certain(self) -> bool:
        """Whether all that may be is in favour of one node, its memory suffices, and the steps are enough to say so."""
        return self.favours_one_node and self.measured >= CERTAIN_STEPS

    @property
    def favours_one_node(self) -> bool:
        """Whether all that these steps leave possible is in favour of one node, and its memory suffices."""
        return self.one_node is not None and self.one_node.speedup_interval[0] > 1 and self.memory == "fits"


def unknown_verdict(steps: RunSteps, reason: str) -> EarlyVerdict:
    """Nothing can be said, for this reason."""
    said = f"unknown whether 1 node would be faster than {steps.nodes}: {reason}"
    sentence = f"Early verdict ({format_count(steps.recorded, 'step')}): {said}"
    return EarlyVerdict(**msgspec.structs.asdict(steps), reason=reason, sentence=sentence)
