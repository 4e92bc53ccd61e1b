"""copy: files and directories made equal on all nodes, from the one that has them, or from this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from multinode.check.probe import probe
from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.dataplane import choose_endpoints
from multinode.cluster.facts import NodeFacts
from multinode.copy.chain import CopyProgress, CopyRound, Participant, find_failures, make_credentials
from multinode.errors import Interrupted, MultinodeError, NodeError, NodeFailed, UsageError
from multinode.findings.finding import Finding
from multinode.findings.rule import RuleGroup
from multinode.stats.unknown import or_none
from multinode.transport.agent import AgentTransport
from multinode.transport.base import Transport, gather
from multinode.transport.local import LocalTransport
from multinode.units import format_count, format_duration, format_list, format_size

CONTROLLER = "controller"
"""What `--from` calls this machine."""

# A directory on a network file system with many files takes its time.
_LOOK_S = 300.0
_KEPT = "received data is kept: run the same command to send the rest"
_TRIES = 2

_Count = Annotated[int, Meta(ge=0)]

COPIES = RuleGroup("Failures of a copy")
_LEFT_OUT = COPIES.rule("left-out", about="a node to which the copy failed", message="{error}", hint="{fix!s}")


class CopyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to copy, and from where.

    Attributes:
        paths: paths to copy. Relative paths start at the job's directory.
        source: the node to copy from, or `controller`. If None, multinode finds a node that has the paths.
        delete: whether to remove files that the source does not have.
    """

    paths: tuple[str, ...]
    source: str | None = None
    delete: bool = False


class CopiedNode(msgspec.Struct, frozen=True, kw_only=True):
    """One node, as the copy left it."""

    name: str
    state: str  # `source`, `copied`, `equal` (it had all), `failed`
    received_bytes: _Count = 0  # without what it had
    extra_files: _Count = 0  # that the source does not have; removed with `--delete`
    cpu_s: float | None = None  # processor time of the agent
    failure: Finding | None = None  # why it failed


class CopyReport(msgspec.Struct, frozen=True, kw_only=True):
    """The document that `copy --json` prints.

    Attributes:
        ok: whether all nodes have the same files now.
        digest: SHA-256 of names, modes, links and contents. The source and each receiver computed it independently.
        transfer_s: time from the first sent byte until the last node had verified all files; None if nothing was sent.
        unreached: whether a node failed because it could not be reached.
    """

    schema: str = "multinode.copy/3"
    ok: bool
    paths: tuple[str, ...]
    source: str
    files: int
    size_bytes: int
    digest: str | None
    nodes: tuple[CopiedNode, ...]
    deleted: bool
    transfer_s: float | None
    time_s: float
    unreached: bool


class PathLook(msgspec.Struct, frozen=True, kw_only=True):
    """What stands at a path of a node; `reason` is why it cannot be copied from there, `refused` why it never is."""

    path: str
    full: str | None = None
    exists: bool = False
    files: _Count = 0
    size_bytes: _Count = 0
    digest: str | None = None
    reason: str | None = None
    refused: str | None = None


class _Looked(msgspec.Struct, frozen=True, tag_field="kind", tag="looked"):
    paths: tuple[PathLook, ...]


def copy_paths(  # noqa: PLR0913 - what is copied, and who is told
    agent: AgentTransport,
    cluster: Cluster,
    request: CopyRequest,
    observe: Callable[[CopyProgress], None] = lambda _: None,
    *,
    say: Callable[[str], None] = lambda _: None,
    here: Transport | None = None,
) -> CopyReport:
    """Make the paths equal on all nodes. A node that fails is left out, and the others get theirs.

    `here` is the way to this machine, which may have the files.

    Raises:
        UsageError: nobody has the paths, or nodes have something different there and none was named as the source.
        NodeError, NodeFailed: the source failed, or a node has no room for them; nothing was written then.
        Interrupted: Ctrl-C; what has come is kept.
    """
    began = time.monotonic()
    agent.refresh()
    survey = _survey(agent, cluster, request, say)
    local = AgentTransport(here or LocalTransport())
    try:
        if request.source == CONTROLLER or not _complete(survey.looks):
            survey.here.extend(_look(local, Node(name=CONTROLLER), request.paths, str(Path.cwd())))
        source = choose_source(request, survey.looks, survey.here)
        chain = _chain(survey, agent, cluster)
        if source == CONTROLLER:
            paths = _full_paths(survey.here)
            chain.insert(0, Participant(Node(name=CONTROLLER), local, "127.0.0.1", paths, is_here=True))
        first = next(member for member in chain if member.node.name == source)
        chain.remove(first)
        if not chain:
            raise UsageError("there is no node to copy to", hint="name more nodes in the hostfile")
        copies = _Copies(first, request, observe, say)
        try:
            copies.run(chain)
        except KeyboardInterrupt:
            raise Interrupted("interrupted", hint=_KEPT) from None
    finally:
        local.close()
    failed = survey.failed | copies.failed
    looked = survey.here if source == CONTROLLER else survey.looks[source]
    order = [CONTROLLER] * (source == CONTROLLER) + [node.name for node in cluster.nodes]
    return CopyReport(
        ok=not failed,
        paths=request.paths,
        source=source,
        files=sum(look.files for look in looked),
        size_bytes=sum(look.size_bytes for look in looked),
        digest=copies.digest,
        nodes=tuple(_node(name, copies, failed) for name in order),
        deleted=request.delete,
        transfer_s=copies.moved_s or None,
        time_s=time.monotonic() - began,
        unreached=any(isinstance(error, NodeError) for error in failed.values()),
    )


class _Survey(NamedTuple):
    """What stands at the paths, by node and here; what else is known of the nodes; and who could not be asked."""

    facts: dict[str, NodeFacts]
    looks: dict[str, tuple[PathLook, ...]]
    failed: dict[str, MultinodeError]
    here: list[PathLook]


def _survey(agent: AgentTransport, cluster: Cluster, request: CopyRequest, say: Callable[[str], None]) -> _Survey:
    """Ask all nodes."""
    say(f"probing {len(cluster.nodes)} nodes")
    probed = probe(agent, cluster, controller_cwd=str(Path.cwd()), packages=False)
    facts = probed.found
    say("listing the files")
    looked = gather(
        [node for node in cluster.nodes if node.name in facts],
        lambda node: _look(agent, node, request.paths, or_none(facts[node.name].cwd)),
        deadline_s=_LOOK_S,
    )
    failed = probed.failed | looked.failed
    if request.source in failed or not looked.found:
        raise failed.get(request.source or "") or next(iter(failed.values()))
    return _Survey(facts, looked.found, failed, [])


def _chain(survey: _Survey, agent: AgentTransport, cluster: Cluster) -> list[Participant]:
    """The nodes that can take part, in their order."""
    nodes = tuple(node for node in cluster.nodes if node.name in survey.looks)
    places = choose_endpoints(msgspec.structs.replace(cluster, nodes=nodes), survey.facts)
    return [
        Participant(node, agent, place.addr or node.name, _full_paths(survey.looks[node.name]))
        for node, place in zip(nodes, places, strict=True)
    ]


def _look(agent: AgentTransport, node: Node, paths: Sequence[str], cwd: str | None) -> tuple[PathLook, ...]:
    looked = agent.call(node, "look", {"schema": 1, "paths": paths, "cwd": cwd}, _Looked, deadline_s=_LOOK_S).paths
    if [look.path for look in looked] != list(paths):
        raise NodeFailed("it reported paths that were not requested", node=node.name)
    refused = next((look for look in looked if look.refused is not None), None)
    if refused is not None:
        raise UsageError(
            f"{refused.path}: {refused.refused}", node=node.name, hint="name the directory of a model or data set"
        )
    full = [PurePosixPath(look.full or "/") for look in looked]
    inner = next((path for path in full if full.count(path) > 1 or not set(full).isdisjoint(path.parents)), None)
    if inner is not None:
        raise UsageError(f"{inner} is already part of the copy", node=node.name, hint="name it once")
    return looked


def _complete(looks: Mapping[str, Sequence[PathLook]]) -> list[str]:
    """The nodes that have all paths."""
    return [name for name, looked in looks.items() if all(look.exists for look in looked)]


def _full_paths(looked: Sequence[PathLook]) -> tuple[str, ...]:
    return tuple(look.full or look.path for look in looked)


def choose_source(request: CopyRequest, looks: Mapping[str, Sequence[PathLook]], here: Sequence[PathLook]) -> str:
    """Who has the paths: the named one, else the first node that has all of them, else this machine. Pure.

    `looks` are by node, `here` is this machine's.

    Raises:
        UsageError: nobody has them, or nodes have different ones and none was named.
        NodeFailed: the source's cannot be copied.
    """
    looks_of = {**looks, CONTROLLER: looks.get(CONTROLLER, here)}
    if request.source is not None:
        if request.source not in looks_of:
            names = format_list([*looks, CONTROLLER], 9)
            raise UsageError(f"there is no node named {request.source}", hint=f"possible sources: {names}")
        source = request.source
        lacks = next((look.path for look in looks_of[source] if not look.exists), None)
        if lacks is not None:
            raise UsageError(f"{source} does not have {lacks}", hint=_having(lacks, looks_of))
    else:
        complete = _complete(looks)
        if not complete and all(look.exists for look in here):
            complete = [CONTROLLER]
        if not complete:
            present = {look.path for looked in looks_of.values() for look in looked if look.exists}
            lacking = next((path for path in request.paths if path not in present), None)
            if lacking is not None:
                raise UsageError(f"{lacking} is neither on a node nor on this machine", hint="correct its name")
            raise UsageError("no node has all of these paths", hint="copy each with a separate command")
        source = complete[0]
        for at, look in enumerate(looks[source] if source != CONTROLLER else ()):
            other = next((name for name in complete if looks[name][at].digest != look.digest), None)
            if other is not None:
                raise UsageError(
                    f"{look.path} differs between {source} ({_size(look)}) and {other} ({_size(looks[other][at])})",
                    hint=f"select one: --from {source}",
                )
    bad = next((look for look in looks_of[source] if look.reason is not None), None)
    if bad is not None:
        raise NodeFailed(f"{bad.path}: {bad.reason}", node=source)
    return source


def _having(path: str, looks_of: Mapping[str, Sequence[PathLook]]) -> str:
    names = [name for name, looked in looks_of.items() if any(look.path == path and look.exists for look in looked)]
    return f"it is on {format_list(names, 9)}" if names else "it is neither on a node nor on this machine"


def _size(look: PathLook) -> str:
    return f"{format_count(look.files, 'file')}, {format_size(look.size_bytes)}"


class _Copies:
    """Rounds until every node has all, or has failed."""

    def __init__(
        self,
        source: Participant,
        request: CopyRequest,
        observe: Callable[[CopyProgress], None],
        say: Callable[[str], None],
    ) -> None:
        self.done: dict[str, CopiedNode] = {}  # by node, its last words
        self.failed: dict[str, MultinodeError] = {}  # by node, why
        self.digest: str | None = None
        self.moved_s = 0.0
        self._source = source
        self._request = request
        self._observe = observe
        self._say = say
        self._credentials = make_credentials()
        self._suspected: dict[str, int] = {}

    def run(self, targets: Sequence[Participant]) -> None:
        """Until all are done or have failed."""
        while targets:
            self._say(f"comparing on {len(targets)} nodes")
            try:
                self._run_round(targets)
            except NodeFailed as error:
                # Who has no room is told before anything is written; later the others get theirs.
                if not self.done or error.node is None or error.node == self._source.node.name:
                    raise
                self.failed[error.node] = error
            left = [member for member in targets if member.node.name not in {**self.done, **self.failed}]
            # Who may have broken the chain stands at its end, where nobody waits for it.
            targets = sorted(left, key=lambda member: self._suspected.get(member.node.name, 0))

    def _run_round(self, targets: Sequence[Participant]) -> None:
        chain = [self._source, *targets]
        copy_round = CopyRound(chain, self._credentials, delete=self._request.delete, observe=self._observe)
        copy_round.run()
        self.moved_s += copy_round.moved_s or 0.0
        for member in copy_round.members:
            if member.copied is None:
                continue
            if member.copied.digest != (self.digest or member.copied.digest):
                raise NodeFailed(
                    "its files differ from those of the other nodes: they changed during the copy",
                    node=member.name,
                    hint="repeat the copy",
                )
            self.digest = member.copied.digest
            received = member.progress.moved_bytes if member.need is not None else 0
            state = "source" if member.need is None else "copied" if received else "equal"
            before = self.done.get(member.name)
            cpu_s = (member.cpu_s or 0.0) + (before.cpu_s or 0.0 if before is not None else 0.0)
            self.done[member.name] = CopiedNode(
                name=member.name,
                state=state,
                received_bytes=received,
                extra_files=member.copied.extra,
                cpu_s=cpu_s,
            )
        failures = find_failures(copy_round.members)
        self.failed |= failures.certain
        if failures.suspect is not None:
            name, error = failures.suspect
            self._suspected[name] = self._suspected.get(name, 0) + 1
            if self._suspected[name] >= _TRIES:
                self.failed[name] = error
            else:
                self._say(f"{error}; trying again")


def _node(name: str, copies: _Copies, failed: Mapping[str, MultinodeError]) -> CopiedNode:
    done = copies.done.get(name)
    error = failed.get(name)
    if error is not None:
        failure = _LEFT_OUT.found(name, error=error.message, fix=error.hint or "")
        return CopiedNode(name=name, state="failed", failure=failure)
    return done or CopiedNode(name=name, state="source")


_BYTES_PER_GB = 1e9


def progress_text(progress: CopyProgress) -> str:
    """How far the slowest node is, at which rate, and how long it will take."""
    if not progress.receive_bytes:
        hashed = max(progress.hashed_bytes.values(), default=0)
        return f"comparing existing files: {format_size(hashed)}" if hashed else "comparing existing files"
    shares = {
        name: (progress.moved_bytes.get(name, 0) / total if total else 1.0)
        for name, total in progress.receive_bytes.items()
    }
    slowest = min(shares, key=lambda name: shares[name])
    moved, total = progress.moved_bytes.get(slowest, 0), progress.receive_bytes[slowest]
    if moved >= total:
        return "writing to the disks"
    text = f"copying: {slowest} has {100 * shares[slowest]:.0f}% of {format_size(total)}"
    if not moved or not progress.time_s:
        return text
    left_s = progress.time_s * (total - moved) / moved
    return f"{text}, {moved / progress.time_s / _BYTES_PER_GB:.3f} GB/s, {format_duration(left_s)} left"
