"""Paths of the job: what it reads stands on every node with the same content, and what it writes can be written."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from multinode.core.cluster.facts import NodeFacts, PathFact
from multinode.core.run.job_files import job_files
from multinode.core.run.quoting import destination, ssh_words
from multinode.preflight.inspection import Inspection
from multinode.preflight.rule import Case, Check, Rule, disagreements, launch_check, listed

__all__ = [
    "check_contents",
    "check_output",
    "check_paths",
    "check_revisions",
    "check_shared",
    "check_workdir",
    "is_network",
]

PATH_MISSING = Rule(
    "paths",
    "error",
    catches="a file or directory of the job is not on a node: model, dataset, dataset_info.json, script",
    message="{path} is missing: the job reads it on every node",
    hint="copy it there; run in this directory:\n{ssh!s} mkdir -p {parent!s} && {scp!s} {quoted!s} "
    "{destination}:{parent!s}/",
)
OUTPUT_NOT_WRITABLE = Rule(
    "paths",
    "error",
    catches="the output directory cannot be made or written on a node: owner, read-only disk",
    message="output_dir {path} {what}: the workers of every node write there when a checkpoint is saved, and those of "
    "this one would fail then, hours into the training",
    hint="another place (--set output_dir=...), or on {node}:\nsudo mkdir -p {full!s} && sudo chown {user} {full!s}",
)
NO_WORKDIR = Rule(
    "workdir",
    "error",
    catches="the directory that workdir= names is not on a node",
    message="the job's directory: {reason}",
    hint="correct workdir= in the hostfile, or make the directory on the node",
)
CONTENT_DIFFERS = Rule(
    "content",
    "error",
    catches="same path, other content: model, tokenizer, dataset or script of another version on a node",
    message="{path} is not what it is on {peer}: {digest} ({size} bytes) here, {expected} ({expected_size} bytes) there"
    "{more}. The workers would train on different models or data, or wait for each other for ever",
    hint="if that of {peer} is right, on {peer}:\nrsync -as --checksum {source!s} {node}:{target!s}",
)
CONTENT_ABSENT = Rule(
    "content",
    "error",
    catches="a file of the model or of a dataset that one node has and another lacks: a copy that stopped half-way",
    message="{path} is not there, and {peer} has it{more}: the nodes would not read the same model or data",
    hint="on {peer}:\nrsync -as {source!s} {node}:{target!s}",
)
CONTENT_UNREAD = Rule(
    "content",
    "note",
    catches="content that could not be compared: a slow disk, no permission",
    message="{path} was not compared with the other nodes: {reason}{more}",
    hint="compare it by hand, on every node:\nsha256sum {target!s}",
)
REVISION_DIFFERS = Rule(
    "content",
    "warning",
    catches="the job's directory is a git checkout of another revision on a node",
    message="its checkout in {cwd} is at {revision}, that of {peer} at {expected}: code and settings may differ",
    hint="on {node}:\ngit -C {quoted!s} fetch && git -C {quoted!s} checkout {full}",
)
CACHE_NOT_SHARED = Rule(
    "shared",
    "warning",
    catches="data_shared_file_system: true without a shared file system",
    message="data_shared_file_system is true, and neither {path} nor the dataset is on a file system that the nodes "
    "share (here: {filesystem}): the other nodes wait while the first worker prepares the data, find nothing of it, "
    "and then all of their workers prepare the same data at once",
    hint="--set data_shared_file_system=false",
)
CACHE_SHARED = Rule(
    "shared",
    "note",
    catches="prepared data on a shared file system, and every node prepares them again",
    message="{path} is on {device}, which all nodes share: each node prepares the data there again, at the same time",
    hint="let the first worker do it for all: --set data_shared_file_system=true",
)

# Type of a file system whose source, where it is equal on two nodes, is one and the same; after NFS, the parallel ones.
_NETWORK_FILESYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "beegfs", "gpfs", "glusterfs", "afs", "ocfs2", "gfs2"}
)
# In user space there are local ones too, with the same source on every node.
_LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.mergerfs", "fuse.bindfs", "fuse.portal"})
_TROUBLES = {"file": "is a file, and no directory", "missing": "cannot be made"}
_REVISION = ".git"
_SHOWN_DIGITS = 12
_SHOWN_FILES = 4


@launch_check
def check_workdir(inspection: Inspection) -> Iterator[Case]:
    """A directory that the hostfile names exists."""
    for node, found in inspection.known:
        if "workdir" in found.missing:
            yield NO_WORKDIR.found(node.name, reason=found.missing["workdir"])


@launch_check
def check_paths(inspection: Inspection) -> Iterator[Case]:
    """What the job reads stands at the same path on every node."""
    files = job_files(inspection.job)
    only_written = {files.output, files.cache} - set(files.needed)
    for node, found in inspection.known:
        missing = [one.path for one in found.paths if one.kind == "missing" and one.path not in only_written]
        for path in missing:
            # What is in a directory comes with it.
            if set(map(PurePosixPath, missing)).isdisjoint(PurePosixPath(path).parents):
                folder, _, _ = _absolute(path.rstrip("/"), found).rpartition("/")
                yield PATH_MISSING.found(
                    node.name,
                    path=path,
                    ssh=shlex.join([*ssh_words(node, "ssh"), destination(node)]),
                    scp=shlex.join([*ssh_words(node, "scp"), "-rp"]),
                    quoted=_quote(path),
                    destination=destination(node),
                    parent=_quote(folder or "/"),
                )


@Check
def check_output(inspection: Inspection) -> Iterator[Case]:
    """What the job writes can be written on every node."""
    output = job_files(inspection.job).output
    for node, found in inspection.known:
        path = _path(found, output)
        if path is not None and (path.kind == "file" or not path.writable):
            what = f"{_TROUBLES.get(path.kind, 'cannot be written')} by {found.user or 'its user'}"
            full = _quote(_absolute(path.path, found))
            yield OUTPUT_NOT_WRITABLE.found(node.name, path=path.path, what=what, full=full, user=found.user or "USER")


@Check
def check_contents(inspection: Inspection) -> Iterator[Case]:
    """Files of the job are what they are on the first node that has told."""
    known = [(node.name, found) for node, found in inspection.known if found.contents]
    if not known or len(inspection.cluster.nodes) == 1:
        return
    for name, found in known:
        unread = [one for one in found.contents if one.digest is None]
        if unread:
            yield CONTENT_UNREAD.found(
                name,
                path=unread[0].path,
                reason=unread[0].reason or "it did not say why",
                more=_more([one.path for one in unread]),
                target=_quote(_absolute(unread[0].path, found)),
            )
    (first, its), *others = known
    expected = _digests(its)
    for name, found in others:
        digests = _digests(found)
        different = [path for path in expected if digests.get(path, expected[path])[0] != expected[path][0]]
        if different:
            (mine, size), (theirs, their_size) = digests[different[0]], expected[different[0]]
            yield CONTENT_DIFFERS.found(
                name,
                digest=mine[:_SHOWN_DIGITS],
                size=size,
                expected=theirs[:_SHOWN_DIGITS],
                expected_size=their_size,
                **_copying(different, found, first, its),
            )
        # What was not read may be there all the same.
        complete = all(one.digest is not None for one in found.contents)
        absent = [path for path in expected if path not in digests and _has_above(path, found)] if complete else []
        if absent:
            yield CONTENT_ABSENT.found(name, **_copying(absent, found, first, its))


@Check
def check_revisions(inspection: Inspection) -> Iterator[Case]:
    """Git checkouts that the job runs in are at one revision."""
    revisions = {
        node.name: one.digest
        for node, found in inspection.known
        for one in found.contents
        if one.path == _REVISION and one.digest is not None
    }
    for name, revision, peer, expected in disagreements(revisions):
        cwd = inspection.facts[name].cwd
        yield REVISION_DIFFERS.found(
            name,
            cwd=cwd,
            quoted=_quote(cwd or "."),
            revision=revision[:_SHOWN_DIGITS],
            expected=expected[:_SHOWN_DIGITS],
            full=expected,
            peer=peer,
        )


@Check
def check_shared(inspection: Inspection) -> Iterator[Case]:
    """What the YAML says of a shared file system is so, where the nodes tell."""
    job, path = inspection.training, job_files(inspection.job).cache
    if job is None or path is None or len(inspection.facts) < 2:  # noqa: PLR2004 - to share
        return
    caches = _places(inspection, path)
    if len(caches) < len(inspection.facts):
        return
    if job.config.get("data_shared_file_system") is not True:
        if len({place.device for place in caches}) == 1 and all(map(_is_network, caches)):
            yield CACHE_SHARED.found(None, path=path, device=caches[0].device)
        return
    # One node may serve the others from its own disk, and a variable may have moved the cache beside the dataset.
    folder = job.config.get("dataset_dir")
    suspects = [*caches, *(_places(inspection, folder) if isinstance(folder, str) else [])]
    if not any(map(_is_network, suspects)):
        yield CACHE_NOT_SHARED.found(None, path=path, filesystem=caches[0].filesystem)


def _places(inspection: Inspection, path: str) -> list[PathFact]:
    """Where a path lies on each node that tells of which file system."""
    places = [_path(found, path) for _, found in inspection.known]
    return [place for place in places if place is not None and place.filesystem is not None]


def _is_network(place: PathFact) -> bool:
    return is_network(place.filesystem)


def is_network(filesystem: str | None) -> bool:
    """Whether a type of file system, as the kernel names it, is one that several machines may have in common."""
    kind = filesystem or ""
    return kind in _NETWORK_FILESYSTEMS or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE)


def _digests(found: NodeFacts) -> dict[str, tuple[str, int | None]]:
    """Digest and size of each file that was read."""
    return {one.path: (one.digest, one.size_bytes) for one in found.contents if one.digest and one.path != _REVISION}


def _has_above(path: str, found: NodeFacts) -> bool:
    """Whether a directory above it is there; one that is missing as a whole is another finding."""
    folders = [place.path for place in found.paths if place.kind == "directory"]
    return any(path != folder and path.startswith(folder.rstrip("/") + "/") for folder in folders)


def _copying(paths: list[str], found: NodeFacts, peer: str, its: NodeFacts) -> Mapping[str, str]:
    """What tells a person to copy the first of these: from a peer, to a node."""
    source, target = (_quote(_absolute(paths[0], facts)) for facts in (its, found))
    return {"path": paths[0], "more": _more(paths), "peer": peer, "source": source, "target": target}


def _more(paths: list[str]) -> str:
    return f"; likewise {listed(paths[1:], _SHOWN_FILES)}" if paths[1:] else ""


def _path(found: NodeFacts, path: str | None) -> PathFact | None:
    return next((one for one in found.paths if one.path == path), None)


def _absolute(path: str, found: NodeFacts) -> str:
    """A path on the node; relative ones start at the job's directory, and `~` stays."""
    if path.startswith(("/", "~")) or found.cwd is None:
        return path
    return f"{found.cwd.rstrip('/')}/{path}"


def _quote(path: str) -> str:
    """For a shell, which still expands the user's home."""
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") and path != "~/" else shlex.quote(path)
