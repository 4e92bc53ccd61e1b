"""`multinode predict`: other networks and settings, with an interval and the model's own back-tested error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from multinode.cli.options import (
    Json,
    LinkMeasured,
    complete_runs,
    expand_options,
    given_options,
    propose,
    read_invocation,
)
from multinode.cli.output import is_quiet
from multinode.cli.panels import examples
from multinode.cli.table import FormOptions, show_blocks
from multinode.decoding import parse_option
from multinode.errors import UsageError
from multinode.units import parse_rate

if TYPE_CHECKING:
    from multinode.predict.forecast import Forecast, ForecastRequest
    from multinode.traffic.step_calls import Strategy

T = TypeVar("T")
_SWITCH = {"on": True, "off": False}


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(epilog=examples("predict last", "predict last --link 10gbit --nodes 4"))(expand_options(predict))


def predict(
    ctx: typer.Context,
    *,
    run_ids: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            autocompletion=complete_runs,
            help=(
                "Runs of one training job, optionally with an nccl-test: run ids, beginnings of run ids, or `last`. A "
                "contrast stands for all of its runs."
            ),
        ),
    ] = None,
    benchmarks: Annotated[
        Path | None, typer.Option(metavar="FILE", help="YAML file of published benchmarks to use instead of runs.")
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="100mbit,10gbit",
            help="Link rates of a node. A bare number is in Gbit/s. Default: common rates and the measured rate.",
        ),
    ] = None,
    nodes: Annotated[str | None, typer.Option(metavar="2,4", help="Numbers of nodes. Default: as measured.")] = None,
    workers_per_node: Annotated[
        str | None,
        typer.Option(
            metavar="1,8",
            help="Workers per node. Default: as measured. The options below, up to --average, have the same default.",
        ),
    ] = None,
    batch: Annotated[str | None, typer.Option(metavar="2,4", help="Samples per micro-batch of a worker.")] = None,
    accumulation: Annotated[str | None, typer.Option(metavar="1,4", help="Micro-batches per step.")] = None,
    strategy: Annotated[
        str | None,
        typer.Option(
            metavar="ddp,zero2",
            help="Sharding strategies: ddp, zero1, zero2, zero3, zero3_hpz, fsdp, shard_grad_op or hybrid_shard.",
        ),
    ] = None,
    method: Annotated[
        str | None, typer.Option(metavar="full,lora:8", help="Training method: full, or lora:RANK.")
    ] = None,
    bucket_mib: Annotated[str | None, typer.Option(metavar="25,100", help="Size of a gradient bucket in MiB.")] = None,
    overlap: Annotated[
        str | None, typer.Option(metavar="on,off", help="Whether gradient reduction overlaps with the backward pass.")
    ] = None,
    grad_compress: Annotated[
        str | None,
        typer.Option(metavar="none,fp16,powersgd:4", help="Gradient compression of DDP, or none."),
    ] = None,
    average: Annotated[
        str | None,
        typer.Option(
            metavar="none,local:16,diloco:64:fp16",
            help="Parameter averaging between nodes every H steps, as in launch --average, or none.",
        ),
    ] = None,
    target: Annotated[float, typer.Option(help="Efficiency for which to find the break-even link rate.")] = 0.9,
    link_measured: LinkMeasured = None,
    stream: Annotated[
        str | None,
        typer.Option(
            metavar="RATE",
            help=(
                "Measured TCP rate between nodes, for example from iperf3. Needed if it is below the NIC rate, as is "
                "common in clouds and on overlay networks, VPNs, Wi-Fi and shared uplinks. Default: from the nccl-test "
                "or the file."
            ),
        ),
    ] = None,
    form: FormOptions,
    as_json: Json = False,
) -> None:
    """Predict the speed of a training job with other links, nodes and settings. Each prediction has an interval."""
    from multinode import api

    request = api.ForecastRequest(
        links=_read("--link", link, parse_rate),
        nodes=_read("--nodes", nodes, int),
        workers_per_node=_read("--workers-per-node", workers_per_node, int),
        per_device_batches=_read("--batch", batch, float),
        accumulations=_read("--accumulation", accumulation, int),
        strategies=_read("--strategy", strategy, _strategy),
        methods=_read("--method", method, str),
        bucket_mib=_read("--bucket-mib", bucket_mib, float),
        overlaps=_read("--overlap", overlap, _SWITCH.__getitem__),
        levers=api.LeverAxes.read(
            grad_compress=_read("--grad-compress", grad_compress, _or_none),
            average=_read("--average", average, _or_none),
        ),
        target=target,
        link_measured=parse_option("--link-measured", link_measured, parse_rate) if link_measured is not None else None,
        stream=parse_option("--stream", stream, parse_rate) if stream is not None else None,
    )
    form.choose(as_json=as_json)
    forecast = _forecast(run_ids, benchmarks, request)

    from multinode.predict.screen import show
    from multinode.render.following import following

    # Published figures name no run whose settings could be changed.
    advise = "" if benchmarks is not None or is_quiet() else propose(read_invocation(ctx), "advise")
    again = f"multinode predict{given_options(ctx)} --details"
    below = following(again, advise)
    show_blocks(form, "forecast", tuple(show(forecast)), forecast, as_json=as_json, below=below)


def _forecast(run_ids: list[str] | None, benchmarks: Path | None, request: ForecastRequest) -> Forecast:
    from multinode import api

    if benchmarks is not None:
        if run_ids:
            raise UsageError("both runs and --benchmarks are given", hint="use only one of them")
        if request.link_measured is not None:
            hint = "set network: {gbit_per_s: 10} in the file"
            raise UsageError("--link-measured applies to runs, not to --benchmarks", hint=hint)
        return api.predict_from_benchmarks(benchmarks, request)
    return api.predict(run_ids or ["last"], request)


def _read(option: str, text: str | None, kind: Callable[[str], T]) -> tuple[T, ...]:
    """Values with commas between."""
    words = [word.strip() for word in text.split(",")] if text is not None else []
    values = []
    for word in words:
        try:
            values.append(kind(word))
        except (ValueError, KeyError):
            raise UsageError(
                f"{option} {text}: {word!r} is not a valid value", hint="multinode predict --help"
            ) from None
    return tuple(dict.fromkeys(values))


def _or_none(word: str) -> str | None:
    return None if word == "none" else word


def _strategy(word: str) -> Strategy:
    from multinode.api import Strategy

    return Strategy.of_option(word.lower())
