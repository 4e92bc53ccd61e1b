"""`multinode bench`: how fast each worker's device is, against its data sheet and its peers, and why one is slow."""

from __future__ import annotations

from typing import Annotated

import typer

from multinode.cli.inputs import given_values
from multinode.cli.options import (
    Check,
    Fresh,
    HangTimeout,
    Hosts,
    Json,
    NodeOptions,
    Nodes,
    OnHang,
    WorkersPerNode,
    expand_options,
    given_options,
    read_invocation,
)
from multinode.cli.output import note
from multinode.cli.panels import examples
from multinode.cli.running import open_context
from multinode.cli.table import FormOptions, show_blocks, write_answer
from multinode.errors import UsageError
from multinode.launch.context import ExecuteOptions, Launch
from multinode.launch.inputs import NodeInput, note_unused_variables, read_nodes, with_environment
from multinode.records.plan import Observation

# As for nccl-test: a measurement with a gap is worth nothing.
_LEASE_S = 30.0
# No test lasts so many times the time that it is timed for.
_SILENT_TESTS = 6
# A test lasts a second: its clocks are looked at several times in it.
_SAMPLE_INTERVAL_S = 0.25


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(epilog=examples("bench --hosts hosts.txt", "bench --local 1"))(expand_options(bench))


def bench(
    ctx: typer.Context,
    *,
    hosts: Hosts = None,
    nodes: Nodes = None,
    local: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Run N workers on this machine, without nodes or SSH.")
    ] = None,
    workers_per_node: WorkersPerNode = None,
    only: Annotated[
        str | None,
        typer.Option(metavar="KINDS", help="Tests to run, separated by commas: matmul, memory, layers. Default: all."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="TYPES",
            help=(
                "Data types to test, separated by commas: fp32, tf32, fp16, bf16. Default: all that the device "
                "supports."
            ),
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option(
            metavar="ROWS",
            help=(
                "Numbers of rows of the square matrices, separated by commas. Default: sizes whose tests fit into "
                "--seconds."
            ),
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(help="Duration of each test.")] = 1.0,
    repeats: Annotated[int, typer.Option(min=1, help="Number of passes over all tests.")] = 1,
    alone: Annotated[bool, typer.Option("--alone", help="Only measure one worker at a time, node by node.")] = False,
    together: Annotated[
        bool, typer.Option("--together", help="Only measure all workers of all nodes at once.")
    ] = False,
    common: NodeOptions,
    check: Check = True,
    hang_timeout: HangTimeout = 300.0,
    on_hang: OnHang = "stop",
    fresh: Fresh = False,
    shown: FormOptions,
    as_json: Json = False,
) -> None:
    """Measure the device of every worker (matrix products, memory, transformer layers), and find slow devices.

    multinode first measures one device at a time. It then measures all devices at the same time, because heat, power
    limits and shared CPUs may then slow them down. It reports the likely cause of a slow device. If the command is
    interrupted, run it again to resume.
    """
    from multinode.bench.measure import bench as run_bench
    from multinode.bench.measure import make_device_test
    from multinode.records.benchmark import PHASES

    shown.choose(as_json=as_json)
    test = make_device_test(
        kinds=_words(only), dtypes=_words(dtype), sizes=_rows(size), seconds=seconds, repeats=repeats
    )
    modes = {"alone": alone, "together": together}
    phases = [phase for phase in PHASES if modes[phase] or not any(modes.values())]
    cluster, hostfile = read_nodes(hosts, nodes, local, note)
    launch = Launch(
        cluster=cluster,
        hostfile=hostfile,
        job=test,
        workers_per_node=local or workers_per_node,
        observation=Observation(sample_interval_s=_SAMPLE_INTERVAL_S),
        command=read_invocation(ctx),
        # A device that hangs would hold up all other nodes.
        execute=ExecuteOptions(
            kind="bench",
            lease_s=_LEASE_S,
            stall_s=hang_timeout + _SILENT_TESTS * seconds if hang_timeout else None,
            on_stall=on_hang,
        ),
        check=check,
    )
    launch = with_environment(launch, NodeInput(**given_values(vars(common))))
    note_unused_variables(launch, note)
    with open_context(launch.cluster, local=local is not None) as context:
        report = run_bench(launch, phases, context, fresh=fresh)
    from multinode.bench.screen import next_step, show

    blocks, below = tuple(show(report)), next_step(report, given_options(ctx, {"--hosts", "--nodes"}))
    shown = write_answer(shown, report.run_id, blocks, report, as_json=as_json)
    show_blocks(shown, report.run_id, blocks, report, as_json=as_json, below=(below,))
    raise typer.Exit(1 if any(node.failures or not node.is_measured for node in report.nodes) else 0)


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in text.split(",")] if text is not None else []


def _rows(text: str | None) -> list[int]:

    words = _words(text)
    wrong = next((word for word in words if not (word.isascii() and word.isdecimal()) or len(word) > 9), None)  # noqa: PLR2004 - digits enough
    if wrong is not None:
        raise UsageError(f"--size: {wrong!r} is not a number of rows", hint="for example --size 1024,4096")
    return [int(word) for word in words]
