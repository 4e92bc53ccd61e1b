"""TrainingState: a training as it stands, with its GPUs' memory; and Options, which each lead to another one. Pure.

Which options there are is `options`, `strategy_options` and `cluster_options`; what one gains is `advice`'s.
"""

from __future__ import annotations

import shlex

import msgspec

from multinode.analyse.collectives.traffic import Strategy
from multinode.analyse.job.memory_need import MemoryNeed, StatePlacement, memory_need
from multinode.analyse.job.step_calls import passing_bytes, with_gradients
from multinode.analyse.job.workload import Settings
from multinode.analyse.prediction.calibration import Calibration
from multinode.analyse.prediction.cost_model import Scenario
from multinode.analyse.prediction.forecast import PredictedScenario, gradient_factor, predict_scenario
from multinode.analyse.prediction.variants import Subject, method_of
from multinode.analyse.steps.stragglers import Straggler
from multinode.core.job.deepspeed import DeepSpeedConfig, fixed_edits

__all__ = [
    "Change",
    "GpuMemoryBudget",
    "TrainingState",
    "TuningOption",
    "batch_edits",
    "expected_gib",
    "fits",
    "joined",
    "more_memory_gib",
    "need_of",
    "options_of",
    "sample_bytes",
]

_QUANTISED_BITS = 4
_DEEPSPEED = frozenset({Strategy.ZERO1, Strategy.ZERO2, Strategy.ZERO3})
# GPUs are never filled to the last byte: CUDA's context, workspaces and fragments take their part.
_USABLE = 0.95


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change as a machine can make it.

    Attributes:
        overrides: `KEY=VALUE` for `--set`.
        deepspeed: `DOTTED.KEY=VALUE` for `--deepspeed-set`.
        grad_compress: for `--grad-compress`.
        nodes: first nodes of the hostfile that are used; None is as many as today.
        workers_per_node: on each; likewise.
    """

    overrides: tuple[str, ...] = ()
    deepspeed: tuple[str, ...] = ()
    grad_compress: str | None = None
    nodes: int | None = None
    workers_per_node: int | None = None


class GpuMemoryBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the GPUs.

    Attributes:
        total_gib: of the smallest GPU.
        peak_gib: the most that a worker had allocated in a run in just these settings; None is unknown.
    """

    total_gib: float
    peak_gib: float | None = None

    @property
    def usable_gib(self) -> float:
        """What a worker can have of it."""
        return self.total_gib * _USABLE


class TrainingState(msgspec.Struct, frozen=True, kw_only=True):
    """A training in its settings.

    Attributes:
        scenario: its settings, as far as the model has them; its gradients' factor is without `--grad-compress`.
        settings: all of them.
        subject: what was trained when its costs were measured; None is unknown.
        deepspeed: its DeepSpeed configuration; None without one.
        gpu_memory: of its GPUs; None is unknown, or no GPUs.
        slots: of the hostfile's nodes, in node-rank order; None of a node whose line does not say; empty is unknown.
        measured_samples_per_s: of exactly this; None where it was not measured.
        stragglers: nodes that the others waited for.
    """

    calibration: Calibration
    scenario: Scenario
    settings: Settings = Settings()
    subject: Subject | None = None
    deepspeed: DeepSpeedConfig | None = None
    gpu_memory: GpuMemoryBudget | None = None
    slots: tuple[int | None, ...] = ()
    measured_samples_per_s: float | None = None
    stragglers: tuple[Straggler, ...] = ()

    @property
    def is_script(self) -> bool:
        """Whether it is a script, whose settings only its author can change."""
        return self.settings.command is not None

    def outlook(self) -> PredictedScenario:
        """The state, predicted.

        Raises:
            ValueError: the strategy gathers all parameters, and how many there are is not known.
        """
        return predict_scenario(
            self.calibration,
            self.scenario,
            method=method_of(self.settings),
            grad_compress=self.settings.grad_compress,
            measured=self.measured_samples_per_s is not None,
        )


class TuningOption(msgspec.Struct, frozen=True, kw_only=True):
    """One change and where it leads.

    Attributes:
        name: in a few words, unique.
        kind: what it moves; two of one kind exclude each other.
        after: the state with it.
        change: how a machine makes it; None where it takes a person.
        by_hand: what a person does where no machine can.
        meaning: what it changes in the training's meaning, or its price; `nothing` where it changes none.
        extra_gib: memory of a worker beyond that of its states; None is unknown.
        doubt: how far off its prediction may be beyond the model's own interval: 0.1 is 10 %.
        remark: what the figures do not say, a sentence.
    """

    name: str
    kind: str
    after: TrainingState
    change: Change | None = None
    by_hand: str = ""
    meaning: str = "nothing"
    extra_gib: float | None = 0.0
    doubt: float = 0.0
    remark: str = ""

    @property
    def command(self) -> str:
        """What a person types or does."""
        return options_of(self.change) if self.change is not None else self.by_hand


def options_of(change: Change) -> str:
    """The change as options of `multinode launch`, quoted for a shell."""
    words: list[str] = []
    if change.nodes is not None:
        words += ["--nodes", str(change.nodes)]
    if change.workers_per_node is not None:
        words += ["--workers-per-node", str(change.workers_per_node)]
    if change.grad_compress is not None:
        words += ["--grad-compress", change.grad_compress]
    for override in change.overrides:
        words += ["--set", override]
    for edit in change.deepspeed:
        words += ["--deepspeed-set", edit]
    return shlex.join(words)


def joined(first: Change, second: Change) -> Change:
    """Both changes; of what both set, the second counts."""
    return Change(
        overrides=(*first.overrides, *second.overrides),
        # A job without DeepSpeed has no configuration to edit.
        deepspeed=() if "deepspeed=null" in second.overrides else (*first.deepspeed, *second.deepspeed),
        grad_compress=second.grad_compress or first.grad_compress,
        nodes=second.nodes if second.nodes is not None else first.nodes,
        workers_per_node=second.workers_per_node or first.workers_per_node,
    )


def need_of(state: TrainingState) -> MemoryNeed | None:
    """What the states of the model take of a worker; None where the model's size is not known."""
    settings, scenario, deepspeed = state.settings, state.scenario, state.deepspeed
    sharing = deepspeed if scenario.strategy in _DEEPSPEED else None
    quantised = settings.method is not None and settings.method.startswith("qlora")
    placement = StatePlacement(
        half=settings.precision in {"bf16", "fp16"},
        frozen_bits=_QUANTISED_BITS if quantised else None,
        optimizer_elsewhere=sharing is not None and sharing.offload_optimizer is not None,
        # Below stage 3 each worker keeps them whole, and DeepSpeed ignores `offload_param`.
        parameters_elsewhere=sharing is not None
        and sharing.offload_parameters is not None
        and scenario.strategy is Strategy.ZERO3,
    )
    return memory_need(scenario.strategy, state.calibration.work.load, scenario.layout, placement)


def more_memory_gib(before: TrainingState, option: TuningOption) -> float | None:
    """What a worker needs more with it, or less; None where that is not known."""
    if option.extra_gib is None:
        return None
    old, new = need_of(before), need_of(option.after)
    if old is None or new is None:
        # Without the model's size, only what leaves the states alone can be told.
        same = before.scenario.strategy is option.after.scenario.strategy
        same = same and before.scenario.layout == option.after.scenario.layout
        return option.extra_gib if same and before.settings.method == option.after.settings.method else None
    return new.total_gib - old.total_gib + option.extra_gib


def expected_gib(before: TrainingState, option: TuningOption) -> float | None:
    """What a worker will have allocated with it; the model's states alone where no peak was measured; None is unknown.

    Where the count of today's states is above today's peak, it is too high, and is taken to be so by the same ratio.
    """
    peak = before.gpu_memory.peak_gib if before.gpu_memory is not None else None
    old, new, more = need_of(before), need_of(option.after), more_memory_gib(before, option)
    if peak is None or more is None:
        return new.total_gib if peak is None and new is not None else None
    if old is not None and new is not None and old.total_gib > peak:
        return peak * new.total_gib / old.total_gib
    return peak + more


def fits(before: TrainingState, option: TuningOption) -> bool | None:
    """Whether the GPUs have room for it; None where that is not known. What takes no more than today fits as today."""
    more, expected = more_memory_gib(before, option), expected_gib(before, option)
    if before.gpu_memory is None or more is None:
        return None
    if more > 0 and expected is not None and expected > before.gpu_memory.usable_gib:
        return False
    # Without activations, what fits so far is no promise.
    return None if before.gpu_memory.peak_gib is None else True


def batch_edits(state: TrainingState) -> tuple[str, ...]:
    """Edits of a DeepSpeed JSON that fixes another batch than the state has."""
    batch, scenario = state.scenario.per_device_batch, state.scenario
    if state.deepspeed is None or batch != int(batch):
        return ()
    return fixed_edits(
        state.deepspeed,
        per_device_batch=int(batch),
        accumulation=scenario.accumulation,
        workers=scenario.layout.workers,
    )


def sample_bytes(state: TrainingState) -> float:
    """Bytes that a worker sends for each of its samples, and receives as many, in rings over all workers.

    Raises:
        ValueError: the strategy gathers all parameters, and how many there are is not known.
    """
    scenario, work = state.scenario, state.calibration.work
    factor = scenario.gradient_factor
    if state.settings.grad_compress is not None:
        factor *= gradient_factor(work.load)
    calls = with_gradients(work.calls_of(scenario.strategy, scenario.layout), factor)
    samples = scenario.per_device_batch * scenario.accumulation
    return passing_bytes(calls, scenario.accumulation, scenario.layout.workers) / samples
