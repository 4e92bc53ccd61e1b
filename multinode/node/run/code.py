"""The trees of `--copy-code` on this node, with the store beside them: which are used, and what may go."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from typing import Optional

from ..channel import Record

TREE = "tree"
MANIFEST_NAME = "files.json"

_STORE = ".store"
# A younger tree may still be under construction, or about to be used by a run.
_YOUNG_S = 3600.0


def code_root() -> str:
    """The directory of the trees of all runs."""
    return os.path.join(os.path.expanduser("~"), ".multinode", "code")


def store_folder() -> str:
    """The directory of the blocks that trees were built from."""
    return os.path.join(code_root(), _STORE)


def clean_code(run_ids: Optional[list[str]], before_s: float) -> Record:
    """Remove trees that no run uses: the trees of some runs, or all old trees and old content of the store.

    A tree in which a job has written files is kept; `__pycache__` does not count.

    Args:
        run_ids: the runs; None removes all old trees, and cleans the store.
        before_s: wall clock; younger trees and contents are kept if `run_ids` is None.

    Returns:
        `code_bytes`, the bytes that were removed, and `code_kept`, the trees in which a job has written files.
    """
    runs = _names(os.path.join(os.path.dirname(code_root()), "runs"))
    freed, kept = 0, []
    young_s = min(before_s, time.time() - _YOUNG_S)
    for name in _names(code_root()):
        place = os.path.join(code_root(), name)
        if name == _STORE:
            freed += forget(before_s) if run_ids is None else 0
        elif not (name in run_ids if run_ids is not None else _modified_s(place) < young_s) or _is_used(name, runs):
            continue
        elif _has_written(place):
            kept.append(os.path.join(place, TREE))
        else:
            freed += _remove(place)
    return {"code_bytes": freed, "code_kept": kept}


def _is_used(name: str, runs: list[str]) -> bool:
    """Whether a run that still has a directory is the run of this tree, or an attempt of it."""
    return any(run.rpartition(".")[0] == name or run.startswith(f"{name}-") for run in runs)


def forget(before_s: float) -> int:
    """Remove content from the store that has not been used since `before_s`; returns the bytes removed."""
    store, freed = store_folder(), 0
    for name in _names(store):
        path = os.path.join(store, name)
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            if status.st_mtime < before_s:
                os.unlink(path)
                freed += status.st_size
    return freed


def read_tree_manifest(place: str) -> Optional[Record]:
    """What is known of a run's tree: its `digest`, and the `paths` that were copied; None if it is not complete."""
    try:
        with open(os.path.join(place, MANIFEST_NAME), "rb") as file:
            manifest: Record = json.loads(file.read())
    except (OSError, ValueError):
        return None
    return manifest


def _has_written(place: str) -> bool:
    """Whether a tree has files that were not copied there; False for a tree that was never finished."""
    manifest, tree = read_tree_manifest(place), os.path.join(place, TREE)
    if manifest is None:
        return False
    copied = set(manifest["paths"])
    for folder, folders, names in os.walk(tree):
        folders[:] = [name for name in folders if name != "__pycache__"]
        if any(os.path.relpath(os.path.join(folder, name), tree) not in copied for name in names):
            return True
    return False


def _remove(place: str) -> int:
    size = 0
    for folder, _, names in os.walk(place):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(folder, name)).st_size
    shutil.rmtree(place, ignore_errors=True)
    return size


def _modified_s(place: str) -> float:
    try:
        return os.lstat(place).st_mtime
    except OSError:
        # Another node that shares this home directory has removed it.
        return time.time()


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
