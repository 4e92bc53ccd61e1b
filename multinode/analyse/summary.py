"""summarise: what the nodes recorded of one run -> its Summary. Pure; composes, and keeps nothing raw."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec

from multinode.analyse.bottleneck import Bottleneck, find_bottleneck
from multinode.analyse.flops import Utilisation
from multinode.analyse.in_training import InTraining, beside, in_training
from multinode.analyse.machine_use import NodeUse, use_of
from multinode.analyse.model_work import ModelWork, utilisation_of
from multinode.analyse.observed import Observed
from multinode.analyse.seen_strategy import recognise
from multinode.analyse.seen_traffic import BytesPerStep, SeenCall, SeenTraffic, see_traffic
from multinode.analyse.spread import Spread, spread_of
from multinode.analyse.step_split import StepSplit, split_steps
from multinode.analyse.stragglers import Straggler, find_stragglers
from multinode.analyse.sweep import SweepReport
from multinode.analyse.throughput import Throughput, measure_throughput
from multinode.analyse.trace_events import TraceEvents
from multinode.analyse.trace_view import TraceView, view_traces
from multinode.core.profile_samples import ModelSample, NoteSample
from multinode.core.samples import LossSample, StepSample, TrainEndSample

__all__ = ["Comm", "Summary", "summarise"]


class Comm(msgspec.Struct, frozen=True, kw_only=True):
    """The communication of one step.

    Attributes:
        bytes_per_step: asked for by the calls, expected of the backend, counted by the card.
        exposed_ms: what no computation hid, waiting for stragglers left out; of the worker that waited least.
        exposed_share: of the step.
        overlap: part of the communication that computation hid.
        in_training_gb_per_s: busbw of the training's own all-reduces.
        in_training: the same with its source, beside nccl-test's.
        calls: what a worker calls in a step.
        explained: why the byte figures differ, a sentence each.
    """

    bytes_per_step: BytesPerStep = BytesPerStep()
    exposed_ms: float | None = None
    exposed_share: float | None = None
    overlap: float | None = None
    in_training_gb_per_s: float | None = None
    in_training: InTraining = InTraining()
    calls: tuple[SeenCall, ...] = ()
    explained: tuple[str, ...] = ()


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One run in figures; None comes with a reason in `missing`.

    Attributes:
        schema: `multinode.summary/1`.
        run_id: the run.
        strategy: how the model is spread over the workers, as `seen_strategy` has it.
        world_size: workers in all.
        steps: optimizer steps that were recorded.
        steady_steps: those that count.
        rule: which those are.
        step_time_ms: of each step the median over the workers (they end a step together), over the steady state.
        samples_per_s: nominal, of all workers together, over the steady state.
        tokens_per_s: likewise, padding counted; `effective_tokens_per_s` without.
        tgs: tokens a second and worker, padding counted; `effective_tgs` without.
        tokens_per_sample: padded length of a sample, in the mean.
        micro_steps: forward passes a step (gradient accumulation).
        parameters: of the model; `trainable` those that have gradients.
        all_steps_samples_per_s: as `samples_per_s`, warm-up included, as the Trainer counts.
        trainer_samples_per_s: the Trainer's own figure.
        first_loss: the first loss that was logged; `last_loss` the last.
        comm: the communication of a step.
        split: where a step's time goes.
        bottleneck: what holds the training up most.
        stragglers: nodes that the others wait for.
        nodes: what the nodes' machines did.
        utilisation: TFLOP/s, MFU and HFU.
        trace: the profiler's window; None where none was asked for.
        missing: reason by name of every figure that is None, and whatever else could not be recorded.
    """

    schema: str = "multinode.summary/1"
    run_id: str
    strategy: str = "unknown"
    world_size: int = 0
    steps: int
    steady_steps: int
    rule: str
    step_time_ms: Spread | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    effective_tokens_per_s: float | None = None
    tgs: float | None = None
    effective_tgs: float | None = None
    tokens_per_sample: float | None = None
    micro_steps: float | None = None
    parameters: int | None = None
    trainable: int | None = None
    all_steps_samples_per_s: float | None = None
    trainer_samples_per_s: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    comm: Comm = Comm()
    split: StepSplit = StepSplit()
    bottleneck: Bottleneck | None = None
    stragglers: tuple[Straggler, ...] = ()
    nodes: tuple[NodeUse, ...] = ()
    utilisation: Utilisation | None = None
    trace: TraceView | None = None
    missing: dict[str, str] = {}
