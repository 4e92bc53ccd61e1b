"""Files of nodes to this machine: a job's output and the traces of its profiler. Prints nothing."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Annotated

import msgspec
from msgspec import Meta

from multinode.cluster.cluster import Cluster, Node
from multinode.errors import ContactLost, MultinodeError, NodeFailed
from multinode.records.plan import LaunchPlan
from multinode.records.run_directory import RunDirectory
from multinode.records.samples import TraceSample, parse_samples
from multinode.transport.agent import AgentStream, AgentTransport, require_kind
from multinode.units import format_size

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
        raise NodeFailed("it listed a file twice", node=node.name)
    to.mkdir(mode=_DIR_MODE, parents=True, exist_ok=True)
    free = shutil.disk_usage(to).free
    if total > free:
        raise MultinodeError(
            f"{node.name} has {format_size(total)} to send, but only {format_size(free)} are free here",
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
    raise ContactLost("it disconnected during the transfer", node=node.name)


def _safe(name: str, node: Node) -> PurePosixPath:
    """The name, which must stay below the directory."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise NodeFailed(f"it listed {name!r}, which is outside the directory", node=node.name)
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
