"""Paths of the job: what it reads stands on every node with the same content, and what it writes can be written."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from multinode.core.check.finding import Finding, Rule
from multinode.core.cluster.cluster import Node
from multinode.core.cluster.facts import ContentFact, NodeFacts, PathFact
from multinode.core.job.job import LlamaFactoryJob
from multinode.core.run.command import destination, ssh_words
from multinode.core.run.job_files import job_files
from multinode.preflight.inspection import Inspection

__all__ = ["check_contents", "check_output", "check_paths", "check_revisions", "check_shared", "check_workdir"]

PATH_MISSING = Rule(
    check="paths",
    severity="error",
    catches="a file or directory of the job is not on a node: model, dataset, dataset_info.json, script",
    message="{path} is missing: the job reads it on every node",
    hint="copy it there, from where this was typed: {ssh!s} mkdir -p {parent!s} && {scp!s} {quoted!s} "
    "{destination}:{parent!s}/",
)
OUTPUT_NOT_WRITABLE = Rule(
    check="paths",
    severity="error",
    catches="the output directory cannot be made or written on a node: owner, read-only disk",
    message="output_dir {path} {what}: the workers of every node write there when a checkpoint is saved, and those of "
    "this one would fail then, hours into the training",
    hint="on {node}: sudo mkdir -p {full!s} && sudo chown {user} {full!s}; or another place: --set output_dir=...",
)
NO_WORKDIR = Rule(
    check="workdir",
    severity="error",
    catches="the directory that workdir= names is not on a node",
    message="the job's directory: {reason}",
    hint="correct workdir= in the hostfile, or make the directory on the node",
)
CONTENT_DIFFERS = Rule(
    check="content",
    severity="error",
    catches="same path, other content: model, tokenizer, dataset or script of another version on a node",
    message="{path} is not what it is on {peer}: {digest} ({size} bytes) here, {expected} ({expected_size} bytes) there"
    "{more}. The workers would train on different models or data, or wait for each other for ever",
    hint="if that of {peer} is right, on {peer}: rsync -as --checksum {source!s} {node}:{target!s}",
)
CONTENT_ABSENT = Rule(
    check="content",
    severity="error",
    catches="a file of the model or of a dataset that one node has and another lacks: a copy that stopped half-way",
    message="{path} is not there, and {peer} has it{more}: the nodes would not read the same model or data",
    hint="on {peer}: rsync -as {source!s} {node}:{target!s}",
)
CONTENT_UNREAD = Rule(
    check="content",
    severity="note",
    catches="content that could not be compared: a slow disk, no permission",
    message="{path} was not compared with the other nodes: {reason}{more}",
    hint="compare it by hand, on every node: sha256sum {target!s}",
)
REVISION_DIFFERS = Rule(
    check="content",
    severity="warning",
    catches="the job's directory is a git checkout of another revision on a node",
    message="its checkout in {cwd} is at {revision}, that of {peer} at {expected}: code and settings may differ",
    hint="on {node}: git -C {quoted!s} fetch && git -C {quoted!s} checkout {full}",
)
CACHE_NOT_SHARED = Rule(
    check="shared",
    severity="warning",
    catches="data_shared_file_system: true without a shared file system",
    message="data_shared_file_system is true, and neither {path} nor the dataset lies on a file system that the nodes "
    "share (here: {filesystem}): the other nodes wait while the first worker prepares the data, find nothing of it, "
    "and then all of their workers prepare the same data at once",
    hint="--set data_shared_file_system=false",
)
CACHE_SHARED = Rule(
    check="shared",
    severity="note",
    catches="prepared data on a shared file system, and every node prepares them again",
    message="{path} lies on {device}, which all nodes share: each node prepares the data there again, at the same time",
    hint="let the first worker do it for all: --set data_shared_file_system=true",
)

# Type of a file system whose source, where it is equal on two nodes, is one and the same; after NFS, the parallel ones.
_NETWORK_FILESYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "beegfs", "gpfs", "glusterfs", "afs", "ocfs2", "gfs2"}
)
# In user space there are local ones too, with the same source on every node.
_LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.mergerfs", "fuse.bindfs", "fuse.portal"})
_TROUBLES = {"file": "is a file, and cannot be made a directory", "missing": "cannot be made"}
_REVISION = ".git"
_SHOWN_DIGITS = 12
_SHOWN_FILES = 3


def check_paths(inspection: Inspection) -> Iterator[Finding]:
    """What the job reads stands at the same path on every node."""
    files = job_files(inspection.job)
    only_written = {files.output, files.cache} - set(files.needed)
    for node, found in inspection.known:
        for path in found.paths:
            if path.kind == "missing" and path.path not in only_written:
                yield PATH_MISSING.found(
                    node.name,
                    path=path.path,
                    ssh=shlex.join([*ssh_words(node, "ssh"), destination(node)]),
                    scp=shlex.join([*ssh_words(node, "scp"), "-rp"]),
                    quoted=_quote(path.path),
                    destination=destination(node),
                    parent=_parent(path.path, found),
                )


def check_output(inspection: Inspection) -> Iterator[Finding]:
    """What the job writes can be written on every node."""
    output = job_files(inspection.job).output
    for node, found in inspection.known:
        path = _path(found, output)
        if path is None or (path.writable and path.kind != "file"):
            continue
        trouble = {"file": "is a file, and no directory", "missing": "cannot be made"}.get(
            path.kind, "cannot be written"
        )
        what = f"{trouble} by {found.user or 'its user'}"
        full = _quote(_absolute(path.path, found))
        yield OUTPUT_NOT_WRITABLE.found(node.name, path=path.path, what=what, full=full, user=found.user or "USER")


def check_workdir(inspection: Inspection) -> Iterator[Finding]:
    """A directory that the hostfile names exists."""
    for node, found in inspection.known:
        if "workdir" in found.missing:
            yield NO_WORKDIR.found(node.name, reason=found.missing["workdir"])


def check_contents(inspection: Inspection) -> Iterator[Finding]:
    """Files of the job are what they are on the first node that has told."""
    known = [(node, found) for node, found in inspection.known if found.contents]
    if not known or len(inspection.cluster.nodes) == 1:
        return
    (first, its), *others = known
    expected = _digests(its)
    for node, found in known:
        yield from _unread(node, found)
    for node, found in others:
        digests = _digests(found)
        different = [path for path in expected if path in digests and digests[path].digest != expected[path].digest]
        if different:
            mine, theirs = digests[different[0]], expected[different[0]]
            yield CONTENT_DIFFERS.found(
                node.name,
                digest=(mine.digest or "")[:_SHOWN_DIGITS],
                size=mine.size_bytes,
                expected=(theirs.digest or "")[:_SHOWN_DIGITS],
                expected_size=theirs.size_bytes,
                **_copying(different, found, first.name, its),
            )
        # What was not read may be there all the same.
        complete = all(one.digest is not None for one in found.contents)
        absent = [path for path in expected if path not in digests and _has_above(path, found)] if complete else []
        if absent:
            yield CONTENT_ABSENT.found(node.name, **_copying(absent, found, first.name, its))


def check_revisions(inspection: Inspection) -> Iterator[Finding]:
    """Git checkouts that the job runs in are at one revision."""
    known = [(node, found, _revision(found)) for node, found in inspection.known]
    checkouts = [(node, found, revision) for node, found, revision in known if revision is not None]
    for node, found, revision in checkouts[1:]:
        first, _, expected = checkouts[0]
        if revision != expected:
            yield REVISION_DIFFERS.found(
                node.name,
                cwd=found.cwd,
                quoted=_quote(found.cwd or "."),
                revision=revision[:_SHOWN_DIGITS],
                expected=expected[:_SHOWN_DIGITS],
                full=expected,
                peer=first.name,
            )


def check_shared(inspection: Inspection) -> Iterator[Finding]:
    """What the YAML says of a shared file system is so, where the nodes tell."""
    job, files = inspection.job, job_files(inspection.job)
    if not isinstance(job, LlamaFactoryJob) or files.cache is None or len(inspection.facts) < 2:  # noqa: PLR2004 - to share
        return
    told = job.config.get("data_shared_file_system") is True
    caches = _places(inspection, files.cache)
    if len(caches) < len(inspection.facts):
        return
    # One node may serve the others from its own disk, and a variable may have moved the cache beside the dataset.
    folder = job.config.get("dataset_dir")
    suspects = [*caches, *(_places(inspection, folder) if isinstance(folder, str) else [])]
    if told and not any(_is_network(place.filesystem or "") for place in suspects):
        yield CACHE_NOT_SHARED.found(None, path=files.cache, filesystem=caches[0].filesystem)
    if not told and _are_shared(caches):
        yield CACHE_SHARED.found(None, path=files.cache, device=caches[0].device)


def _places(inspection: Inspection, path: str) -> list[PathFact]:
    """Where a path lies on each node that tells of which file system."""
    places = [_path(found, path) for _, found in inspection.known]
    return [place for place in places if place is not None and place.filesystem is not None]


def _are_shared(places: list[PathFact]) -> bool:
    one_source = len({place.device for place in places}) == 1
    return one_source and all(_is_network(place.filesystem or "") for place in places)


def _is_network(filesystem: str) -> bool:
    return filesystem in _NETWORK_FILESYSTEMS or (filesystem.startswith("fuse.") and filesystem not in _LOCAL_FUSE)


def _digests(found: NodeFacts) -> dict[str, ContentFact]:
    return {one.path: one for one in found.contents if one.digest is not None and one.path != _REVISION}


def _revision(found: NodeFacts) -> str | None:
    return next((one.digest for one in found.contents if one.path == _REVISION), None)


def _unread(node: Node, found: NodeFacts) -> Iterator[Finding]:
    unread = [one for one in found.contents if one.digest is None]
    if unread:
        more = _more([one.path for one in unread])
        target = _quote(_absolute(unread[0].path, found))
        reason = unread[0].reason or "it did not say why"
        yield CONTENT_UNREAD.found(node.name, path=unread[0].path, reason=reason, more=more, target=target)


def _has_above(path: str, found: NodeFacts) -> bool:
    """Whether a directory above it is there; one that is missing as a whole is another finding."""
    return any(
        path != place.path and path.startswith(place.path.rstrip("/") + "/")
        for place in found.paths
        if place.kind == "directory"
    )


def _copying(paths: list[str], found: NodeFacts, peer: str, its: NodeFacts) -> Mapping[str, str]:
    """What tells a person to copy the first of these: from a peer, to a node."""
    return {
        "path": paths[0],
        "more": _more(paths),
        "peer": peer,
        "source": _quote(_absolute(paths[0], its)),
        "target": _quote(_absolute(paths[0], found)),
    }


def _more(paths: list[str]) -> str:
    others = paths[1 : _SHOWN_FILES + 1]
    if not others:
        return ""
    left = len(paths) - 1 - len(others)
    return f"; likewise {', '.join(others)}" + (f" and {left} more" if left else "")


def _path(found: NodeFacts, path: str | None) -> PathFact | None:
    return next((one for one in found.paths if one.path == path), None)


def _absolute(path: str, found: NodeFacts) -> str:
    """A path on the node; relative ones start at the job's directory, and `~` stays."""
    if path.startswith(("/", "~")) or found.cwd is None:
        return path
    return f"{found.cwd.rstrip('/')}/{path}"


def _parent(path: str, found: NodeFacts) -> str:
    """The directory that a path lies in, on the node."""
    folder, _, _ = _absolute(path.rstrip("/"), found).rpartition("/")
    return _quote(folder or "/")


def _quote(path: str) -> str:
    """For a shell, which still expands the user's home."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") and path != "~/" else shlex.quote(path)
