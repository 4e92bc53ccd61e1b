"""Private files: readable only by their owner; written atomically, or line by line."""

from __future__ import annotations

import contextlib
import difflib
import os
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from multinode.errors import MultinodeError, UsageError
from multinode.node.files import user_name
from multinode.secret_values import redacted

DIRECTORY_MODE = 0o700
_FILE_MODE = 0o600


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Report errors of writing a file in one line.

    Raises:
        MultinodeError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise MultinodeError(f"{path} cannot be written: {error.strerror}", hint=f"df -h {path.parent}") from error


def append(path: Path, data: bytes, size: int | None = None) -> None:
    """Append to a file, which is created if missing.

    Args:
        path: the file.
        data: the bytes to append.
        size: the expected size; a file of another size is renamed to `NAME.old`, as a gap would mislead. None
            accepts any.

    Raises:
        MultinodeError: it cannot be written, or has another size.
    """
    with writing(path), open(path, "ab", buffering=0, opener=open_private) as file:
        there = os.fstat(file.fileno()).st_size
        if size is not None and there != size:
            path.replace(path.with_name(f"{path.name}.old"))
            raise MultinodeError(f"another program changed {path}: it has {there} bytes instead of {size}")
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]


def open_private(path: str, flags: int) -> int:
    """An opener for `open` that creates files readable only by their owner."""
    return os.open(path, flags, _FILE_MODE)


T = TypeVar("T")
MAX_BYTES = 16 << 20


def read_text(path: Path, noun: str, hint: str | None = None) -> str:
    """The file's text; `noun` names its role in the message.

    Raises:
        UsageError: it is missing, a directory, unreadable, too large or not UTF-8.
    """
    try:
        if path.is_file() and path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{noun} {path} is too large", hint=hint)
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{noun} {path} does not exist", hint=hint) from None
    except UnicodeDecodeError:
        raise UsageError(f"{noun} {path} is not UTF-8 text", hint="save it as UTF-8") from None
    except ValueError:  # a NUL, which a quoted string of a YAML can hold
        raise UsageError(f"{noun} {str(path)!r} is not a valid path", hint=hint) from None
    except OSError as error:
        raise UsageError(f"{noun} {path} cannot be read: {error.strerror}", hint=hint) from None


def exists(path: Path) -> bool:
    """Whether there is something at a path, which may be no valid path at all."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def nearest_path(path: Path) -> str | None:
    """What in its directory has the most similar name; None if nothing there is similar."""
    try:
        names = [beside.name for beside in path.parent.iterdir()]
    except (OSError, ValueError):
        return None
    near = difflib.get_close_matches(path.name, names, n=1)
    return str(path.with_name(near[0])) if near else None


def load_yaml(path: Path, noun: str, kind: type[T], hint: str) -> T:
    """A YAML file as `kind`, strict about every key."""
    from multinode.strict_yaml import decode_yaml

    return decode_yaml(read_text(path, noun, hint), kind, path, hint)


def write_new_text(path: Path, text: str) -> None:
    """Write a new file; never overwrites one."""
    _write(path, "x", text, "choose another file: -o FILE")


def require_directory(path: Path) -> None:
    """Reject an unusable output directory before work is lost.

    Raises:
        UsageError: it is not a directory, or not writable.
    """
    if not path.is_dir():
        raise UsageError(f"{path} is not a directory", hint=f"mkdir -p {shlex.quote(str(path))}")
    if not os.access(path, os.W_OK):
        raise UsageError(f"{path} is not writable", hint=f"ls -ld {shlex.quote(str(path))}")


def write_text(path: Path, text: str) -> None:
    """Write an output file named by the user, replacing an earlier one."""
    _write(path, "w", text, f"ls -ld {shlex.quote(str(path.parent))}")


def _write(path: Path, mode: str, text: str, hint: str) -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} already exists", hint=hint) from None
    except IsADirectoryError:
        raise UsageError(f"{path} is a directory", hint="name a file in it") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a valid path"
        raise UsageError(f"{path} cannot be written: {reason}", hint=hint) from None


def ownership_fix(path: Path) -> str:
    """The command that makes a file or directory ours alone."""
    whole = shlex.quote(str(path))
    return f"if you trust its content: sudo chown -R {user_name(os.getuid())} {whole} && chmod -R go-w {whole}"


def document_text(value: object) -> str:
    """A document as JSON, without secrets."""
    return msgspec.json.format(msgspec.json.encode(redacted(value)), indent=2).decode() + "\n"


def choose_form(form: str | None, output: Path | None, endings: Mapping[str, str]) -> str:
    """The form of `--format`, or by the ending of `--output`; the first of `endings` without either."""
    if output is not None:
        require_directory(output.parent)
    if form is not None or output is None:
        return form or next(iter(endings.values()))
    by_ending = endings.get(output.suffix.lower())
    if by_ending is None:
        known_endings = ", ".join(filter(None, endings))
        raise UsageError(
            (f"--output {output}: unknown format {output.suffix or 'without a suffix'}"),
            hint=f"use one of {known_endings}",
        )
    return by_ending
