"""explain_logs: reads logs of any run, and explains its first failure."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from multinode.diagnose.explanation import STDIN, Explanation, explain
from multinode.diagnose.log_words import LogReading, read_log
from multinode.errors import UsageError

Progress = Callable[[str, int, int], None]


def explain_logs(paths: Sequence[str], progress: Progress) -> Explanation:
    """The first failure of logs.

    Args:
        paths: files; directories, whose files are all read; `-` is standard input.
        progress: called now and then with a file's name, the bytes of it that are read, and its size (0 is unknown).
    """
    names = [name for path in paths for name in _files(path)]
    return explain([(name, _read(name, progress)) for name in dict.fromkeys(names)])


def _files(path: str) -> Iterator[str]:
    if path == STDIN or not Path(path).is_dir():
        yield path
        return
    found = sorted(str(one) for one in Path(path).rglob("*") if one.is_file() and not one.is_symlink())
    if not found:
        raise UsageError(f"{path} has no files", hint="name the directory with the launcher's logs")
    yield from found


def _read(name: str, progress: Progress) -> LogReading:
    done = 0

    def tell(count: int) -> None:
        nonlocal done
        done += count
        progress(name, done, size)

    try:
        if name == STDIN:
            size = 0
            return read_log(sys.stdin.buffer, progress=tell)
        size = Path(name).stat().st_size
        with Path(name).open("rb") as file:
            return read_log(file, progress=tell)
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from error
