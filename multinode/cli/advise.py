"""`multinode advise`: which changes pay off, their cost, and how to make them."""

from __future__ import annotations

from typing import Annotated

import typer

from multinode.cli.options import Json, LinkMeasured, RunIds, expand_options, given_options
from multinode.cli.output import is_quiet
from multinode.cli.panels import examples
from multinode.cli.table import FormOptions, show_blocks


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
        typer.Option(
            min=1, metavar="N", help="Number of changes to show. Default: 3, or all with --json or --details."
        ),
    ] = None,
    form: FormOptions,
    as_json: Json = False,
) -> None:
    """Show which changes would make a measured training job faster, by how much, and how to make them."""
    import msgspec

    from multinode import api
    from multinode.predict.advice import is_one_node, pays
    from multinode.predict.advice_screen import show
    from multinode.render.following import following

    form.choose(as_json=as_json)
    recommendations = api.advise(*(run_ids or ("last",)), link=link, link_measured=link_measured).value
    again = f"multinode advise{given_options(ctx)} --details"
    paying = [advice for advice in recommendations.advice if advice.change is not None and pays(advice)]
    command, command_line = recommendations.command, ""
    if paying and link is None:
        from multinode.cli.contrast import tune_command

        measured = ("--link-measured", link_measured) if link_measured is not None else ()
        command_line = tune_command(command, run_ids or ["last"], measured)
    is_best = paying and paying[0] is recommendations.advice[0] and is_one_node(paying[0])
    if is_best and command is not None and not command.is_script:
        command_line = command.launch(paying[0].command)
    document = msgspec.structs.replace(recommendations, advice=recommendations.advice[:top])
    below = following(again, "" if is_quiet() else command_line)
    show_blocks(form, "advice", tuple(show(recommendations, top)), document, as_json=as_json, below=below)
