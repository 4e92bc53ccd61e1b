"""Private files: only their owner may read them; written whole or not at all, or line by line."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from multinode.errors import MultinodeError

DIRECTORY_MODE = 0o700
_FILE_MODE = 0o600


def replace_file(path: Path, data: bytes) -> None:
    """Put a file in place, all of it or nothing, however many do so at once: the last one wins.

    Raises:
        OSError: it cannot be written; nothing is left of the attempt.
    """
    fd, partial = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, _FILE_MODE)
            file.write(data)
            file.flush()
            os.fsync(fd)
        Path(partial).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(partial).unlink()
        raise


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """What goes wrong with writing a file, as one clear line.

    Raises:
        MultinodeError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise MultinodeError(f"{path} cannot be written: {error.strerror}", hint=f"df -h {path.parent}") from error


def append(path: Path, data: bytes, size: int | None = None) -> None:
    """Add to a file, which is made if there is none.

    Args:
        path: the file.
        data: what is added.
        size: bytes that are in it; one that has more or fewer is put aside as `NAME.old`, as a gap would mislead. None
            takes any.

    Raises:
        MultinodeError: it cannot be written, or has another size.
    """
    with writing(path), open(path, "ab", buffering=0, opener=open_private) as file:
        there = os.fstat(file.fileno()).st_size
        if size is not None and there != size:
            path.replace(path.with_name(f"{path.name}.old"))
            raise MultinodeError(f"{path} was changed by another program: {there} bytes where {size} were written")
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]


def open_private(path: str, flags: int) -> int:
    """An opener for `open`: what it makes, only the owner may read."""
    return os.open(path, flags, _FILE_MODE)
