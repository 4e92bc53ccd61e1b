"""Paths of the job: its inputs exist on every node with the same content, and its outputs can be written."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from multinode.check.rule import Check, CheckFinding, CheckRules, Inspection, disagreements, launch_check, listed
from multinode.cluster.cluster import Cluster, Node
from multinode.cluster.facts import NO_ANSWER, UNASKED, NodeFacts, PathFact
from multinode.cluster.quoting import destination, hosts_option, ssh_words
from multinode.job.job import set_options
from multinode.job.job_files import job_files, may_be_paths
from multinode.stats.unknown import Unknown, entries, or_empty, or_none, reason_of

_PATHS = CheckRules("paths")
_NOEXEC = CheckRules("noexec")
_WORKDIR = CheckRules("workdir")
_CONTENT = CheckRules("content")
_SHARED = CheckRules("shared")

PATH_MISSING = _PATHS.error(
    about="a node lacks a file or directory of the job (model, dataset, dataset_info.json, script)",
    message="{path} is missing, but the job reads it on every node",
    hint="copy it to the nodes. Run in this directory:\nmultinode copy{hosts!s} {path}",
)
PATH_ELSEWHERE = _PATHS.error(
    about="a node lacks the directory from which you launch, and its files",
    message="{path} is missing from {cwd}, where the job would run, because {node} does not have {here}, the directory "
    "from which you launch",
    hint="copy this directory to the node. Run in it:\n{ssh!s} mkdir -p {target!s} && {scp!s} . "
    "{destination}:{target!s}/",
)
PATH_NOWHERE = _PATHS.error(
    about="a file or directory of the job is missing on a node, and this machine has no copy",
    message="{path} is missing on {nodes} and on this machine, but the job reads it on every node{near}",
    hint="correct its name, or copy it to {nodes!s}",
)
PATH_OF_PEER = _PATHS.error(
    about="a file or directory of the job is missing on one node but present on another",
    message="{path} is present on {peer} but missing here, and the job reads it on every node",
    hint="copy it from there:\nmultinode copy{hosts!s} --from {peer} {path}",
)
PATH_HANGS = _PATHS.error(
    about="a file system that the job uses hangs (for example, its NFS server is unreachable)",
    message="{path} does not respond{mount}, so the job would hang",
    hint="check that the server of this file system is up. Run on {node} as root:\n{command!s}",
)
ARGUMENT_MISSING = _PATHS.warning(
    about="an argument of the script is a path that exists on this machine but not on a node",
    message=(
        "{path}, an argument of the script, exists on this machine but not on the node. The script fails if it reads "
        "this path"
    ),
    hint="unless the script writes this file, copy it. Run in this directory:\nmultinode copy{hosts!s} {path}",
)
MODULE_MISSING = _PATHS.error(
    about="a node cannot import the module that the job starts, as in `-m package.train`",
    message="{python} finds module {module} neither in {cwd}, where the job would run, nor in its packages",
    hint=(
        "correct the name of the module, or python= and workdir= in the hostfile. If the module is in this directory, "
        "use --copy-code"
    ),
)
PROGRAM_MISSING = _PATHS.error(
    about="a node lacks the program that the job starts with `--engine exec`",
    message="{program} is not on the PATH of a non-interactive shell{elsewhere}",
    hint="use the full path of the program, or extend PATH with --setup",
)
NOEXEC = _NOEXEC.warning(
    about="a temporary directory or cache is mounted noexec, so compiled code cannot be loaded from it",
    message="{places} on {nodes} {are} mounted noexec, but torch.compile, Triton and DeepSpeed load compiled code from "
    "there. They would fail with `failed to map segment from shared object`",
    hint="use other directories. Add to your command:\n{command!s}",
)
OUTPUT_NOT_WRITABLE = _PATHS.error(
    about="the output directory cannot be created or written on a node (wrong owner, read-only disk)",
    message="output_dir {path} {what}. Workers of every node write there at each checkpoint, so workers on this node "
    "would fail hours into training",
    hint="use another directory (--set output_dir=...), or run on {node}:\nsudo mkdir -p {full!s} && sudo chown "
    "{user} {full!s}",
)
NO_WORKDIR = _WORKDIR.error(
    about="the directory in workdir= does not exist on a node",
    message="workdir= is unusable: {reason}",
    hint="correct workdir= in the hostfile, or create the directory on the node",
)
CONTENT_DIFFERS = _CONTENT.error(
    about="a node has a different version of the model, tokenizer, dataset or script at the same path",
    message="{path} is not the same as on {peer}: {digest} ({size} bytes) here, {expected} ({expected_size} bytes) "
    "there{more}. The workers would train with different models or data, or hang",
    hint="if the version on {peer} is correct:\nmultinode copy{hosts!s} --from {peer} {paths!s}",
)
CONTENT_ABSENT = _CONTENT.error(
    about="a file of the model or dataset is missing on one node (incomplete copy)",
    message="{path} is present on {peer} but missing here{more}. The nodes would read different models or data",
    hint="copy it from there:\nmultinode copy{hosts!s} --from {peer} {paths!s}",
)
CONTENT_UNREAD = _CONTENT.note(
    about="content could not be compared (slow disk, no permission)",
    message="{path} could not be compared with the other nodes: {reason}{more}",
    hint="compare it manually. Run on every node:\nsha256sum {target!s}",
)
REVISION_DIFFERS = _CONTENT.warning(
    about="the job's directory is a git checkout, and its revision differs between nodes",
    message=(
        "the checkout in {cwd} is at revision {revision} here and at {expected} on {peer}, so code and settings may "
        "differ"
    ),
    hint="run on {node}:\ngit -C {quoted!s} fetch && git -C {quoted!s} checkout {full}",
)
CACHE_NOT_SHARED = _SHARED.warning(
    about="data_shared_file_system is true, but there is no shared file system",
    message="data_shared_file_system is true, but neither {path} nor the dataset is on a file system that the nodes "
    "share (here: {filesystem}). All other workers wait while the first worker prepares the data, but workers on other "
    "nodes do not find its result. They then prepare the same data at the same time",
    hint="{option!s}",
)
CACHE_SHARED = _SHARED.note(
    about="every node prepares the same data on a shared file system",
    message=(
        "{path} is on {device}, which all nodes share, but every node prepares the same data there at the same time"
    ),
    hint="let the first worker prepare the data for all nodes: {option!s}",
)

# File system types for which equal sources mean one file system; after NFS, the parallel ones.
_NETWORK_FILESYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "beegfs", "gpfs", "glusterfs", "afs", "ocfs2", "gfs2"}
)
# Some FUSE file systems are local, with the same source on every node.
_LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.mergerfs", "fuse.bindfs", "fuse.portal"})
# Other places for compiled code, by the variable that moves it.
_ELSEWHERE = {
    "TMPDIR": "/var/tmp",  # noqa: S108 - the job's
    "TORCHINDUCTOR_CACHE_DIR": "/var/tmp/inductor",  # noqa: S108
    "TRITON_CACHE_DIR": "/var/tmp/triton",  # noqa: S108
    "TORCH_EXTENSIONS_DIR": "/var/tmp/ext",  # noqa: S108
}
_IS_FILE = "is a file, not a directory"
_REVISION = ".git"
_SHOWN_DIGITS = 12
_SHOWN_FILES = 4


@launch_check
def check_workdir(inspection: Inspection) -> Iterator[CheckFinding]:
    """A directory in the hostfile exists."""
    for node, facts in inspection.known:
        # A directory that hangs is reported as such.
        if isinstance(facts.cwd, Unknown) and facts.cwd not in {UNASKED, NO_ANSWER}:
            yield NO_WORKDIR.found(node.name, reason=facts.cwd.reason)


@launch_check
def check_paths(inspection: Inspection) -> Iterator[CheckFinding]:
    """The job's inputs exist at the same path on every node."""
    files = job_files(inspection.job, inspection.options.code)
    copied_or_not = may_be_paths(inspection.job) if inspection.options.code is not None else ()
    not_needed = {files.output, files.cache, *files.named, *copied_or_not} - set(files.needed)
    for node, facts in inspection.known:
        missing = [path.path for path in facts.paths if path.kind == "missing" and path.path not in not_needed]
        for path in missing:
            # Contents come with their directory; without the job's directory nothing in it can be checked.
            is_known = not isinstance(facts.cwd, Unknown) or path.startswith(("/", "~"))
            if is_known and set(map(PurePosixPath, missing)).isdisjoint(PurePosixPath(path).parents):
                yield _missing(inspection, node, facts, path)


@Check
def check_arguments(inspection: Inspection) -> Iterator[CheckFinding]:
    """Arguments of a script that are paths on the controller are paths on every node."""
    files, hosts = job_files(inspection.job, inspection.options.code), hosts_option(inspection.cluster.hosts)
    for node, facts in inspection.known:
        for path in files.named:
            if (there := _path(facts, path)) is not None and there.kind == "missing":
                yield ARGUMENT_MISSING.found(node.name, path=path, hosts=hosts)


@launch_check
def check_program(inspection: Inspection) -> Iterator[CheckFinding]:
    """The module or the program that a job starts is found on every node."""
    files = job_files(inspection.job, inspection.options.code)
    for node, facts in inspection.known:
        if files.module in or_empty(facts.absent_modules):
            python, cwd = or_none(facts.python), or_none(facts.cwd) or "~"
            yield MODULE_MISSING.found(node.name, module=files.module, python=python, cwd=cwd)
        if files.program is not None and files.program not in facts.tools:
            other = entries(facts.interactive).get(files.program)
            elsewhere = f"; an interactive shell finds {other}" if other else ""
            yield PROGRAM_MISSING.found(node.name, program=files.program, elsewhere=elsewhere)


def _missing(inspection: Inspection, node: Node, facts: NodeFacts, path: str) -> CheckFinding:
    here = inspection.controller_cwd
    is_relative = not path.startswith(("/", "~"))
    hosts = hosts_option(inspection.cluster.hosts)
    if path in inspection.absent_here:
        having = (name for name, its in inspection.facts.items() if (at := _path(its, path)) and at.kind != "missing")
        peer = next(having, None)
        if peer is not None:
            return PATH_OF_PEER.found(node.name, path=path, peer=peer, hosts=hosts)
        nearest = inspection.absent_here[path]
        return PATH_NOWHERE.found(node.name, path=path, near=f". Did you mean {nearest}?" if nearest else "")
    if is_relative and node.workdir is None and here is not None and facts.cwd != here:
        copying = {
            "ssh": shlex.join([*ssh_words(node, "ssh"), destination(node)]),
            "scp": shlex.join([*ssh_words(node, "scp"), "-rp"]),
            "destination": destination(node),
        }
        target = _quote(here)
        return PATH_ELSEWHERE.found(node.name, path=path, cwd=or_none(facts.cwd), here=here, target=target, **copying)
    return PATH_MISSING.found(node.name, path=path, hosts=hosts)


@launch_check
def check_hung_paths(inspection: Inspection) -> Iterator[CheckFinding]:
    """Every path of the job answers."""
    for node, facts in inspection.known:
        for hung in facts.hung_paths:
            mounted = hung.place not in {None, "/"}
            yield PATH_HANGS.found(
                node.name,
                path=hung.path,
                mount=f": {hung.device} ({hung.filesystem}), mounted at {hung.place}, hangs" if mounted else "",
                command=f"umount -fl {_quote(hung.place or '/')} && mount {_quote(hung.place or '/')}"
                if mounted
                else "cat /proc/mounts",
            )


@Check
def check_noexec(inspection: Inspection) -> Iterator[CheckFinding]:
    """What a job compiles for itself can be loaded."""
    for node, facts in inspection.known:
        env = node.env | inspection.options.environment.env
        # Values from the command line or hostfile differ from the node's session.
        noexec = entries(facts.noexec)
        names = [name for name in _ELSEWHERE if name in noexec and name not in env]
        if names:
            mounted = list(dict.fromkeys(noexec[name] for name in names))
            command = " ".join(f"--env {name}={_ELSEWHERE[name]}" for name in names)
            yield NOEXEC.found(
                node.name,
                places=listed(mounted, len(mounted)),
                are="is" if len(mounted) == 1 else "are",
                command=command,
            )


@Check
def check_output(inspection: Inspection) -> Iterator[CheckFinding]:
    """The job's output can be written on every node."""
    output = job_files(inspection.job).output
    for node, facts in inspection.known:
        path = _path(facts, output)
        if path is not None and (path.kind == "file" or not path.writable):
            user = or_none(facts.user)
            done = "created" if path.kind == "missing" else "written"
            reason = _IS_FILE if path.kind == "file" else f"cannot be {done} by {user or 'its user'}"
            full = _quote(_absolute(path.path, facts))
            yield OUTPUT_NOT_WRITABLE.found(node.name, path=path.path, what=reason, full=full, user=user or "USER")


@Check
def check_contents(inspection: Inspection) -> Iterator[CheckFinding]:
    """Files of the job are equal to those of the first node that read them."""
    readers = [(node.name, facts) for node, facts in inspection.known if facts.contents]
    if not readers or len(inspection.cluster.nodes) == 1:
        return
    for name, facts in readers:
        unread = [content for content in facts.contents if isinstance(content.digest, Unknown)]
        if unread:
            yield CONTENT_UNREAD.found(
                name,
                path=unread[0].path,
                reason=reason_of(unread[0].digest),
                more=_more([content.path for content in unread]),
                target=_quote(_absolute(unread[0].path, facts)),
            )
    (first, its), *others = readers
    expected = _digests(its)
    for name, facts in others:
        digests = _digests(facts)
        different = [path for path in expected if digests.get(path, expected[path])[0] != expected[path][0]]
        if different:
            (mine, size), (theirs, their_size) = digests[different[0]], expected[different[0]]
            yield CONTENT_DIFFERS.found(
                name,
                digest=mine[:_SHOWN_DIGITS],
                size=size,
                expected=theirs[:_SHOWN_DIGITS],
                expected_size=their_size,
                **_copying(different, first, inspection.cluster),
            )
        # A file that was not read may exist.
        complete = not any(isinstance(content.digest, Unknown) for content in facts.contents)
        absent = [path for path in expected if path not in digests and _has_above(path, facts)] if complete else []
        if absent:
            yield CONTENT_ABSENT.found(name, **_copying(absent, first, inspection.cluster))


@Check
def check_revisions(inspection: Inspection) -> Iterator[CheckFinding]:
    """Git checkouts of the job are at one revision."""
    revisions = {
        node.name: content.digest
        for node, facts in inspection.known
        for content in facts.contents
        if content.path == _REVISION and not isinstance(content.digest, Unknown) and inspection.options.code is None
    }
    for name, revision, peer, expected in disagreements(revisions):
        cwd = or_none(inspection.facts[name].cwd)
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
def check_shared(inspection: Inspection) -> Iterator[CheckFinding]:
    """Settings for shared file systems in the YAML are true, as far as the nodes know."""
    job, path = inspection.training, job_files(inspection.job).cache
    if job is None or path is None or len(inspection.facts) < 2:  # noqa: PLR2004 - to share
        return
    caches = _places(inspection, path)
    if len(caches) < len(inspection.facts):
        return
    if job.arguments.get("data_shared_file_system") is not True:
        option = set_options(job, data_shared_file_system=True)
        if option and len({place.device for place in caches}) == 1 and all(map(_is_network, caches)):
            yield CACHE_SHARED.found(None, path=path, device=caches[0].device, option=option)
        return
    # One node may serve the others from its disk, and a variable may have moved the cache.
    folder = job.arguments.get("dataset_dir")
    suspects = [*caches, *(_places(inspection, folder) if isinstance(folder, str) else [])]
    if not any(map(_is_network, suspects)):
        option = set_options(job, data_shared_file_system=False)
        yield CACHE_NOT_SHARED.found(None, path=path, filesystem=caches[0].filesystem, option=option)


def _places(inspection: Inspection, path: str) -> list[PathFact]:
    places = [_path(facts, path) for _, facts in inspection.known]
    return [place for place in places if place is not None and place.filesystem is not None]


def _is_network(place: PathFact) -> bool:
    return is_network(place.filesystem)


def is_network(filesystem: str | None) -> bool:
    """Whether a file system type, as in the kernel, can be shared by several machines."""
    kind = filesystem or ""
    return kind in _NETWORK_FILESYSTEMS or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE)


def _digests(facts: NodeFacts) -> dict[str, tuple[str, int | None]]:
    return {
        content.path: (content.digest, content.size_bytes)
        for content in facts.contents
        if not isinstance(content.digest, Unknown) and content.path != _REVISION
    }


def _has_above(path: str, facts: NodeFacts) -> bool:
    folders = [place.path for place in facts.paths if place.kind == "directory"]
    return any(path != folder and path.startswith(folder.rstrip("/") + "/") for folder in folders)


def _copying(paths: list[str], peer: str, cluster: Cluster) -> Mapping[str, str]:
    """What tells a person to copy these from a peer; of many, the directories that they are in."""
    shown = paths if len(paths) <= _SHOWN_FILES else dict.fromkeys(str(PurePosixPath(path).parent) for path in paths)
    hosts = hosts_option(cluster.hosts)
    return {"path": paths[0], "more": _more(paths), "peer": peer, "hosts": hosts, "paths": shlex.join(shown)}


def _more(paths: list[str]) -> str:
    return f"; the same applies to {listed(paths[1:], _SHOWN_FILES)}" if paths[1:] else ""


def _path(facts: NodeFacts, path: str | None) -> PathFact | None:
    known = (entry for entry in facts.paths if not isinstance(entry.kind, Unknown))
    return next((entry for entry in known if entry.path == path), None)


def _absolute(path: str, facts: NodeFacts) -> str:
    """A path on the node; relative ones start at the job's directory, and `~` stays."""
    cwd = or_none(facts.cwd)
    return path if path.startswith(("/", "~")) or cwd is None else f"{cwd.rstrip('/')}/{path}"


def _quote(path: str) -> str:
    return f"~/{shlex.quote(path[2:])}" if path.startswith("~/") and path != "~/" else shlex.quote(path)
