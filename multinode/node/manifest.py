"""The files, directories and links of the paths that are copied, and the blocks of the files.

The source makes a manifest from its disk. A receiver parses the one it was sent, and refuses names outside the paths.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Optional, Union

from .channel import AgentError

BLOCK_BYTES = 4 << 20
DIGEST_BYTES = hashlib.sha256().digest_size
# Suffix of the names under which arriving files are staged.
STAGING = ".multinode-copy"

_MOST_ENTRIES = 1_000_000
_MOST_BLOCKS = 1 << 22
_MODE = 0o777
_FILE, _DIRECTORY, _LINK = "f", "d", "l"


class File(NamedTuple):
    """One file: the index of its path, and its name below the path, which is empty if the path itself is the file.

    Without a time, that of its writing stays.
    """

    root: int
    name: str
    size_bytes: int
    mode: int
    mtime_ns: Optional[int]
    first_block: int

    @property
    def blocks(self) -> range:
        """Numbers of its blocks; none if it is empty."""
        return range(self.first_block, self.first_block - (-self.size_bytes // BLOCK_BYTES))


class Manifest:
    """The list of what is copied.

    Args:
        data: JSON with `roots` (the mode of a directory, or null for a file) and `entries`.

    Raises:
        AgentError: the data cannot be read, or names something outside the paths.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.files: list[File] = []
        self.directories: list[tuple[int, str, int]] = []  # index of the path, name and mode, parents first
        self.links: list[tuple[int, str, str]] = []  # index of the path, name and target
        self.block_count = 0
        try:
            content = json.loads(data)
            # mode of each path that is a directory; None for a file
            self.roots = [None if mode is None else _number(mode, _MODE) for mode in content["roots"]]
            entries = content["entries"]
            seen: set[tuple[int, str]] = set()
            folders = {(root, "") for root, mode in enumerate(self.roots) if mode is not None}
            for root, kind, name, *rest in entries:
                self._add(_number(root, len(self.roots) - 1), kind, self._check_name(root, name, seen, folders), rest)
                if kind == _DIRECTORY:
                    folders.add((root, name))
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            raise AgentError(f"refused: the list of files cannot be read: {error}") from error
        if len(seen) > _MOST_ENTRIES or self.block_count > _MOST_BLOCKS:
            raise AgentError("refused: more files than multinode can copy")
        self._firsts = [file.first_block for file in self.files if file.size_bytes]
        self._filled = [file for file in self.files if file.size_bytes]

    @property
    def size_bytes(self) -> int:
        """Size of all files together."""
        return sum(file.size_bytes for file in self.files)

    def place(self, block: int) -> tuple[File, int, int]:
        """The file of a block, the block's offset in it, and its size in bytes."""
        file = self._filled[bisect.bisect_right(self._firsts, block) - 1]
        offset = (block - file.first_block) * BLOCK_BYTES
        return file, offset, min(BLOCK_BYTES, file.size_bytes - offset)

    def names(self, root: int) -> set[str]:
        """All names below a path."""
        named = [(file.root, file.name) for file in self.files]
        named += [(of, name) for of, name, _ in (*self.directories, *self.links)]
        return {name for of, name in named if of == root}

    def _check_name(self, root: int, name: str, seen: set[tuple[int, str]], folders: set[tuple[int, str]]) -> str:
        """Check that a name is new, and below its path in a directory that came before; returns the name."""
        parts = name.split("/")
        if self.roots[root] is None:
            good = not name
        else:
            good = (root, "/".join(parts[:-1])) in folders and not any(map(_is_elsewhere, parts))
        if not good or "\0" in name or (root, name) in seen:
            raise ValueError(f"{name!r} is not an allowed path")
        os.fsencode(name)
        seen.add((root, name))
        return name

    def _add(self, root: int, kind: str, name: str, rest: Sequence[Any]) -> None:
        if kind == _FILE:
            size_bytes, mode, mtime_ns = rest
            size_bytes = _number(size_bytes, _MOST_BLOCKS * BLOCK_BYTES)
            mtime_ns = None if mtime_ns is None else _number(mtime_ns, (1 << 63) - 1)
            self.files.append(File(root, name, size_bytes, _number(mode, _MODE), mtime_ns, self.block_count))
            self.block_count += len(self.files[-1].blocks)
        elif kind == _DIRECTORY and name:
            (mode,) = rest
            self.directories.append((root, name, _number(mode, _MODE)))
        elif kind == _LINK and name and stays_below(str(rest[0]), name.count("/")):
            (text,) = rest
            os.fsencode(text)
            self.links.append((root, name, text))
        else:
            raise ValueError(f"{name!r} points elsewhere")


def _number(value: Any, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r} is out of range")
    return value


def _is_elsewhere(part: str) -> bool:
    return part in {"", ".", ".."} or is_staging(part)


def is_staging(name: str) -> bool:
    """Whether the name is that of a copy's staging directory."""
    return name.startswith(".") and name.endswith(STAGING)


def stays_below(text: str, depth: int) -> bool:
    """Whether a link with this target, `depth` directories below a path, leads to somewhere below that path.

    `..` is only allowed at the beginning: after a name, which may itself be a link, it could lead anywhere.
    """
    parts = text.split("/")
    ups = next((index for index, part in enumerate(parts) if part != ".."), len(parts))
    return bool(text) and not text.startswith("/") and ups <= depth and ".." not in parts[ups:] and "\0" not in text


def make_manifest(paths: Sequence[str]) -> Manifest:
    """Manifest of what exists at these paths of the source."""
    entries = [entry for root, path in enumerate(paths) for entry in list_entries(root, path)]
    modes = [os.stat(path).st_mode & _MODE if os.path.isdir(path) else None for path in paths]
    # File names that are not UTF-8 contain lone surrogates, which JSON in ASCII can hold.
    return Manifest(json.dumps({"roots": modes, "entries": entries}, separators=(",", ":")).encode())


def list_entries(root: int, top: str) -> Iterator[list[Any]]:
    """Entries of one path for a manifest: a directory before its content, names sorted.

    A link that stays below the path is kept as a link; other links are followed.

    Raises:
        AgentError: there are too many files, a special file, or a link to nowhere or to a directory above it.
        OSError: the path cannot be read.
    """
    status = os.stat(top)
    if stat.S_ISREG(status.st_mode):
        yield _file(root, "", status)
        return
    # Name, path, identities of the directories above, and how many directories ago a link was followed.
    waiting: list[tuple[str, str, tuple[tuple[int, int], ...], int]] = [("", top, (_identity(status),), 0)]
    count = 0
    while waiting:
        name, path, above, depth = waiting.pop()
        with os.scandir(path) as children:
            ordered = sorted((child for child in children if not is_staging(child.name)), key=lambda child: child.name)
        for child in ordered:
            count += 1
            if count > _MOST_ENTRIES:
                raise AgentError(f"{top} has more than {_MOST_ENTRIES} files", hint="pack them into larger ones")
            inner = f"{name}/{child.name}" if name else child.name
            is_link = child.is_symlink()
            if is_link and stays_below(text := os.readlink(child.path), depth):
                yield [root, _LINK, inner, text]
                continue
            status = _follow(child.path)
            if stat.S_ISDIR(status.st_mode):
                if _identity(status) in above:
                    raise AgentError(f"{child.path} is a link to a directory that contains it")
                yield [root, _DIRECTORY, inner, status.st_mode & _MODE]
                waiting.append((inner, child.path, (*above, _identity(status)), 0 if is_link else depth + 1))
            elif stat.S_ISREG(status.st_mode):
                yield _file(root, inner, status)
            else:
                raise AgentError(f"{child.path} is neither a file nor a directory nor a link")


def _follow(path: str) -> os.stat_result:
    try:
        return os.stat(path)
    except FileNotFoundError:
        raise AgentError(f"{path} is a broken link", hint="remove it, or create its target") from None


def _file(root: int, name: str, status: os.stat_result) -> list[Any]:
    return [root, _FILE, name, status.st_size, status.st_mode & _MODE, max(0, status.st_mtime_ns)]


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def digest_entries(entries: Iterable[list[Any]]) -> tuple[int, int, str]:
    """Number of files, their bytes, and a digest of names, kinds, sizes and link targets; content is not read."""
    files, size_bytes, digest = 0, 0, hashlib.sha256()
    for _, kind, name, *rest in sorted(entries, key=lambda entry: str(entry[2])):
        files += kind == _FILE
        size_bytes += rest[0] if kind == _FILE else 0
        fields = [kind, name] if kind == _DIRECTORY else [kind, name, rest[0]]
        digest.update(json.dumps(fields).encode())
    return files, size_bytes, digest.hexdigest()


Flags = Union[bytes, bytearray]
"""A byte for each block: 0 or 1."""

_TO_DIGITS = bytes.maketrans(b"\0\1", b"01")
_TO_FLAGS = bytes.maketrans(b"01", b"\0\1")


def pack_flags(flags: Flags) -> bytes:
    """Pack flags into bits."""
    return int(b"0" + flags.translate(_TO_DIGITS), 2).to_bytes(len(flags) // 8 + 1, "big")


def unpack_flags(data: bytes, count: int) -> bytearray:
    """Unpack `count` flags of `pack_flags`.

    Raises:
        ValueError: the data has more flags.
    """
    bits = int.from_bytes(data, "big")
    if bits.bit_length() > count:
        raise ValueError("more flags than blocks")
    return bytearray(format(bits, f"0{count}b").encode().translate(_TO_FLAGS) if count else b"")
