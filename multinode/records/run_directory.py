"""RunDirectory: one run on the controller's disk, one file per subject. Readable only by its owner."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import shlex
import stat
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from multinode.cluster.cluster import Cluster
from multinode.cluster.hostfile import redact_hostfile
from multinode.decoding import decode_json
from multinode.errors import AlreadyFollowed, MultinodeError, UsageError, printable_line
from multinode.node.files import describe_stranger, read_end, replace_file
from multinode.records.files import (
    DIRECTORY_MODE,
    append,
    open_private,
    ownership_fix,
    writing,
)
from multinode.records.run import Run, match_runs
from multinode.records.sample_files import LONGEST_LINE, EvenStretches, read_lines, read_tail
from multinode.secret_values import redacted

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

_LOCK = "lock"
# Errors of file systems without locks: Lustre without flock, some FUSE file systems, NFS without lock service.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
# struct flock of fcntl(2): type, whence, start, length, pid.
_FLOCK = struct.Struct("hhqqi4x")
_WHOLE = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
# File names come from the nodes.
_SAMPLES_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.jsonl")
# Of a log, at a time.
_LOG_PIECE_BYTES = 1 << 16


def runs_root() -> Path:
    """The directory of runs: $MULTINODE_RUNS, or `runs` in the working directory."""
    named = os.environ.get("MULTINODE_RUNS")
    return Path(named).expanduser() if named else Path.cwd() / "runs"


class _Cluster(msgspec.Struct, frozen=True):
    """The part of the cluster that is read here."""

    hosts: str = ""


class RunDirectory:
    """A run's files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Nodes whose sample directory exists.
        self._sampled: set[int] = set()

    def __str__(self) -> str:
        return str(self.path)

    @classmethod
    def create(cls, root: Path, run_id: str) -> RunDirectory:
        """A new directory for a run.

        Raises:
            UsageError: it exists; a run id is never reused.
            MultinodeError: it cannot be created.
        """
        directory = cls(root / run_id)
        try:
            root.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            for path in (directory.path, directory.path / "logs", directory.path / "samples"):
                path.mkdir(mode=DIRECTORY_MODE)
        except FileExistsError as error:
            raise UsageError(f"run {run_id} already exists", hint=f"multinode attach {run_id}") from error
        except OSError as error:
            raise MultinodeError(
                f"the run directory cannot be created: {error}",
                hint="set MULTINODE_RUNS to a writable directory",
            ) from error
        return directory

    @classmethod
    def open(cls, root: Path, run_id: str) -> RunDirectory:
        """The directory of an earlier run, by a unique beginning of its id; `last` is the newest.

        Raises:
            UsageError: there is none, or several match.
        """
        runs = scan_runs(root)
        names = [path.name for path in runs.ours]
        matching = names[-1:] if run_id == "last" else match_runs(names, run_id)
        if run_id == "last":
            for ignored in runs.ignored_after_last:
                _LOG.warning("a run is ignored: %s", ignored)
        if len(matching) == 1:
            return cls(root / matching[0])
        theirs = runs.ignored if run_id == "last" else match_runs(list(runs.ignored), run_id)
        for name in [] if matching else theirs:
            raise UsageError(runs.ignored[name], hint=ownership_fix(root / name))
        if not names:
            raise UsageError(f"there are no runs in {root} yet", hint="choose another directory: $MULTINODE_RUNS")
        found = f"{len(matching)} runs begin" if matching else "no run begins"
        raise UsageError(
            f"{found} with {run_id!r} in {root} (the latest are {', '.join((matching or names)[-3:])})",
            hint="list them: multinode runs",
        )

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the run: one process at a time follows it and writes its files. No lock on file systems without locks.

        Raises:
            AlreadyFollowed: another process holds it.
        """
        with writing(self.path / _LOCK):
            fd = open_private(str(self.path / _LOCK), os.O_RDWR | os.O_CREAT)
        try:
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WHOLE)
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    _LOG.warning(
                        "the file system of %s has no locks (%s): make sure that only one multinode process follows "
                        "run %s",
                        self.path, error.strerror, self.run_id,
                    )  # fmt: skip
                    yield
                    return
                if error.errno not in {errno.EAGAIN, errno.EACCES}:
                    raise MultinodeError(f"{self.path / _LOCK} cannot be locked: {error.strerror}") from error
                pid = os.pread(fd, 20, 0).decode(errors="replace").strip()
                raise AlreadyFollowed(
                    f"another multinode process (pid {pid}) is already following run {self.run_id}",
                    hint=f"watch its output: multinode logs -f {self.run_id}",
                ) from None
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            yield
        finally:
            os.close(fd)

    @property
    def is_locked(self) -> bool:
        """Whether a process of this machine follows the run now."""
        try:
            fd = os.open(self.path / _LOCK, os.O_RDWR)
        except OSError:
            return False
        try:
            # Asking takes no lock, or a follower that starts now would be turned away.
            held = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _WHOLE)
        except OSError:
            # A file system without locks.
            return False
        finally:
            os.close(fd)
        return bool(_FLOCK.unpack(held)[0] != fcntl.F_UNLCK)

    @property
    def run_id(self) -> str:
        """The run's name."""
        return self.path.name

    def write(self, name: str, value: object) -> None:
        """Write a file as indented JSON without secrets, atomically."""
        data = msgspec.json.format(msgspec.json.encode(redacted(value)), indent=2)
        self.write_bytes(name, data + b"\n")

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a file atomically."""
        with writing(self.path / name):
            replace_file(self.path / name, data, sync=True)

    def write_cluster(self, cluster: Cluster, hostfile: str) -> None:
        """Write the nodes, and the text of their hostfile."""
        self.write_bytes("hostfile.txt", redact_hostfile(hostfile).encode())
        self.write("cluster.json", cluster)

    def read_hosts(self) -> str:
        """The `--hosts` argument of the run; empty if the nodes came from elsewhere."""
        cluster = self.read("cluster.json", _Cluster)
        return cluster.hosts if cluster is not None else ""

    def read_run(self) -> Run | None:
        """The record of the run as it is now; None if the directory has none."""
        return self.read("run.json", Run)

    def read(self, name: str, kind: type[T]) -> T | None:
        """Read a file; None if the run has none.

        Raises:
            MultinodeError: the file is invalid, or another release of multinode wrote it in another version.
        """
        path = self.path / name
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise MultinodeError(f"{path} cannot be read: {error}") from error
        try:
            return decode_json(text, kind)
        except msgspec.DecodeError as error:
            raise _unreadable(path, text, kind) or MultinodeError(f"{path} cannot be read: {error}") from error

    def append_log(self, node_rank: int, data: bytes, size: int | None = None) -> None:
        """Append to a node's log, as the job wrote it; `size` as for `append`."""
        append(self.log_path(node_rank), data, size)

    def append_samples(self, node_rank: int, name: str, data: bytes, size: int | None = None) -> None:
        """Append to one of a node's sample files: `name` as on the node, `size` as for `append`.

        Raises:
            MultinodeError: it cannot be written, or the name is invalid.
        """
        if not _SAMPLES_NAME.fullmatch(name):
            raise MultinodeError(f"not the name of a samples file: {name!r}")
        path = self.path / "samples" / f"node-{node_rank}" / name
        if node_rank not in self._sampled:
            with writing(path.parent):
                path.parent.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
            self._sampled.add(node_rank)
        append(path, data, size)

    def restore(self) -> None:
        """Recreate the parts of the directory that were removed meanwhile."""
        self._sampled.clear()
        with writing(self.path):
            for path in (self.path, self.path / "logs", self.path / "samples"):
                path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)

    def require_room(self, size_bytes: int) -> None:
        """Check that this much more can be written."""
        with writing(self.path), tempfile.TemporaryFile(dir=self.path) as file:
            file.write(bytes(size_bytes))
            file.flush()

    def sizes(self, node_rank: int) -> dict[str, int]:
        """Bytes of each of a node's files here, by name in the node's run directory."""
        files = {f"samples/{path.name}": path for path in self.sample_files(node_rank)}
        files["log"] = self.log_path(node_rank)
        sizes: dict[str, int] = {}
        for name, path in files.items():
            with contextlib.suppress(OSError):
                status = path.stat()
                if stat.S_ISREG(status.st_mode):
                    sizes[name] = status.st_size
        return sizes

    def offsets(self, node_rank: int) -> dict[str, int]:
        """How much of each of these files has been transferred, including parts that the node has dropped."""
        offsets = self.sizes(node_rank)
        if "log" in offsets:
            with contextlib.suppress(FileNotFoundError):
                offsets["log"] += sum(map(int, self._gaps_path(node_rank).read_text().split()))
        return offsets

    def note_gap(self, node_rank: int, more_bytes: int) -> None:
        """Record that this many bytes of the node's log are missing here, with a message in their place."""
        append(self._gaps_path(node_rank), f"{more_bytes}\n".encode())

    def _gaps_path(self, node_rank: int) -> Path:
        return self.log_path(node_rank).with_suffix(".gaps")

    def log_path(self, node_rank: int) -> Path:
        """Path of a node's log."""
        return self.path / "logs" / f"node-{node_rank}.log"

    def log_tail(self, node_rank: int, size_bytes: int = 1 << 16) -> str:
        """The end of a node's log."""
        try:
            return read_end(self.log_path(node_rank), size_bytes).decode(errors="replace")
        except FileNotFoundError:
            return ""

    def sample_tails(self, node_rank: int, size_bytes: int = 1 << 18) -> Iterator[bytes]:
        """The last whole lines of each of a node's sample files."""
        for path in self.sample_files(node_rank):
            yield from read_tail(path, size_bytes)

    def sample_lines(self, node_rank: int, stretches: EvenStretches | None = None) -> Iterator[bytes]:
        """A node's samples, line by line, one file after the other; overlong lines in pieces.

        `stretches` selects what is read; None is everything.
        """
        for path in self.sample_files(node_rank):
            yield from stretches.lines(path) if stretches is not None else (line for _, line in read_lines(path))

    def trace_path(self, rank: int) -> Path:
        """Where a worker's trace is, if there is one."""
        return self.path / "traces" / f"rank-{rank}.json.gz"

    def sample_files(self, node_rank: int) -> list[Path]:
        """A node's sample files."""
        return sorted((self.path / "samples" / f"node-{node_rank}").glob("*.jsonl"))


class LogReader:
    """A node's log as it arrives, as the job wrote it.

    The controller's file has no gaps: `note_gap` records what the node no longer had.
    """

    def __init__(self, directory: RunDirectory, node_rank: int) -> None:
        self._path = directory.log_path(node_rank)
        self._offset = 0

    def pieces(self) -> Iterator[bytes]:
        """What has arrived since the last call."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset)
            while data := file.read(_LOG_PIECE_BYTES):
                self._offset += len(data)
                yield data


class SampleTail:
    """A node's samples as they arrive."""

    def __init__(self, directory: RunDirectory, node_rank: int) -> None:
        self._directory = directory
        self._node_rank = node_rank
        self._read: dict[Path, int] = {}

    def lines(self) -> Iterator[bytes]:
        """Whole lines that have arrived since the last call; overlong lines in pieces."""
        for path in self._directory.sample_files(self._node_rank):
            for at, line in read_lines(path, self._read.get(path, 0)):
                if not line.endswith(b"\n") and len(line) < LONGEST_LINE:
                    break
                self._read[path] = at + len(line)
                yield line


class RunFolders(NamedTuple):
    """The directories below a root."""

    ours: list[Path]  # run directories, in the order in which they were last written
    ignored: dict[str, str]  # by name, in the same order, those that another user could have written, with the reason
    ignored_after_last: list[str]  # the reasons of those newer than the last of `ours`


def list_runs(root: Path) -> list[Path]:
    """Our run directories below `root`, in the order in which they were last written."""
    return scan_runs(root).ours


def scan_runs(root: Path) -> RunFolders:
    """The run directories below `root`: ours, and those of others, which could make us run their programs.

    Raises:
        MultinodeError: `root` cannot be read.
    """
    try:
        paths = list(root.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        paths = []
    except OSError as error:
        hint = f"ls -ld {shlex.quote(str(root))}; choose another directory: $MULTINODE_RUNS"
        raise MultinodeError(f"the runs in {root} cannot be read: {error.strerror}", hint=hint) from error
    written: list[tuple[int, Path, str | None]] = []
    for path in paths:
        # A directory that disappears or cannot be read is not a run of ours.
        with contextlib.suppress(OSError):
            record = (path / "run.json").stat()
            if stat.S_ISREG(record.st_mode):
                written.append((record.st_mtime_ns, path, describe_stranger(path)))
    ours: list[Path] = []
    ignored: dict[str, str] = {}
    after_last: list[str] = []
    for _, path, stranger in sorted(written):
        if stranger is None:
            ours.append(path)
            after_last = []
        else:
            ignored[path.name] = f"run directory {path} {stranger}"
            after_last.append(ignored[path.name])
    return RunFolders(ours, ignored, after_last)


class _Versioned(msgspec.Struct):
    schema: str


def _unreadable(path: Path, text: bytes, kind: type) -> MultinodeError | None:
    """The error of a document whose version is not the one that is read here."""
    fields = msgspec.structs.fields(kind) if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else ()
    ours = next((field.default for field in fields if field.name == "schema"), None)
    try:
        theirs = decode_json(text, _Versioned).schema
    except (msgspec.DecodeError, RecursionError):
        return None
    if ours is None or theirs == ours:
        return None
    return MultinodeError(
        f"{path} is a {printable_line(theirs)}; this release of multinode reads {ours}",
        hint="read it with the release that wrote it, or measure again",
    )
