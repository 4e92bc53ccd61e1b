"""Files between this machine and nodes: the code of a job to all, its output and traces back. Prints nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from multinode.cluster.cluster import Cluster, Node
from multinode.errors import ContactLost, MultinodeError, NodeFailed, UsageError
from multinode.records.plan import CodeCopy, LaunchPlan, SentCode
from multinode.records.run_directory import RunDirectory
from multinode.records.samples import TraceSample, parse_samples
from multinode.transport.agent import AgentStream, AgentTransport, require_kind
from multinode.transport.base import gather
from multinode.units import format_count, format_size

if TYPE_CHECKING:
    from multinode.job.code_tree import CodeFile, CodeTree

_ANSWER_S = 60.0
# Minimum average rate, 64 kbit/s, so that the announced size bounds the time.
_LEAST_BYTES_PER_S = 8 << 10
_DIR_MODE = 0o700


class Fetched(msgspec.Struct, frozen=True, kw_only=True):
    """What was copied."""

    directory: Path
    files: tuple[str, ...]  # names below `directory`
    size_bytes: int


class _ListedFile(msgspec.Struct, frozen=True):
    name: str
    size_bytes: Annotated[int, Meta(ge=0)]


class _ListedFiles(msgspec.Struct, frozen=True, tag_field="kind", tag="files"):
    # The agent's maximum.
    files: Annotated[tuple[_ListedFile, ...], Meta(max_length=100_000)]


class _FileData(msgspec.Struct, frozen=True, tag_field="kind", tag="data"):
    file: int
    data: bytes


class _Fetched(msgspec.Struct, frozen=True, tag_field="kind", tag="fetched"):
    """All files were sent."""


_FetchedRecord = _ListedFiles | _FileData | _Fetched


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What to copy."""

    node: Node
    paths: tuple[str, ...]
    cwd: str | None  # start of relative paths


def fetch_files(
    agent: AgentTransport,
    wanted: Wanted,
    to: Path,
    say: Callable[[str], None] = lambda _: None,
    *,
    patience_s: float = _ANSWER_S,
) -> Fetched:
    """Copy files and directories of a node below `to`.

    `patience_s` is how long nothing may arrive, and how much longer than at 8 KiB/s everything may take.

    Raises:
        NodeError, NodeFailed: a path does not exist, or contact was lost.
        MultinodeError: they cannot be written here.
    """
    request = {"schema": 1, "paths": list(wanted.paths), "cwd": wanted.cwd}
    stream: AgentStream[_FetchedRecord]
    stream = agent.open(wanted.node, "fetch", request, _FetchedRecord, deadline_s=patience_s)  # type: ignore[arg-type]  # a union is no type
    try:
        return _receive(stream, wanted.node, to, say, patience_s)
    except OSError as error:
        raise MultinodeError(f"{to} cannot be written: {error.strerror}", hint=f"df -h {to}") from error
    finally:
        stream.close()


def _receive(
    stream: AgentStream[_FetchedRecord], node: Node, to: Path, say: Callable[[str], None], patience_s: float
) -> Fetched:
    listed = require_kind(stream.first, _ListedFiles, node.name).files
    total = sum(file.size_bytes for file in listed)
    places = [to / _safe(file.name, node) for file in listed]
    if len(set(places)) < len(places):
        raise NodeFailed("it named a file twice", node=node.name)
    to.mkdir(mode=_DIR_MODE, parents=True, exist_ok=True)
    free = shutil.disk_usage(to).free
    if total > free:
        raise MultinodeError(
            f"{node.name} has {format_size(total)} to send, but only {format_size(free)} are free",
            hint=f"df -h {to}",
        )
    for place in places:
        place.parent.mkdir(mode=_DIR_MODE, parents=True, exist_ok=True)
        place.write_bytes(b"")
    left = [file.size_bytes for file in listed]
    began = time.monotonic()
    while (record := stream.read(patience_s)) is not None:
        if isinstance(record, _Fetched):
            short = next((file.name for file, lacking in zip(listed, left, strict=True) if lacking), None)
            if short is not None:
                raise NodeFailed(f"it sent less of {short} than announced", node=node.name)
            return Fetched(directory=to, files=tuple(file.name for file in listed), size_bytes=total)
        data = require_kind(record, _FileData, node.name)
        if not 0 <= data.file < len(places):
            raise NodeFailed(f"it sent file {data.file} of {len(places)}", node=node.name)
        left[data.file] -= len(data.data)
        if left[data.file] < 0:
            raise NodeFailed(f"it sent more of {listed[data.file].name} than announced", node=node.name)
        with places[data.file].open("ab") as file:
            file.write(data.data)
        came = total - sum(left)
        if time.monotonic() - began > patience_s + came / _LEAST_BYTES_PER_S:
            raise ContactLost(
                (f"stopped at {format_size(came)} of {format_size(total)}: the transfer is too slow"), node=node.name
            )
        say(f"fetching {listed[data.file].name}: {100 * came // max(1, total)}%")
    raise ContactLost("it disconnected while files were fetched", node=node.name)


def _safe(name: str, node: Node) -> PurePosixPath:
    """The name, which must stay below the directory."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise NodeFailed(f"it named a file {name!r} outside the directory", node=node.name)
    return path


def fetch_traces(
    agent: AgentTransport,
    cluster: Cluster,
    plan: LaunchPlan,
    directory: RunDirectory,
    say: Callable[[str], None] = lambda _: None,
) -> None:
    """Copy the profiler's windows into the run's `traces`; a node that cannot send them is left out.

    They are optional and the run is over: `read_traces` notes a missing one in the summary.
    """
    nodes = {node.name: node for node in cluster.nodes}
    for node in plan.nodes:
        ranks = set(node.place.ranks) & {sample.rank for sample in _recorded(directory, node.place.node_rank)}
        if not ranks or node.place.node not in nodes:
            continue
        paths = tuple(f"{node.place.run_dir}/traces/{directory.trace_path(rank).name}" for rank in sorted(ranks))
        wanted = Wanted(node=nodes[node.place.node], paths=paths, cwd=None)
        try:
            fetch_files(agent, wanted, directory.trace_path(0).parent, say)
        except MultinodeError as error:
            say(f"{node.place.node}: its traces could not be fetched: {error.message}")


def _recorded(directory: RunDirectory, node_rank: int) -> list[TraceSample]:
    samples = parse_samples(line for line in directory.sample_lines(node_rank) if b'"trace"' in line)
    return [sample for sample in samples if isinstance(sample, TraceSample) and sample.file is not None]


_CODE_ANSWER_S = 60.0
# What comes slower does not come.
_LEAST_CODE_BYTES_PER_S = 64 << 10
_PIECE_BYTES = 1 << 16
# How long an agent that reads no more may take to say why.
_REASON_S = 5.0


class _Wanted(msgspec.Struct, frozen=True, tag_field="kind", tag="wanted"):
    files: tuple[Annotated[int, Meta(ge=0)], ...]


class _Copied(msgspec.Struct, frozen=True, tag_field="kind", tag="copied"):
    path: str


def copy_code(
    agent: AgentTransport, cluster: Cluster, code: CodeTree, run_id: str, say: Callable[[str], None]
) -> CodeCopy:
    """Bring the tree to every node, as the directory of this run; only what a node lacks is sent."""
    copied = code.copy()
    say(f"copying {format_count(copied.files, 'file')}, {format_size(copied.size_bytes)}, of {code.source}")
    deadline_s = 2 * _CODE_ANSWER_S + code.size_bytes / _LEAST_CODE_BYTES_PER_S
    sent = gather(
        cluster.nodes, lambda node: _send(agent, node, code, run_id, deadline_s), deadline_s=deadline_s
    ).require()
    most = max(sent.values(), key=lambda transfer: transfer.size_bytes)
    say(f"sent at most {format_count(most.files, 'file')}, {format_size(most.size_bytes)}, to a node")
    return msgspec.structs.replace(copied, sent=sent)


def _send(agent: AgentTransport, node: Node, code: CodeTree, run_id: str, deadline_s: float) -> SentCode:
    request = {
        "schema": 1,
        "then": True,
        "run_id": code.run_id or run_id,
        "manifest": code.manifest.decode(),
        "digests": [file.digest for file in code.files],
    }
    stream: AgentStream[_Wanted | _Copied]
    stream = agent.open(node, "code", request, _Wanted | _Copied, deadline_s=_CODE_ANSWER_S)  # type: ignore[arg-type]  # a union is no type
    try:
        files = _wanted(stream, node, code)
        for number, file in files.items():
            for data in _read(code, file):
                _say(stream, {"file": number, "data": data})
        require_kind(stream.read(deadline_s), _Copied, node.name)
    except BaseException:
        stream.close()
        raise
    agent.keep(node, stream)
    return SentCode(files=len(files), size_bytes=sum(file.size_bytes for file in files.values()))


def _wanted(stream: AgentStream[_Wanted | _Copied], node: Node, code: CodeTree) -> dict[int, CodeFile]:
    """The files that a node lacks, by their numbers."""
    numbers = require_kind(stream.first, _Wanted, node.name).files
    if len(set(numbers)) < len(numbers) or max(numbers, default=-1) >= len(code.files):
        raise NodeFailed("it asked for files that it was not told of", node=node.name)
    return {number: code.files[number] for number in numbers}


def _say(stream: AgentStream[_Wanted | _Copied], piece: dict[str, object]) -> None:
    try:
        stream.send(piece)
    except ContactLost:
        # It may have said why it takes no more.
        with contextlib.suppress(ContactLost):
            stream.read(_REASON_S)
        raise


def _read(code: CodeTree, file: CodeFile) -> Iterator[bytes]:
    """The file as it was announced."""
    path, left = Path(code.source, file.path), file.size_bytes
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as source:
            while left and (data := source.read(min(_PIECE_BYTES, left))):
                left -= len(data)
                yield data
    except OSError as error:
        raise UsageError(f"--copy-code: {path} cannot be read: {error.strerror}") from error
    if left:
        raise UsageError(f"--copy-code: {path} changed while it was copied", hint="launch again")
