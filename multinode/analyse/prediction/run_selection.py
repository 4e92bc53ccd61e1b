"""select_runs: which of the stored runs predictions start from: one node, several nodes, and an nccl-test. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from multinode.analyse.prediction.record import Record, difference, is_alike, settings_of
from multinode.errors import UsageError
from multinode.units import format_rate

__all__ = ["CONTRAST", "RunSelection", "select_runs", "tells_exposed"]

CONTRAST = "multinode contrast --hosts H JOB.yaml"
"""What measures a training on one node and on several."""


class RunSelection(msgspec.Struct, frozen=True, kw_only=True):
    """The records that are used.

    Attributes:
        newest: the run that says what is trained, and how it is laid out today.
        single: on one node; None where none is known.
        several: on several nodes, oldest first, the newest last.
        sweep: an nccl-test of the same nodes; None where none is stored.
    """

    newest: Record
    single: Record | None = None
    several: tuple[Record, ...] = ()
    sweep: Record | None = None

    @property
    def sources(self) -> tuple[str, ...]:
        """Which they are, a sentence each."""
        found = [f"one node: run {self.single.run_id}"] if self.single is not None else []
        found += [f"{one.layout.nodes} nodes: run {one.run_id}" for one in self.several]
        if self.sweep is None:
            return (*found, "network: the link's stated rate alone")
        rate = self.sweep.link_gbit_per_s
        return (*found, f"network: nccl-test {self.sweep.run_id}" + (f" at {format_rate(rate)}" if rate else ""))


def select_runs(named: Sequence[Record], others: Sequence[Record]) -> RunSelection:
    """Sort them.

    Args:
        named: by the user, oldest first.
        others: all others that are stored, oldest first.

    Raises:
        UsageError: there is no training among them, or there are several.
    """
    trainings = [record for record in named if record.is_training]
    sweeps = [record for record in named if record.sweep is not None]
    if not trainings and sweeps:
        # An nccl-test alone: the newest training on its nodes is meant.
        trainings = _newest_on(others, sweeps[-1])
    if not trainings:
        raise _nothing_to_use(named)
    last = trainings[-1]
    stranger = next((one for one in trainings if not is_alike(one, last)), None)
    if stranger is not None:
        raise UsageError(
            f"runs {stranger.run_id} and {last.run_id} are of different trainings ({difference(stranger, last)})",
            hint="name runs of one training",
        )
    singles, several = ([one for one in trainings if (one.layout.nodes > 1) is many] for many in (False, True))
    if not singles and not tells_exposed(several[-1]):
        singles = [one for one in others if _could_be_single(one, several[-1])][-1:]
    single = _usual(singles) if singles else None
    newest = _usual(several) if several else single or last
    ordered = (*(one for one in several if one.run_id != newest.run_id), newest) if several else ()
    sweep = sweeps[-1] if sweeps else _sweep_for(newest, others)
    return RunSelection(newest=newest, single=single, several=ordered, sweep=sweep)


def tells_exposed(record: Record) -> bool:
    """Whether it tells what of its communication nothing hid."""
    mean = record.summary.split.mean if record.summary is not None else None
    return mean is not None and mean.exposed_ms is not None


def _usual(runs: Sequence[Record]) -> Record:
    """Of the newest run's repeats the middle one."""
    last = runs[-1]
    repeats = [
        one
        for one in runs
        if (one.layout, settings_of(one), one.node_names) == (last.layout, settings_of(last), last.node_names)
    ]
    return sorted(repeats, key=lambda one: one.samples_per_s)[(len(repeats) - 1) // 2]


def _newest_on(others: Sequence[Record], sweep: Record) -> list[Record]:
    fitting = [one for one in others if one.is_training and set(one.node_names) <= set(sweep.node_names)]
    if not fitting:
        return []
    alike = [one for one in fitting if is_alike(one, fitting[-1])]
    sides = [[one for one in alike if (one.layout.nodes > 1) is many][-1:] for many in (False, True)]
    return [*sides[0], *sides[1]]


def _nothing_to_use(named: Sequence[Record]) -> UsageError:
    for record in named:
        if record.sweep is not None:
            return UsageError(
                f"run {record.run_id} is an nccl-test, and no training on its nodes is stored",
                hint=f"measure one: {CONTRAST}",
            )
        reason = record.summary.missing.get("samples_per_s", "") if record.summary is not None else "it has no summary"
        told = f": {reason}" if reason else ""
        return UsageError(
            f"run {record.run_id} tells no samples/s to predict others from{told}",
            hint="use a run with more steps, or of a training whose batches can be counted",
        )
    return UsageError("no run was named", hint=f"measure one: {CONTRAST}")


def _could_be_single(one: Record, several: Record) -> bool:
    return (
        one.is_training
        and one.layout.nodes == 1
        and set(one.node_names) <= set(several.node_names)
        and is_alike(one, several)
    )


def _sweep_for(training: Record, others: Sequence[Record]) -> Record | None:
    """Of these nodes before one of more, on their link, with as many workers; of equal ones the newest."""
    ours = set(training.node_names)
    fitting = [
        one for one in others if one.sweep is not None and len(one.node_names) > 1 and ours <= set(one.node_names)
    ]

    def fit(one: Record) -> tuple[bool, bool, bool]:
        same_link = training.link_gbit_per_s in {None, one.link_gbit_per_s}
        return one.node_names == training.node_names, same_link, one.layout == training.layout

    # Of equal ones the first is taken.
    return max(reversed(fitting), key=fit, default=None)
