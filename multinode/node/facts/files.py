"""The job's files on this node: whether they exist, can be written, and on which file system; digests to compare.

Small files are hashed whole, large ones by their size and both ends.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any, Optional

from ..channel import Record
from ..files import Mount, list_names, read_object
from .aside import READ_S, Aside
from .unknown import Unknown

_MOST_FILES = 200
_WHOLE_BYTES = 16 << 20
_END_BYTES = 1 << 20
# Weights are hashed by size and ends, too: hashing them whole would take longer than everything else.
_WEIGHTS = (".safetensors", ".bin")
_MOST_JSON_BYTES = 1 << 18
_MOST_INFO_BYTES = 4 << 20
_MOST_REFS_BYTES = 4 << 20
_MOST_CHARACTERS = 1000
_MOST_DEPTH = 64
_MOST_NUMBER = 1 << 53

_INFO = "dataset_info.json"
# Files of a model or an adapter; logs and optimizer states beside them may differ between nodes.
_MODEL_FILES = re.compile(
    r"config\.json|adapter_config\.json|preprocessor_config\.json|.*\.index\.json|tokenizer.*|vocab\.(json|txt)"
    r"|merges\.txt|special_tokens_map\.json|added_tokens\.json|chat_template\..*|.*\.safetensors"
    r"|(pytorch|adapter)_model.*\.bin"
)
# Texts of a config.json that describe the model's size; an unknown text might be a secret.
_MODEL_TEXTS = frozenset({"model_type", "dtype", "torch_dtype", "quant_method"})
_REVISION = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_GIT = ".git"


class ContentReader:
    """Reads digests in the background, beside everything else that a probe does.

    Args:
        paths: paths of the job; relative ones start at `cwd`.
        datasets: names in dataset_info.json whose files are read.
        cwd: the job's directory, whose git revision is read as well.
        deadline_s: seconds from now for everything.
    """

    def __init__(self, paths: list[str], datasets: list[str], cwd: str, deadline_s: float = READ_S) -> None:
        self._paths = paths
        self._datasets = datasets
        self._cwd = cwd
        self._late = f"not read within {deadline_s:g} s"
        self._deadline = time.monotonic() + deadline_s
        self._reading = Aside(self._read, deadline_s) if paths else None

    def facts(self) -> list[Record]:
        """Facts that were read in time; of the others the digest is unknown."""
        facts: list[Record] = []
        # Requested paths that have not been read completely.
        waiting = list(self._paths)
        for value in self._reading.values(self._deadline) if self._reading is not None else ():
            if isinstance(value, str):
                waiting.remove(value)
            else:
                facts.append(value)
        return [*facts, *({"path": path[:_MOST_CHARACTERS], "digest": Unknown(self._late)} for path in waiting)]

    def _read(self) -> Iterator[Any]:
        """Yield facts, and each path after its last fact."""
        revision = read_revision(self._cwd)
        count = 0
        if revision is not None:
            count += 1
            yield {"path": _GIT, "digest": revision}
        for path in self._paths:
            for name in list_files(path, self._cwd, self._datasets):
                if time.monotonic() > self._deadline:
                    return
                if count >= _MOST_FILES:
                    yield {"path": path, "digest": Unknown(f"more than {_MOST_FILES} files")}
                    break
                count += 1
                yield _fact(name, self._cwd, self._datasets)
            yield path


def look_at(path: str, cwd: str, mounts: list[Mount]) -> Record:
    """Facts of one path; a relative path starts at `cwd`."""
    full = _full(path, cwd)
    kind = "directory" if os.path.isdir(full) else "file" if os.path.exists(full) else "missing"
    # The nearest existing parent decides whether a missing path can be created, and on which disk.
    full = find_existing(full)
    mount = find_mount(os.path.realpath(full), mounts)
    return {
        "path": path,
        "kind": kind,
        "writable": _is_writable(full) and (kind != "missing" or os.path.isdir(full)),
        "filesystem": mount.filesystem[:_MOST_CHARACTERS] if mount else None,
        "device": mount.device[:_MOST_CHARACTERS] if mount else None,
    }


def find_noexec(env: Mapping[str, str]) -> dict[str, str]:
    """Directories for compiled code that are mounted noexec, by the variables that set them."""
    places = {
        "TMPDIR": env.get("TMPDIR") or "/tmp",  # noqa: S108 - what the job takes
        "TORCHINDUCTOR_CACHE_DIR": env.get("TORCHINDUCTOR_CACHE_DIR"),
        "TRITON_CACHE_DIR": env.get("TRITON_CACHE_DIR") or "~/.triton",
        "TORCH_EXTENSIONS_DIR": env.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions",
    }
    full = {name: os.path.expanduser(place) for name, place in places.items() if place}
    return {name: place for name, place in full.items() if os.statvfs(find_existing(place)).f_flag & os.ST_NOEXEC}


def find_existing(full: str) -> str:
    """The path itself, or the nearest directory above it that exists."""
    while not os.path.exists(full):
        full = os.path.dirname(full)
    return full


def find_mount(full: str, mounts: list[Mount]) -> Optional[Mount]:
    """The mount that holds an absolute path without links: the deepest one, and the last one at a mount point."""
    innermost = None
    for mount in mounts:
        inside = full == mount.place or full.startswith(mount.place.rstrip("/") + "/")
        if inside and (innermost is None or len(mount.place) >= len(innermost.place)):
            innermost = mount
    return innermost


def list_files(path: str, cwd: str, datasets: list[str]) -> Iterator[str]:
    """Files of a path to compare, each name starting with the path; none if the path does not exist.

    For a directory they are a model's files, dataset_info.json, and the files of the datasets that are named there.
    """
    full = _full(path, cwd)
    if os.path.isfile(full):
        yield path
        return
    names = list_names(full)
    for name in names:
        if _MODEL_FILES.fullmatch(name) and os.path.isfile(os.path.join(full, name)):
            yield os.path.join(path, name)
    if _INFO in names:
        yield os.path.join(path, _INFO)
        yield from _dataset_files(path, cwd, datasets)


def digest_file(full: str) -> tuple[str, int]:
    """Digest and size in bytes; for a large file or weights, the digest covers the size and the first and last MiB."""
    import hashlib

    digest = hashlib.sha256()
    with open(full, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= 2 * _END_BYTES or (size <= _WHOLE_BYTES and not full.endswith(_WEIGHTS)):
            digest.update(file.read(_WHOLE_BYTES))
        else:
            digest.update(b"%d " % size + file.read(_END_BYTES))
            file.seek(size - _END_BYTES)
            digest.update(file.read(_END_BYTES))
    return digest.hexdigest(), size


def read_revision(cwd: str) -> Optional[str]:
    """The commit of the git checkout around a directory; None if there is none, or it is unknown."""
    try:
        folder = _find_git(os.path.realpath(cwd))
        return None if folder is None else _resolve_head(folder)
    except (OSError, ValueError):
        return None


def read_model(path: str, cwd: str) -> Record:
    """Numbers in a model directory's config.json, and the texts that describe the model's size."""
    config = read_object(os.path.join(_full(path, cwd), "config.json"), _MOST_JSON_BYTES, "config.json")
    return {key: value for key, value in config.items() if _is_harmless(key, value)}


def _is_writable(full: str) -> bool:
    # Creating a file in a directory needs permission to search it, too.
    return os.access(full, os.W_OK | os.X_OK if os.path.isdir(full) else os.W_OK)


def _full(path: str, cwd: str) -> str:
    return os.path.join(cwd, os.path.expanduser(path))


def _fact(name: str, cwd: str, datasets: list[str]) -> Record:
    shown, full = name[:_MOST_CHARACTERS], _full(name, cwd)
    try:
        digest, size = digest_file(full)
        if datasets and os.path.basename(name) == _INFO:
            digest = _digest_entries(full, datasets) or digest
    except OSError as error:
        return {"path": shown, "digest": Unknown(error.strerror or str(error))}
    return {"path": shown, "digest": digest, "size_bytes": size}


def _digest_entries(full: str, datasets: list[str]) -> Optional[str]:
    """Digest of the job's entries only: entries for other jobs may differ between nodes."""
    import hashlib

    info = _read_info(full)
    used = [info.get(dataset) for dataset in datasets]
    return hashlib.sha256(json.dumps(used, sort_keys=True).encode()).hexdigest() if info else None


def _read_info(full: str) -> Record:
    try:
        return read_object(full, _MOST_INFO_BYTES)
    except (OSError, ValueError):
        return {}


def _dataset_files(path: str, cwd: str, datasets: list[str]) -> Iterator[str]:
    info = _read_info(os.path.join(_full(path, cwd), _INFO))
    for dataset in datasets:
        entry = info.get(dataset)
        name = entry.get("file_name") if isinstance(entry, dict) else None
        # A zero byte in a path raises ValueError instead of OSError.
        if not isinstance(name, str) or "\0" in name:
            continue
        place = os.path.join(path, name)
        full = _full(place, cwd)
        if os.path.isfile(full):
            yield place
        elif os.path.isdir(full):
            yield from _files_in(place, full)


def _files_in(place: str, full: str) -> Iterator[str]:
    return (os.path.join(place, name) for name in list_names(full) if os.path.isfile(os.path.join(full, name)))


def _find_git(folder: str) -> Optional[str]:
    """The git directory of a checkout; the `.git` of a worktree is a file with its path."""
    for _ in range(_MOST_DEPTH):
        place = os.path.join(folder, _GIT)
        if os.path.isdir(place):
            return place
        if os.path.isfile(place):
            key, _, named = _read_text(place).partition(":")
            return os.path.join(folder, named.strip()) if key == "gitdir" else None
        if folder == os.path.dirname(folder):
            return None
        folder = os.path.dirname(folder)
    return None


def _resolve_head(folder: str) -> Optional[str]:
    head = _read_text(os.path.join(folder, "HEAD"))
    if not head.startswith("ref:"):
        return head if _REVISION.fullmatch(head) else None
    name = head[len("ref:") :].strip()
    common = os.path.join(folder, "commondir")
    shared = os.path.join(folder, _read_text(common)) if os.path.isfile(common) else folder
    for place in (folder, shared):
        if os.path.isfile(os.path.join(place, name)):
            text = _read_text(os.path.join(place, name))
            return text if _REVISION.fullmatch(text) else None
    for line in _read_text(os.path.join(shared, "packed-refs")).splitlines():
        revision, _, packed = line.partition(" ")
        if packed == name and _REVISION.fullmatch(revision):
            return revision
    return None


def _read_text(path: str) -> str:
    with open(path, "rb") as file:
        return file.read(_MOST_REFS_BYTES).decode(errors="replace").strip()


def _is_harmless(key: str, value: Any) -> bool:
    # Only numbers that every JSON reader accepts: no NaN, and no integer beyond a double's precision.
    if isinstance(value, (int, float)):
        return abs(value) < _MOST_NUMBER
    return value is None or (key in _MODEL_TEXTS and isinstance(value, str) and len(value) < _MOST_CHARACTERS)
