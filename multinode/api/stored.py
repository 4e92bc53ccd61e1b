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
    """Predict the speed with other networks, nodes and settings from stored runs. Equivalent to `multinode predict`.

    Args:
        names: runs of the same training job, and optionally an nccl-test. Each name is a run id, the beginning of a run
            id, or `last`. If a run is a contrast, all of its runs are used.
        request: what to predict. Default: the speed of the measured job at common link rates.
        runs: the directory of all runs. Default: $MULTINODE_RUNS, or `runs` in the working directory.

    Raises:
        UsageError: a run does not exist, the runs lack data, or the requested settings cannot be predicted.
    """
    from multinode.predict.request import forecast_runs
    from multinode.records.run_directory import runs_root

    return forecast_runs(runs or runs_root(), names, request)


def predict_from_benchmarks(path: str | Path, request: ForecastRequest | None = None) -> Forecast:
    """Predict the speed from a file of published benchmarks. Equivalent to `multinode predict --benchmarks`.

    Raises:
        UsageError: the file is invalid, or the requested settings cannot be predicted.
    """
    from multinode.predict.request import forecast_benchmarks

    return forecast_benchmarks(Path(path), request)


def advise(
    *names: str, link: str | None = None, link_measured: str | None = None, runs: Path | None = None
) -> Result[Recommendations]:
    """Rank changes that would make a measured training job faster. Equivalent to `multinode advise`.

    Args:
        names: run ids, beginnings of run ids, or `last` (the default).
        link: link rate to assume, such as `10gbit`. Default: the measured link rate.
        link_measured: link rate during these runs. Needed only if the NICs did not report it.
        runs: the directory of all runs. Default: $MULTINODE_RUNS, or `runs` in the working directory.

    Raises:
        UsageError: a run does not exist, the runs lack data, or a rate is invalid.
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
    """Report all results of runs. Equivalent to `multinode report`. A notebook shows the report without charts.

    Args:
        names: run ids, beginnings of run ids, or `last` (the default).
        output: file or directory to write. If None, nothing is written.
        form: `html`, `markdown`, `csv`, `json` or `table`. If None, the suffix of `output` determines the format.
        say: called with a line of text at each stage.
        runs: the directory of all runs. Default: $MULTINODE_RUNS, or `runs` in the working directory.

    Raises:
        UsageError: a run does not exist, or `output` cannot be written.
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
    """Load a stored run with its record, its figures, and its directory.

    Args:
        name: the run id, the beginning of a run id, or `last`.
        runs: the directory of all runs. Default: $MULTINODE_RUNS, or `runs` in the working directory.

    Raises:
        UsageError: the run does not exist.
    """
    from multinode.records.run_directory import runs_root
    from multinode.runs.stored_run import load_run as load

    return load(runs or runs_root(), name)


def document(result: object) -> Any:
    """Convert a result to the dicts, lists, strings and numbers that `--json` prints. Secrets are redacted."""
    from multinode.secret_values import redacted

    return redacted(result)
