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
    help="Inject one fault at a time into the lab, until `multinode lab fault clear`. Without a verb: list.",
)

_SCHEMA = "multinode.lab-fault/1"
_OFFSET = re.compile(r"(?P<number>[+-]\d+(?:\.\d+)?)(?P<unit>s|m|h|d)")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Node = Annotated[str, typer.Argument(metavar="NODE|all", help="Node to inject the fault into.")]
OneNode = Annotated[str, typer.Argument(metavar="NODE", help="Node to inject the fault into.")]


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
    """Inject one fault at a time into the lab, until `multinode lab fault clear`. Without a verb: list."""
    if context.invoked_subcommand is None:
        list_()


@app.command(name="list")
def list_(as_json: Json = False) -> None:
    """List active faults, oldest first."""
    require_lab()
    faults = list_faults()
    if as_json:
        print_document({"schema": _SCHEMA, "faults": faults})
        return
    _print_faults(faults)
    if not faults:
        note("no active fault")


@app.command()
def clear(
    node: Annotated[str, typer.Argument(metavar="NODE|all", help="Node to clear. Default: all.")] = "all",
    as_json: Json = False,
) -> None:
    """Clear faults, newest first. A killed node restarts with a fresh disk."""
    cleared = clear_faults(require_lab(), None if node == "all" else node)
    if as_json:
        print_document({"schema": _SCHEMA, "cleared": cleared, "faults": list_faults()})
        return
    _print_faults(cleared)
    note(f"faults cleared: {len(cleared)}" if cleared else "there was no active fault")


@_fault_command()
def link(
    node: Node,
    down: Annotated[bool, typer.Option("--down", help="No carrier, like a pulled cable.")] = False,
    rate: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Limit the rate without changing the reported one, such as 100mbit."),
    ] = None,
    way: Annotated[
        Literal["send", "receive", "both"],
        typer.Option(metavar="send|receive|both", help="With --rate: limit sending, receiving or both."),
    ] = "both",
    interface: Annotated[str, typer.Option(metavar="IFNAME", help="The NIC: ens1f0, or eth0 for management.")] = (
        "ens1f0"
    ),
) -> Fault:
    """Pull a cable, or limit a link to less than its NIC reports."""
    _require_one({"--down": down or None, "--rate": rate}, f"multinode lab fault link {node} --down")
    if rate is None:
        if way != "both":
            raise UsageError("a link that is down carries nothing in either direction", hint="--way belongs to --rate")
        return LinkDown(node=node, ifname=interface)
    value = parse_option("--rate", rate, parse_rate)
    return LinkSlow(node=node, ifname=interface, rate_gbit_per_s=value, way=way)


@_fault_command()
def mtu(
    node: Node,
    size: Annotated[int, typer.Argument(metavar="MTU", help="MTU above the switch's 1500, such as 9000.")],
) -> Fault:
    """Let the training NIC send frames that its switch port drops: large ones are lost, small ones arrive.

    A TCP stream is affected if both ends have the fault: use `all`.
    """
    return Mtu(node=node, mtu=size)


@_fault_command()
def ports(
    node: Node,
    drop: Annotated[
        str | None, typer.Option(metavar="RANGE", help="Drop packets to these ports, such as 30000-60999 or 29500.")
    ] = None,
    reject: Annotated[str | None, typer.Option(metavar="RANGE", help="Refuse connections to these ports.")] = None,
) -> Fault:
    """Block TCP connections to these ports on the training NIC, as a firewall does."""
    _require_one({"--drop": drop, "--reject": reject}, f"multinode lab fault ports {node} --drop 30000-60999")
    action: Literal["drop", "reject"] = "reject" if drop is None else "drop"
    first, last = parse_option(f"--{action}", drop or reject or "", _parse_ports)
    return Ports(node=node, first=first, last=last, action=action)


@_fault_command()
def sshd(
    node: Node,
    how: Annotated[
        Literal["stop", "freeze", "new-host-key", "refuse-key", "crowded"],
        typer.Argument(metavar="stop|freeze|new-host-key|refuse-key|crowded", help="State of the SSH daemon."),
    ],
) -> Fault:
    """Make the SSH daemon stop, hang, change its host key, refuse this client's key, or accept no more clients.

    Existing sessions continue.
    """
    return SshdState(node=node, how=how)


@_fault_command(name="node")
def node_(
    node: Node,
    how: Annotated[
        Literal["kill", "freeze"],
        typer.Argument(metavar="kill|freeze", help="kill: like a power loss; freeze: stop all processes."),
    ],
) -> Fault:
    """Kill the node abruptly, or freeze all its processes."""
    return NodeState(node=node, how=how)


@_fault_command()
def cpu(
    node: Node,
    share: Annotated[float, typer.Option("--share", metavar="CORES", help="Share of one core, such as 0.3.")],
) -> Fault:
    """Limit all processes of the node to a share of a core, as in a container with a small limit."""
    return Cpu(node=node, share=share)


@_fault_command()
def memory(
    node: Node,
    limit: Annotated[str, typer.Option("--limit", metavar="SIZE", help="Memory limit, such as 700MiB or 2G.")],
) -> Fault:
    """Limit the memory of all processes of the node; above it the kernel kills the largest.

    The node's disk counts, as it is in memory; memory already in use does not.
    """
    limit_bytes = parse_option("--limit", limit, parse_size)
    return Memory(node=node, limit_bytes=limit_bytes)


@_fault_command()
def disk(
    node: Node,
    how: Annotated[Literal["full"], typer.Argument(metavar="full", help="To the last byte.")],  # noqa: ARG001 - the one that there is
) -> Fault:
    """Fill the node's disk."""
    return DiskFull(node=node)


@_fault_command()
def package(
    node: Node,
    requirement: Annotated[
        str, typer.Argument(metavar="NAME=VERSION", help="Package and version, such as torch=2.4.1.")
    ],
) -> Fault:
    """Make the job's interpreter report another version of a package."""
    package_name, version = parse_option("NAME=VERSION", requirement, _parse_pair)
    return Package(node=node, name=package_name, version=version)


@_fault_command()
def file(
    node: Node,
    path: Annotated[str, typer.Argument(metavar="PATH", help="Absolute path on the node.")],
    missing: Annotated[bool, typer.Option("--missing", help="Remove the file or directory.")] = False,
    text: Annotated[str | None, typer.Option(metavar="TEXT", help="Replace or create the file with this text.")] = None,
    append: Annotated[str | None, typer.Option(metavar="TEXT", help="Append this text to the file.")] = None,
) -> Fault:
    """Remove or change a file on this node only."""
    options = {"--missing": missing or None, "--text": text, "--append": append}
    _require_one(options, f"multinode lab fault file {node} {path} --missing")
    if missing:
        return FileMissing(node=node, path=path)
    content = _line((append if text is None else text) or "")
    return FileText(node=node, path=path, text=content, append=text is None)


@_fault_command()
def variable(
    node: Node,
    assignment: Annotated[str, typer.Argument(metavar="NAME=VALUE", help="Variable, such as NCCL_SOCKET_IFNAME=eth0.")],
) -> Fault:
    """Set a variable in the environment of new SSH sessions."""
    variable_name, value = parse_option("NAME=VALUE", assignment, _parse_pair)
    return Variable(node=node, name=variable_name, value=value)


@_fault_command(context_settings={"ignore_unknown_options": True})
def clock(
    node: Node,
    offset: Annotated[str, typer.Argument(metavar="OFFSET", help="Offset: +90s, -5m, +2h or +1d.")],
) -> Fault:
    """Set a wrong wall clock for new SSH sessions."""
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
    ifname: Annotated[str, typer.Argument(metavar="IFNAME", help="Name, such as br-1234 or tailscale0.")],
    network: Annotated[str, typer.Option("--address", metavar="ADDRESS/PREFIX", help="Its address.")] = (
        "172.18.0.1/16"
    ),
) -> Fault:
    """Add an interface with an address that leads nowhere."""
    return Interface(node=node, name=ifname, address=network)


@_fault_command(for_all=False)
def route(
    node: OneNode,
    peer: Annotated[str, typer.Argument(metavar="PEER", help="Node that it then reaches through eth0.")],
) -> Fault:
    """Send to a peer's training address through the management NIC; replies are unchanged."""
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
    return text if text.endswith("\n") or not text else f"{text}\n"


def _require_one(options: Mapping[str, object], example: str) -> None:
    """See that just one of these options was given.

    Raises:
        UsageError: none was, or more.
    """
    given = [name for name, value in options.items() if value is not None]
    if len(given) != 1:
        said = " and ".join(given) or "nothing"
        raise UsageError(f"{said}: expected one of {', '.join(options)}", hint=example)


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
        raise ValueError(f"{text!r} is not a clock offset; write it as +90s, -5m, +2h or +1d")
    return float(match["number"]) * _UNIT_S[match["unit"]]


def _parse_pair(text: str) -> tuple[str, str]:
    """`NAME=VALUE` as its two parts."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise ValueError(f"{text!r} has no name and value; write it as NAME=VALUE")
    return name, value
