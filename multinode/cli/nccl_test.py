"""`multinode nccl-test`: what the network really gives, whether that is normal, and the cause if not."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer

from multinode.cli.inputs import given_values
from multinode.cli.options import (
    Check,
    Details,
    HangTimeout,
    Hosts,
    Json,
    NodeOptions,
    Nodes,
    OnHang,
    Overrides,
    expand_options,
    given_options,
    propose,
    read_invocation,
)
from multinode.cli.output import fail_gate, note, print_table
from multinode.cli.panels import examples
from multinode.cli.running import open_context
from multinode.cli.table import FormOptions, show_blocks, write_answer
from multinode.cluster.hostfile_variables import with_variables
from multinode.errors import UsageError
from multinode.records.files import MAX_BYTES, read_text, write_text
from multinode.records.invocation import Invocation
from multinode.records.run_directory import runs_root
from multinode.units import format_figure

if TYPE_CHECKING:
    from multinode.launch.context import Launch
    from multinode.network.measure import Extent
    from multinode.network.read_scan import Missing
    from multinode.network.scan_evidence import CollectiveRow
    from multinode.network.size_scan import ScanReport
    from multinode.render.sheet import NextCommand


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(
        "nccl-test",
        epilog=examples(
            "nccl-test --hosts hosts.txt",
            "nccl-test --hosts hosts.txt --pairs all_reduce sendrecv",
            "nccl-test --read all_reduce_perf.log --link 4x200gbit --nodes 2",
        ),
    )(expand_options(nccl_test))


def nccl_test(
    ctx: typer.Context,
    *,
    collectives: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[COLLECTIVE]...",
            help=(
                "Collectives to measure: all_reduce, all_gather, reduce_scatter, broadcast, all_to_all or sendrecv. "
                "Default: all_reduce."
            ),
        ),
    ] = None,
    hosts: Hosts = None,
    nodes: Nodes = None,
    local: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="Run N workers on this machine, without nodes or SSH.")
    ] = None,
    workers_per_node: Annotated[
        int | None, typer.Option(min=1, help="Workers per node. Default: 1, or the slots of each node with --like.")
    ] = None,
    begin: Annotated[str, typer.Option("-b", "--begin", help="Smallest message size, such as 8, 64K or 128M.")] = "64K",
    end: Annotated[str, typer.Option("-e", "--end", help="Largest message size.")] = "64M",
    factor: Annotated[int, typer.Option("-f", "--factor", help="Factor between two sizes.")] = 4,
    step: Annotated[
        str | None,
        typer.Option("-i", "--step", metavar="SIZE", help="Increment between two sizes, instead of a factor."),
    ] = None,
    iters: Annotated[int, typer.Option("-n", "--iters", min=1, help="Number of timed iterations per size.")] = 20,
    warmup_iters: Annotated[int, typer.Option("-w", "--warmup-iters", min=1, help="Number of warm-up iterations.")] = 2,
    verify: Annotated[
        int, typer.Option("-c", "--verify", min=0, help="Number of times to verify the results. 0 disables this.")
    ] = 1,
    dtype: Annotated[
        str,
        typer.Option("-d", "--dtype", help="Data type: int8, uint8, int32, int64, half, bfloat16, float or double."),
    ] = "float",
    op: Annotated[str, typer.Option("-o", "--op", help="Reduction: sum, prod, max, min or avg.")] = "sum",
    max_seconds: Annotated[
        float,
        typer.Option(
            min=0.1,
            help="Time limit per size. If iterations are slow, multinode runs fewer of them, but never fewer than 5.",
        ),
    ] = 5.0,
    backend: Annotated[
        str | None,
        typer.Option(
            help="Backend: nccl, gloo, xccl (Intel) or hccl (Ascend). Default: the backend for the GPUs of the nodes."
        ),
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option(
            metavar="JOB.yaml", help="Measure the message sizes of this job instead of those given by -b, -e and -f."
        ),
    ] = None,
    set_: Overrides = None,
    tcp: Annotated[
        bool,
        typer.Option(
            "--tcp/--no-tcp",
            help="Also measure raw TCP between the nodes, in turn with collectives of the largest message size.",
        ),
    ] = True,
    pairs: Annotated[bool, typer.Option("--pairs", help="Also measure every pair of nodes to find outliers.")] = False,
    compare: Annotated[
        str | None, typer.Option(metavar="RUN", help="Show changes since this earlier nccl-test.")
    ] = None,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help=(
                "Try NCCL settings for sockets, algorithms, protocols and buffers, and report how much each one gains."
            ),
        ),
    ] = False,
    repeats: Annotated[int, typer.Option(min=2, max=20, help="With --tune, number of repeats per setting.")] = 3,
    write: Annotated[
        bool, typer.Option("--write", help="With --tune, write the best settings to every line of the hostfile.")
    ] = False,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            help=(
                "With --tune, measure everything again. By default, the same command resumes an interrupted "
                "measurement."
            ),
        ),
    ] = False,
    form: Annotated[
        Literal["table", "html", "markdown", "csv", "json", "nccl-tests"] | None,
        typer.Option(
            "--format",
            help=(
                "Output format. `nccl-tests` is the output format of the program of that name. Default: from the "
                "suffix of --output, or a table."
            ),
        ),
    ] = None,
    read: Annotated[
        list[str] | None,
        typer.Option(
            "--read",
            metavar="FILE",
            rich_help_panel="Output of other programs",
            help=(
                "Evaluate existing output of nccl-tests, iperf3 or ib_write_bw instead of measuring. Use - for "
                "standard input. Add --nodes, --workers-per-node and a collective if the output does not state them. "
                "Repeatable."
            ),
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="[Nx]RATE",
            rich_help_panel="Output of other programs",
            help="With --read, link rate of a node, such as 25gbit, or of its NICs, such as 4x200gbit.",
        ),
    ] = None,
    rdma: Annotated[
        bool | None,
        typer.Option(
            "--rdma/--no-rdma",
            rich_help_panel="Output of other programs",
            help=(
                "With --read, whether the collectives used RDMA. By default, multinode derives this from NCCL's log "
                "or from the speeds."
            ),
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE|DIR",
            help="Also write the results to this file or directory. The suffix selects the format: .html (a page with "
            "charts), .md, .csv, .json or .txt.",
        ),
    ] = None,
    min_busbw: Annotated[
        float | None,
        typer.Option(
            min=0.0, metavar="GB/S", help="Exit with code 1 if the best busbw of a collective is below this value."
        ),
    ] = None,
    common: NodeOptions,
    check: Check = True,
    hang_timeout: HangTimeout = 300.0,
    on_hang: OnHang = "report",
    details: Details = False,
    as_json: Json = False,
) -> None:
    """Measure the speed of PyTorch collectives on the nodes, report whether it is normal, and if not, why.

    Columns, units and busbw are the same as in nccl-tests.
    """
    shown = FormOptions(form=form if form != "nccl-tests" else None, output=output, details=details)
    shown.choose(as_json=as_json)
    if read:
        _only_read([option[0] for option in read_invocation(ctx).options])
        if form == "nccl-tests":
            raise UsageError("--format nccl-tests cannot be combined with --read, which measures nothing")
        from multinode.network.read_scan import read_missing

        missing = read_missing(collectives or (), link, nodes, workers_per_node, over_rdma=rdma)
        _read(read, missing, min_busbw, shown, as_json=as_json)
    if link is not None or rdma is not None:
        raise UsageError("--link and --rdma need --read", hint="add --read FILE")
    from multinode import api
    from multinode.network.inputs import NcclTestInput

    if tune and (form == "nccl-tests" or min_busbw is not None):
        raise UsageError(
            "--tune measures one test with several settings; it cannot be combined with --format nccl-tests or "
            "--min-busbw"
        )
    if write and not tune:
        raise UsageError("--write needs --tune", hint="add --tune")
    options = {
        "hosts": hosts,
        "nodes": nodes,
        "local": local,
        "workers_per_node": workers_per_node,
        "begin": begin,
        "end": end,
        "factor": factor,
        "step": step,
        "iters": iters,
        "warmup_iters": warmup_iters,
        "verify": verify,
        "dtype": dtype,
        "op": op,
        "max_seconds": max_seconds,
        "backend": backend,
        "like": like,
        "set_": set_,
        "tcp": tcp,
        "pairs": pairs,
        "compare": compare,
        "tune": tune,
        "repeats": repeats,
        "fresh": fresh,
        "check": check,
        "hang_timeout": hang_timeout,
        "on_hang": on_hang,
    }
    given = NcclTestInput(
        collectives=tuple(collectives or ()), invocation=read_invocation(ctx), **given_values(options | vars(common))
    )
    launch, extent = given.read(note)
    if tune:
        _tune(launch, extent, repeats, shown, write=write, as_json=as_json)
        return
    from multinode.network.screen import next_step

    with open_context(launch.cluster, local=local is not None) as context:
        report = api.nccl_test(launch, context, extent)
    contrast = contrast_command(hosts, nodes, like, set_)
    below = next_step(report, given_options(ctx, {"--hosts", "--nodes"}), contrast)
    _show(report, shown, below, as_nccl_tests=form == "nccl-tests", as_json=as_json)
    _check_least(report.rows, min_busbw)
    raise typer.Exit(1 if report.verdict.is_failure or not report.rows else 0)


def _check_least(rows: Sequence[CollectiveRow], min_busbw: float | None) -> None:
    for collective in dict.fromkeys(row.collective for row in rows):
        best = max(row.busbw_gb_per_s for row in rows if row.collective == collective)
        if min_busbw is not None and best < min_busbw:
            fail_gate(
                f"{collective} reaches {format_figure(best, digits=4)} GB/s busbw, below --min-busbw {min_busbw:g}"
            )


# What says something of a printed text; everything else measures.
_OF_READING = frozenset(
    {
        *("--read", "--link", "--rdma", "--no-rdma", "--nodes", "--workers-per-node", "--min-busbw"),
        *("--format", "--output", "--details", "--json"),
    }
)


def _only_read(options: Sequence[str]) -> None:
    others = [name for name in options if name not in _OF_READING]
    if others:
        raise UsageError(f"--read measures nothing, so it cannot be combined with {', '.join(others)}")


def _read(
    files: Sequence[str], missing: Missing, min_busbw: float | None, shown: FormOptions, *, as_json: bool
) -> NoReturn:
    from multinode.network.read_scan import read_scans
    from multinode.network.screen import show_read

    report = read_scans([(name, _text(name)) for name in dict.fromkeys(files)], missing)
    title, blocks = "nccl-test", tuple(show_read(report))
    shown = write_answer(shown, title, blocks, report, as_json=as_json)
    show_blocks(shown, title, blocks, report, as_json=as_json, below=())
    _check_least([row for scan in report.scans for row in scan.rows], min_busbw)
    raise typer.Exit(1 if any(scan.verdict.is_failure for scan in report.scans) else 0)


def _text(name: str) -> str:
    if name != "-":
        return read_text(Path(name), "the output")
    return sys.stdin.buffer.read(MAX_BYTES).decode(errors="replace")


def _tune(launch: Launch, extent: Extent, repeats: int, shown: FormOptions, *, write: bool, as_json: bool) -> None:
    from multinode.network.tune import nccl_tune
    from multinode.network.tuning_screen import env_keys, show, tune_warnings

    path = Path(launch.cluster.source)
    if write and not (path.is_file() and read_text(path, "the hostfile") == launch.hostfile):
        raise UsageError(
            f"--write changes a hostfile, but {launch.cluster.source} is not one",
            hint="without --write, multinode prints the keys",
        )
    with open_context(launch.cluster) as context:
        report = nccl_tune(launch, extent, repeats, context)
    blocks = tuple(show(report))
    shown = write_answer(shown, report.run_id, blocks, report, as_json=as_json)
    show_blocks(shown, report.run_id, blocks, report, as_json=as_json, below=())
    if write and report.winner:
        for line in tune_warnings(report) if as_json else ():
            note(line)
        write_text(path, with_variables(launch.hostfile, report.winner))
        note(f"{path}: every node's line now has {env_keys(report)}")


def _show(report: ScanReport, shown: FormOptions, below: NextCommand, *, as_nccl_tests: bool, as_json: bool) -> None:
    from multinode.network.screen import show

    blocks = tuple(show(report))
    shown = write_answer(shown, report.run_id, blocks, report, as_json=as_json)
    if as_nccl_tests and not as_json:
        _print_nccl_tests(report)
    else:
        show_blocks(shown, report.run_id, blocks, report, as_json=as_json, below=(below,))


def _print_nccl_tests(report: ScanReport) -> None:
    from multinode.network.screen import change_sheets, nccl_tests_text, pair_sheet, scan_lines
    from multinode.render.sheet import IN_BRIEF
    from multinode.render.table import sheet_table

    typer.echo(nccl_tests_text(report.rows, report.test, report.devices))
    if report.tcp.pairs:
        print_table(sheet_table(pair_sheet(report.tcp.pairs, report.odd, nodes=report.nodes)), prefix="# ")
    for line in scan_lines(report):
        typer.echo(f"# {line}")
    for sheet in change_sheets(report):
        if sheet.detail in IN_BRIEF:
            typer.echo(f"# {sheet.title}")
            print_table(sheet_table(sheet), prefix="# ")


def contrast_command(
    hosts: str | None, nodes: int | None, like: Path | None, settings: Sequence[str] | None = None
) -> str:
    """The contrast of a training on these nodes: that of `--like` and `--set`, the last one, or the default job."""
    from multinode.launch.one_node import newest_training

    where = (("--hosts", hosts) if hosts is not None else (), ("--nodes", f"1,{nodes}") if nodes is not None else ())
    launched = newest_training(runs_root()) if like is None else None
    if launched is not None:
        first, without = tuple(itertools.chain(*where)), {"--hosts", "--nodes"}
        if line := propose(launched, "contrast", first=first, without=without):
            return line
    own = "" if like is not None or _has_default_job() else " JOB.yaml (or your command after --)"
    named = (str(like),) if like is not None else ()
    changed = [("--set", setting) for setting in settings or ()]
    invocation = Invocation(verb="contrast", options=tuple(filter(None, (*where, *changed))), job=named)
    return f"multinode contrast{invocation.arguments}{own}"


def _has_default_job() -> bool:
    from multinode.records.settings import default_job, load_settings

    try:
        default_job(load_settings(Path.cwd()), Path.cwd())
    except UsageError:
        return False
    return True
