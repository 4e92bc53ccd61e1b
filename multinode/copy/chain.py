"""CopyChain: one round of a copy, along a chain of nodes: its sessions, what they say, and who has failed."""

from __future__ import annotations

import base64
import collections
import contextlib
import datetime as dt
import functools
import itertools
import operator
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from msgspec import Meta

from multinode.cluster.cluster import Node
from multinode.decoding import convert
from multinode.errors import AgentFailed, ContactLost, MultinodeError, NodeFailed
from multinode.node.copies.session import Session
from multinode.transport.agent import AgentStream, AgentTransport, require_kind
from multinode.transport.base import gather
from multinode.units import format_size

_OPEN_S = 30.0
# A node says something every quarter of a second.
_SILENT_S = 30.0
# Of a chain that is broken, the others end by themselves, or what they still have to say comes too late.
_BROKEN_S = 5.0
_STALL_S = 600.0
_END_S = 10.0
_LOOK_S = 0.5
_CHANNEL = "channel"

_Count = Annotated[int, Meta(ge=0)]


class Participant(NamedTuple):
    """A node of the chain, the way to it, its address on the training network, and the paths there, absolute.

    `is_here` says that it is this machine, from which nodes are reached through the channels of their agents alone.
    """

    node: Node
    agent: AgentTransport
    addr: str
    paths: tuple[str, ...]
    is_here: bool = False


class CopyCredentials(msgspec.Struct, frozen=True, kw_only=True):
    """What the nodes of one copy recognise each other by, in PEM, and the token."""

    certificate: str
    key: str
    token: str


def make_credentials() -> CopyCredentials:
    """New ones. The certificate has no end, as clocks of nodes may be wrong: its key is gone after the copy."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "multinode copy")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(dt.datetime(1970, 1, 1, tzinfo=dt.UTC))
        .not_valid_after(dt.datetime(9999, 12, 31, tzinfo=dt.UTC))
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return CopyCredentials(
        certificate=certificate.public_bytes(pem).decode(), key=private.decode(), token=secrets.token_hex(32)
    )


class Room(msgspec.Struct, frozen=True):
    """What a file system has to take, and what is free on it."""

    path: str
    need_bytes: _Count
    free_bytes: _Count


class _Listening(msgspec.Struct, frozen=True, tag_field="kind", tag="listening"):
    port: Annotated[int, Meta(ge=1, le=65535)] | None


class _Candidates(msgspec.Struct, frozen=True, tag_field="kind", tag="candidates"):
    blocks: bytes


class _Need(msgspec.Struct, frozen=True, tag_field="kind", tag="need"):
    receive_bytes: _Count
    places: tuple[Room, ...]


class _MemberProgress(msgspec.Struct, frozen=True, tag_field="kind", tag="progress"):
    hashed_bytes: _Count = 0
    moved_bytes: _Count = 0


class Trouble(msgspec.Struct, frozen=True, tag_field="kind", tag="trouble"):
    """What went wrong on a node: there, or with the node before or behind it in the chain."""

    where: Literal["here", "upstream", "downstream"]
    message: str
    hint: str | None = None


class Copied(msgspec.Struct, frozen=True, tag_field="kind", tag="copied"):
    """All is in its place: the digest of it, and how many files the source does not have."""

    digest: str
    extra: _Count


class _Ended(msgspec.Struct, frozen=True, tag_field="kind", tag="ended"):
    cpu_s: float


class _Data(msgspec.Struct, frozen=True, tag_field="kind", tag="data"):
    data: bytes = b""


_RECORD: Any = _Listening | _Candidates | _Need | _MemberProgress | Trouble | Copied | _Ended | _Data


class Member:
    """A node of the chain and what it has said so far."""

    def __init__(self, participant: Participant) -> None:
        self.participant = participant
        self.stream: AgentStream[Any] | _SessionHere | None = None
        self.port: int | None = None
        self.candidates: bytes | None = None
        self.need: _Need | None = None
        self.progress = _MemberProgress()
        self.troubles: list[Trouble] = []
        self.copied: Copied | None = None
        self.copied_s = 0.0
        self.cpu_s: float | None = None
        self.error: MultinodeError | None = None  # why it says nothing more

    @property
    def name(self) -> str:
        """The node's."""
        return self.participant.node.name

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be expected of it."""
        return self.cpu_s is not None or self.error is not None

    @property
    def is_cut(self) -> bool:
        """Whether the chain is broken here."""
        return self.error is not None or bool(self.troubles)

    @property
    def receives(self) -> bool:
        """Whether it can go on receiving, as only the node behind it is lost."""
        return self.error is None and all(trouble.where == "downstream" for trouble in self.troubles)

    def open(self, credentials: CopyCredentials, *, is_source: bool, delete: bool, share: float) -> None:
        """Start its part."""
        request = {"schema": 1, "paths": self.participant.paths, "addr": self.participant.addr, "source": is_source}
        request |= {"delete": delete, "share": share, "background": share < 1, **msgspec.to_builtins(credentials)}
        if self.participant.is_here:
            self.stream = _SessionHere(request)
        else:
            agent, node = self.participant.agent, self.participant.node
            self.stream = agent.open(node, "copy", request, _RECORD, deadline_s=_OPEN_S)
        self.port = require_kind(self.stream.first, _Listening, self.name).port

    def send(self, order: dict[str, Any]) -> None:
        """Give an order; a node that is gone is heard of when it is read."""
        if self.stream is not None:
            with contextlib.suppress(ContactLost):
                self.stream.send(order)

    def take(self, record: Any) -> None:
        """What it said."""
        match record:
            case _Candidates():
                self.candidates = record.blocks
            case _Need():
                self.need = record
            case _MemberProgress():
                self.progress = record
            case Trouble():
                self.troubles.append(record)
            case Copied():
                self.copied = record
                self.copied_s = time.monotonic()
            case _Ended():
                self.cpu_s = record.cpu_s


class _SessionHere:
    """This machine as the source: a session in this process, which is spoken to like an agent.

    `across` is the node behind it in the chain, which it reaches through that node's agent.
    """

    def __init__(self, request: dict[str, Any]) -> None:
        self.across: Member | None = None
        self.first = _Listening(None)
        self._session = Session(request, self._carry)
        self._records: collections.deque[dict[str, Any]] = collections.deque()
        self._session.start()

    def send(self, order: dict[str, Any]) -> None:
        self._session.give(msgspec.to_builtins(order))

    def read(self, deadline_s: float) -> Any:
        while not self._records:
            self._records.extend(self._session.report(min(deadline_s, _LOOK_S)))
        return convert(self._records.popleft(), _RECORD)

    def close_stdin(self) -> None:
        self._session.close()

    def finish(self, deadline_s: float) -> None:
        """Nothing of it is left to wait for."""

    def close(self) -> None:
        self._session.close()

    def _carry(self, piece: memoryview) -> None:
        """Send bytes to the next node; one that is slow is waited for."""
        stream = self.across.stream if self.across is not None and self.across.error is None else None
        if self.across is None or stream is None:
            raise BrokenPipeError
        try:
            stream.send({"data": piece})
        except ContactLost as error:
            # Half a line may have gone: nothing may follow it.
            self.across.error = error
            raise BrokenPipeError from error


class CopyProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a copy.

    Attributes:
        hashed_bytes: by node: bytes that were hashed, to compare them with the source.
        moved_bytes: by receiver: how many of `receive_bytes` have arrived; empty until `receive_bytes` is known.
        receive_bytes: by receiver: bytes that it needs.
        time_s: time since the first byte was sent.
    """

    hashed_bytes: dict[str, int]
    moved_bytes: dict[str, int] = {}
    receive_bytes: dict[str, int] = {}
    time_s: float = 0.0


class CopyRound:
    """One round: the source, and behind it whoever receives, in this order.

    Args:
        chain: at least two.
        delete: whether files that the source does not have are removed.
        observe: is shown the progress; an exception from it ends the copy.
        share: the part of the time, from 0 to 1, in which each node sends; a smaller one leaves the link to others.
    """

    def __init__(
        self,
        chain: Sequence[Participant],
        credentials: CopyCredentials,
        *,
        delete: bool,
        observe: Callable[[CopyProgress], None],
        share: float = 1.0,
    ) -> None:
        self.members = [Member(participant) for participant in chain]  # of the chain
        # seconds from the first byte until the last node had all; None if none got so far
        self.moved_s: float | None = None
        self._credentials = credentials
        self._delete = delete
        self._share = share
        self._observe = observe
        self._heard: queue.Queue[tuple[Member, Any]] = queue.Queue()
        # Members that could be asked.
        self._chain: list[Member] = []
        self._readers: list[threading.Thread] = []
        self._has_asked = False
        self._began: float | None = None
        self._broke: float | None = None
        self._moved = (0.0, -1)

    def run(self) -> None:
        """From the opening of the sessions to their end; how it went stands in the members."""
        try:
            self._open()
            while not self._is_over():
                with contextlib.suppress(queue.Empty):
                    member, answer = self._heard.get(timeout=_LOOK_S)
                    if isinstance(answer, MultinodeError):
                        member.error = answer
                    else:
                        member.take(answer)
                self._advance()
                self._show()
            if self._began is not None:
                self.moved_s = max(0.0, max(member.copied_s for member in self.members) - self._began)
        finally:
            self._close()

    def _open(self) -> None:
        by_node = {member.name: member for member in self.members}
        source = self.members[0]

        def begin(node: Node) -> None:
            member = by_node[node.name]
            member.open(self._credentials, is_source=member is source, delete=self._delete, share=self._share)

        begun = gather([member.participant.node for member in self.members], begin, deadline_s=_OPEN_S)
        for name, error in begun.failed.items():
            by_node[name].error = error
        chain = [member for member in self.members if member.error is None]
        if chain[:1] != [source] or len(chain) == 1:
            return
        self._chain = chain
        if isinstance(source.stream, _SessionHere):
            source.stream.across = chain[1]
        for member, following in zip(chain, [*chain[1:], None], strict=True):
            previous = _CHANNEL if source.participant.is_here and member is chain[1] else None
            member.send({"next": self._address(member, following), "previous": previous})
        for member in chain:
            reader = threading.Thread(target=self._read, args=(member,), name=f"copy-{member.name}", daemon=True)
            self._readers.append(reader)
            reader.start()

    def _address(self, member: Member, following: Member | None) -> dict[str, Any] | str | None:
        if following is None:
            return None
        if member.participant.is_here:
            return _CHANNEL
        return {"addr": following.participant.addr, "port": following.port}

    def _read(self, member: Member) -> None:
        stream = member.stream
        record: Any = None
        try:
            while stream is not None and not isinstance(record, _Ended):
                record = stream.read(_SILENT_S)
                if record is None:
                    raise ContactLost("its agent exited before the copy finished", node=member.name)
                if isinstance(record, _Data):
                    self.members[0].send({"data": record.data})
                else:
                    self._heard.put((member, record))
        except MultinodeError as error:
            error.node = error.node or member.name
            self._heard.put((member, error))
        if self.members[0].participant.is_here and member is self._chain[1]:
            self.members[0].send({"data": b""})

    def _is_over(self) -> bool:
        """Whether all have ended who may still get something, and those behind a break have had their say."""
        cut = next((at for at, member in enumerate(self._chain) if member.is_cut), len(self._chain))
        # Who cannot send goes on receiving.
        cut += cut < len(self._chain) and self._chain[cut].receives
        if not all(member.is_over for member in self._chain[:cut]):
            return False
        if all(member.is_over for member in self._chain):
            return True
        self._broke = self._broke or time.monotonic()
        return time.monotonic() - self._broke > _BROKEN_S

    def _advance(self) -> None:
        """Give the next order to all, once all have said what it depends on."""
        if not self._chain:
            return
        source, *targets = self._chain
        if not self._has_asked and all(member.candidates is not None for member in targets):
            self._has_asked = True
            flags = [member.candidates or b"" for member in targets]
            union = functools.reduce(operator.or_, (int.from_bytes(mine, "big") for mine in flags))
            source.send({"hash": base64.b64encode(union.to_bytes(max(map(len, flags)), "big")).decode()})
        if self._has_asked and self._began is None and all(member.need is not None for member in targets):
            require_room(targets)
            self._began = time.monotonic()
            # What the source sends must not come before it, on one channel.
            for member in (*targets, source):
                member.send({"go": True})

    def _show(self) -> None:
        hashed = {member.name: member.progress.hashed_bytes for member in self.members}
        moved = {member.name: member.progress.moved_bytes for member in self.members[1:] if member.need is not None}
        now = time.monotonic()
        total = sum(hashed.values()) + sum(moved.values()) + sum(member.is_over for member in self.members)
        if total != self._moved[1]:
            self._moved = (now, total)
        elif now - self._moved[0] > _STALL_S:
            raise ContactLost(
                f"no progress for {_STALL_S:.0f} s", hint="received data is kept: run the same command again"
            )
        if self._began is None:
            self._observe(CopyProgress(hashed_bytes=hashed))
            return
        receive = {member.name: member.need.receive_bytes for member in self.members if member.need is not None}
        self._observe(
            CopyProgress(hashed_bytes=hashed, moved_bytes=moved, receive_bytes=receive, time_s=now - self._began)
        )

    def _close(self) -> None:
        """The agents end with their stdin; their locks have to be free for whoever comes next."""
        for member in self.members:
            if member.stream is not None:
                with contextlib.suppress(MultinodeError):
                    member.stream.close_stdin()
        end = time.monotonic() + _END_S
        for reader in self._readers:
            reader.join(max(0.0, end - time.monotonic()))
        for member in self.members:
            if member.stream is not None:
                with contextlib.suppress(MultinodeError):
                    member.stream.finish(max(0.0, end - time.monotonic()))
                member.stream.close()


def require_room(members: Sequence[Member]) -> None:
    """Nothing is written unless all of it fits everywhere.

    Raises:
        NodeFailed: it does not; the first node's error, with those of others in its detail.
    """
    errors = [
        NodeFailed(
            f"the copy needs {format_size(place.need_bytes)} in {place.path}, but only {format_size(place.free_bytes)} "
            "are free; nothing was written",
            node=member.name,
            hint="free space there, or leave the node out",
        )
        for member in members
        for place in (member.need.places if member.need is not None else ())
        if place.need_bytes > place.free_bytes
    ]
    if errors:
        errors[0].detail = "\n".join(f"also {error}" for error in errors[1:])
        raise errors[0]


class Failures(NamedTuple):
    """Who has failed in a round, and why; and who may have, as the node before it says."""

    certain: dict[str, MultinodeError]
    suspect: tuple[str, MultinodeError] | None


def find_failures(members: Sequence[Member]) -> Failures:
    """Why a round has not reached all. Pure.

    Raises:
        MultinodeError: it was the source.
    """
    source, *targets = members
    certain: dict[str, MultinodeError] = {}
    for member in members:
        here = next((trouble for trouble in member.troubles if trouble.where == "here"), None)
        if member.copied is not None:
            continue
        if here is not None:
            certain[member.name] = AgentFailed(here.message, node=member.name, hint=here.hint)
        elif member.error is not None:
            certain[member.name] = member.error
    if source.name in certain:
        raise certain[source.name]
    left = [member for member in targets if member.copied is None and member.name not in certain]
    if certain or not left:
        return Failures(certain, None)
    # Who is behind a break says so too: the first of the chain is the one that counts.
    for member, following in itertools.pairwise(members):
        down = next((trouble for trouble in member.troubles if trouble.where == "downstream"), None)
        if down is not None and following in left:
            message = f"{member.name} cannot send to it: {down.message}"
            return Failures(certain, (following.name, NodeFailed(message, node=following.name)))
    up = next((trouble for trouble in left[0].troubles if trouble.where == "upstream"), None)
    message = f"it did not receive everything: {up.message if up is not None else 'the copy did not finish'}"
    return Failures(certain, (left[0].name, NodeFailed(message, node=left[0].name)))
