"""`multinode lab`: virtual nodes on this machine. Prints; what it does is in multinode.lab."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from multinode.cli.options import Json
from multinode.cli.output import note, print_document
from multinode.cli.panels import PanelApp, PanelGroup, examples
from multinode.decoding import parse_option
from multinode.errors import MultinodeError, UsageError
from multinode.lab.cluster import (
    LabStatus,
    LabUp,
    describe_lab,
    describe_runs,
    down_lab,
    exec_in_node,
    explain_missing,
    live_runs,
    require_lab,
    set_rate,
    up_lab,
)
from multinode.lab.network import ENOUGH, LinkSpeed, parse_lab_rate, rate_text
from multinode.lab.state import LabSpec, load_lab
from multinode.units import format_figure, parse_size

app = PanelApp(
    cls=PanelGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Start and manage virtual nodes on this machine. Each node has its own sshd, disk, hostname and rate-limited "
    "NIC.",
)


def register(main: typer.Typer) -> None:
    """Add the verbs to the command."""
    main.add_typer(app, name="lab")


_LINK_ROW = "{:<18}{:>14}{:>18}{:>18}"
_NODE_ROW = "{:<10}{:<7}{:<17}{:<17}{:<10}{}"


@app.command()
def up(
    nodes: Annotated[int, typer.Option(min=1, max=200, help="Number of nodes.")] = 2,
    rate: Annotated[
        str, typer.Option(help="Line rate of the training network, such as 100mbit or 1gbit, or none for no limit.")
    ] = "1gbit",
    slots: Annotated[int, typer.Option(min=1, help="Workers per node.")] = 2,
    cores_per_node: Annotated[
        int | None,
        typer.Option(min=1, help="Pin each node to this many cores of its own. By default, the nodes share all cores."),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Python interpreter of the training environment. Default: the interpreter of this command.",
        ),
    ] = None,
    disk: Annotated[
        str, typer.Option(metavar="SIZE", help="Size of the writable disk of each node. The disks are in memory.")
    ] = "4G",
    network: Annotated[str, typer.Option(metavar="NET/23", help="Private network for the lab.")] = ("10.213.0.0/23"),
    ipv6: Annotated[bool, typer.Option("--ipv6", help="Use only IPv6 addresses in the training network.")] = False,
    as_json: Json = False,
) -> None:
    """Start the lab, and measure its links."""
    spec = LabSpec(
        node_count=nodes,
        rate_gbit_per_s=parse_option("--rate", rate, parse_lab_rate),
        slots=slots,
        cores_per_node=cores_per_node,
        python=python or sys.executable,
        disk_bytes=parse_option("--disk", disk, parse_size),
        network=network,
        ipv6=ipv6,
    )
    links: list[LinkSpeed] = []
    lab = up_lab(spec, note, links.append if as_json else lambda link: _print_link(link, links))
    if as_json:
        status = describe_lab(lab)
        print_document(LabUp(hostfile=status.hostfile, nodes=status.nodes, links=tuple(links)))
    _warn_of_slow_links(links)
    note(f"{len(lab.nodes)} nodes are up: {lab.hostfile}")


@app.command()
def status(as_json: Json = False) -> None:
    """List the nodes and their state."""
    lab = load_lab()
    described = describe_lab(lab)
    if as_json:
        print_document(described)
    if lab is None:
        message, hint = explain_missing()
        raise MultinodeError(message, hint=hint)
    if not as_json:
        _print_status(described)


@app.command()
def rate(
    node: Annotated[str, typer.Argument(metavar="NODE|all", help="Node to change, or `all`.")],
    line_rate: Annotated[
        str, typer.Argument(metavar="RATE", help="New rate, such as 100mbit or 2.5gbit, or none for no limit.")
    ],
    as_json: Json = False,
) -> None:
    """Change the line rate of a node's training network in both directions, also while jobs are running."""
    rate_gbit_per_s = parse_option("RATE", line_rate, parse_lab_rate)
    names = [node.name for node in require_lab().nodes] if node == "all" else [node]
    lab = set_rate(names, rate_gbit_per_s)
    if as_json:
        print_document(describe_lab(lab))
        return
    for name in names:
        typer.echo(f"{name} {lab.node(name).ifname} {rate_text(rate_gbit_per_s)}")


@app.command(
    name="exec",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    epilog=examples("lab exec node0 -- ip address"),
)
def exec_(
    node: Annotated[str, typer.Argument(metavar="NODE", help="Node on which to run the command.")],
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="Command to run. Put it after --.")],
) -> None:
    """Run a command on a node as root, in the environment of an SSH login."""
    argv = command[1:] if command[0] == "--" else command
    if not argv:
        raise UsageError("no command follows --", hint=f"multinode lab exec {node} -- hostname")
    raise typer.Exit(exec_in_node(require_lab().node(node), argv))


@app.command()
def down(
    as_json: Json = False,
    force: Annotated[bool, typer.Option("--force", help="Also end active runs in the lab.")] = False,
) -> None:
    """Stop the lab, and remove what a crashed lab left behind."""
    if not force:
        _guard(live_runs())
    removed = down_lab()
    if as_json:
        print_document({"schema": "multinode.lab/2", "removed": removed})
    elif removed:
        typer.echo(f"removed {removed.count()}")
    note("the lab is down" if removed else "no lab is running")


def _guard(runs: dict[str, str]) -> None:
    """Ask before a run is ended with the lab it runs in; where nobody can answer, refuse."""
    if not runs:
        return
    message = f"the lab has an active run: {describe_runs(runs)}"
    hint = f"first stop the run with multinode stop {next(iter(runs))}, or end both: multinode lab down --force"
    if sys.stdin.isatty() and sys.stderr.isatty():
        typer.echo(message, err=True)
        if typer.confirm("End both the run and the lab?", err=True):
            return
    raise UsageError(message, hint=hint)


def _print_link(link: LinkSpeed, links: list[LinkSpeed]) -> None:

    if not links:
        typer.echo(_LINK_ROW.format("link", "line rate", "TCP at most", "TCP measured"))
        typer.echo(_LINK_ROW.format("", "", "Gbit/s", "Gbit/s"))
    links.append(link)
    expected = "" if link.expected_gbit_per_s is None else format_figure(link.expected_gbit_per_s, digits=4)
    way = f"{link.source} -> {link.target}"
    typer.echo(
        _LINK_ROW.format(
            way, rate_text(link.rate_gbit_per_s), expected, format_figure(link.goodput_gbit_per_s, digits=4)
        )
    )


def _warn_of_slow_links(links: list[LinkSpeed]) -> None:
    slow = [f"{link.source} -> {link.target}" for link in links if link.is_slow]
    if slow:
        typer.echo(f"warning: below {ENOUGH:.0%} of the TCP line rate: {', '.join(slow)}", err=True)
        typer.echo("  hint: this machine may be busy or too slow for this rate: use a lower --rate", err=True)


def _print_status(lab: LabStatus) -> None:
    typer.echo(_NODE_ROW.format("node", "state", "management", "training", "NIC", "line rate"))
    for node in lab.nodes:
        typer.echo(_NODE_ROW.format(node.name, node.state, node.management_addr, node.addr, node.ifname, node.rate))
    typer.echo(f"hostfile {lab.hostfile}")
