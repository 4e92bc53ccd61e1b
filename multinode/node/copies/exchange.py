"""What the two ends of a copy say to each other: the list of files, what is there, the blocks that lack, the end.

Both `copy` and `--copy-code` do. The digests of blocks say what is equal; where a block is kept is the store's matter.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator

from ..channel import AgentError
from ..manifest import BLOCK_BYTES, DIGEST_BYTES, Flags, Manifest, pack_flags, unpack_flags
from . import wire
from .store import CopyTarget
from .wire import PeerError, Wire

_MOST_MANIFEST_BYTES = 256 << 20
_BLOCK_HEAD = struct.Struct(f">Q{DIGEST_BYTES}s")


def pack_digests(flags: Flags, digests: Flags) -> bytes:
    """The digests of the blocks that have a flag, of those of all blocks."""
    own = (digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES] for block, flag in enumerate(flags) if flag)
    return pack_flags(flags) + b"".join(own)


def ask_lacking(peer: Wire, count: int) -> list[int]:
    """Wait until the receiver has compared; the numbers of the blocks that it lacks, of `count`.

    Raises:
        ValueError: it names more blocks.
    """
    peer.await_frame()
    have = unpack_flags(peer.read(wire.HAVE, most_bytes=count // 8 + 1), count)
    return [block for block, has in enumerate(have) if not has]


def send_blocks(peer: Wire, items: Iterable[tuple[int, bytes, memoryview]]) -> None:
    """Send blocks, each with its number and digest, and wait until the receiver has put everything in place."""
    for block, digest, view in items:
        peer.send(wire.BLOCK, _BLOCK_HEAD.pack(block, digest), view)
    peer.send(wire.DONE)
    peer.await_frame()
    peer.receive(wire.COPIED, most_bytes=0)


def receive_manifest(peer: Wire) -> Manifest:
    """The list of files; raises AgentError if it is refused."""
    return Manifest(peer.read(wire.MANIFEST, most_bytes=_MOST_MANIFEST_BYTES))


def compare(peer: Wire, target: CopyTarget, own: bytearray) -> bytes:
    """Receive the source's digests, and find what is here by our `own`; returns what came, for the next node.

    Raises:
        AgentError: there are more or fewer digests than blocks.
        ValueError: they are of more blocks than the manifest has.
    """
    count = target.manifest.block_count
    flag_bytes = count // 8 + 1
    digests = peer.read(wire.DIGESTS, most_bytes=flag_bytes + count * DIGEST_BYTES)
    flags = unpack_flags(digests[:flag_bytes], count)
    if len(digests) != flag_bytes + DIGEST_BYTES * sum(flags):
        raise AgentError("refused: more or fewer digests than blocks")
    target.compare(own, flags, digests[flag_bytes:])
    return digests


def receive_blocks(
    peer: Wire, target: CopyTarget, buffer: Callable[[], bytearray]
) -> Iterator[tuple[int, bytes, memoryview, bytearray]]:
    """Say what is here, and receive the rest: each block with its number, its digest and the buffer that holds it."""
    peer.send(wire.HAVE, pack_flags(target.has))
    head = bytearray(_BLOCK_HEAD.size)
    while True:
        kind, size_bytes = peer.receive(wire.BLOCK, wire.DONE, most_bytes=len(head) + BLOCK_BYTES)
        if kind == wire.DONE:
            return
        if size_bytes < len(head):
            raise PeerError("it sent half a block")
        peer.read_into(memoryview(head))
        block, digest = _BLOCK_HEAD.unpack(head)
        empty = buffer()
        view = memoryview(empty)[: size_bytes - len(head)]
        peer.read_into(view)
        yield block, digest, view, empty
