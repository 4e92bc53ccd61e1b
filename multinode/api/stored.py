"""What stored runs say: read back, predicted from, advised for, reported on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multinode.api.result import Result
    from multinode.predict.advice import Recommendations
    from multinode.predict.forecast import Forecast, ForecastRequest
    from multinode.results.forms import AnswerForm
    from multinode.results.run_page import Report
    from multinode.runs.stored_run import StoredRun


def predict(names: Sequence[str], request: ForecastRequest | None = None, *, runs: Path | None = None) -> Forecast:
    """Predict other networks, nodes and settings from stored runs, as `multinode predict`.

    Args:
        names: of runs of one training, and of an nccl-test: ids, their beginnings, or `last`; a contrast has its own.
        request: what is predicted; None is the usual links for what was measured.
        runs: the directory of all runs; None is $MULTINODE_RUNS, else `runs` in the working directory.

    Raises:
        UsageError: there is no such run, they say too little, or what is asked for cannot be.
    """
    from multinode.predict.request import forecast_runs
    from multinode.records.run_directory import runs_root

    return forecast_runs(runs or runs_root(), names, request)


def predict_from_benchmarks(path: str | Path, request: ForecastRequest | None = None) -> Forecast:
    """Predict from a file of published figures, as `multinode predict --benchmarks`.

    Raises:
        UsageError: the file is not what it should be, or what is asked for cannot be.
    """
    from multinode.predict.request import forecast_benchmarks

    return forecast_benchmarks(Path(path), request)


def advise(
    *names: str, link: str | None = None, link_measured: str | None = None, runs: Path | None = None
) -> Result[Recommendations]:
    """Which changes would make a measured training faster, by how much, and how to make them, as `multinode advise`.

    Args:
        names: of runs: ids, their beginnings, or `last`, which is the default.
        link: the rate of the links that is assumed, such as `10gbit`; None is the measured one.
        link_measured: the rate of the links of the runs, if their NICs did not report it.
        runs: the directory of all runs; None is $MULTINODE_RUNS, else `runs` in the working directory.

    Raises:
        UsageError: there is no such run, they say too little, or a rate is none.
    """
    from multinode.api.result import Result
    from multinode.predict.advice_screen import show
    from multinode.predict.recommendations import advise_runs
    from multinode.predict.run_selection import read_rate
    from multinode.records.run_directory import runs_root

    found = advise_runs(
        runs or runs_root(),
        names or ("last",),
        link_gbit_per_s=read_rate("--link", link),
        link_measured=read_rate("--link-measured", link_measured),
    )
    return Result(value=found, blocks=lambda: show(found), details=True)


def report(
    *names: str,
    output: str | Path | None = None,
    form: AnswerForm | None = None,
    say: Callable[[str], None] = lambda _: None,
    runs: Path | None = None,
) -> Result[Report]:
    """Everything that is known of runs, as `multinode report`; a notebook shows it without charts.

    Args:
        names: of runs: ids, their beginnings, or `last`, which is the default.
        output: the file that is written, or a directory; None writes nothing.
        form: `html`, `markdown`, `csv`, `json` or `table`; None is what the ending of `output` says.
        say: is told what is read.
        runs: the directory of all runs; None is $MULTINODE_RUNS, else `runs` in the working directory.

    Raises:
        UsageError: there is no such run, or `output` cannot be written.
    """
    from multinode.api.result import Result
    from multinode.records.run_directory import runs_root
    from multinode.results.forms import choose_answer_form
    from multinode.results.run_page import (
        load_report,
        report_blocks,
        report_markdown,
        write_answer,
    )

    into = Path(output) if output is not None else None
    chosen = choose_answer_form(form, into, "html")
    loaded = load_report(runs or runs_root(), names or ("last",), say)
    if into is not None:
        write_answer(loaded, chosen, into)
    return Result(
        value=loaded,
        directory=loaded.runs[0].directory.path,
        screen=lambda: report_markdown(loaded).splitlines(),
        blocks=lambda: report_blocks(loaded),
    )


def load_run(name: str = "last", *, runs: Path | None = None) -> StoredRun:
    """A run read back, as `multinode show`: its record, its figures, and the directory that has all the rest.

    Args:
        name: its id, the beginning of it, or `last`.
        runs: the directory of all runs; None is $MULTINODE_RUNS, else `runs` in the working directory.

    Raises:
        UsageError: there is no such run.
    """
    from multinode.records.run_directory import runs_root
    from multinode.runs.stored_run import load_run as load

    return load(runs or runs_root(), name)


def document(result: object) -> Any:
    """A result as the command prints it with `--json`: dicts, lists, text and numbers, without secrets."""
    from multinode.secret_values import redacted

    return redacted(result)
