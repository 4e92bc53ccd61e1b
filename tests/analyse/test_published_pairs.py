"""Published speeds of one node and of several: what the model makes of one, held against the other.

A file of `published_pairs/` each, with its source; nothing in the model is fitted to them.
"""

from __future__ import annotations

from pathlib import Path

from multinode.analyse.prediction.back_test import BackTest
from multinode.analyse.prediction.forecast import ForecastRequest, make_forecast
from multinode.analyse.prediction.published_benchmarks import evidence_of_benchmarks
from multinode.workflows.prediction.predict import load_published_benchmarks

PAIRS = sorted((Path(__file__).parent / "published_pairs").glob("*.yaml"))
# Outside of the interval, and why.
MISSES = {
    "internlm-7b-16": "its optimizer is shared out inside each node alone, which the file cannot say",
    "internlm-7b-64": "likewise",
    "p3-resnet50-25g-4n": "faster than four times one node, by the author's own table",
}


def held(path: Path) -> BackTest:
    return make_forecast(evidence_of_benchmarks(load_published_benchmarks(path)), ForecastRequest()).back_test


def test_nine_of_ten_published_pairs_lie_in_their_intervals_and_each_miss_has_its_reason() -> None:
    tested = {path.stem: held(path).tested[0] for path in PAIRS}
    assert len(tested) == 28
    assert {name for name, trial in tested.items() if not trial.is_covered} == set(MISSES)
