"""What a node says while its run is followed, as types. Its words are checked here, once; what it sent is untrusted."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from multinode.decoding import convert
from multinode.errors import NodeFailed
from multinode.transport.agent import Record

__all__ = ["Chunk", "Ended", "Hello", "Message", "Status", "parse_record"]

_OURS = frozenset({"hello", "chunk", "status", "end"})


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="hello"):
    """A channel to the run has been opened; `time_s` is the node's wall clock."""

    time_s: float


class Chunk(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="chunk"):
    """A piece of a file of the run directory, base64 on the way; `offset` in bytes."""

    file: str
    offset: Annotated[int, msgspec.Meta(ge=0)]
    data: bytes


class Status(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="status"):
    """The node's status.json, as far as it is read here."""

    state: Literal["starting", "running", "stopping", "ended"]
    exit_code: int | None = None
    signal: str | None = None
    cause: str | None = None
    message: str | None = None
    ended_s: float | None = None
    processes_left: int | None = None
    oom_kills: int | None = None
    disk_free_bytes: int | None = None


class Ended(Status, frozen=True, kw_only=True, tag_field="kind", tag="end"):
    """The last status; nothing follows it."""

    state: Literal["ended"]


Message = Hello | Chunk | Status | Ended


def parse_record(record: Record, node: str) -> Message | None:
    """The record as a type; None for one that only shows that the node lives.

    Raises:
        NodeFailed: it lacks a field, or a field is not what it should be.
    """
    if record.get("kind") not in _OURS:
        return None
    try:
        message: Message = convert(record, Message)  # type: ignore[arg-type]  # a union is no type
    except msgspec.ValidationError as error:
        raise NodeFailed(f"it answered what is not a record: {error}", node=node) from None
    return message
