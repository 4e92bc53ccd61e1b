"""`multinode advise`: which change pays, what it costs, and how to make it; the best ones tried on request."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from multinode.cli.inputs import parse_option, read_cluster, read_job
from multinode.cli.options import (
    SCRIPT,
    Check,
    Details,
    HangTimeout,
    Hosts,
    Json,
    LinkMeasured,
    Nodes,
    OnHang,
    Overrides,
    RunIds,
    ScriptCommand,
    TrainingOptions,
    expand_options,
    given_options,
)
from multinode.cli.output import is_quiet, print_directory, print_document, print_screen
from multinode.cli.running import open_context
from multinode.cluster.quoting import hosts_option
from multinode.errors import UsageError
from multinode.job.planning import LaunchOptions
from multinode.launch.request import ExecuteOptions
from multinode.records.run_directory import runs_root
from multinode.units import parse_rate

if TYPE_CHECKING:
    from multinode.job.job import Job
    from multinode.predict.advice import Recommendations

_FOR_TRYING = (
    "pick",
    "job",
    "steps",
    "repeats",
    "hosts",
    "nodes",
    "set_",
    "check",
    "hang_timeout",
    "on_hang",
    *(field.name for field in dataclasses.fields(TrainingOptions)),
)

_TOP = 3
_FOR_A_TRY = {"run_ids", "link_measured"}
_FOR_A_LAUNCH = {"hosts", "nodes", "set_", *(field.name for field in dataclasses.fields(TrainingOptions))}


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(
        cls=ScriptCommand,
        epilog="\b\nTry the best three: multinode advise last --try 3 --hosts H\n"
        "A script that was measured stands after --, as for launch.",
    )(expand_options(advise))


def advise(
    ctx: typer.Context,
    *,
    run_ids: RunIds = None,
    link: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="As if the nodes had this link: 10gbit; a bare number is in Gbit/s."),
    ] = None,
    link_measured: LinkMeasured = None,
    top: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Show the best N; else 3, all in JSON and with --details."),
    ] = None,
    try_: Annotated[
        int | None, typer.Option("--try", min=1, metavar="N", help="Measure the best N in short runs on the nodes.")
    ] = None,
    pick: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT", help="Try only changes with this in their name; two at once by `a + b`. Repeatable."
        ),
    ] = None,
    job: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Try them with this YAML; else with the job that was measured.")
    ] = None,
    steps: Annotated[int, typer.Option(min=3, help="Measured steps of each run, after the warm-up (max_steps).")] = 20,
    repeats: Annotated[int, typer.Option(min=1, max=20, help="Try each so often, in turns.")] = 1,
    hosts: Hosts = None,
    nodes: Nodes = None,
    set_: Overrides = None,
    training: TrainingOptions,
    check: Check = True,
    hang_timeout: HangTimeout = 300.0,
    on_hang: OnHang = "stop",
    details: Details = False,
    as_json: Json = False,
) -> None:
    """Say which change of a measured training pays, by how much, what it costs, and how to make it."""
    if try_ is None and (given := _given(ctx)):
        raise UsageError(f"{given} is for trying what is advised", hint="add --try N")
    if try_ is not None and link is not None:
        raise UsageError("--link is for predicting: a try uses the link that is there", hint="leave one of them out")
    recommendations = _recommendations(run_ids, link, link_measured)
    if try_ is None:
        from multinode.predict.advice import pays
        from multinode.predict.advice_screen import is_one_node
        from multinode.predict.words import launch_command

        again = f"multinode advise{given_options(ctx)} --details"
        paying = [one for one in recommendations.advice if one.change is not None and pays(one)]
        named = hosts_option(recommendations.hosts)
        following = (
            f"multinode advise{given_options(ctx, _FOR_A_TRY)} --try 2{named}" if paying and link is None else ""
        )
        if paying and paying[0] is recommendations.advice[0] and recommendations.job and is_one_node(paying[0]):
            following = launch_command(recommendations.job, recommendations.hosts, paying[0].command)
        _tell(recommendations, _Shown(top=top, details=details, as_json=as_json, more=again, next_command=following))
        return

    from multinode.job.job import LlamaFactoryJob
    from multinode.predict.advice import best_tried
    from multinode.predict.try_advice import Trials, try_advice
    from multinode.profile.observed import steps_to_run

    there = read_cluster(hosts, nodes)
    script = ctx.meta[SCRIPT]
    # A script makes as many steps as its own arguments say.
    overrides = [*(set_ or []), *([f"max_steps={steps_to_run(steps)}"] if script is None else [])]
    what_job = _job(recommendations, (job, script), overrides, training.deepspeed_set)
    grad_compress = training.grad_compress or recommendations.settings.grad_compress
    training = dataclasses.replace(training, grad_compress=grad_compress)
    execute = ExecuteOptions(kind="advise", stall_s=hang_timeout or None, on_stall=on_hang)
    what = training.make_training(there, what_job, LaunchOptions(), execute, check=check)
    with open_context(what.cluster) as context:
        attempt = try_advice(
            what, context, recommendations, Trials(count=try_, repeats=repeats, picks=tuple(pick or ()))
        )
    following = ""
    if (best := best_tried(attempt.recommendations.advice)) is not None:
        path = f" {shlex.quote(what_job.config_path)}" if isinstance(what_job, LlamaFactoryJob) else ""
        following = f"multinode launch{path} {best.command}{given_options(ctx, _FOR_A_LAUNCH)}"
    _tell(attempt.recommendations, _Shown(top=top, details=details, as_json=as_json, next_command=following))
    print_directory(attempt.directory)


def _given(ctx: typer.Context) -> str:
    """The first of what is given that only a try needs; empty where nothing is."""
    if ctx.meta[SCRIPT] is not None:
        return "a script"
    sources = ((name, ctx.get_parameter_source(name)) for name in _FOR_TRYING)
    names = (name for name, source in sources if source is not None and source.name == "COMMANDLINE")
    return next((f"--{name.rstrip('_').replace('_', '-')}" for name in names), "")


def _recommendations(run_ids: list[str] | None, link: str | None, link_measured: str | None) -> Recommendations:
    from multinode.predict.advise import advise_runs

    return advise_runs(
        runs_root(),
        run_ids or ["last"],
        link_gbit_per_s=_rate("--link", link),
        link_measured=_rate("--link-measured", link_measured),
    )


def _rate(option: str, text: str | None) -> float | None:
    """A link's rate in Gbit/s.

    Raises:
        UsageError: it is none, or none that a link can have.
    """
    from multinode.predict.run_selection import is_rate

    rate = parse_option(option, text, parse_rate) if text is not None else None
    if rate is not None and not is_rate(rate):
        raise UsageError(f"{option} {text}: no link has that rate", hint="for example 10gbit")
    return rate


def _job(
    recommendations: Recommendations,
    named: tuple[Path | None, tuple[str, ...] | None],
    overrides: list[str],
    edits: list[str] | None,
) -> Job:
    """The YAML or the script that was named; else the job that was measured, from its stored run."""
    from multinode.launch.change import Change
    from multinode.predict.advise import measured_job
    from multinode.predict.try_advice import changed_job

    if named != (None, None):
        return read_job(*named, overrides, edits)
    return changed_job(
        measured_job(runs_root(), recommendations), Change(overrides=tuple(overrides), deepspeed=tuple(edits or ()))
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Shown:
    """How much is shown, and the commands that are named below it."""

    top: int | None
    details: bool
    as_json: bool
    more: str = ""
    next_command: str = ""


def _tell(recommendations: Recommendations, shown: _Shown) -> None:
    """What was tried is shown whatever its rank."""
    import msgspec

    from multinode.predict.advice import shortlist
    from multinode.predict.advice_screen import advice_parts

    if shown.top is None and not (shown.as_json or shown.details):
        advice = shortlist(recommendations.advice, _TOP)
    else:
        most = shown.top
        advice = tuple(
            one for place, one in enumerate(recommendations.advice) if most is None or place < most or one.tried
        )
    if shown.as_json:
        print_document(msgspec.structs.replace(recommendations, advice=advice))
        return
    following = "" if is_quiet() else shown.next_command
    print_screen(advice_parts(recommendations, advice, details=shown.details, more=shown.more, next_command=following))
