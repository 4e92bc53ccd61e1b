"""Shortfall: whether several nodes were slower than their network allows, as from what rate, and in which case. Pure.

The one judgement of a measured speed: `predict`, `contrast` and the early verdict show its finding.
"""

from __future__ import annotations

import math

import msgspec

from multinode.predict.calibration import Calibration, Residual
from multinode.predict.cost_model import Scenario
from multinode.predict.network_model import NetworkCase, NetworkModel
from multinode.predict.predict import Prediction
from multinode.records.finding import Finding
from multinode.render.sheet import times
from multinode.units import BITS_PER_BYTE, format_rate

_MS_PER_S = 1e3
# A rate may be off by as much before its link is suspected, as a nominal one is.
_NOTICEABLE = 1.25
_SLOWEST_GB_PER_S = 1e-5
_HALVINGS = 60
_CODE = "slower-than-network"


class PredictedCase(msgspec.Struct, frozen=True, kw_only=True):
    """A scenario in another case of its network than the likely one."""

    name: str  # `one of 8 NICs`, `TCP sockets`
    samples_per_s: float  # of all workers
    interval: tuple[float, float]  # of it: low, high


def predict_cases(calibration: Calibration, scenario: Scenario) -> tuple[PredictedCase, ...]:
    """The scenario in each other case of its network; none on one node, or if the network was measured."""
    if scenario.layout.nodes == 1:
        return ()
    network = msgspec.structs.replace(calibration.network, link=scenario.link)
    predicted = [(case.name, _in_case(calibration, scenario, case)) for case in network.cases()]
    return tuple(
        PredictedCase(name=name, samples_per_s=prediction.samples_per_s, interval=prediction.interval)
        for name, prediction in predicted
    )


def judge_speed(
    calibration: Calibration, scenario: Scenario, samples_per_s: float, most_samples_per_s: float | None = None
) -> Finding | None:
    """What a measured speed of several nodes says about their network; None if it is no slower than that allows.

    A network that may fall back to something far slower, by RDMA or in a cloud, is judged against the rate that it has
    on paper. Any other, and one that was measured, only beyond the whole interval, as slow computation looks the same.

    Args:
        calibration: the measurements. What the same run taught about overlap and waits is not used, except for its
            exposed communication, which tells the network's part from that of slow nodes.
        scenario: of the measured speed.
        samples_per_s: measured, of all workers.
        most_samples_per_s: the highest that its rounding leaves; None if it is exact.
    """
    if scenario.layout.nodes == 1:
        return None
    plain = _untaught(calibration)
    alone = Prediction(plain, scenario)
    measured_ms, least_ms = (
        scenario.samples / rate * _MS_PER_S for rate in (samples_per_s, most_samples_per_s or samples_per_s)
    )
    if calibration.residual.at == scenario:
        exposed_ms = Prediction(calibration, scenario).parts.exposed_ms
        measured_ms = least_ms = alone.step_time_ms - alone.parts.exposed_ms + exposed_ms
    slower = measured_ms / alone.step_time_ms
    if slower < _NOTICEABLE or scenario.samples / least_ms * _MS_PER_S >= _least(plain, scenario, alone):
        return None
    network = msgspec.structs.replace(plain.network, link=scenario.link)
    gb_per_s = _as_from(plain, scenario, measured_ms)
    gbit_per_s = gb_per_s * BITS_PER_BYTE
    rate = scenario.samples / measured_ms * _MS_PER_S
    held = [case for case in predict_cases(plain, scenario) if case.interval[0] <= rate <= case.interval[1]]
    case = min(held, key=lambda each: abs(math.log(each.samples_per_s / rate)), default=None)
    allows = "allow" if not (network.curves or network.stream_gb_per_s) else "allow as measured"
    over = " over RDMA" if scenario.link.rdma else ""
    as_with = f", as with {case.name}" if case is not None else ""
    return Finding(
        code=_CODE,
        message=(
            f"{times(slower)} slower than {format_rate(scenario.link.gbit_per_s)}{over} {allows}: as from about "
            f"{format_rate(float(f'{gbit_per_s:.2g}'))}{as_with}"
        ),
        hint=_hint(network),
        figures={
            "slower": slower,
            "link_gbit_per_s": scenario.link.gbit_per_s,
            "as_from_gbit_per_s": gbit_per_s,
            **({"case": case.name} if case is not None else {}),
        },
    )


def _untaught(calibration: Calibration) -> Calibration:
    costs = msgspec.structs.replace(calibration.costs, overlap=None, least_overlap=0.0)
    return msgspec.structs.replace(calibration, costs=costs, residual=Residual(), quantile=None)


def _in_case(calibration: Calibration, scenario: Scenario, case: NetworkCase) -> Prediction:
    network = msgspec.structs.replace(calibration.network, case=case)
    return Prediction(msgspec.structs.replace(calibration, network=network, quantile=None), scenario)


def _least(calibration: Calibration, scenario: Scenario, alone: Prediction) -> float:
    """The lowest speed that is not judged."""
    network = msgspec.structs.replace(calibration.network, link=scenario.link)
    if not network.cases():
        return alone.interval[0]
    return _in_case(calibration, scenario, network.as_rated).interval[0]


def _as_from(calibration: Calibration, scenario: Scenario, measured_ms: float) -> float:
    """The payload of a link in GB/s with which the model predicts the measured step."""
    network = msgspec.structs.replace(calibration.network, link=scenario.link)
    # Without its curves: they are of another link.
    stated = msgspec.structs.replace(calibration, network=msgspec.structs.replace(network, curves={}))

    def takes_longer(gb_per_s: float) -> bool:
        case = NetworkCase(name="", gb_per_s=(gb_per_s, gb_per_s))
        return _in_case(stated, scenario, case).step_time_ms > measured_ms

    low, high = math.log(_SLOWEST_GB_PER_S), math.log(scenario.link.goodput_gb_per_s)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if takes_longer(math.exp(middle)) else (low, middle)
    return math.exp(high)


def _hint(network: NetworkModel) -> str:
    if network.curves or network.stream_gb_per_s is not None:
        return "find what the step waits for: multinode show"
    if network.link.rdma:
        return "is NCCL using RDMA, on every NIC? multinode nccl-test"
    if network.may_cap_flows(network.link):
        return "does a cloud cap a TCP flow? multinode nccl-test"
    return "measure the link, or the nodes one by one: multinode nccl-test, multinode bench"
