"""`multinode lab fault`: takes one thing of the lab away at a time. Prints; what it does is in multinode.lab.faults."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import typer
from msgspec.structs import replace

from multinode.cli.inputs import parse_option
from multinode.cli.options import Json
from multinode.cli.output import note, print_document
from multinode.cli.panels import PanelApp, PanelGroup
from multinode.errors import UsageError
from multinode.lab.cluster import require_lab
from multinode.lab.faults import (
    Address,
    Clock,
    Cpu,
    DiskFull,
    Fault,
    FileMissing,
    FileText,
    Interface,
    LinkDown,
    LinkSlow,
    Memory,
    Mtu,
    NodeState,
    Package,
    Ports,
    Route,
    SshdState,
    Variable,
    clear_faults,
    list_faults,
    make_fault,
)
from multinode.units import parse_rate, parse_size

app = PanelApp(
    cls=PanelGroup,
    invoke_without_command=True,
    rich_markup_mode=None,
    help="Take one thing of the lab away at a time, until `multinode lab fault clear`; without a verb: list.",
)

_SCHEMA = "multinode.lab-fault/1"
_OFFSET = re.compile(r"(?P<number>[+-]\d+(?:\.\d+)?)(?P<unit>s|m|h|d)")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Node = Annotated[str, typer.Argument(metavar="NODE|all", help="Whom to take it from.")]
OneNode = Annotated[str, typer.Argument(metavar="NODE", help="Whom to take it from.")]


def _fault_command(*, for_all: bool = True, **settings: Any) -> Callable[[Callable[..., Fault]], None]:
    """For a verb that says which fault is meant: it is made on the node, or on every node where `all` means that."""

    def register(verb: Callable[..., Fault]) -> None:
        @functools.wraps(verb)
        def command(*, as_json: bool, **values: Any) -> None:
            _make(verb(**values), as_json, for_all=for_all)

        as_json = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json)
        parameters = [*inspect.signature(verb, eval_str=True).parameters.values(), as_json]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command(**settings)(command)

    return register


@app.callback()
def fault(context: typer.Context) -> None:
    """Take one thing of the lab away at a time, until `multinode lab fault clear`; without a verb: list."""
    if context.invoked_subcommand is None:
        list_()


@app.command(name="list")
def list_(as_json: Json = False) -> None:
    """Say what is in force, oldest first."""
    require_lab()
    faults = list_faults()
    if as_json:
        print_document({"schema": _SCHEMA, "faults": faults})
        return
    _print_faults(faults)
    if not faults:
        note("no fault is in force")


@app.command()
def clear(
    node: Annotated[str, typer.Argument(metavar="NODE|all", help="Whom to give back what was taken.")] = "all",
    as_json: Json = False,
) -> None:
    """Give back what was taken, newest first; a killed node is started anew, with a fresh disk."""
    cleared = clear_faults(require_lab(), None if node == "all" else node)
    if as_json:
        print_document({"schema": _SCHEMA, "cleared": cleared, "faults": list_faults()})
        return
    _print_faults(cleared)
    note(f"faults cleared: {len(cleared)}" if cleared else "no fault was in force")


@_fault_command()
def link(
    node: Node,
    down: Annotated[bool, typer.Option("--down", help="No carrier, as when the cable is pulled.")] = False,
    rate: Annotated[
        str | None, typer.Option(metavar="RATE", help="Carry this at most, and say otherwise: 100mbit.")
    ] = None,
    way: Annotated[
        Literal["send", "receive", "both"],
        typer.Option(metavar="send|receive|both", help="With --rate: slow what the node sends, receives, or both."),
    ] = "both",
    interface: Annotated[str, typer.Option(metavar="IFNAME", help="The NIC: ens1f0, or eth0 for management.")] = (
        "ens1f0"
    ),
) -> Fault:
    """Pull a cable, or have a link carry less than its NIC reports."""
    _require_one({"--down": down or None, "--rate": rate}, f"multinode lab fault link {node} --down")
    if rate is None:
        if way != "both":
            raise UsageError("a link that is down carries nothing either way", hint="--way belongs to --rate")
        return LinkDown(node=node, ifname=interface)
    value = parse_option("--rate", rate, parse_rate)
    return LinkSlow(node=node, ifname=interface, rate_gbit_per_s=value, way=way)


@_fault_command()
def mtu(
    node: Node,
    size: Annotated[int, typer.Argument(metavar="MTU", help="Larger than the 1500 of the switch, such as 9000.")],
) -> Fault:
    """Let the training NIC send frames that its switch port drops: large ones vanish, small ones arrive.

    A TCP stream suffers where both ends have the fault: take `all`.
    """
    return Mtu(node=node, mtu=size)


@_fault_command()
def ports(
    node: Node,
    drop: Annotated[str | None, typer.Option(metavar="RANGE", help="Answer nothing: 30000-60999 or 29500.")] = None,
    reject: Annotated[str | None, typer.Option(metavar="RANGE", help="Answer with a refusal.")] = None,
) -> Fault:
    """Turn away TCP connections to these ports that come in on the training NIC, as a firewall does."""
    _require_one({"--drop": drop, "--reject": reject}, f"multinode lab fault ports {node} --drop 30000-60999")
    action: Literal["drop", "reject"] = "reject" if drop is None else "drop"
    first, last = parse_option(f"--{action}", drop or reject or "", _parse_ports)
    return Ports(node=node, first=first, last=last, action=action)


@_fault_command()
def sshd(
    node: Node,
    how: Annotated[
        Literal["stop", "freeze", "new-host-key", "refuse-key", "crowded"],
        typer.Argument(metavar="stop|freeze|new-host-key|refuse-key|crowded", help="What it does."),
    ],
) -> Fault:
    """Have the SSH daemon stop, hang, change its host key, refuse this client's key, or take no further client.

    Sessions that have begun go on.
    """
    return SshdState(node=node, how=how)


@_fault_command(name="node")
def node_(
    node: Node,
    how: Annotated[
        Literal["kill", "freeze"], typer.Argument(metavar="kill|freeze", help="No power, or no process that runs.")
    ],
) -> Fault:
    """Kill the node without a farewell, or freeze all its processes."""
    return NodeState(node=node, how=how)


@_fault_command()
def cpu(
    node: Node,
    share: Annotated[float, typer.Option("--share", metavar="CORES", help="Of one core, for example 0.3.")],
) -> Fault:
    """Have all processes of the node together get a part of a core, as in a container with a small limit."""
    return Cpu(node=node, share=share)


@_fault_command()
def memory(
    node: Node,
    limit: Annotated[str, typer.Option("--limit", metavar="SIZE", help="In memory, such as 700MiB or 2G.")],
) -> Fault:
    """Hold all processes of the node together to so much memory; the kernel kills the largest when it is exceeded.

    What the node has on its disk counts, as it is in memory; what a process holds already does not.
    """
    limit_bytes = parse_option("--limit", limit, parse_size)
    return Memory(node=node, limit_bytes=limit_bytes)


@_fault_command()
def disk(
    node: Node,
    how: Annotated[Literal["full"], typer.Argument(metavar="full", help="To the last byte.")],  # noqa: ARG001 - the one that there is
) -> Fault:
    """Leave no room on the node's disk."""
    return DiskFull(node=node)


@_fault_command()
def package(
    node: Node,
    requirement: Annotated[str, typer.Argument(metavar="NAME=VERSION", help="Such as torch=2.4.1.")],
) -> Fault:
    """Have the job's interpreter report another version of a package."""
    package_name, version = parse_option("NAME=VERSION", requirement, _parse_pair)
    return Package(node=node, name=package_name, version=version)


@_fault_command()
def file(
    node: Node,
    path: Annotated[str, typer.Argument(metavar="PATH", help="From the root, as the node sees it.")],
    missing: Annotated[bool, typer.Option("--missing", help="The file or directory is gone.")] = False,
    text: Annotated[str | None, typer.Option(metavar="TEXT", help="The file is this, or is there at all.")] = None,
    append: Annotated[str | None, typer.Option(metavar="TEXT", help="The file has this at its end.")] = None,
) -> Fault:
    """Take a file away from this node alone, or change it there."""
    options = {"--missing": missing or None, "--text": text, "--append": append}
    _require_one(options, f"multinode lab fault file {node} {path} --missing")
    if missing:
        return FileMissing(node=node, path=path)
    content = _line((append if text is None else text) or "")
    return FileText(node=node, path=path, text=content, append=text is None)


@_fault_command()
def variable(
    node: Node,
    assignment: Annotated[str, typer.Argument(metavar="NAME=VALUE", help="Such as NCCL_SOCKET_IFNAME=eth0.")],
) -> Fault:
    """Set a variable in the environment of every SSH session that begins."""
    variable_name, value = parse_option("NAME=VALUE", assignment, _parse_pair)
    return Variable(node=node, name=variable_name, value=value)


@_fault_command(context_settings={"ignore_unknown_options": True})
def clock(
    node: Node,
    offset: Annotated[str, typer.Argument(metavar="OFFSET", help="+90s, -5m, +2h or +1d.")],
) -> Fault:
    """Have the wall clock of every SSH session that begins be wrong."""
    offset_s = parse_option("OFFSET", offset, _parse_offset)
    return Clock(node=node, offset_s=offset_s)


@_fault_command(for_all=False)
def address(
    node: OneNode,
    network: Annotated[str, typer.Argument(metavar="ADDRESS/PREFIX", help="Such as 10.213.1.100/24.")],
) -> Fault:
    """Add a second NIC ens1f1 with this address: two NICs in one subnet."""
    return Address(node=node, address=network)


@_fault_command()
def interface(
    node: Node,
    ifname: Annotated[str, typer.Argument(metavar="IFNAME", help="Such as br-1234 or tailscale0.")],
    network: Annotated[str, typer.Option("--address", metavar="ADDRESS/PREFIX", help="What it has.")] = (
        "172.18.0.1/16"
    ),
) -> Fault:
    """Add an interface that is up, has an address, and leads nowhere."""
    return Interface(node=node, name=ifname, address=network)


@_fault_command(for_all=False)
def route(
    node: OneNode,
    peer: Annotated[str, typer.Argument(metavar="PEER", help="The node that it then sends to through eth0.")],
) -> Fault:
    """Send to a peer's training address through the management NIC; the answers come as before."""
    return Route(node=node, peer=peer)


def _make(fault: Fault, as_json: bool, *, for_all: bool) -> None:
    names = [one.name for one in require_lab().nodes] if fault.node == "all" and for_all else [fault.node]
    for name in names:
        one = replace(fault, node=name)
        make_fault(require_lab(), one)
        if not as_json:
            _print_faults([one])
    if as_json:
        print_document({"schema": _SCHEMA, "faults": list_faults()})


def _print_faults(faults: Sequence[Fault]) -> None:
    for one in faults:
        typer.echo(f"{one.node}: {one.describe()}")


def _line(text: str) -> str:
    """A line of a file as a shell gives it, without the end that it has there."""
    return text if text.endswith("\n") or not text else f"{text}\n"


def _require_one(options: Mapping[str, object], example: str) -> None:
    """See that just one of these options was given.

    Raises:
        UsageError: none was, or more.
    """
    given = [name for name, value in options.items() if value is not None]
    if len(given) != 1:
        said = " and ".join(given) or "nothing"
        raise UsageError(f"{said} was given, and it is one of {', '.join(options)}", hint=example)


def _parse_ports(text: str) -> tuple[int, int]:
    """One port or a range, `29500` or `30000-60999`, as its first and its last."""
    first, _, last = text.partition("-")
    if not (first.isdecimal() and (last or first).isdecimal()):
        raise ValueError(f"{text!r} is not a range of ports; write it as 29500 or 30000-60999")
    return int(first), int(last or first)


def _parse_offset(text: str) -> float:
    """How far a clock is off, `+90s`, `-5m`, `+2h` or `+1d`, in seconds."""
    match = _OFFSET.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} does not say how far a clock is off; write it as +90s, -5m, +2h or +1d")
    return float(match["number"]) * _UNIT_S[match["unit"]]


def _parse_pair(text: str) -> tuple[str, str]:
    """`NAME=VALUE` as its two parts."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ValueError(f"{text!r} has no name and value; write it as NAME=VALUE")
    return name, value
