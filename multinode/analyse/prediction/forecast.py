"""Forecast: what `predict` is asked and answers: scenarios with their intervals, the break-even, the model's own error.

Data, and one prediction as a PredictedScenario. Which scenarios a request means is `scenarios`'s. Pure.
"""

from __future__ import annotations

import msgspec

from multinode.analyse.collectives.traffic import Strategy
from multinode.analyse.prediction.back_test import BackTest
from multinode.analyse.prediction.break_even import BreakEven, on_one_node
from multinode.analyse.prediction.calibration import Calibration, gradient_factor
from multinode.analyse.prediction.carried_network import UncertaintySource
from multinode.analyse.prediction.cost_model import StepParts
from multinode.analyse.prediction.predict import predict
from multinode.analyse.prediction.scenario import Scenario
from multinode.analyse.steps.bottleneck import Bottleneck

__all__ = ["GRAD_COMPRESS", "Forecast", "ForecastRequest", "PredictedScenario", "gradient_factor", "predict_scenario"]

GRAD_COMPRESS = ("fp16", "bf16")
"""What a hook of DDP may send gradients as."""
_MIB = 1 << 20


class ForecastRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to predict: every combination of its axes; an empty axis is as it was measured.

    Attributes:
        links: rates of a node's card, Gbit/s; empty takes the usual ones and the measured one.
        per_device_batches: samples of a worker's micro-batch.
        accumulations: micro-batches a step.
        methods: `full` or `lora:RANK`.
        bucket_mib: the most that a reduction carries at once.
        overlaps: whether computation may hide communication.
        grad_compress: `fp16`, `bf16`, or None for gradients as they are.
        target: efficiency of the break-even, above 0 and below 1.
        link_measured: rate of the link that the runs and the nccl-test used, where their cards did not say it.
    """

    links: tuple[float, ...] = ()
    nodes: tuple[int, ...] = ()
    workers_per_node: tuple[int, ...] = ()
    per_device_batches: tuple[float, ...] = ()
    accumulations: tuple[int, ...] = ()
    strategies: tuple[Strategy, ...] = ()
    methods: tuple[str, ...] = ()
    bucket_mib: tuple[float, ...] = ()
    overlaps: tuple[bool, ...] = ()
    grad_compress: tuple[str | None, ...] = ()
    target: float = 0.9
    link_measured: float | None = None


class PredictedScenario(msgspec.Struct, frozen=True, kw_only=True):
    """One scenario, predicted.

    Attributes:
        link_gbit_per_s: of a node's card; None on one node, which uses none.
        per_device_batch: samples of a worker's micro-batch.
        accumulation: micro-batches a step.
        method: `full` or `lora:8`; None as calibrated.
        grad_compress: `fp16`, `bf16` or None.
        bucket_mib: the most that a reduction carries at once; None as calibrated.
        overlap: whether computation may hide communication.
        step_time_ms: of an optimizer step.
        samples_per_s: of all workers.
        interval: of samples_per_s: low, high.
        tokens_per_s: padded; None where samples have no known length.
        speedup: over one node in the same settings, with all the workers that one was measured with.
        efficiency: speed-up over the ratio of workers.
        bottleneck: what holds it up most.
        doubts: why the interval is as wide.
        measured: whether exactly this was measured, so that the figure is near to it by construction.
    """

    link_gbit_per_s: float | None
    nodes: int
    workers_per_node: int
    per_device_batch: float
    accumulation: int
    strategy: str
    method: str | None = None
    grad_compress: str | None = None
    bucket_mib: float | None = None
    overlap: bool = True
    step_time_ms: float
    samples_per_s: float
    interval: tuple[float, float]
    tokens_per_s: float | None = None
    speedup: float
    efficiency: float
    parts: StepParts
    bottleneck: Bottleneck
    doubts: tuple[UncertaintySource, ...] = ()
    measured: bool = False


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """What `predict --json` prints.

    Attributes:
        sources: what it was calibrated from, a sentence each: which run, which nccl-test, which figures.
        scenarios: as asked for, nodes by nodes, link by link.
        break_even: of the scenario that was measured, or of the first on several nodes; None on one node alone.
        break_even_of: which scenario that is, in a few words.
        back_test: the same model held against every stored run that it can be held against.
        notes: what had to be taken for granted, a sentence each.
    """

    schema: str = "multinode.predict/1"
    sources: tuple[str, ...] = ()
    scenarios: tuple[PredictedScenario, ...]
    break_even: BreakEven | None = None
    break_even_of: str = ""
    back_test: BackTest = BackTest()
    notes: tuple[str, ...] = ()


def predict_scenario(
    calibration: Calibration,
    scenario: Scenario,
    *,
    method: str | None = None,
    grad_compress: str | None = None,
    measured: bool = False,
) -> PredictedScenario:
    """One scenario, predicted, beside one node in the same settings.

    Args:
        calibration: what was measured; of another method where one is named (`scenarios.variant`).
        scenario: what is asked for; of a hook that compresses, the factor of its gradients is put in here.
        method: how it is told.
        grad_compress: the hook: one of GRAD_COMPRESS, or None.
        measured: whether exactly this was measured.

    Raises:
        ValueError: the strategy gathers all parameters, and how many there are is not known.
    """
    if grad_compress is not None:
        factor = gradient_factor(calibration.work.load)
        scenario = msgspec.structs.replace(scenario, gradient_factor=scenario.gradient_factor * factor)
    found = predict(calibration, scenario)
    layout = scenario.layout
    alone = predict(calibration, on_one_node(calibration, scenario))
    length = calibration.tokens_per_sample
    speedup = found.samples_per_s / alone.samples_per_s
    return PredictedScenario(
        link_gbit_per_s=scenario.link.gbit_per_s if layout.nodes > 1 else None,
        nodes=layout.nodes,
        workers_per_node=layout.workers_per_node,
        per_device_batch=scenario.per_device_batch,
        accumulation=scenario.accumulation,
        strategy=str(scenario.strategy),
        method=method,
        grad_compress=grad_compress,
        bucket_mib=None if scenario.bucket_bytes is None else scenario.bucket_bytes / _MIB,
        overlap=scenario.overlap,
        step_time_ms=found.step_time_ms,
        samples_per_s=found.samples_per_s,
        interval=found.interval,
        tokens_per_s=None if length is None else found.samples_per_s * length,
        speedup=speedup,
        efficiency=speedup * alone.scenario.layout.workers / layout.workers,
        parts=found.parts,
        bottleneck=found.bottleneck,
        doubts=found.doubts,
        measured=measured,
    )
