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
from ..files import list_names, read_end, read_mounts, read_object, read_text

# If there are more, only the newest are checked.
_MOST_CHECKPOINTS = 50
_MOST_FILES = 4096
_NAME = re.compile(r"checkpoint-(\d{1,15})")
# Folders of shards in a checkpoint: DeepSpeed's, and those of FSDP as accelerate names them.
_SHARDS = re.compile(r"global_step\d+|(?:pytorch_model_fsdp|optimizer)_\d+")
_STATE = "trainer_state.json"
_LATEST = "latest"
_METADATA = ".metadata"
# Names of files, as pickled in the metadata.
_DISTCP_NAME = re.compile(rb"__\d+_\d+\.distcp")
_INDEX = ".index.json"
_SAFETENSORS = ".safetensors"
_TORCH = (".pt", ".pth", ".bin")
_DISTCP = ".distcp"
# Enough for the history of a long training; the limit of safetensors itself for a header.
_MOST_STATE_BYTES = 64 << 20
_MOST_HEADER_BYTES = 100_000_000
_MOST_STEP = 1 << 53
_MOST_TAG_CHARACTERS = 200
# Length of the header of a safetensors file.
_LENGTH = struct.Struct("<Q")
# The record at the end of a zip file without a comment, as torch writes it, and how it begins.
_ZIP_END_BYTES, _ZIP_END = 22, b"PK\5\6"


def run(request: Record, channel: Channel) -> None:
    """The verb `checkpoints`: emits one record with the newest checkpoints below `directory`, at most `most`."""
    folder = os.path.join(os.path.expanduser(request["cwd"] or "~"), os.path.expanduser(request["directory"]))
    numbered = [(int(match[1]), name) for name in list_names(folder) for match in [_NAME.fullmatch(name)] if match]
    most = min(request.get("most", _MOST_CHECKPOINTS), _MOST_CHECKPOINTS)
    names = [name for _, name in sorted(numbered, reverse=True)[:most]]
    checkpoints = [{"name": name, **look_at(os.path.join(folder, name))} for name in names]
    place = files.look_at(folder, "/", read_mounts())
    lies = {name: place[name] for name in ("filesystem", "device")}
    channel.emit({"kind": "checkpoints", "folder": os.path.abspath(folder), "checkpoints": checkpoints, **lies})


def look_at(folder: str) -> Record:
    """Describe one checkpoint.

    Returns:
        `files`: `size_bytes` and `problem` of each file, by path; the problem is None if it has none, or if only its
        size is known. `step` and `max_steps` of trainer_state.json; `saved_ns`: when that file was written; `tag`:
        DeepSpeed's folder; `shards`: paths in the indexes of the weights and in the metadata of FSDP.
    """
    look = _Look(folder)
    names = list_names(folder)
    for name in names:
        if _SHARDS.fullmatch(name) and os.path.isdir(os.path.join(folder, name)):
            for inner in list_names(os.path.join(folder, name)):
                look.add(f"{name}/{inner}")
        else:
            look.add(name)
    try:
        saved_ns = os.stat(os.path.join(folder, _STATE)).st_mtime_ns
    except OSError:
        saved_ns = None
    shards = sorted(set(look.shards))[:_MOST_FILES]
    steps = {"step": look.step, "max_steps": look.max_steps}
    return {"files": look.files, **steps, "saved_ns": saved_ns, "tag": look.tag, "shards": shards}


class _Look:
    """What the files of a checkpoint say so far."""

    def __init__(self, folder: str) -> None:
        self.files: dict[str, Record] = {}
        self.step: Optional[int] = None
        self.max_steps: Optional[int] = None
        self.tag: Optional[str] = None
        self.shards: list[str] = []
        self._folder = folder

    def add(self, name: str) -> None:
        """Look at one file, by its path in the checkpoint."""
        path = os.path.join(self._folder, name)
        is_known = name.endswith((_STATE, _LATEST, _METADATA, _INDEX, _SAFETENSORS, _DISTCP, *_TORCH))
        if len(self.files) >= _MOST_FILES or not (is_known or os.path.isfile(path)):
            return
        problem = None
        try:
            self._read(name, path)
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            problem = (getattr(error, "strerror", None) or str(error))[:200]
        try:
            size_bytes = os.path.getsize(path)
        except OSError:
            size_bytes = 0
        self.files[name] = {"size_bytes": size_bytes, "problem": problem}

    def _read(self, name: str, path: str) -> None:
        if name == _STATE:
            self.step, self.max_steps = _read_steps(path)
        elif name == _LATEST:
            self.tag = _read_tag(path)
        elif name.endswith("/" + _METADATA):
            self.shards += [os.path.join(os.path.dirname(name), shard) for shard in _read_metadata(path)]
        elif name.endswith(_INDEX):
            self.shards += _read_shards(path)
        elif name.endswith(_SAFETENSORS):
            _check_safetensors(path)
        elif name.endswith(_DISTCP):
            _check_archives(path)
        elif name.endswith(_TORCH):
            _check_archive(path)


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


def _read_tag(path: str) -> str:
    """The folder that DeepSpeed loads."""
    tag = read_text(path, _MOST_TAG_CHARACTERS)
    if _SHARDS.fullmatch(tag) is None:
        raise ValueError("it names no folder of shards" if tag else "it is empty")
    return tag


def _read_metadata(path: str) -> list[str]:
    """The files that torch.distributed.checkpoint lists in its metadata, a pickle; it is not executed."""
    with open(path, "rb") as file:
        data = file.read(_MOST_STATE_BYTES + 1)
    if len(data) > _MOST_STATE_BYTES:
        raise ValueError("it is too large")
    # The opcode STOP of pickle.
    if not data.endswith(b"."):
        raise ValueError("it is truncated" if data else "it is empty")
    return sorted({name.decode() for name in _DISTCP_NAME.findall(data)})


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


def _check_archives(path: str) -> None:
    """Check a file of torch.distributed.checkpoint: what torch.save writes, one tensor after the other.

    zipfile would also find the end of an archive that is followed by part of another one.
    """
    end = read_end(path, _ZIP_END_BYTES)
    if not end.startswith(_ZIP_END):
        raise ValueError("it is truncated" if end else "it is empty")
