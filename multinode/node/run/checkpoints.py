"""The verb `checkpoints`: which files each checkpoint has on this node, and which are truncated or unreadable.

The controller decides which checkpoints are complete, since several nodes may hold parts of one. Only the framing of
tensor files is checked: reading a whole optimizer state would take too long.
"""

from __future__ import annotations

import json
import os
import re
import struct
import zipfile
from typing import Optional

from ..channel import Channel, Record
from ..facts import files
from ..files import list_names, read_mounts, read_object

# If there are more, only the newest are checked.
_MOST_CHECKPOINTS = 50
_MOST_FILES = 4096
_NAME = re.compile(r"checkpoint-(\d{1,15})")
_STATE = "trainer_state.json"
_INDEX = ".index.json"
_SAFETENSORS = ".safetensors"
_TORCH = (".pt", ".pth", ".bin")
# Enough for the history of a long training; the limit of safetensors itself for a header.
_MOST_STATE_BYTES = 64 << 20
_MOST_HEADER_BYTES = 100_000_000
_MOST_STEP = 1 << 53
# Length of the header of a safetensors file.
_LENGTH = struct.Struct("<Q")


def run(request: Record, channel: Channel) -> None:
    """The verb `checkpoints`: emits one record with the checkpoints below `directory`, newest first."""
    folder = os.path.join(os.path.expanduser(request["cwd"] or "~"), os.path.expanduser(request["directory"]))
    numbered = [(int(match[1]), name) for name in list_names(folder) for match in [_NAME.fullmatch(name)] if match]
    names = [name for _, name in sorted(numbered, reverse=True)[:_MOST_CHECKPOINTS]]
    checkpoints = [{"name": name, **look_at(os.path.join(folder, name))} for name in names]
    place = files.look_at(folder, "/", read_mounts())
    lies = {name: place[name] for name in ("filesystem", "device")}
    channel.emit({"kind": "checkpoints", "checkpoints": checkpoints, **lies})


def look_at(folder: str) -> Record:
    """Describe one checkpoint.

    Returns:
        `files`: the problem of each file that a resume reads, by name, None if it has none; `step` and `max_steps` of
        trainer_state.json; `saved_ns`: when that file was written; `shards`: file names in the indexes of the weights.
    """
    problems: dict[str, Optional[str]] = {}
    step: Optional[int] = None
    max_steps: Optional[int] = None
    shards: list[str] = []
    for name in list_names(folder)[:_MOST_FILES]:
        path = os.path.join(folder, name)
        try:
            if name == _STATE:
                step, max_steps = _read_steps(path)
            elif name.endswith(_INDEX):
                shards += _read_shards(path)
            elif name.endswith(_SAFETENSORS):
                _check_safetensors(path)
            elif name.endswith(_TORCH):
                _check_archive(path)
            else:
                continue
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            problems[name] = (getattr(error, "strerror", None) or str(error))[:200]
        else:
            problems[name] = None
    try:
        saved_ns = os.stat(os.path.join(folder, _STATE)).st_mtime_ns
    except OSError:
        saved_ns = None
    shards = sorted(set(shards))[:_MOST_FILES]
    return {"files": problems, "step": step, "max_steps": max_steps, "saved_ns": saved_ns, "shards": shards}


def _read_steps(path: str) -> tuple[int, Optional[int]]:
    state = read_object(path, _MOST_STATE_BYTES)
    step, max_steps = (_as_step(state.get(name)) for name in ("global_step", "max_steps"))
    if step is None:
        raise ValueError("it has no global_step")
    return step, max_steps or None


def _as_step(value: object) -> Optional[int]:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_STEP:
        return value
    return None


def _read_shards(path: str) -> list[str]:
    named = read_object(path, _MOST_STATE_BYTES).get("weight_map")
    if not isinstance(named, dict) or not named or not all(isinstance(name, str) for name in named.values()):
        raise ValueError("it has no weight_map")
    return list(named.values())


def _check_safetensors(path: str) -> None:
    """Check the size of a file: 8 bytes with the length of the header, the header in JSON, then the tensors.

    https://github.com/huggingface/safetensors#format
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        begin = file.read(_LENGTH.size)
        if len(begin) < _LENGTH.size:
            raise ValueError("it is empty" if not begin else "it is truncated")
        (length,) = _LENGTH.unpack(begin)
        if length > min(_MOST_HEADER_BYTES, size - _LENGTH.size):
            raise ValueError("it is truncated, or not a safetensors file")
        try:
            header = json.loads(file.read(length))
            ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
            end = _LENGTH.size + length + max(ends, default=0)
        except (ValueError, RecursionError, AttributeError, KeyError, IndexError, TypeError):
            raise ValueError("cannot read its header") from None
    if end != size:
        raise ValueError(f"it has {size} of {end} bytes")


def _check_archive(path: str) -> None:
    """Check a file of torch.save: a zip file, whose directory is at its end and so missing if it is truncated."""
    if os.path.getsize(path) == 0:
        raise ValueError("it is empty")
    with zipfile.ZipFile(path) as archive:
        if not archive.namelist():
            raise ValueError("it contains no data")
