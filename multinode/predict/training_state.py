"""TrainingState: an unchanged job, with its GPUs' memory; a TuningOption leads from one to another. Pure.

Which options there are is `tuning_options`'; what one gains is `advice`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from multinode.findings.finding import Finding
from multinode.job.deepspeed import DeepSpeedConfig, fixed_edits
from multinode.job.job_files import Change
from multinode.levers.levers import Levers
from multinode.model.fitting import USABLE
from multinode.model.memory import MemoryNeed, PeakMemory, memory_need
from multinode.model.workload import JobSettings
from multinode.predict.calibration import Calibration, sent_as
from multinode.predict.cost_model import Scenario
from multinode.predict.forecast import PredictedScenario, predict_scenario
from multinode.predict.needed_memory import state_placement, worker_peak
from multinode.predict.prediction import Prediction, calls_of, sent_bytes
from multinode.predict.variants import Subject, method_of
from multinode.profile.figures import BalanceOutlook, Straggler
from multinode.stats.estimate import Estimate

_replace = msgspec.structs.replace


class GpuMemoryBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of the GPUs."""

    total_gib: float  # of the smallest GPU
    # the most that a worker had allocated in a run in just these settings; None is unknown
    peak_gib: float | None = None


class TrainingState(msgspec.Struct, frozen=True, kw_only=True):
    """A training in its settings."""

    calibration: Calibration
    scenario: Scenario  # its settings, as far as the model has them; its gradients' factor is without compression
    settings: JobSettings = JobSettings()  # all of them
    subject: Subject | None = None  # what was trained when its costs were measured; None is unknown
    deepspeed: DeepSpeedConfig | None = None  # its DeepSpeed configuration; None without one
    gpu_memory: GpuMemoryBudget | None = None  # None is unknown, or no GPUs
    # of the hostfile's nodes, in node-rank order; None of a node whose line does not say; empty is unknown
    slots: tuple[int | None, ...] = ()
    measured_samples_per_s: float | None = None  # of exactly this; None where it was not measured
    single_gain: Estimate | None = None  # of one node over the measured training, where both were repeated
    single_samples_per_s: float | None = None  # of the measured run on one node, if there is one
    stragglers: tuple[Straggler, ...] = ()  # nodes that the others waited for
    dataset_samples: int | None = None  # of the training set; None is unknown
    balance: BalanceOutlook | None = None  # what dealing samples out by the nodes' speed would give; None is unknown

    def with_(
        self, scenario: Mapping[str, Any] | None = None, settings: Mapping[str, Any] | None = None, **own: Any
    ) -> TrainingState:
        """The state with other fields, those of its scenario and of its settings too; nobody has measured it."""
        return _replace(
            self,
            scenario=_replace(self.scenario, **(scenario or {})),
            settings=_replace(self.settings, **(settings or {})),
            measured_samples_per_s=None,
            **own,
        )

    def with_levers(self, levers: Levers) -> TrainingState:
        """The state with more levers; nobody has measured it."""
        joined = {"levers": self.settings.levers.joined(levers)}
        return self.with_(joined, joined)

    @property
    def is_script(self) -> bool:
        """Whether it is a script, whose settings only its author can change."""
        return self.settings.command is not None

    def outlook(self) -> PredictedScenario:
        """The state, predicted."""
        return predict_scenario(
            self.calibration,
            self.scenario,
            method=method_of(self.settings),
            measured=self.measured_samples_per_s is not None,
        )

    def prediction(self) -> Prediction:
        """The prediction, over all draws of the unknown quantities."""
        return Prediction(self.calibration, self.sent)

    @property
    def sent(self) -> Scenario:
        """The scenario with its gradients as they are sent."""
        return sent_as(self.calibration, self.scenario)

    def memory_need(self) -> MemoryNeed | None:
        """What the states of the model take of a worker; None where the model's size is not known."""
        placement = state_placement(self.settings, self.scenario.strategy, self.deepspeed)
        return memory_need(self.scenario.strategy, self.calibration.work.load, self.scenario.layout, placement)

    def peak(self) -> PeakMemory | None:
        """What a worker needs with samples of the full length; None where widths or length are not known."""
        load = self.calibration.work.load
        return worker_peak(self.subject, self.settings, self.scenario, load, self.deepspeed)

    def batch_edits(self) -> tuple[str, ...]:
        """Edits of a DeepSpeed JSON that fixes another batch than this."""
        scenario, batch = self.scenario, int(self.scenario.per_device_batch)
        if self.deepspeed is None or batch != scenario.per_device_batch:
            return ()
        return fixed_edits(
            self.deepspeed,
            per_device_batch=batch,
            accumulation=scenario.accumulation,
            workers=scenario.layout.workers,
        )

    def sample_mb(self) -> float:
        """MB that a worker sends for each of its samples, and receives as many, in rings over all workers."""
        scenario = self.sent
        samples = scenario.per_device_batch * scenario.accumulation
        return sent_bytes(scenario, calls_of(self.calibration, scenario)) / samples / 1e6


class TuningOption(msgspec.Struct, frozen=True, kw_only=True):
    """One change and where it leads."""

    name: str  # in a few words, unique
    kind: str  # what it moves; two of one kind exclude each other
    before: TrainingState  # the state without it; `after` with it
    after: TrainingState
    change: Change | None = None  # how a machine makes it; None where it takes a person
    by_hand: Change | None = None  # options that follow what a person has to do first; None where there are none
    extra_gib: float | None = 0.0  # memory of a worker beyond that of its states; None is unknown
    doubt: float = 0.0  # how far off its prediction may be beyond the model's own interval: 0.1 is 10%
    parts: tuple[TuningOption, ...] = ()  # of a pair, both
    effects: tuple[Finding, ...] = ()  # what it changes beside the speed
    person: str = ""  # what a person does where no machine makes it
    remarks: Callable[[TuningOption], Iterable[Finding]] = lambda _: ()  # what the figures do not say

    @property
    def more_memory_gib(self) -> float | None:
        """What a worker needs more with it, or less; None where that is not known."""
        before, after = self.before, self.after
        if self.extra_gib is None:
            return self._more_of_batch_gib
        old, new = before.memory_need(), after.memory_need()
        if old is None or new is None:
            # Without the model's size, only what leaves the states alone is known.
            same = before.scenario.strategy is after.scenario.strategy
            same = same and before.scenario.layout == after.scenario.layout
            return self.extra_gib if same and before.settings.method == after.settings.method else None
        return new.total_gib - old.total_gib + self.extra_gib

    @property
    def _more_of_batch_gib(self) -> float | None:
        """Of a larger micro-batch, its activations and logits."""
        if self.before.scenario.per_device_batch == self.after.scenario.per_device_batch:
            return None
        old, new = self.before.peak(), self.after.peak()
        return new.allocated_gib - old.allocated_gib if old is not None and new is not None else None

    @property
    def expected_gib(self) -> float | None:
        """What a worker will have allocated, from a recorded peak if there is one; None is unknown.

        Where the count of today's states is above today's peak, it is too high, and is taken to be so by the same
        ratio. Without a peak it is the estimate; without the model's widths, the states alone.
        """
        before = self.before
        peak = before.gpu_memory.peak_gib if before.gpu_memory is not None else None
        old, new, more = before.memory_need(), self.after.memory_need(), self.more_memory_gib
        if peak is None or more is None:
            estimate = self.after.peak() if peak is None else None
            if estimate is not None:
                return estimate.allocated_gib + (self.extra_gib or 0.0)
            return new.total_gib if peak is None and new is not None else None
        if old is not None and new is not None and old.total_gib > peak:
            return peak * new.total_gib / old.total_gib
        return peak + more

    @property
    def fits(self) -> bool | None:
        """Whether the GPUs have room for it; None is unknown. What takes no more than today fits as today."""
        memory, more, expected = self.before.gpu_memory, self.more_memory_gib, self.expected_gib
        if memory is None or more is None:
            return None
        if more > 0 and expected is not None and expected > memory.total_gib * USABLE:
            return False
        estimate = self.after.peak() if memory.peak_gib is None else None
        if estimate is not None and estimate.needed.high + (self.extra_gib or 0.0) <= memory.total_gib:
            return True
        # Without activations, what fits so far is no promise.
        return None if memory.peak_gib is None else True
