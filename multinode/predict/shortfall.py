"""Shortfall: whether several nodes were slower than their network allows, as from what rate, and in which case. Pure.

The one judgement of a measured speed: `predict`, `contrast`, `import` and the early verdict show its finding.
"""

from __future__ import annotations

import math

import msgspec

from multinode.findings.finding import Finding
from multinode.findings.rule import RuleGroup
from multinode.predict.calibration import Calibration, Residual, sent_as
from multinode.predict.cost_model import Scenario
from multinode.predict.evidence import HoldoutRun
from multinode.predict.network_model import NetworkCase, NetworkModel
from multinode.predict.prediction import Prediction
from multinode.units import format_rate, times

_MS_PER_S = 1e3
# A rate may be off by as much before its link is suspected, as a nominal one is.
_NOTICEABLE = 1.25
_SLOWEST_GB_PER_S = 1e-5
_HALVINGS = 60
SHORTFALLS = RuleGroup("Speed that the network does not explain")
_SLOWER = SHORTFALLS.rule(
    "slower-than-network",
    about="several nodes that are slower than their network allows",
    message="{times} slower than {link} {allows}; the measured speed corresponds to a link of about {rate}{as_with}",
    hint="{fix!s}",
    figures=("slower", "link_gbit_per_s", "as_from_gbit_per_s", "case"),
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
    network, rate = plain.network.on(scenario.link), scenario.samples / measured_ms * _MS_PER_S
    link = scenario.link
    gbit_per_s = link.gbit_per_s * _as_from(plain, scenario, measured_ms) / link.goodput_gb_per_s
    case = _nearest_case(plain, scenario, rate)
    allows = "allows (as measured)" if network.is_measured else "allows"
    over = " over RDMA" if link.rdma else ""
    as_with = f", or {case}" if case else ""
    return _SLOWER.found(
        None,
        times=times(slower),
        link=f"{format_rate(link.gbit_per_s)}{over}",
        allows=allows,
        rate=format_rate(gbit_per_s, digits=2),
        as_with=as_with,
        fix=_hint(network),
        slower=slower,
        link_gbit_per_s=link.gbit_per_s,
        as_from_gbit_per_s=gbit_per_s,
        case=case or None,
    )


def judge_holdout(held: HoldoutRun) -> Finding | None:
    """What the speed of a run says about a network that nobody measured; None if it is no slower than that allows.

    The network of another run is known, and a miss is the model's.
    """
    if held.calibration.network.is_measured:
        return None
    sent = sent_as(held.calibration, held.scenario)
    return judge_speed(held.calibration, sent, held.samples_per_s.value, held.samples_per_s.high)


def shortfall_words(finding: Finding) -> str:
    """What was found, and what to do, as one line."""
    hint = finding.hint or ""
    return f"{finding.message}. {hint[:1].upper()}{hint[1:]}"


def _untaught(calibration: Calibration) -> Calibration:
    costs = msgspec.structs.replace(calibration.costs, overlap=None, least_overlap=0.0)
    return msgspec.structs.replace(calibration, costs=costs, residual=Residual(), quantile=None)


def _nearest_case(calibration: Calibration, scenario: Scenario, rate: float) -> str:
    """The case whose interval holds a speed; empty if none does."""
    cases = calibration.network.on(scenario.link).cases()
    predicted = [(case.name, Prediction(calibration.in_case(case), scenario)) for case in cases]
    held = [(abs(math.log(at.samples_per_s / rate)), name) for name, at in predicted if _holds(at, rate)]
    return min(held)[1] if held else ""


def _holds(prediction: Prediction, rate: float) -> bool:
    low, high = prediction.interval
    return low <= rate <= high


def _least(calibration: Calibration, scenario: Scenario, alone: Prediction) -> float:
    """The lowest speed that is not judged."""
    network = calibration.network.on(scenario.link)
    if not network.cases():
        return alone.interval[0]
    return Prediction(calibration.in_case(network.as_rated), scenario).interval[0]


def _as_from(calibration: Calibration, scenario: Scenario, measured_ms: float) -> float:
    """The payload of a link in GB/s with which the model predicts the measured step."""
    # The curves are of the link that was measured.
    network = msgspec.structs.replace(calibration.network.on(scenario.link), curves={})
    stated = msgspec.structs.replace(calibration, network=network)

    def takes_longer(gb_per_s: float) -> bool:
        case = NetworkCase(name="", gb_per_s=(gb_per_s, gb_per_s))
        return Prediction(stated.in_case(case), scenario).step_time_ms > measured_ms

    low, high = math.log(_SLOWEST_GB_PER_S), math.log(scenario.link.goodput_gb_per_s)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if takes_longer(math.exp(middle)) else (low, middle)
    return math.exp(high)


def _hint(network: NetworkModel) -> str:
    if network.is_measured:
        return "find what the step waits for: multinode show"
    if network.link.rdma:
        return "check whether NCCL uses RDMA on every NIC: multinode nccl-test"
    if network.may_cap_flows(network.link):
        return "check whether a cloud caps TCP flows: multinode nccl-test"
    return "measure the link, or the nodes one by one: multinode nccl-test, multinode bench"
