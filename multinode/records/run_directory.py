"""RunDirectory: one run on the controller's disk, one file a noun. Only its owner may read it."""

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
from multinode.errors import MultinodeError, UsageError
from multinode.records.files import (
    DIRECTORY_MODE,
    append,
    describe_stranger,
    open_private,
    ownership_fix,
    replace_file,
    writing,
)
from multinode.records.run import match_runs
from multinode.records.sample_files import LONGEST_LINE, EvenStretches, read_lines, read_tail
from multinode.secret_values import redact

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

_LOCK = "lock"
# What a file system answers that has none: Lustre without flock, some of FUSE, NFS whose lock service is down.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}
# struct flock of fcntl(2): type, whence, start, length, pid.
_FLOCK = struct.Struct("hhqqi4x")
_WHOLE = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
# Names of files come from the nodes.
_SAMPLES_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.jsonl")


def runs_root() -> Path:
    """Where runs are kept: $MULTINODE_RUNS, else `runs` in the working directory."""
    named = os.environ.get("MULTINODE_RUNS")
    return Path(named).expanduser() if named else Path.cwd() / "runs"


class _Cluster(msgspec.Struct, frozen=True):
    """What is read of a run's nodes here."""

    hosts: str = ""


class RunDirectory:
    """A run's files."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # Nodes whose folder of samples is there.
        self._sampled: set[int] = set()

    def __str__(self) -> str:
        return str(self.path)

    @classmethod
    def create(cls, root: Path, run_id: str) -> RunDirectory:
        """A new directory for a run.

        Raises:
            UsageError: there is one of this name already; a run id is never used twice.
            MultinodeError: it cannot be made.
        """
        directory = cls(root / run_id)
        try:
            root.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
            for path in (directory.path, directory.path / "logs", directory.path / "samples"):
                path.mkdir(mode=DIRECTORY_MODE)
        except FileExistsError as error:
            raise UsageError(f"there is a run {run_id} already", hint=f"multinode attach {run_id}") from error
        except OSError as error:
            raise MultinodeError(
                f"the run directory cannot be made: {error}",
                hint="set MULTINODE_RUNS to a directory that can be written",
            ) from error
        return directory

    @classmethod
    def open(cls, root: Path, run_id: str) -> RunDirectory:
        """The directory of an earlier run; a unique beginning of its id is enough, and `last` is the newest.

        Raises:
            UsageError: there is none, or several begin so.
        """
        runs = scan_runs(root)
        names = [path.name for path in runs.ours]
        matching = names[-1:] if run_id == "last" else match_runs(names, run_id)
        if run_id == "last":
            for ignored in runs.ignored_after_last:
                _LOG.warning("ignored: %s", ignored)
        if len(matching) == 1:
            return cls(root / matching[0])
        theirs = runs.ignored if run_id == "last" else match_runs(list(runs.ignored), run_id)
        for name in [] if matching else theirs:
            raise UsageError(runs.ignored[name], hint=ownership_fix(root / name))
        if not names:
            raise UsageError(f"there are no runs in {root} yet", hint="another directory: $MULTINODE_RUNS")
        found = ", ".join(matching or names[-3:])
        raise UsageError(
            f"{'several runs begin' if matching else 'no run begins'} with {run_id!r} in {root} ({found})",
            hint="list them: multinode runs",
        )

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run: one process at a time follows it and writes its files; unlocked where there are no locks.

        Raises:
            UsageError: another one does.
        """
        with writing(self.path / _LOCK):
            fd = open_private(str(self.path / _LOCK), os.O_RDWR | os.O_CREAT)
        try:
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WHOLE)
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    _LOG.warning(
                        "the file system of %s has no locks (%s): see yourself that one multinode follows run %s",
                        self.path, error.strerror, self.run_id,
                    )  # fmt: skip
                    yield
                    return
                if error.errno not in {errno.EAGAIN, errno.EACCES}:
                    raise MultinodeError(f"{self.path / _LOCK} cannot be locked: {error.strerror}") from error
                pid = os.pread(fd, 20, 0).decode(errors="replace").strip()
                raise UsageError(
                    f"run {self.run_id} is followed by another multinode already (pid {pid})",
                    hint=f"watch what it writes: multinode logs -f {self.run_id}",
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
            # Who asks takes nothing, or a follower that comes in this moment would be turned away.
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
        """Write a noun as indented JSON without secrets, all of it or nothing.

        Raises:
            MultinodeError: it cannot be written; so do all that write.
        """
        shown = redact(decode_json(msgspec.json.encode(value), object))
        data = msgspec.json.format(msgspec.json.encode(shown), indent=2)
        self.write_bytes(name, data + b"\n")

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a file, all of it or nothing."""
        with writing(self.path / name):
            replace_file(self.path / name, data)

    def write_cluster(self, cluster: Cluster, hostfile: str) -> None:
        """Write the nodes, and the text of the hostfile that names them."""
        self.write_bytes("hostfile.txt", redact_hostfile(hostfile).encode())
        self.write("cluster.json", cluster)

    def read_hosts(self) -> str:
        """What `--hosts` named for the run; empty where something else did, or an earlier release kept none."""
        cluster = self.read("cluster.json", _Cluster)
        return cluster.hosts if cluster is not None else ""

    def read(self, name: str, kind: type[T]) -> T | None:
        """Read a noun back; None where the run has none.

        Raises:
            MultinodeError: the file is not what it should be.
        """
        path = self.path / name
        try:
            return decode_json(path.read_bytes(), kind)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise MultinodeError(f"{path} cannot be read: {error}") from error

    def append_log(self, node_rank: int, data: bytes, size: int | None = None) -> None:
        """Append to a node's log, as the job wrote it; `size` as `append` has it."""
        append(self.log_path(node_rank), data, size)

    def append_samples(self, node_rank: int, name: str, data: bytes, size: int | None = None) -> None:
        """Append to one of a node's files of samples: `name` is as on the node, `size` as `append` has it.

        Raises:
            MultinodeError: it cannot be written, or is not the name of such a file.
        """
        if not _SAMPLES_NAME.fullmatch(name):
            raise MultinodeError(f"not the name of a file of samples: {name!r}")
        path = self.path / "samples" / f"node-{node_rank}" / name
        if node_rank not in self._sampled:
            with writing(path.parent):
                path.parent.mkdir(mode=DIRECTORY_MODE, exist_ok=True)
            self._sampled.add(node_rank)
        append(path, data, size)

    def restore(self) -> None:
        """Make anew what of the directory was removed meanwhile.

        Raises:
            MultinodeError: it cannot be made.
        """
        self._sampled.clear()
        with writing(self.path):
            for path in (self.path, self.path / "logs", self.path / "samples"):
                path.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)

    def require_room(self, size_bytes: int) -> None:
        """See that so much more can be written.

        Raises:
            MultinodeError: it cannot.
        """
        with writing(self.path), tempfile.TemporaryFile(dir=self.path) as file:
            file.write(bytes(size_bytes))
            file.flush()

    def sizes(self, node_rank: int) -> dict[str, int]:
        """Bytes of each of a node's files that are here, by the file's name in the node's run directory."""
        files = {f"samples/{path.name}": path for path in self.sample_files(node_rank)}
        files["log"] = self.log_path(node_rank)
        sizes: dict[str, int] = {}
        for name, path in files.items():
            with contextlib.suppress(OSError):
                found = path.stat()
                if stat.S_ISREG(found.st_mode):
                    sizes[name] = found.st_size
        return sizes

    def offsets(self, node_rank: int) -> dict[str, int]:
        """How much of each of these files has come, what is gone on the node included."""
        offsets = self.sizes(node_rank)
        if "log" in offsets:
            with contextlib.suppress(FileNotFoundError):
                offsets["log"] += sum(map(int, self._gaps_path(node_rank).read_text().split()))
        return offsets

    def note_gap(self, node_rank: int, more_bytes: int) -> None:
        """The node's log is so much longer there than here, for what is gone in this place, and what is said of it.

        Raises:
            MultinodeError: it cannot be written.
        """
        append(self._gaps_path(node_rank), f"{more_bytes}\n".encode())

    def _gaps_path(self, node_rank: int) -> Path:
        return self.log_path(node_rank).with_suffix(".gaps")

    def log_path(self, node_rank: int) -> Path:
        """Where a node's log lies."""
        return self.path / "logs" / f"node-{node_rank}.log"

    def log_tail(self, node_rank: int, size_bytes: int = 1 << 16) -> str:
        """The end of a node's log."""
        try:
            with self.log_path(node_rank).open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - size_bytes))
                return file.read().decode(errors="replace")
        except FileNotFoundError:
            return ""

    def sample_tails(self, node_rank: int, size_bytes: int = 1 << 18) -> Iterator[bytes]:
        """The last lines of each of a node's files of samples, whole ones."""
        for path in self.sample_files(node_rank):
            yield from read_tail(path, size_bytes)

    def sample_lines(self, node_rank: int, stretches: EvenStretches | None = None) -> Iterator[bytes]:
        """A node's samples, a line at a time, one file after the other; of a line without end pieces.

        `stretches` says what is read of them; None is everything.
        """
        for path in self.sample_files(node_rank):
            yield from stretches.lines(path) if stretches is not None else (line for _, line in read_lines(path))

    def traces(self) -> Path:
        """Where the workers' traces lie, once there are any."""
        return self.path / "traces"

    def sample_files(self, node_rank: int) -> list[Path]:
        """A node's files of samples, as many as there are."""
        return sorted((self.path / "samples" / f"node-{node_rank}").glob("*.jsonl"))


class SampleTail:
    """A node's samples as they come."""

    def __init__(self, directory: RunDirectory, node_rank: int) -> None:
        self._directory = directory
        self._node_rank = node_rank
        self._read: dict[Path, int] = {}

    def lines(self) -> Iterator[bytes]:
        """What has come since it was last asked, whole lines alone; of a line that is longer than any, pieces."""
        for path in self._directory.sample_files(self._node_rank):
            for at, line in read_lines(path, self._read.get(path, 0)):
                if not line.endswith(b"\n") and len(line) < LONGEST_LINE:
                    break
                self._read[path] = at + len(line)
                yield line


class RunFolders(NamedTuple):
    """What lies below a root.

    Attributes:
        ours: the run directories, in the order in which their records were last written.
        ignored: by name, in the same order, those that another user may have written, with a sentence of why.
        ignored_after_last: those sentences of them that are newer than the last of `ours`.
    """

    ours: list[Path]
    ignored: dict[str, str]
    ignored_after_last: list[str]


def list_runs(root: Path) -> list[Path]:
    """Our run directories below `root`, in the order in which their records were last written.

    Raises:
        MultinodeError: `root` cannot be read.
    """
    return scan_runs(root).ours


def scan_runs(root: Path) -> RunFolders:
    """The run directories below `root`: ours, and those of others, which name programs that would be run as us.

    Raises:
        MultinodeError: `root` cannot be read.
    """
    try:
        paths = list(root.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        paths = []
    except OSError as error:
        hint = f"ls -ld {shlex.quote(str(root))}; another directory: $MULTINODE_RUNS"
        raise MultinodeError(f"the runs in {root} cannot be read: {error.strerror}", hint=hint) from error
    written: list[tuple[int, Path, str | None]] = []
    for path in paths:
        # What is removed meanwhile, or cannot be read, is no run of ours.
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
