"""The checkpoints below a directory of this node: which files each has, and which of them are cut or unreadable.

It says what is there; which checkpoint is complete, where several nodes hold parts of one, the controller decides.
Tensor files are judged by their framing alone: reading all of an optimizer's state would take as long as training on.
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

# A training that keeps more has its newest looked at.
_MOST_CHECKPOINTS = 50
_MOST_FILES = 4096
_NAME = re.compile(r"checkpoint-(\d{1,15})")
_STATE = "trainer_state.json"
_INDEX = ".index.json"
_SAFETENSORS = ".safetensors"
_TORCH = (".pt", ".pth", ".bin")
# The log of a long training; what safetensors itself allows for a header.
_MOST_STATE_BYTES = 64 << 20
_MOST_HEADER_BYTES = 100_000_000
_MOST_STEP = 1 << 53
# Of a safetensors file's header.
_LENGTH = struct.Struct("<Q")


def run(request: Record, channel: Channel) -> None:
    """The verb `checkpoints`: one record with those below `directory`, the newest first."""
    folder = os.path.join(os.path.expanduser(request["cwd"] or "~"), os.path.expanduser(request["directory"]))
    numbered = [(int(match[1]), name) for name in list_names(folder) for match in [_NAME.fullmatch(name)] if match]
    names = [name for _, name in sorted(numbered, reverse=True)[:_MOST_CHECKPOINTS]]
    checkpoints = [{"name": name, **look_at(os.path.join(folder, name))} for name in names]
    place = files.look_at(folder, "/", read_mounts())
    lies = {name: place[name] for name in ("filesystem", "device")}
    channel.emit({"kind": "checkpoints", "checkpoints": checkpoints, **lies})


def look_at(folder: str) -> Record:
    """One checkpoint.

    Returns:
        `files`: by name, what is wrong with each file that a resume reads, None where nothing is; `step` and
        `max_steps`: those of trainer_state.json; `saved_ns`: when that was written; `shards`: names that the indexes
        of the weights list.
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
    """Length of the header in 8 bytes, the header in JSON, then the tensors, which end where the last one ends.

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
    """What torch.save writes is a zip file without compression, whose directory stands at its end."""
    if os.path.getsize(path) == 0:
        raise ValueError("it is empty")
    with zipfile.ZipFile(path) as archive:
        if not archive.namelist():
            raise ValueError("it contains no data")
