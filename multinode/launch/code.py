"""copy_code: the files that a run's job is started in, sent to its nodes. Prints nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from multinode.cluster.cluster import Cluster, Node
from multinode.errors import ContactLost, NodeFailed, UsageError
from multinode.job.code_tree import CodeFile, CodeTree
from multinode.launch.context import RunContext
from multinode.records.plan import CodeCopy, SentCode
from multinode.transport.agent import AgentStream, AgentTransport, read_answer
from multinode.transport.fan_out import gather
from multinode.units import format_count, format_size

_ANSWER_S = 60.0
# What comes slower does not come.
_LEAST_BYTES_PER_S = 64 << 10
_PIECE_BYTES = 1 << 16
# How long an agent that reads no more may take to say why.
_REASON_S = 5.0


class _Wanted(msgspec.Struct, frozen=True):
    files: tuple[Annotated[int, Meta(ge=0)], ...]


class _Copied(msgspec.Struct, frozen=True, tag_field="kind", tag="copied"):
    path: str


def copy_code(context: RunContext, cluster: Cluster, code: CodeTree, run_id: str) -> CodeCopy:
    """Bring the tree to every node, as the directory of this run; only what a node lacks is sent."""
    copied = code.copy()
    context.say(f"copying {format_count(copied.files, 'file')}, {format_size(copied.size_bytes)}, of {code.source}")
    deadline_s = 2 * _ANSWER_S + code.size_bytes / _LEAST_BYTES_PER_S
    sent = gather(
        cluster.nodes, lambda node: _send(context.agent, node, code, run_id, deadline_s), deadline_s=deadline_s
    ).require()
    most = max(sent, key=lambda one: one.size_bytes)
    context.say(f"sent at most {format_count(most.files, 'file')}, {format_size(most.size_bytes)}, to a node")
    names = (node.name for node in cluster.nodes)
    return msgspec.structs.replace(copied, sent=dict(zip(names, sent, strict=True)))


def _send(agent: AgentTransport, node: Node, code: CodeTree, run_id: str, deadline_s: float) -> SentCode:
    request = {
        "schema": 1,
        "then": True,
        "run_id": code.run_id or run_id,
        "digest": code.digest,
        "files": [[file.path, file.digest, file.size_bytes, file.is_executable] for file in code.files],
        "links": code.links,
    }
    stream = agent.open(node, "code", request, deadline_s=_ANSWER_S)
    try:
        files = _wanted(stream, node, code)
        for number, file in files.items():
            for data in _read(code, file):
                _say(stream, {"file": number, "data": data})
        read_answer(stream.read(deadline_s), _Copied, node.name)
    except BaseException:
        stream.close()
        raise
    agent.keep(node, stream)
    return SentCode(files=len(files), size_bytes=sum(file.size_bytes for file in files.values()))


def _wanted(stream: AgentStream, node: Node, code: CodeTree) -> dict[int, CodeFile]:
    """The files that a node lacks, by their numbers."""
    numbers = read_answer(stream.first, _Wanted, node.name).files
    if len(set(numbers)) < len(numbers) or max(numbers, default=-1) >= len(code.files):
        raise NodeFailed("it asked for files that it was not told of", node=node.name)
    return {number: code.files[number] for number in numbers}


def _say(stream: AgentStream, piece: dict[str, object]) -> None:
    try:
        stream.send(piece)
    except ContactLost:
        # It may have said why it takes no more.
        with contextlib.suppress(ContactLost):
            stream.read(_REASON_S)
        raise


def _read(code: CodeTree, file: CodeFile) -> Iterator[bytes]:
    """The file as it was announced."""
    path, left = Path(code.source, file.path), file.size_bytes
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as source:
            while left and (data := source.read(min(_PIECE_BYTES, left))):
                left -= len(data)
                yield data
    except OSError as error:
        raise UsageError(f"--copy-code: {path} cannot be read: {error.strerror}") from error
    if left:
        raise UsageError(f"--copy-code: {path} changed while it was copied", hint="launch again")
