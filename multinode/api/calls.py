"""The verbs of the command in one call each: hosts, a job, and the options of the command as keywords."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multinode.api.keywords import JobWords, Names, read_hosts, read_job, read_keywords, takes
from multinode.api.launches import launch as launch_once
from multinode.api.result import Result
from multinode.api.verbs import check as check_cluster
from multinode.api.verbs import contrast as measure_contrast
from multinode.api.verbs import nccl_test as measure_scan
from multinode.check.screen import show as show_check
from multinode.contrast.inputs import ContrastInput
from multinode.errors import MultinodeError
from multinode.export.target import parse_targets
from multinode.launch.context import connect
from multinode.launch.export import export_while
from multinode.launch.inputs import CheckInput, LaunchInput
from multinode.launch.launch import fetch_results
from multinode.launch.notice import tell_of
from multinode.launch.progress_lines import ProgressLines, telling_stalls
from multinode.network.inputs import NcclTestInput
from multinode.network.screen import show_read
from multinode.records.files import read_text
from multinode.render.sheet import Block
from multinode.results.run_page import load_report, report_blocks
from multinode.sweep.inputs import SweepInput
from multinode.sweep.measure import load_tables, measure_swept
from multinode.tune.inputs import TuneInput, refuse_other_judge
from multinode.tune.measure import Tuned, measure_tuned

if TYPE_CHECKING:
    from multinode.check.check import CheckReport
    from multinode.cluster.cluster import Cluster
    from multinode.contrast.measure import Contrasted
    from multinode.launch.context import Launched, RunContext
    from multinode.network.nccl_tuning import TuneReport
    from multinode.network.read_scan import ReadReport
    from multinode.network.size_scan import ScanReport
    from multinode.records.run import Run
    from multinode.sweep.figures import CellTable

Say = Callable[[str], None] | None
# A cell keeps every line.
_PROGRESS_EVERY_S = 30.0
_WIDTH = 100


@takes(CheckInput, "check")
def run_check(hosts: Names = None, job: JobWords = None, *, say: Say = print, **options: Any) -> Result[CheckReport]:
    """Find problems that would break a training job on these nodes. Equivalent to `multinode check`.

    Args:
        hosts: a hostfile, a list of names, `@NAME` (an entry of multinode.toml), `lab` or `auto`. Default: same as for
            `--hosts`.
        job: path of a YAML file, or a command as a list of words, such as `["train.py", "--lr", "1e-4"]`. If None, the
            check covers only what every training job requires.
        say: called with a line of text at each stage. If None, nothing is printed.
        options: the options of the command, with underscores instead of hyphens.

    Raises:
        UsageError: a keyword, the hostfile or the job is invalid.
    """
    given = read_keywords(CheckInput, "run_check", options, hosts=read_hosts(hosts), **read_job(job))
    nodes, checked, how = given.read(_note(say))
    with _connected(nodes.cluster, say) as context:
        report = check_cluster(nodes.cluster, context, checked, how)
    return Result(value=report, blocks=lambda: show_check(report), details=True)


@takes(LaunchInput, "launch")
def run_launch(hosts: Names = None, job: JobWords = None, *, say: Say = print, **options: Any) -> Result[Launched]:
    """Run a training job to completion on every node. Equivalent to `multinode launch`.

    A failed run does not raise an error.

    Args:
        hosts: same as in `run_check`.
        job: same as in `run_check`. Default: the job in the settings, or configs/default.yaml.
        say: called with a line of text at each stage, and every 30 seconds with the progress. If None, nothing is
            printed.
        options: the options of the command, with underscores instead of hyphens.

    Raises:
        UsageError: a keyword, the hostfile or the job is invalid.
        NodeError, NodeFailed: same as in `launch`. Nothing was started.
        MultinodeError: the run succeeded, but a path in `fetch` could not be copied.
    """
    options.setdefault("notify", os.environ.get("MULTINODE_NOTIFY"))
    given = read_keywords(LaunchInput, "run_launch", options, hosts=read_hosts(hosts), **read_job(job))
    note = _note(say)
    launch, restarts = given.read(note)
    with _connected(launch.cluster, say) as context, _followed(given, context, note) as tell_end:
        launched = launch_once(launch, context, restarts)
        try:
            fetch_results(context, launched, launch.cluster, given.fetch, note)
        except MultinodeError as error:
            if launched.run.status == "succeeded":
                raise
            note(str(error))
        finally:
            tell_end(launched.run)
    directory = launched.directory.path
    return Result(
        value=launched,
        directory=directory,
        blocks=lambda: _stored_blocks(directory),
    )


@takes(ContrastInput, "contrast")
def run_contrast(hosts: Names = None, job: JobWords = None, *, say: Say = print, **options: Any) -> Result[Contrasted]:
    """Compare one node with several, and explain which is faster and why. Equivalent to `multinode contrast`.

    If the measurement was interrupted, make the same call again to resume it.

    Args:
        hosts: same as in `run_check`.
        job: same as in `run_launch`.
        say: same as in `run_launch`.
        options: the options of the command, with underscores instead of hyphens.

    Raises:
        UsageError: a keyword, the hostfile or the job is invalid, or the mode is not possible.
        RunFailed: a run failed.
        NodeError, NodeFailed: same as in `launch`.
    """
    given = read_keywords(ContrastInput, "run_contrast", options, hosts=read_hosts(hosts), **read_job(job))
    launch, request = given.read(_note(say))
    with _connected(launch.cluster, say) as context:
        contrasted = measure_contrast(launch, context, request, repeats=given.repeats, fresh=given.fresh)
    return Result(
        value=contrasted,
        directory=contrasted.directory,
        blocks=lambda: _stored_blocks(contrasted.directory),
    )


@takes(NcclTestInput, "nccl-test")
def run_nccl_test(
    hosts: Names = None, collectives: str | Iterable[str] = "all_reduce", *, say: Say = print, **options: Any
) -> Result[ScanReport] | Result[TuneReport]:
    """Measure collectives with PyTorch on the nodes and evaluate the network. Equivalent to `multinode nccl-test`.

    Args:
        hosts: same as in `run_check`.
        collectives: name of a collective, or a list of names, such as `["all_reduce", "sendrecv"]`.
        say: same as in `run_launch`.
        options: the options of the command, with underscores instead of hyphens. `tune=True` measures NCCL settings.

    Raises:
        UsageError: a keyword or the hostfile is invalid.
        RunFailed: the test failed.
        NodeError, NodeFailed: same as in `launch`.
    """
    names = (collectives,) if isinstance(collectives, str) else tuple(collectives)
    given = read_keywords(NcclTestInput, "run_nccl_test", options, hosts=read_hosts(hosts), collectives=names)
    launch, extent = given.read(_note(say))
    with _connected(launch.cluster, say, local=given.local is not None) as context:
        if given.tune:
            from multinode.network.tune import nccl_tune
            from multinode.network.tuning_screen import show

            tuned = nccl_tune(launch, extent, given.repeats, context)
            return Result(value=tuned, blocks=lambda: show(tuned))
        report = measure_scan(launch, context, extent)
        directory = context.runs / report.run_id
    return Result(
        value=report,
        directory=directory,
        blocks=lambda: _stored_blocks(directory),
    )


def read_nccl_test(  # noqa: PLR0913 - each is an option of the command
    files: str | Path | Iterable[str | Path],
    *,
    collective: str | None = None,
    link: str | None = None,
    nodes: int | None = None,
    workers_per_node: int | None = None,
    rdma: bool | None = None,
) -> Result[ReadReport]:
    """Evaluate the output of nccl-tests, iperf3 or perftest. Equivalent to `multinode nccl-test --read`.

    Args:
        files: path of a file that contains the output, or several paths.
        collective: name of the collective. Needed only if the output does not contain it.
        link: link rate of a node, such as `100gbit`, or of its NICs, such as `8x400gbit`.
        nodes: number of nodes. Needed only if the output does not contain it.
        workers_per_node: number of processes on each node.
        rdma: whether NCCL used RDMA. If None, multinode derives this from the output.

    Raises:
        UsageError: a file cannot be read, or it contains no output of these programs.
    """
    from multinode.network.read_scan import read_missing, read_scans

    names = [str(name) for name in ([files] if isinstance(files, (str, os.PathLike)) else files)]
    missing = read_missing((collective,) if collective else (), link, nodes, workers_per_node, over_rdma=rdma)
    report = read_scans([(name, read_text(Path(name), "the output")) for name in names], missing)
    return Result(value=report, blocks=lambda: show_read(report))


@takes(SweepInput, "sweep")
def sweep(hosts: Names = None, job: JobWords = None, *, say: Say = print, **options: Any) -> Result[CellTable]:
    """Measure a job over a grid of settings, node counts and worker counts. Equivalent to `multinode sweep`.

    For a YAML, pass the grid as `grid={"per_device_train_batch_size": [1, 2, 4]}`. For a script, pass it as
    `grid_arg={"--batch": [1, 2, 4]}`. If the measurement was interrupted, make the same call again to resume it.

    Args:
        hosts: same as in `run_check`.
        job: same as in `run_launch`.
        say: same as in `run_launch`.
        options: the options of the command, with underscores instead of hyphens.

    Raises:
        UsageError: a keyword, the hostfile, the job or the grid is invalid.
        NodeError, NodeFailed: same as in `launch`. After the first finished run, raised only if two runs in a row
            cannot start.
    """
    given = read_keywords(SweepInput, "sweep", options, hosts=read_hosts(hosts), **read_job(job))
    note = _note(say)
    swept = measure_swept(given.read(note), given.resume, lambda cluster: _connected(cluster, say), note)
    table = load_tables(swept.directory.parent, [swept.directory.name])
    return Result(
        value=table,
        directory=swept.directory,
        blocks=lambda: _stored_blocks(swept.directory),
    )


@takes(TuneInput, "tune")
def tune(hosts: Names = None, job: JobWords = None, *, say: Say = print, **options: Any) -> Result[Tuned]:
    """Find the change that lets a training job reach a given loss fastest. Equivalent to `multinode tune`.

    To compare changes by samples/s instead, set `judge="speed"`. To try the changes that `advise` recommends for the
    last run, set `from_="last"`. If the measurement was interrupted, make the same call again to resume it.

    Args:
        hosts: same as in `run_check`.
        job: same as in `run_launch`.
        say: same as in `run_launch`.
        options: the options of the command, with underscores instead of hyphens.

    Raises:
        UsageError: a keyword, the hostfile or the job is invalid, or the job cannot be tuned.
        RunFailed: a run of the unchanged job failed.
        NodeError, NodeFailed: same as in `launch`.
    """
    given = read_keywords(TuneInput, "tune", options, hosts=read_hosts(hosts), **read_job(job))
    refuse_other_judge({name for name, value in options.items() if value is not None}, given.judge)
    note = _note(say)
    tuned = measure_tuned(given.read(note), given.resume, lambda cluster: _connected(cluster, say), note)
    return Result(value=tuned, directory=tuned.directory, blocks=lambda: _stored_blocks(tuned.directory))


def _note(say: Say) -> Callable[[str], None]:
    return say if say is not None else lambda _: None


@contextlib.contextmanager
def _connected(cluster: Cluster, say: Say, *, local: bool = False) -> Iterator[RunContext]:
    """Connections whose stages and progress are told in lines. No signal is handled, so that any thread may call."""
    with connect(cluster, local=local) as context:
        if say is not None:
            context.say = say
            context.observe = telling_stalls(say, ProgressLines(say, _PROGRESS_EVERY_S).show)
        yield context


@contextlib.contextmanager
def _followed(given: LaunchInput, context: RunContext, note: Callable[[str], None]) -> Iterator[Callable[[Run], None]]:
    """Exports and notices of a run while inside; what is yielded tells of its end."""
    with contextlib.ExitStack() as stack:
        tell_end: Callable[[Run], None] = lambda _: None  # noqa: E731 - without notices
        if given.on_end is not None or given.notify is not None:
            tell_end = stack.enter_context(tell_of(context, given.on_end, given.notify, note))
        targets = parse_targets(given.export, given.metrics_port)
        if targets:
            stack.enter_context(export_while(context, targets, note))
        yield tell_end


def _stored_blocks(directory: Path) -> Iterator[Block]:
    return report_blocks(load_report(directory.parent, [directory.name]), _WIDTH)
