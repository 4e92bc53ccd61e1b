"""The verb `code`: the tree of files in which a run's job starts. Only content that no earlier tree had is sent.

A tree is built beside its place and then moved there. The store beside the trees holds each content once, named by its
SHA-256. The manifest judges names and links, as for `copy`.
"""

from __future__ import annotations

import binascii
import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple, Optional

from ..channel import AgentError, Channel, Record
from ..manifest import File, Manifest
from ..rundir import is_run_id

_STORE = ".store"
_TREE = "tree"
_MANIFEST = "files.json"
_DIGEST_DIGITS = 64
_BLOCK_BYTES = 1 << 20
_MOST_FILES = 100_000
_PATIENCE_S = 60.0
# Content that no tree has used for this long is removed from the store.
_UNUSED_S = 30 * 86400.0
# A younger tree may still be under construction, or about to be used by a run.
_YOUNG_S = 3600.0


class _Content(NamedTuple):
    file: File
    digest: str


def run(request: Record, channel: Channel) -> None:
    """The verb `code`: emits `wanted`, the numbers of the files to send, then `copied` when the tree is in place.

    Raises:
        AgentError: the manifest is refused, a file differs from its digest, or the tree cannot be written.
    """
    run_id: str = request["run_id"]
    if not is_run_id(run_id):
        raise AgentError(f"not a run id: {run_id!r}")
    manifest = Manifest(request["manifest"].encode())
    contents = _pair_with_digests(manifest, request["digests"])
    digest = hashlib.sha256("".join([request["manifest"], *request["digests"]]).encode()).hexdigest()
    place = os.path.join(_root(), run_id)
    if not _is_made(place, digest):
        try:
            _make(place, digest, manifest, contents, channel)
        except (OSError, ValueError) as error:
            raise AgentError(f"the code cannot be copied: {error}", hint="df -h ~; df -i ~") from error
    else:
        channel.emit({"kind": "wanted", "files": []})
    channel.emit({"kind": "copied", "path": os.path.join(place, _TREE)})


def clean_code(run_ids: Optional[list[str]], before_s: float) -> Record:
    """Remove trees that no run uses: the trees of some runs, or all old trees and old content of the store.

    A tree in which a job has written files is kept; `__pycache__` does not count.

    Args:
        run_ids: the runs; None removes all old trees, and cleans the store.
        before_s: wall clock; younger trees and contents are kept if `run_ids` is None.

    Returns:
        `code_bytes`, the bytes that were removed, and `code_kept`, the trees in which a job has written files.
    """
    runs = _names(os.path.join(os.path.dirname(_root()), "runs"))
    freed, kept = 0, []
    young_s = min(before_s, time.time() - _YOUNG_S)
    for name in _names(_root()):
        place = os.path.join(_root(), name)
        if name == _STORE:
            freed += _forget(before_s) if run_ids is None else 0
        elif not (name in run_ids if run_ids is not None else _modified_s(place) < young_s) or _is_used(name, runs):
            continue
        elif _has_written(place):
            kept.append(os.path.join(place, _TREE))
        else:
            freed += _remove(place)
    return {"code_bytes": freed, "code_kept": kept}


def _is_used(name: str, runs: list[str]) -> bool:
    """Whether a run that still has a directory is the run of this tree, or an attempt of it."""
    return any(run.rpartition(".")[0] == name or run.startswith(f"{name}-") for run in runs)


def _root() -> str:
    return os.path.join(os.path.expanduser("~"), ".multinode", "code")


def _make(place: str, digest: str, manifest: Manifest, contents: list[_Content], channel: Channel) -> None:
    store = os.path.join(_root(), _STORE)
    os.makedirs(store, mode=0o700, exist_ok=True)
    _require_room(store, manifest.size_bytes)
    new = tempfile.mkdtemp(prefix=".", dir=_root())
    tree = os.path.join(new, _TREE)
    try:
        os.mkdir(tree)
        for _, name, mode in manifest.directories:
            os.mkdir(os.path.join(tree, name), mode)
        lacking: dict[str, list[_Content]] = {}
        wanted = []
        for number, content in enumerate(contents):
            if content.digest in lacking:
                lacking[content.digest].append(content)
            elif not _take(store, tree, content):
                lacking[content.digest] = [content]
                wanted.append(number)
        _require_room(store, sum(contents[number].file.size_bytes for number in wanted))
        channel.emit({"kind": "wanted", "files": wanted})
        pieces = _pieces(channel)
        for number in wanted:
            _receive(store, number, contents[number], pieces)
            for content in lacking[contents[number].digest]:
                if not _take(store, tree, content):
                    raise AgentError(
                        f"{content.file.name} cannot be read back as it was written", hint="df -h ~; dmesg"
                    )
        for _, name, text in manifest.links:
            os.symlink(text, os.path.join(tree, name))
        with open(os.path.join(new, _MANIFEST), "w", encoding="utf-8") as record:
            json.dump({"digest": digest, "paths": sorted(manifest.names(0))}, record)
        _move(new, place, digest)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    _forget(time.time() - _UNUSED_S)


def _pair_with_digests(manifest: Manifest, digests: list[str]) -> list[_Content]:
    """Each file of a tree with the digest of its content."""
    if len(manifest.roots) != 1 or manifest.roots[0] is None or len(digests) != len(manifest.files):
        raise AgentError("refused: the manifest is not that of one directory, with a digest for each file")
    if len(digests) > _MOST_FILES:
        raise AgentError(f"{len(digests)} files are more than a tree may have")
    for digest in digests:
        if len(digest) != _DIGEST_DIGITS or not set(digest) <= set("0123456789abcdef"):
            raise AgentError(f"not a digest: {digest!r}")
    return [_Content(file, digest) for file, digest in zip(manifest.files, digests)]


def _require_room(folder: str, size_bytes: int) -> None:
    volume = os.statvfs(folder)
    free = volume.f_bavail * volume.f_frsize
    if size_bytes > free:
        raise AgentError(f"the code takes {size_bytes >> 20} MiB, and {free >> 20} MiB are free", hint="df -h ~")


def _take(store: str, tree: str, content: _Content) -> bool:
    """Copy a file from the store into the tree; False if the store lacks it. Damaged content is removed from the store.

    It is a copy, not a hard link: a job that changes its file must not change the store.
    """
    stored, place = os.path.join(store, content.digest), os.path.join(tree, content.file.name)
    digest = hashlib.sha256()
    try:
        with open(stored, "rb", buffering=0) as source, _create(place, content.file.mode) as target:
            os.utime(source.fileno())
            while data := source.read(_BLOCK_BYTES):
                digest.update(data)
                target.write(data)
    except FileNotFoundError:
        return False
    if digest.hexdigest() == content.digest:
        return True
    os.unlink(place)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(stored)
    return False


def _create(path: str, mode: int) -> BinaryIO:
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb")


def _pieces(channel: Channel) -> Iterator[tuple[int, bytes]]:
    """Pieces from the controller: the number of a file, and bytes of it."""
    heard = time.monotonic()
    while time.monotonic() < heard + _PATIENCE_S and not channel.closed:
        for line in channel.lines(_PATIENCE_S):
            heard = time.monotonic()
            record = json.loads(line)
            yield record["file"], binascii.a2b_base64(record["data"])
    raise AgentError("the controller went away while files were sent")


def _receive(store: str, number: int, content: _Content, pieces: Iterator[tuple[int, bytes]]) -> None:
    """Receive a file into the store, atomically."""
    descriptor, partial = tempfile.mkstemp(prefix=".", dir=store)
    try:
        with open(descriptor, "wb") as target:
            _write(target, number, content, pieces)
        os.replace(partial, os.path.join(store, content.digest))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def _write(target: BinaryIO, number: int, content: _Content, pieces: Iterator[tuple[int, bytes]]) -> None:
    digest, left = hashlib.sha256(), content.file.size_bytes
    while left > 0:
        sent, data = next(pieces)
        left -= len(data)
        if sent != number or left < 0:
            raise AgentError(f"what was sent of {content.file.name} is not what was announced")
        digest.update(data)
        target.write(data)
    if digest.hexdigest() != content.digest:
        raise AgentError(f"{content.file.name} changed while it was copied", hint="launch again")


def _move(new: str, place: str, digest: str) -> None:
    try:
        os.rename(new, place)
    except OSError:
        # Another node that shares this home directory has made the tree.
        if not _is_made(place, digest):
            raise


def _is_made(place: str, digest: str) -> bool:
    """Whether the run's tree is complete; raises AgentError if it holds other code."""
    manifest = _read_manifest(place)
    if manifest is not None and manifest["digest"] != digest:
        raise AgentError(f"{place} holds other code than this run's", hint=f"rm -r {place}")
    return manifest is not None


def _read_manifest(place: str) -> Optional[Record]:
    try:
        with open(os.path.join(place, _MANIFEST), "rb") as file:
            manifest: Record = json.loads(file.read())
    except (OSError, ValueError):
        return None
    return manifest


def _has_written(place: str) -> bool:
    """Whether a tree has files that were not copied there; False for a tree that was never finished."""
    manifest, tree = _read_manifest(place), os.path.join(place, _TREE)
    if manifest is None:
        return False
    copied = set(manifest["paths"])
    for folder, folders, names in os.walk(tree):
        folders[:] = [name for name in folders if name != "__pycache__"]
        if any(os.path.relpath(os.path.join(folder, name), tree) not in copied for name in names):
            return True
    return False


def _forget(before_s: float) -> int:
    """Remove content from the store that has not been used since `before_s`; returns the bytes removed."""
    store, freed = os.path.join(_root(), _STORE), 0
    for name in _names(store):
        path = os.path.join(store, name)
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            if status.st_mtime < before_s:
                os.unlink(path)
                freed += status.st_size
    return freed


def _remove(place: str) -> int:
    size = 0
    for folder, _, names in os.walk(place):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(folder, name)).st_size
    shutil.rmtree(place, ignore_errors=True)
    return size


def _modified_s(place: str) -> float:
    try:
        return os.lstat(place).st_mtime
    except OSError:
        # Another node that shares this home directory has removed it.
        return time.time()


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
