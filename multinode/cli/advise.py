"""`multinode advise`: which changes pay off, their cost, and how to make them."""

from __future__ import annotations

from typing import Annotated

import typer

from multinode.cli.options import Json, LinkMeasured, RunIds, expand_options, given_options
from multinode.cli.output import is_quiet
from multinode.cli.panels import examples
from multinode.cli.table import FormOptions, show_blocks
from multinode.records.invocation import Invocation
from multinode.records.run_directory import RunDirectory, runs_root


def register(app: typer.Typer) -> None:
    """Add the verb to the command."""
    app.command(
        epilog=examples(
            "advise last",
            "advise last --link 10gbit",
            "tune --judge speed --from last --candidates 3 --hosts hosts.txt",
        )
    )(expand_options(advise))


def advise(
    ctx: typer.Context,
    *,
    run_ids: RunIds = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="RATE", help="Assume this link rate between nodes, such as 10gbit. A bare number is in Gbit/s."
        ),
    ] = None,
    link_measured: LinkMeasured = None,
    top: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Number of changes to show. Default: 3; all with --json or --details."),
    ] = None,
    form: FormOptions,
    as_json: Json = False,
) -> None:
    """Show which changes would make a measured training faster, by how much, and how to make them."""
    import msgspec

    from multinode import api
    from multinode.predict.advice import is_one_node, pays
    from multinode.predict.advice_screen import show
    from multinode.predict.screen import launch_command
    from multinode.render.following import following

    form.choose(as_json=as_json)
    recommendations = api.advise(*(run_ids or ("last",)), link=link, link_measured=link_measured).value
    again = f"multinode advise{given_options(ctx)} --details"
    paying = [advice for advice in recommendations.advice if advice.change is not None and pays(advice)]
    command_line = ""
    if paying and link is None:
        from multinode.cli.contrast import stored_command, tune_command

        measured = ("--link-measured", link_measured) if link_measured is not None else ()
        commands = (stored_command(RunDirectory.open(runs_root(), name)) for name in recommendations.runs)
        command = next(filter(None, commands), None)
        if command is None and recommendations.job:
            # A YAML is kept with its runs, whoever started them.
            hosts = (("--hosts", recommendations.hosts),) if recommendations.hosts else ()
            command = Invocation(verb="launch", options=hosts)
        command_line = tune_command(command, run_ids or ["last"], measured)
    if paying and paying[0] is recommendations.advice[0] and recommendations.job and is_one_node(paying[0]):
        command_line = launch_command(recommendations.job, recommendations.hosts, paying[0].command)
    document = msgspec.structs.replace(recommendations, advice=recommendations.advice[:top])
    below = following(again, "" if is_quiet() else command_line)
    show_blocks(form, "advice", tuple(show(recommendations, top)), document, as_json=as_json, below=below)
