"""The code of a job to all nodes; only what a node lacks is sent. Prints nothing."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from multinode.cluster.cluster import Cluster, Node
from multinode.errors import ContactLost, NodeFailed, UsageError
from multinode.node.channel import AgentError
from multinode.node.copies import wire
from multinode.node.copies.exchange import ask_lacking, pack_digests, send_blocks
from multinode.node.copies.store import Store
from multinode.node.copies.wire import PeerError, Pipe, Wire
from multinode.node.manifest import File, Manifest
from multinode.records.plan import CodeCopy, SentCode
from multinode.transport.agent import AgentStream, AgentTransport
from multinode.transport.base import gather
from multinode.units import format_count, format_size

if TYPE_CHECKING:
    from multinode.job.code_tree import CodeTree

_ANSWER_S = 60.0
# What comes slower does not come.
_LEAST_BYTES_PER_S = 64 << 10
# How long an agent that reads no more may take to say why.
_REASON_S = 5.0


class _Data(msgspec.Struct, frozen=True, tag_field="kind", tag="data"):
    data: bytes


class _Source(Store):
    """The tree as it was read; a file that has changed since is an error."""

    def __init__(self, code: CodeTree) -> None:
        super().__init__(Manifest(code.manifest), [code.source])
        self.digests[:] = code.block_digests

    def blocks(self, numbers: Sequence[int]) -> Iterator[tuple[int, bytes, memoryview]]:
        """Blocks with their numbers and digests; each is gone when the next one is read."""
        buffer = memoryview(bytearray(max((self.manifest.place(number)[2] for number in numbers), default=0)))
        for number in numbers:
            file, _, _ = self.manifest.place(number)
            try:
                view = self.read(number, buffer)
            except AgentError as error:
                raise _changed(self.path(file)) from error
            except OSError as error:
                raise UsageError(f"--copy-code: {self.path(file)} cannot be read: {error.strerror}") from error
            if hashlib.sha256(view).digest() != self.digest(number):
                raise _changed(self.path(file))
            yield number, bytes(self.digest(number)), view

    def _open(self, file: File) -> int:
        return os.open(self.path(file), os.O_RDONLY | os.O_NOFOLLOW)

    def _has_changed(self, file: File, status: os.stat_result) -> bool:
        # Its digest says so.
        del file, status
        return False


def copy_code(
    agent: AgentTransport, cluster: Cluster, code: CodeTree, run_id: str, say: Callable[[str], None]
) -> CodeCopy:
    """Bring the tree to every node, as the directory of this run; only what a node lacks is sent."""
    copied = code.copy()
    say(f"copying {format_count(copied.files, 'file')} ({format_size(copied.size_bytes)}) from {code.source}")
    source = _Source(code)
    request = {"schema": 1, "then": True, "run_id": code.run_id or run_id, "data": _opening(source)}
    deadline_s = 2 * _ANSWER_S + code.size_bytes / _LEAST_BYTES_PER_S
    sent = gather(
        cluster.nodes, lambda node: _send(agent, node, source, request, deadline_s), deadline_s=deadline_s
    ).require()
    most = max(sent.values(), key=lambda transfer: transfer.size_bytes)
    say(f"sent at most {format_count(most.files, 'file')} ({format_size(most.size_bytes)}) per node")
    return msgspec.structs.replace(copied, sent=sent)


def _opening(source: Store) -> bytes:
    """What every node is told before it answers."""
    said: list[bytes] = []
    peer = Wire(Pipe(lambda piece: said.append(bytes(piece)), bytes))
    peer.send(wire.MANIFEST, source.manifest.data)
    peer.send(wire.DIGESTS, pack_digests(source.has, source.digests))
    return b"".join(said)


def _send(
    agent: AgentTransport, node: Node, source: _Source, request: dict[str, object], deadline_s: float
) -> SentCode:
    stream: AgentStream[_Data] = agent.open(node, "code", request, _Data, deadline_s=_ANSWER_S)
    answers = [stream.first]

    def send(piece: memoryview) -> None:
        try:
            stream.send({"data": piece})
        except ContactLost:
            # It may have said why it takes no more.
            with contextlib.suppress(ContactLost):
                stream.read(_REASON_S)
            raise

    def receive() -> bytes:
        answer = answers.pop() if answers else stream.read(deadline_s)
        if answer is None:
            raise ContactLost("it disconnected while the code was being sent", node=node.name)
        return answer.data

    try:
        peer = Wire(Pipe(send, receive))
        lacking = ask_lacking(peer, source.manifest.block_count)
        send_blocks(peer, source.blocks(lacking))
    except (PeerError, ValueError) as error:
        stream.close()
        raise NodeFailed(f"it requested data that it was not offered: {error}", node=node.name) from error
    except BaseException:
        stream.close()
        raise
    agent.keep(node, stream)
    places = [source.manifest.place(block) for block in lacking]
    return SentCode(files=len({file for file, _, _ in places}), size_bytes=sum(size for _, _, size in places))


def _changed(path: str) -> UsageError:
    return UsageError(f"--copy-code: {path} changed while it was copied", hint="run the same command again")
