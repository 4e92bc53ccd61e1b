"""The files of a copy on this node: files that it had, and files that arrive. A path appears when it is complete.

Arriving files are staged in a directory beside the path, or inside it if the path exists. They stay there if the copy
is aborted, and the next copy sends the rest.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Optional

from ..channel import AgentError, Record
from ..manifest import BLOCK_BYTES, DIGEST_BYTES, STAGING, File, Flags, Manifest, is_staging

_OWN = 0o700
_HASHING_THREADS = 4
_LOCK = "lock"


class StagedPath(NamedTuple):
    """One path on this node: its final place, and the directory where its arriving files are staged."""

    final: str
    staging: str

    @property
    def tree(self) -> str:
        """Where the files of the path are staged."""
        return os.path.join(self.staging, "tree")


def _find_place(path: str) -> StagedPath:
    # The path itself may be a symbolic link to another disk.
    final = os.path.realpath(path)
    if os.path.isdir(final):
        return StagedPath(final, os.path.join(final, STAGING))
    folder, name = os.path.split(final)
    return StagedPath(final, os.path.join(folder, f".{name}{STAGING}"))


class Store:
    """The files of a manifest on the source, which has all of them.

    Args:
        manifest: the source's manifest.
        paths: absolute paths, one for each root of the manifest.
    """

    def __init__(self, manifest: Manifest, paths: Sequence[str]) -> None:
        if len(paths) != len(manifest.roots):
            raise AgentError("refused: the list of files has paths that were not requested")
        self.manifest = manifest
        self.places = [_find_place(path) for path in paths]
        self.has = bytearray(b"\1" * manifest.block_count)  # by block, whether it is here and equal to the source's
        # digests of all blocks in order; zeros where a digest is unknown
        self.digests = bytearray(DIGEST_BYTES * manifest.block_count)

    def read(self, block: int, buffer: memoryview) -> memoryview:
        """Read one block into a buffer; returns the part of the buffer that it fills.

        Raises:
            AgentError: the file has changed.
        """
        file, offset, size_bytes = self.manifest.place(block)
        view = buffer[:size_bytes]
        descriptor = self._open(file)
        try:
            count, filled = -1, 0
            while count and filled < size_bytes:
                count = os.preadv(descriptor, [view[filled:]], offset + filled)
                filled += count
            if filled < size_bytes or self._has_changed(file, os.fstat(descriptor)):
                raise AgentError(f"{self.path(file)} changed while it was copied", hint="copy it again")
        finally:
            os.close(descriptor)
        return view

    def digest(self, block: int) -> memoryview:
        """The source's digest of one block."""
        return memoryview(self.digests)[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]

    def hash(self, flags: Flags, hashed: Callable[[int], None]) -> bytearray:
        """Hash the blocks that have a flag; returns digests of all blocks, zeros for the others.

        Args:
            flags: by block.
            hashed: called with the size of each hashed block in bytes.

        Raises:
            AgentError, OSError: a block cannot be read.
        """
        digests = bytearray(len(self.digests))
        errors: list[Exception] = []
        blocks = iter([block for block, flag in enumerate(flags) if flag])

        def work() -> None:
            buffer = memoryview(bytearray(BLOCK_BYTES))
            try:
                # All threads take blocks from one iterator; that of a list is safe to share.
                for block in blocks:
                    view = self.read(block, buffer)
                    digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES] = hashlib.sha256(view).digest()
                    hashed(len(view))
            except (AgentError, OSError) as error:
                errors.append(error)

        count = min(_HASHING_THREADS, os.cpu_count() or 1)
        threads = [threading.Thread(target=work, daemon=True) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return digests

    def whole_digest(self) -> str:
        """Digest of the whole copy: names, modes, links and content. Every block's digest must be known."""
        return hashlib.sha256(self.manifest.data + self.digests).hexdigest()

    def path(self, file: File) -> str:
        """Final path of a file."""
        return _join(self.places[file.root].final, file.name)

    def _open(self, file: File) -> int:
        return os.open(self.path(file), os.O_RDONLY)

    def _has_changed(self, file: File, status: os.stat_result) -> bool:
        return (status.st_size, max(0, status.st_mtime_ns)) != (file.size_bytes, file.mtime_ns)


class CopyTarget(Store):
    """The files of a manifest on a receiver.

    Attributes:
        extra: number of files that the source does not have; `finish` removes them if asked.
    """

    def __init__(self, manifest: Manifest, paths: Sequence[str]) -> None:
        super().__init__(manifest, paths)
        self.has = bytearray(manifest.block_count)
        self.extra = 0
        # Files that are in place and equal to the source's; then bytes of others that an earlier copy has staged.
        self._equal: set[File] = set()
        self._staged: dict[File, int] = {}
        self._locked: set[StagedPath] = set()

    def find_candidates(self) -> bytearray:
        """Flags of the blocks that may already be here; writes no data."""
        self._check()
        for place in self.places:
            if os.path.isdir(place.staging):
                self._lock(place)
        flags = bytearray(self.manifest.block_count)
        for file in self.manifest.files:
            staged = _regular(os.lstat, self._staged_path(file))
            if staged is not None:
                self._staged[file] = min(staged.st_size, file.size_bytes)
                count = len(file.blocks) if staged.st_size >= file.size_bytes else staged.st_size // BLOCK_BYTES
            else:
                there = _regular(os.stat, self.path(file))
                count = len(file.blocks) if there is not None and there.st_size == file.size_bytes else 0
                if there is not None and file.size_bytes == there.st_size == 0:
                    self._equal.add(file)
            flags[file.first_block : file.first_block + count] = b"\1" * count
        return flags

    def compare(self, own: bytearray, flags: Flags, theirs: bytes) -> None:
        """Find the blocks and files that are equal to the source's.

        Args:
            own: our digests of the candidates.
            flags: the blocks whose digests the source has sent.
            theirs: the source's digests of these blocks, in order.
        """
        for number, block in enumerate(block for block, flag in enumerate(flags) if flag):
            digest = theirs[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
            self.digest(block)[:] = digest
            self.has[block] = digest == own[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES]
        for file in self.manifest.files:
            mine = self.has[file.blocks.start : file.blocks.stop]
            if file in self._staged or not file.size_bytes:
                continue
            if all(mine):
                self._equal.add(file)
            else:
                # The whole file is written again, beside the old one, which stays until the copy is complete.
                self.has[file.blocks.start : file.blocks.stop] = bytes(len(mine))

    def needs(self) -> list[Record]:
        """Bytes that will be written to each file system, and bytes that are free there.

        Raises:
            AgentError: a directory cannot be written.
        """
        from ..facts.files import find_existing

        needs: dict[int, Record] = {}
        for root, place in enumerate(self.places):
            folder = find_existing(place.staging)
            if not self.is_whole() and not os.access(folder, os.W_OK | os.X_OK):
                raise AgentError(f"{folder} cannot be written", hint="choose another path, or change its owner")
            free = os.statvfs(folder)
            need = needs.setdefault(
                os.stat(folder).st_dev, {"path": folder, "need_bytes": 0, "free_bytes": free.f_bavail * free.f_frsize}
            )
            coming = (file for file in self.manifest.files if file.root == root and file not in self._equal)
            need["need_bytes"] += sum(file.size_bytes - self._staged.get(file, 0) for file in coming)
        return list(needs.values())

    def is_whole(self) -> bool:
        """Whether everything is in place already, so nothing has to be written."""
        places = ((_join(self.places[root].final, name), text) for root, name, text in self.manifest.links)
        links = all(_read_link(path) == text for path, text in places)
        named = [(root, name) for root, name, _ in self.manifest.directories]
        named += [(root, "") for root, mode in enumerate(self.manifest.roots) if mode is not None]
        folders = all(os.path.isdir(_join(self.places[root].final, name)) for root, name in named)
        return links and folders and len(self._equal) == len(self.manifest.files)

    def prepare(self) -> None:
        """Create and lock the staging directories, and remove leftovers of other copies."""
        for root, place in enumerate(self.places):
            os.makedirs(os.path.dirname(place.staging), exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(place.staging, _OWN)
            self._lock(place)
            self._clear(root, place)

    def write(self, block: int, digest: bytes, data: memoryview) -> None:
        """Write one received block to its staged file.

        Raises:
            AgentError: the data does not match the digest, or the block was not requested.
            OSError: it cannot be written.
        """
        if block >= self.manifest.block_count or self.has[block]:
            raise AgentError("refused: a block that was not requested")
        file, _, size_bytes = self.manifest.place(block)
        if len(data) != size_bytes or hashlib.sha256(data).digest() != digest:
            raise AgentError(f"refused: {file.name or self.path(file)} was damaged in transit")
        self._put(block, data)
        self.digest(block)[:] = digest
        self.has[block] = 1

    def finish(self, *, delete: bool) -> None:
        """Put everything in place.

        Args:
            delete: whether to remove files that the source does not have.
        """
        for file in self._equal:
            # We may not own the file; its content is right all the same.
            with contextlib.suppress(OSError):
                _set_metadata(file, os.open(self.path(file), os.O_RDONLY | os.O_NOFOLLOW))
        if self.is_whole():
            for root, place in enumerate(self.places):
                self._sweep(root, place, delete=delete)
            return
        for file in self.manifest.files:
            if file not in self._equal:
                self._complete(file)
        for root, place in enumerate(self.places):
            is_new = self.manifest.roots[root] is not None and not os.path.isdir(place.final)
            # A new directory appears complete; in an existing one, files are replaced one by one.
            self._make_tree(root, place.tree if is_new else place.final, place)
            _sync(place.staging)
            if is_new or self.manifest.roots[root] is None:
                if os.path.lexists(place.tree):
                    os.replace(place.tree, place.final)
            else:
                self._move_files(root)
            self._sweep(root, place, delete=delete)
            shutil.rmtree(place.staging)
            _sync(os.path.dirname(place.final))

    def _lock(self, place: StagedPath) -> None:
        """Lock a staging directory until this process ends."""
        if place in self._locked:
            return
        status = os.lstat(place.staging)
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise AgentError(f"{place.staging} does not belong to multinode", hint="remove it")
        lock = os.open(os.path.join(place.staging, _LOCK), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise AgentError(
                f"another copy is writing {place.final}, here or on a node that shares its file system",
                hint="wait until it ends; a file system that nodes share needs only one copy of the data",
            ) from error
        self._locked.add(place)

    def _make_tree(self, root: int, top: str, place: StagedPath) -> None:
        """Make the directories and links of one root below `top`."""
        mode = self.manifest.roots[root]
        if mode is None:
            return
        made = [(top, mode), *((_join(top, name), mode) for of, name, mode in self.manifest.directories if of == root)]
        for path, mode in made:
            is_there = os.path.isdir(path)
            if not is_there:
                os.mkdir(path)
            if not is_there or top == place.tree:
                # We must be able to put files into it.
                os.chmod(path, mode | _OWN)
        for of, name, text in self.manifest.links:
            path = _join(top, name)
            if of == root and _read_link(path) != text:
                new = os.path.join(place.staging, "link")
                os.symlink(text, new)
                os.replace(new, path)

    def _move_files(self, root: int) -> None:
        for file in self.manifest.files:
            if file.root == root and file not in self._equal:
                os.replace(self._staged_path(file), self.path(file))

    def _sweep(self, root: int, place: StagedPath, *, delete: bool) -> None:
        """Count files that the source does not have, and remove them if `delete` is set."""
        names = self.manifest.names(root)
        for folder, folders, files in os.walk(place.final):
            below = os.path.relpath(folder, place.final)
            inner = "" if below == os.curdir else below + "/"
            folders[:] = [name for name in folders if not is_staging(name)]
            for name in [*files, *folders]:
                path = os.path.join(folder, name)
                if inner + name in names:
                    continue
                if os.path.isdir(path) and not os.path.islink(path):
                    folders.remove(name)
                    self.extra += sum(len(inside) for _, _, inside in os.walk(path))
                    if delete:
                        shutil.rmtree(path)
                else:
                    self.extra += 1
                    if delete:
                        os.remove(path)

    def _check(self) -> None:
        """Check that no file is where a directory must be or the reverse, and that no link leads out of the path."""
        folders = [(self.places[root].final, mode is not None) for root, mode in enumerate(self.manifest.roots)]
        folders += [(_join(self.places[root].final, name), True) for root, name, _ in self.manifest.directories]
        files = [self.path(file) for file in self.manifest.files]
        files += [_join(self.places[root].final, name) for root, name, _ in self.manifest.links]
        for path, is_folder in [*folders, *((path, False) for path in files)]:
            kind = _kind(path)
            if kind == "nothing" or (kind == "a directory") == is_folder:
                continue
            raise AgentError(
                f"{path} is {kind} here and {'a directory' if is_folder else 'a file'} on the source",
                hint="move it away; to copy the directory that a link points to, name that directory",
            )

    def _clear(self, root: int, place: StagedPath) -> None:
        """Remove staged files that belong to another copy."""
        wanted = {self._staged_path(file): file for file in self.manifest.files if file.root == root}
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(place.staging, "link"))
        for path in _files_below(place.tree):
            file = wanted.get(path)
            if file is None or file in self._equal or not stat.S_ISREG(os.lstat(path).st_mode):
                os.remove(path)
            elif os.lstat(path).st_size > file.size_bytes:
                os.truncate(path, file.size_bytes)

    def _put(self, block: int, data: memoryview) -> None:
        file, offset, _ = self.manifest.place(block)
        descriptor = self._create(file)
        try:
            while data:
                count = os.pwrite(descriptor, data, offset)
                data, offset = data[count:], offset + count
        finally:
            os.close(descriptor)

    def _complete(self, file: File) -> None:
        """Give a staged file, which may be empty, its mode and time."""
        _set_metadata(file, self._create(file))

    def _create(self, file: File) -> int:
        path = self._staged_path(file)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), _OWN, exist_ok=True)
            return os.open(path, flags, 0o600)

    def _open(self, file: File) -> int:
        """Open a staged file, or the final one, since it may be moved there meanwhile."""
        staged = self._staged_path(file)
        for path in (staged, self.path(file)):
            with contextlib.suppress(FileNotFoundError):
                return os.open(path, os.O_RDONLY)
        return os.open(staged, os.O_RDONLY)

    def _has_changed(self, file: File, status: os.stat_result) -> bool:
        # A receiver compares each block by its digest instead.
        del file, status
        return False

    def _staged_path(self, file: File) -> str:
        return _join(self.places[file.root].tree, file.name)


def _set_metadata(file: File, descriptor: int) -> None:
    """Set mode and time of an open file to the source's, and close it."""
    try:
        os.fchmod(descriptor, file.mode)
        if file.mtime_ns is not None:
            os.utime(descriptor, ns=(file.mtime_ns, file.mtime_ns))
    finally:
        os.close(descriptor)


def _join(top: str, name: str) -> str:
    return os.path.join(top, name) if name else top


def _kind(path: str) -> str:
    if os.path.islink(path):
        return "a link"
    return "a directory" if os.path.isdir(path) else "a file" if os.path.lexists(path) else "nothing"


def _read_link(path: str) -> Optional[str]:
    """The target of a symbolic link; None if the path is not a link."""
    return os.readlink(path) if os.path.islink(path) else None


def _regular(look: Callable[[str], os.stat_result], path: str) -> Optional[os.stat_result]:
    """The status of a regular file; None if there is none."""
    try:
        kept = look(path)
    except OSError:
        return None
    return kept if stat.S_ISREG(kept.st_mode) else None


def _files_below(top: str) -> Iterator[str]:
    """All files and links below `top`, or `top` itself; removes directories that the caller has emptied."""
    if os.path.islink(top) or os.path.isfile(top):
        yield top
    for folder, folders, files in os.walk(top, topdown=False):
        for name in [*files, *(name for name in folders if os.path.islink(os.path.join(folder, name)))]:
            yield os.path.join(folder, name)
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def _sync(folder: str) -> None:
    """Flush the file system of a folder to disk."""
    import ctypes

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):
            raise OSError(ctypes.get_errno(), f"{folder} cannot be synced")
    finally:
        os.close(descriptor)
