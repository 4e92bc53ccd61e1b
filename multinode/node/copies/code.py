"""The verb `code`: the tree of files in which a run's job starts. Only blocks that no earlier tree had are sent.

A tree is built beside its place and then moved there. The store beside the trees holds each block once, named by its
SHA-256, for the trees of other runs.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from typing import Optional

from ..channel import AgentError, Channel, Record
from ..manifest import BLOCK_BYTES, Flags, Manifest
from ..run.code import MANIFEST_NAME, TREE, code_root, forget, read_tree_manifest, store_folder
from ..rundir import is_run_id
from . import wire
from .exchange import compare, receive_blocks, receive_manifest
from .store import CopyTarget, StagedPath
from .wire import PeerError, Pipe, Wire

_PATIENCE_S = 60.0
# Content that no tree has used for this long is removed from the store.
_UNUSED_S = 30 * 86400.0


def run(request: Record, channel: Channel) -> None:
    """The verb `code`: receives a tree over the channel; what the controller says first is part of the request.

    Raises:
        AgentError: the manifest is refused, a block differs from its digest, or the tree cannot be written.
    """
    run_id: str = request["run_id"]
    if not is_run_id(run_id):
        raise AgentError(f"not a run id: {run_id!r}")
    pieces = [base64.b64decode(request["data"])]

    def send(piece: memoryview) -> None:
        channel.emit({"kind": "data", "data": base64.b64encode(piece).decode()})

    def receive() -> bytes:
        heard = time.monotonic()
        while not pieces and not channel.closed and time.monotonic() < heard + _PATIENCE_S:
            pieces.extend(base64.b64decode(json.loads(line)["data"]) for line in channel.lines(_PATIENCE_S))
        if not pieces:
            raise AgentError("the controller disconnected while files were being sent")
        return pieces.pop(0)

    try:
        _receive(Wire(Pipe(send, receive)), os.path.join(code_root(), run_id))
    except PeerError as error:
        raise AgentError(f"the data sent differ from the data announced: {error}") from error
    except (OSError, ValueError) as error:
        raise AgentError(f"the code could not be stored: {error}", hint="df -h ~; df -i ~") from error


def _receive(peer: Wire, place: str) -> None:
    with contextlib.closing(_CodeTarget(receive_manifest(peer), place)) as target:
        compare(peer, target, bytearray())
        buffer = bytearray(BLOCK_BYTES)
        for block, digest, view, _ in receive_blocks(peer, target, lambda: buffer):
            target.write(block, digest, view)
        if not all(target.has):
            raise PeerError("it did not send all of its data")
        target.finish(delete=False)
    peer.send(wire.COPIED)
    forget(time.time() - _UNUSED_S)


class _CodeTarget(CopyTarget):
    """The tree of a run, whose blocks are also kept in the store.

    Args:
        manifest: of one directory.
        place: of the run; it gets the tree, and the manifest by which it is known.
    """

    def __init__(self, manifest: Manifest, place: str) -> None:
        if len(manifest.roots) != 1 or manifest.roots[0] is None:
            raise AgentError("refused: the manifest does not describe exactly one directory")
        super().__init__(manifest, [os.path.join(place, TREE)])
        self._place = place
        self._is_made = False
        self._new: Optional[str] = None
        self._stored = store_folder()
        # Blocks by the first one that has the same content.
        self._equals: dict[int, list[int]] = {}

    def compare(self, own: bytearray, flags: Flags, theirs: bytes) -> None:
        """Find out whether the tree is there, else take from the store what it has; every block needs a digest."""
        del own
        if not all(flags):
            raise AgentError("refused: a block without a digest")
        self.digests[:] = theirs
        self.has[:] = b"\1" * len(self.has)
        self._is_made = _is_made(self._place, self.whole_digest())
        if self._is_made:
            return
        os.makedirs(self._stored, mode=0o700, exist_ok=True)
        _require_room(self._stored, self.manifest.size_bytes)
        self._new = tempfile.mkdtemp(prefix=".", dir=code_root())
        self.places = [StagedPath(self.places[0].final, self._new)]
        first: dict[bytes, int] = {}
        for block in range(self.manifest.block_count):
            digest = bytes(self.digest(block))
            if digest in first:
                self._equals[first[digest]].append(block)
            elif not self._take(block, digest):
                first[digest] = block
                self._equals[block] = []
        for block in self._equals:
            self.has[block] = 0
        _require_room(self._stored, sum(self.manifest.place(block)[2] for block in self._equals))

    def write(self, block: int, digest: bytes, data: memoryview) -> None:
        """Write one received block to the tree, wherever it occurs, and to the store."""
        if block < self.manifest.block_count and digest != self.digest(block):
            raise AgentError("refused: the digest of a block differs from the one announced")
        super().write(block, digest, data)
        for equal in self._equals[block]:
            self._put(equal, data)
        self._keep(digest, data)

    def finish(self, *, delete: bool) -> None:
        """Put the tree in its place."""
        del delete
        if self._is_made:
            return
        staged = self.places[0]
        os.makedirs(staged.tree, exist_ok=True)
        for file in self.manifest.files:
            self._complete(file)
        self._make_tree(0, staged.tree, staged)
        with open(os.path.join(staged.staging, MANIFEST_NAME), "w", encoding="utf-8") as record:
            json.dump({"digest": self.whole_digest(), "paths": sorted(self.manifest.names(0))}, record)
        try:
            os.rename(staged.staging, self._place)
        except OSError:
            # Another node that shares this home directory has made the tree.
            if not _is_made(self._place, self.whole_digest()):
                raise

    def close(self) -> None:
        """Remove what is left of the work."""
        if self._new is not None:
            shutil.rmtree(self._new, ignore_errors=True)

    def _take(self, block: int, digest: bytes) -> bool:
        """Put a block of the store into the tree. False if the store lacks it. What is damaged there is removed.

        It is a copy, not a hard link: a job that changes its file must not change the store.
        """
        path = os.path.join(self._stored, digest.hex())
        try:
            with open(path, "rb", buffering=0) as file:
                os.utime(file.fileno())
                data = file.read(self.manifest.place(block)[2] + 1)
        except FileNotFoundError:
            return False
        if hashlib.sha256(data).digest() != digest:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return False
        self._put(block, memoryview(data))
        return True

    def _keep(self, digest: bytes, data: memoryview) -> None:
        """Write a block to the store, atomically."""
        descriptor, partial = tempfile.mkstemp(prefix=".", dir=self._stored)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
            os.replace(partial, os.path.join(self._stored, digest.hex()))
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(partial)
            raise


def _require_room(folder: str, size_bytes: int) -> None:
    volume = os.statvfs(folder)
    free = volume.f_bavail * volume.f_frsize
    if size_bytes > free:
        raise AgentError(f"the code needs {size_bytes >> 20} MiB, but only {free >> 20} MiB are free", hint="df -h ~")


def _is_made(place: str, digest: str) -> bool:
    """Whether the run's tree is complete; raises AgentError if it holds other code."""
    manifest: Optional[Record] = read_tree_manifest(place)
    if manifest is not None and manifest["digest"] != digest:
        raise AgentError(f"{place} holds code that differs from this run's", hint=f"rm -r {place}")
    return manifest is not None
