"""Text files that the user names: read, or written anew, or one clear line about why not."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TypeVar

from multinode.errors import UsageError
from multinode.strict_yaml import decode_yaml

T = TypeVar("T")
MAX_BYTES = 16 << 20


def read_text(path: Path, what: str, hint: str | None = None) -> str:
    """The file's text; `what` names its role in the message.

    Raises:
        UsageError: it is missing, a directory, unreadable, too large or not UTF-8.
    """
    try:
        if path.is_file() and path.stat().st_size > MAX_BYTES:
            raise UsageError(f"{what} {path} is larger than any of its kind", hint=hint)
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(f"{what} {path} does not exist", hint=hint) from None
    except UnicodeDecodeError:
        raise UsageError(f"{what} {path} is not text in UTF-8", hint="save it as UTF-8") from None
    except ValueError:  # a NUL, which a quoted string of a YAML can hold
        raise UsageError(f"{what} {str(path)!r} cannot be a path", hint=hint) from None
    except OSError as error:
        raise UsageError(f"{what} {path} cannot be read: {error.strerror}", hint=hint) from None


def load_yaml(path: Path, what: str, kind: type[T], hint: str) -> T:
    """A YAML file as `kind`, strict about every key.

    Raises:
        UsageError: it cannot be read, is not YAML, or a key is unknown, missing or of the wrong kind; the message has
            its place.
    """
    return decode_yaml(read_text(path, what, hint), kind, path, hint)


def write_new_text(path: Path, text: str) -> None:
    """Write a file that does not exist yet; one that does is never overwritten.

    Raises:
        UsageError: it exists, or cannot be written.
    """
    _write(path, "x", text, "name another: -o FILE")


def require_directory(path: Path) -> None:
    """Refuse a place for output before the work that would be lost.

    Raises:
        UsageError: it is no directory, or not to be written to.
    """
    if not path.is_dir():
        raise UsageError(f"{path} is no directory", hint=f"mkdir -p {shlex.quote(str(path))}")
    if not os.access(path, os.W_OK):
        raise UsageError(f"{path} cannot be written to", hint=f"ls -ld {shlex.quote(str(path))}")


def write_text(path: Path, text: str) -> None:
    """Write a file that the user named for output; one of an earlier time is replaced.

    Raises:
        UsageError: it cannot be written.
    """
    _write(path, "w", text, f"ls -ld {path.parent}")


def _write(path: Path, mode: str, text: str, hint: str) -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{path} already exists", hint=hint) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it cannot be a path"
        raise UsageError(f"{path} cannot be written: {reason}", hint=hint) from None
