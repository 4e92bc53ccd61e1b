"""CodeTree: the files of a directory that travel to the nodes with a job: which they are, and what each holds.

Reads the directory, and asks git what it ignores. Sends nothing.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

import msgspec

from multinode.errors import UsageError, printable_line
from multinode.findings.finding import Finding
from multinode.findings.rule import Rule, RuleGroup
from multinode.node.manifest import BLOCK_BYTES, is_staging, stays_below
from multinode.records.plan import CodeCopy
from multinode.units import format_count, format_list, format_size

MOST_BYTES = 256 << 20
MOST_FILES = 50_000
_OPTION = "--copy-code"
_GIT_S = 60.0
_SUBMODULE = "160000"
_LFS_BEGIN, _LFS_BYTES = b"version https://git-lfs.github.com/spec/", 1024
_KEY = re.compile(rb"\A\s*-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY")
_LARGEST = 3
# What no job reads and a directory without git has: other tools' own, environments, and what trainings leave.
_NOT_CODE = frozenset(
    {".git", ".hg", ".svn", ".venv", "venv", "node_modules", "__pycache__", ".ipynb_checkpoints", ".tox", ".nox"}
    | {".mypy_cache", ".pytest_cache", ".ruff_cache", ".cache", ".idea", ".vscode", ".DS_Store", "wandb", "mlruns"}
)
_LEFTOVER = re.compile(r".*\.(?:pyc|pyo|egg-info)|checkpoint-\d+")
_SECRET_FOLDERS = frozenset({".ssh", ".aws", ".azure", ".gnupg", ".kube", ".docker"})
_SECRET = re.compile(
    r"\.env(?:\..+)?|.+\.env|\.envrc|id_(?:rsa|dsa|ecdsa|ed25519)(?:_sk)?|[._]netrc|\.pgpass|\.npmrc|\.pypirc"
    r"|\.git-credentials|\.htpasswd|\.vault-token|\.?kubeconfig|(?:.*[._-])?credentials(?:\.(?:json|ya?ml|toml|ini))?"
    r"|(?:.*[._-])?secrets?(?:\.(?:json|ya?ml|toml|ini|txt))?|client_secret.*\.json|service[_-]?account.*\.json"
    r"|(?:\.|hf[._-]?)?token(?:\.txt)?|.+\.(?:pem|key|p12|pfx|jks|keystore|kdbx|ppk|tfvars)"
)
_NO_SECRET = re.compile(r".*\.(?:example|sample|template|dist)")

LEFT_OUT = RuleGroup("Files that --copy-code leaves out, and Git LFS pointers")
_NOT_UTF8 = LEFT_OUT.rule(
    "not-utf8",
    about="a file name that is not UTF-8",
    message="{path} is left out: its name is not UTF-8",
    figures=("path",),
)
_UNFINISHED = LEFT_OUT.rule(
    "unfinished-copy",
    about="a file of an unfinished copy",
    message="{path} is left out: it belongs to an unfinished copy made by multinode",
    figures=("path",),
)
_SECRET_NAME = LEFT_OUT.rule(
    "secret-name",
    about="a file whose name suggests a secret",
    message="{path} is left out: its name suggests that it holds a secret",
    figures=("path",),
)
_PRIVATE_KEY = LEFT_OUT.rule(
    "private-key",
    about="a private key",
    message="{path} is left out: it holds a private key",
    figures=("path",),
)
_OUTSIDE = LEFT_OUT.rule(
    "outside",
    about="a symbolic link that points outside the directory",
    message="{path} is left out: it points outside the directory, to {target}",
    figures=("path", "target"),
)
_NOT_REGULAR = LEFT_OUT.rule(
    "not-regular",
    about="a device, a socket or a named pipe",
    message="{path} is left out: it is not a regular file",
    figures=("path",),
)
_NO_CHECKOUT = LEFT_OUT.rule(
    "submodule",
    about="a submodule without its files",
    message="{path} is left out: it is a submodule that is not checked out",
    hint="git submodule update --init",
    figures=("path",),
)
_LFS_POINTER = LEFT_OUT.rule(
    "lfs-pointer",
    about="a Git LFS pointer in place of a file",
    message="{path} is a Git LFS pointer; it is copied without the content of the file",
    hint="to get the content: git lfs pull",
    figures=("path",),
)


class CodeFile(msgspec.Struct, frozen=True, kw_only=True):
    """One regular file; `path` is relative to the tree, `digest` its SHA-256 in hex.

    `blocks` are those of its blocks (`BLOCK_BYTES`), if it has more than one.
    """

    path: str
    digest: str
    size_bytes: int
    is_executable: bool = False
    blocks: tuple[str, ...] = ()


class CodeTree(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a directory at the time when they were read.

    Attributes:
        source: absolute path of the directory.
        cwd: directory in the tree in which the job runs.
        links: symbolic links with their targets, relative to the directory of the link.
        left_out: files and directories that are not copied, except caches.
        notes: which of these git does not ignore, and which files are copied although they are only placeholders.
        run_id: the run whose copy is used, for all of its attempts; None for the run that is launched.
    """

    source: str
    cwd: str = "."
    files: tuple[CodeFile, ...] = ()
    links: dict[str, str] = {}
    left_out: tuple[str, ...] = ()
    notes: tuple[Finding, ...] = ()
    run_id: str | None = None

    @property
    def size_bytes(self) -> int:
        """Of all files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def digest(self) -> str:
        """SHA-256 of names, kinds and content."""
        digests = [[file.path, file.digest, file.is_executable] for file in self.files]
        return hashlib.sha256(msgspec.json.encode([digests, sorted(self.links.items())])).hexdigest()

    @property
    def manifest(self) -> bytes:
        """The tree as JSON of a copy's manifest (multinode/node/manifest.py), its files in their order.

        Times are left out: equal trees have equal manifests.
        """
        names = (*(file.path for file in self.files), *self.links)
        folders = {str(folder) for name in names for folder in PurePosixPath(name).parents} - {"."}
        entries = [
            # A directory comes before those in it.
            *([0, "d", folder, 0o700] for folder in sorted(folders)),
            *(
                [0, "f", file.path, file.size_bytes, 0o700 if file.is_executable else 0o600, None]
                for file in self.files
            ),
            *([0, "l", name, target] for name, target in self.links.items()),
        ]
        return msgspec.json.encode({"roots": [0o700], "entries": entries})

    @property
    def block_digests(self) -> bytes:
        """SHA-256 of all blocks, in the manifest's order."""
        return bytes.fromhex("".join("".join(file.blocks or (file.digest,)) for file in self.files if file.size_bytes))

    def holds(self, path: str) -> bool:
        """Whether a path, relative to where the job runs, names a file, or a directory that is copied whole."""
        if path.startswith(("/", "~")):
            return False
        name = os.path.normpath(f"{self.cwd}/{path}")
        below = "" if name == "." else f"{name}/"
        names = (*(file.path for file in self.files), *self.links)
        is_there = any(path == name or path.startswith(below) for path in names)
        return is_there and not any(path.startswith(below) for path in self.left_out)

    def place(self, run_id: str, home: str) -> str:
        """Where the job of a run starts on a node. Attempts share it, with what is written there."""
        return os.path.normpath(f"{home}/.multinode/code/{self.run_id or run_id}/tree/{self.cwd}")

    def copy(self) -> CodeCopy:
        """As a plan names it."""
        count = len(self.files) + len(self.links)
        return CodeCopy(source=self.source, digest=self.digest, files=count, size_bytes=self.size_bytes)


def read_code(directory: Path, cwd: Path, without: Collection[Path] = ()) -> CodeTree:
    """The files of a directory that git does not ignore; without git, all but what no job reads. Secrets stay here.

    The job runs at the place of `cwd` in the tree, or at its top; `without` are directories that are left out.

    Raises:
        UsageError: there is no such directory, git cannot be asked, or there are no files, or too many or too large.
    """
    if not directory.is_dir():
        hint = f"use {_OPTION} . {directory}" if directory.exists() else f"{_OPTION} . copies the working directory"
        raise UsageError(f"{_OPTION} {directory}: this is not a directory", hint=hint)
    root, notes = directory.resolve(), list[Finding]()
    listed = _list_by_git(root, notes)
    names = _without(root, sorted(set(_walk(root) if listed is None else listed)), without)
    links, sizes = _look_at(root, names, notes)
    _require_size(root, sizes, by_git=listed is not None)
    files = tuple(file for name in sizes if (file := _read_file(root, name, notes)) is not None)
    copied = {*links, *(file.path for file in files)}
    left_out = [name for name in names if name not in copied and os.path.lexists(root / name)]
    left_out += _list_ignored(root) if listed is not None else []
    if not files:
        raise UsageError(
            f"{_OPTION} {directory}: it has no files to copy", hint="check whether git ignores it: git status"
        )
    place = cwd.resolve()
    inside = place.relative_to(root).as_posix() if place.is_relative_to(root) else "."
    return CodeTree(
        source=str(root),
        cwd=inside,
        files=files,
        links=links,
        left_out=tuple(left_out),
        notes=tuple(notes),
    )


def is_secret_file(name: str) -> bool:
    """Whether a file of this name likely holds a secret: `.env`, a private key, what a login keeps."""
    *folders, base = PurePosixPath(name.lower()).parts
    secret = _SECRET.fullmatch(base) is not None and _NO_SECRET.fullmatch(base) is None
    return secret or not _SECRET_FOLDERS.isdisjoint(folders)


def _list_by_git(root: Path, notes: list[Finding]) -> list[str] | None:
    """Names that git tracks or would; None where the directory is in no checkout."""
    try:
        answer = _git(root, "rev-parse", "--is-inside-work-tree")
        if answer.returncode == 0 and answer.stdout.strip() == b"true":
            return list(_list_checkout(root, "", notes))
        reason = answer.stderr.decode(errors="replace").strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    if any((folder / ".git").exists() for folder in (root, *root.parents)):
        raise UsageError(
            f"{_OPTION} {root}: git cannot tell which files it ignores: {reason}", hint=f"git -C {root} status"
        )
    return None


def _list_checkout(root: Path, below: str, notes: list[Finding]) -> Iterator[str]:
    """Of a checkout and of those inside it, each name with `below` before it."""
    nested = []
    for entry in _git_list(root, "--cached", "--stage"):
        about, _, name = entry.partition("\t")
        if about.startswith(_SUBMODULE):
            nested.append(name)
        else:
            yield below + name
    for name in _git_list(root, "--others", "--exclude-standard"):
        if name.endswith("/"):
            nested.append(name.rstrip("/"))
        else:
            yield below + name
    for name in nested:
        if (root / name / ".git").exists():
            yield from _list_checkout(root / name, f"{below}{name}/", notes)
        else:
            notes.append(_found(_NO_CHECKOUT, below + name))


def _found(rule: Rule, path: str, **more: str) -> Finding:
    """A finding about a file; its name may hold anything."""
    return rule.found(None, **{name: printable_line(text) for name, text in {"path": path, **more}.items()})


def _list_ignored(root: Path) -> list[str]:
    """Of a checkout, what it ignores; a directory of which it ignores all stands for what is in it."""
    which = ("--others", "--ignored", "--exclude-standard", "--directory")
    names = [name.rstrip("/") for name in _git_list(root, *which)]
    return [name for name in names if not _is_leftover(PurePosixPath(name).name)]


def _git_list(root: Path, *which: str) -> list[str]:
    listed = _git(root, "ls-files", "-z", *which)
    if listed.returncode != 0:
        reason = listed.stderr.decode(errors="replace").strip()
        raise UsageError(f"{_OPTION} {root}: git cannot list its files: {reason}", hint=f"git -C {root} status")
    return [os.fsdecode(entry) for entry in listed.stdout.split(b"\0") if entry]


def _git(root: Path, *words: str) -> subprocess.CompletedProcess[bytes]:
    # Of a hook, git's variables name another repository; and a monitor is a program that the repository names.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(
        ["git", "-C", str(root), "-c", "core.fsmonitor=false", *words],
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=_GIT_S,
        check=False,
    )


def _walk(root: Path) -> Iterator[str]:
    """Without git: every file and link, but for what no job reads."""
    for folder, folders, names in os.walk(root):
        kept = [name for name in folders if not _is_leftover(name) and not Path(folder, name, "pyvenv.cfg").exists()]
        linked = [name for name in kept if Path(folder, name).is_symlink()]
        folders[:] = sorted(set(kept) - set(linked))
        for name in (*names, *linked):
            if not _is_leftover(name):
                yield os.path.relpath(Path(folder, name), root)


def _is_leftover(name: str) -> bool:
    return name in _NOT_CODE or _LEFTOVER.fullmatch(name) is not None


def _without(root: Path, names: list[str], without: Collection[Path]) -> list[str]:
    places = [os.path.relpath(path.resolve(), root) for path in without if path.resolve().is_relative_to(root)]
    return [name for name in names if not any(name == place or name.startswith(f"{place}/") for place in places)]


def _look_at(root: Path, names: list[str], notes: list[Finding]) -> tuple[dict[str, str], dict[str, int]]:
    """The links, and the size of each file."""
    links: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for name in names:
        path = root / name
        try:
            status = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            # Git has it, and it was removed.
            continue
        if any("\udc80" <= char <= "\udcff" for char in name):
            notes.append(_found(_NOT_UTF8, repr(name)))
        elif any(map(is_staging, PurePosixPath(name).parts)):
            notes.append(_found(_UNFINISHED, name))
        elif is_secret_file(name):
            notes.append(_found(_SECRET_NAME, name))
        elif stat.S_ISREG(status.st_mode):
            sizes[name] = status.st_size
        elif stat.S_ISLNK(status.st_mode):
            real = path.resolve()
            if real.is_relative_to(root):
                target = str(path.readlink())
                is_below = stays_below(target, name.count("/"))
                links[name] = target if is_below else os.path.relpath(real, path.parent.resolve())
            else:
                notes.append(_found(_OUTSIDE, name, target=str(real)))
        else:
            notes.append(_found(_NOT_REGULAR, name))
    # A directory that git tracks may have become a link.
    linked = {name for name in sizes if not {str(parent) for parent in PurePosixPath(name).parents}.isdisjoint(links)}
    return links, {name: size for name, size in sizes.items() if name not in linked}


def _require_size(root: Path, sizes: dict[str, int], *, by_git: bool) -> None:
    """Refuse a directory that has more than code."""
    total = sum(sizes.values())
    if total <= MOST_BYTES and len(sizes) <= MOST_FILES:
        return
    largest = sorted(sizes, key=lambda name: -sizes[name])[:_LARGEST]
    how = "; add them to .gitignore" if by_git else "; to ignore files, use git init and a .gitignore"
    raise UsageError(
        f"{_OPTION} {root}: {format_count(len(sizes), 'file')}, {format_size(total)}, exceed the limit of "
        f"{MOST_FILES:,} files and {format_size(MOST_BYTES)}",
        hint=f"the largest are {format_list([f'{name} ({format_size(sizes[name])})' for name in largest])}{how}",
    )


def _read_file(root: Path, name: str, notes: list[Finding]) -> CodeFile | None:
    """A file with its digest; None of one that is a secret by what it holds."""
    digest, size, blocks = hashlib.sha256(), 0, list[str]()
    try:
        with (root / name).open("rb") as file:
            status = os.fstat(file.fileno())
            while data := file.read(BLOCK_BYTES):
                if not size and _KEY.match(data):
                    notes.append(_found(_PRIVATE_KEY, name))
                    return None
                if not size and status.st_size < _LFS_BYTES and data.startswith(_LFS_BEGIN):
                    notes.append(_found(_LFS_POINTER, name))
                if blocks or len(data) == BLOCK_BYTES:
                    blocks.append(hashlib.sha256(data).hexdigest())
                digest.update(data)
                size += len(data)
    except OSError as error:
        raise UsageError(f"{_OPTION}: {root / name} cannot be read: {error.strerror}") from error
    is_executable = bool(status.st_mode & stat.S_IXUSR)
    several = tuple(blocks) if size > BLOCK_BYTES else ()
    return CodeFile(path=name, digest=digest.hexdigest(), size_bytes=size, is_executable=is_executable, blocks=several)
