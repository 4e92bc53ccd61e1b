"""How far predictions from published figures are off: pairs of one node and several, each file predicted from the one.

A pair is a file of published figures (`multinode predict --benchmarks`) with `several_nodes`, which the prediction does
not use. Printed are each pair, and by network what all come to: how many lie in their intervals, how wide these are
(half of high minus low, over the prediction), how far the middle is off, beside the guess that several nodes scale
linearly, and how often the interval says whether several nodes are faster than one.

    .venv/bin/python benchmarks/published_pairs.py tests/predict/published_pairs
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from multinode.predict.forecast import ForecastRequest, make_forecast
from multinode.predict.published_benchmarks import evidence_of_benchmarks
from multinode.predict.request import load_published_benchmarks


class Pair(NamedTuple):
    """A pair; speeds are over one node with the same settings."""

    name: str
    rdma: bool
    predicted: float
    low: float
    high: float
    measured: float
    linear: float
    inside: bool  # whether the measured speed, as far as its digits tell it, is in the interval
    verdict: str  # on the measured speed
    cases: str  # other ways to use the network: their intervals

    @property
    def half_width(self) -> float:
        """Of the interval, over the prediction."""
        return (self.high - self.low) / 2 / self.predicted

    @property
    def decided(self) -> str:
        """Whether the interval says that several nodes are faster or slower: `right`, `wrong` or `open`."""
        if self.low < 1 < self.high:
            return "open"
        return "right" if (self.low >= 1) == (self.measured >= 1) else "wrong"


def pair_of(path: Path) -> Pair:
    """The prediction of a file, beside what it says of several nodes."""
    evidence = evidence_of_benchmarks(load_published_benchmarks(path))
    scenario = evidence.today
    forecast = make_forecast(evidence, ForecastRequest(links=(scenario.link.gbit_per_s,)))
    (trial,), (row,) = forecast.back_test.tested, forecast.scenarios
    alone = trial.predicted.value / row.speedup.value
    return Pair(
        name=path.stem,
        rdma=scenario.link.rdma,
        predicted=trial.predicted.value / alone,
        low=trial.predicted.low / alone,
        high=trial.predicted.high / alone,
        measured=trial.measured.value / alone,
        linear=row.layout.workers / (row.layout.workers * row.efficiency / row.speedup.value),
        inside=trial.is_covered,
        verdict=forecast.shortfall.message if forecast.shortfall is not None else "",
        cases="; ".join(
            f"{case.case} {case.samples_per_s.low / alone:.2f} to {case.samples_per_s.high / alone:.2f}"
            for case in row.cases
        ),
    )


def summary(name: str, pairs: Sequence[Pair]) -> str:
    """One row of the table by network."""
    decided = [pair.decided for pair in pairs]
    return row_of(
        name,
        len(pairs),
        sum(pair.inside for pair in pairs),
        f"{statistics.median(abs(pair.predicted / pair.measured - 1) for pair in pairs):.1%}",
        f"{statistics.median(abs(pair.linear / pair.measured - 1) for pair in pairs):.1%}",
        f"{statistics.median(pair.half_width for pair in pairs):.1%}",
        f"{statistics.median(pair.high / pair.low for pair in pairs):.2f}",
        " / ".join(str(decided.count(word)) for word in ("right", "wrong", "open")),
    )


def report(pairs: Sequence[Pair]) -> Iterator[str]:
    """Every pair, then what they come to."""
    yield from header(
        "pair", "measured", "predicted", "interval", "inside", "half width", "faster or slower", "cases", "verdict"
    )
    for pair in pairs:
        yield row_of(
            pair.name,
            f"{pair.measured:.2f}x",
            f"{pair.predicted:.2f}x",
            f"{pair.low:.2f} to {pair.high:.2f}",
            "yes" if pair.inside else "no",
            f"{pair.half_width:.1%}",
            pair.decided,
            pair.cases,
            pair.verdict,
        )
    yield ""
    names = ("inside", "median error", "linear", "median half width", "high/low", "right / wrong / open")
    yield from header("network", "pairs", *names)
    for name, some in (
        ("TCP", [pair for pair in pairs if not pair.rdma]),
        ("RDMA", [pair for pair in pairs if pair.rdma]),
        ("all", pairs),
    ):
        if some:
            yield summary(name, some)


def header(*names: str) -> tuple[str, str]:
    """Of a table in Markdown."""
    return row_of(*names), row_of(*("---" for _ in names))


def row_of(*values: object) -> str:
    """One row of it."""
    return f"| {' | '.join(map(str, values))} |"


def files_of(paths: Iterable[Path]) -> Iterator[Path]:
    """Files, and those of directories."""
    for path in paths:
        yield from sorted(path.glob("*.yaml")) if path.is_dir() else (path,)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", type=Path, nargs="+", help="files of published figures, or directories of them")
    parser.add_argument("--skip", action="append", default=[], help="pairs with that text in their names; repeatable")
    arguments = parser.parse_args()
    paths = [path for path in files_of(arguments.paths) if not any(text in path.stem for text in arguments.skip)]
    for line in report([pair_of(path) for path in paths]):
        print(line)


if __name__ == "__main__":
    main()
