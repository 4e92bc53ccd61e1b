"""Published speeds of one node and of several: what the model makes of one, held against the other.

A file of `published_pairs/` each, with its source; nothing in the model is fitted to them.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from multinode.predict.back_test import Trial, back_test
from multinode.predict.forecast import Forecast, ForecastRequest, make_forecast
from multinode.predict.published_benchmarks import evidence_of_benchmarks
from multinode.predict.request import load_published_benchmarks

PAIRS = sorted((Path(__file__).parent / "published_pairs").glob("*.yaml"))
# Slower than their network allows, each as with the case that is named.
SHORT = {
    "titan-708-faulty": "TCP sockets",
    "llmc-2n": "one of 8 NICs",
    "llmc-8n": "TCP sockets",
    "dlperf-mxnet-bert-b32-2n": "TCP sockets",
    "dlperf-tf1-bert-b32-4n": "TCP sockets",
    "p3-roberta-25g": "a capped flow",
}
# Outside of the interval, and why.
MISSES = {
    **dict.fromkeys(("titan-708-faulty", "llmc-2n", "llmc-8n"), "its nodes used their network badly"),
    "dlperf-tf1-bert-b32-4n": "32 of its 100 Gbit/s, with Horovod in TensorFlow 1",
    "mpt-13b-a100-2n": "2.39x on two nodes, with micro-batches of 10 samples instead of 4: at most 2.34x",
    "mpt-760m-h100-2n": "2.17x on two nodes, with one micro-batch instead of two: at most 2.07x",
}


@pytest.fixture(scope="module")
def forecasts() -> dict[str, Forecast]:
    return {path.stem: forecast(path) for path in PAIRS}


def forecast(path: Path) -> Forecast:
    evidence = evidence_of_benchmarks(load_published_benchmarks(path))
    return make_forecast(evidence, ForecastRequest(links=(evidence.today.link.gbit_per_s,)))


def held(found: Forecast) -> Trial:
    (trial,) = found.back_test.tested
    return trial


def test_nine_of_ten_published_pairs_lie_in_their_intervals_and_each_miss_has_its_reason(
    forecasts: dict[str, Forecast],
) -> None:
    tested = {name: held(found) for name, found in forecasts.items()}
    assert len(tested) == 56
    assert {name for name, trial in tested.items() if not trial.is_covered} == set(MISSES)
    found = back_test(tuple(tested.values()))
    assert found.median_error is not None
    assert found.median_error < 0.07


def test_their_intervals_are_no_wider_than_is_useful(forecasts: dict[str, Forecast]) -> None:
    half_widths: dict[bool, list[float]] = {True: [], False: []}
    for path in PAIRS:
        trial = held(forecasts[path.stem])
        rdma = load_published_benchmarks(path).network.rdma
        half_widths[rdma].append((trial.predicted.high - trial.predicted.low) / 2 / trial.predicted.value)
    assert statistics.median(half_widths[True]) <= 0.20
    assert statistics.median(half_widths[False]) <= 0.43


def test_over_tcp_the_interval_never_says_faster_of_what_is_slower_and_decides_most(
    forecasts: dict[str, Forecast],
) -> None:
    decided = 0
    for path in PAIRS:
        if load_published_benchmarks(path).network.rdma:
            continue
        (row,), trial = forecasts[path.stem].scenarios, held(forecasts[path.stem])
        alone = row.samples_per_s.value / row.speedup.value
        low, high = (end / alone for end in trial.predicted.bounds)
        if not low < 1 < high:
            decided += 1
            assert (low >= 1) == (trial.measured.value / alone >= 1)
    assert decided == 12


def test_nodes_that_use_their_network_badly_are_told_so_and_in_which_way(forecasts: dict[str, Forecast]) -> None:
    short = {name: found for name, found in forecasts.items() if found.shortfall is not None}
    assert set(short) == set(SHORT)
    for name, found in short.items():
        assert found.shortfall is not None
        assert found.shortfall.figures["case"] == SHORT[name]
        (row,), measured = found.scenarios, held(found).measured.value
        (case,) = (case for case in row.cases if case.case == SHORT[name])
        assert case.samples_per_s.low <= measured <= case.samples_per_s.high
    titan = short["titan-708-faulty"].shortfall
    assert titan is not None
    assert titan.message == (
        "4.0x slower than 3,200 Gbit/s over RDMA allows; the measured speed corresponds to a link of about 75 "
        "Gbit/s, or TCP sockets"
    )
    assert titan.hint == "check whether NCCL uses RDMA on every NIC: multinode nccl-test"
    # The likely case stays as certain as it was.
    assert short["titan-708-faulty"].scenarios[0].samples_per_s.low > 25


def test_each_pair_has_its_source() -> None:
    for path in PAIRS:
        assert path.read_text().startswith("# ")


def test_a_flow_that_was_measured_explains_what_a_stated_rate_did_not() -> None:
    """transformers#3707 and horovod#2581 met AWS's caps: 5 Gbit/s, and 10 in a placement group."""
    cloud = load_published_benchmarks(PAIRS[0].with_name("p3-roberta-25g.yaml"))
    assert cloud.several_nodes is not None
    evidence = evidence_of_benchmarks(cloud, 5.0)
    trial = make_forecast(evidence, ForecastRequest()).back_test.tested[0]
    assert trial.is_covered
    assert abs(trial.error) < 0.05


BLIND = sorted((Path(__file__).parent / "blind_pairs").glob("*.yaml"))
# Outside of the interval at the only try; the model is not changed on them.
BLIND_MISSES = {
    "hf-3274-bert-40g": "0.25x: slower than 40 Gbit/s allow, as from about 1.9 Gbit/s; the verdict says so",
    "mlperf31-xe9680-rnnt-2n": "1.42x: slower than 3200 Gbit/s over RDMA allow; the row of TCP sockets holds it",
    "ml710-llava-zero2-1g": "1.73x: its source says about 1 Gbit/s, at which its other steps could not be done either",
}


def test_of_pairs_that_were_sought_afterwards_nine_of_ten_lie_in_their_intervals() -> None:
    tested = {path.stem: held(forecast(path)) for path in BLIND}
    assert len(tested) == 31
    assert {name for name, trial in tested.items() if not trial.is_covered} == set(BLIND_MISSES)
