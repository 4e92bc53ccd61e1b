"""What a bench says above its tables, a line each: who is slow, the likely cause, what mends it, what else differs."""

from __future__ import annotations

from collections.abc import Iterator

from multinode.analyse.bench.bench_figures import BenchReport
from multinode.analyse.steps.stragglers import Clue

__all__ = ["bench_lines"]


def bench_lines(report: BenchReport) -> list[str]:
    """Lines of plain text: the verdict, and below each of its sentences what is to be done."""
    clues: dict[str, tuple[Clue, ...]] = {}
    clues |= {one.text: one.clues for one in report.slow}
    clues |= {one.text: one.clues for one in report.drops}
    clues |= {one.text: one.clues for one in report.below_sheet}
    return [line for sentence in report.verdict for line in (sentence, *_below(clues.get(sentence, ())))]


def _below(clues: tuple[Clue, ...]) -> Iterator[str]:
    """The first clue stands in the sentence already."""
    for number, clue in enumerate(clues):
        if number:
            yield f"  also: {clue.sentence}"
        yield f"  hint: {clue.hint}"
