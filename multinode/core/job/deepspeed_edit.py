"""Edits of a DeepSpeed JSON for one run: the user's text with some values changed, and what changed as a diff.

Only what is edited moves: order, indentation and every other value stay as they were written. Reads and writes no file.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from multinode.core.job.assignment import parse_assignment
from multinode.core.job.deepspeed import DeepSpeedConfig, parse_deepspeed
from multinode.core.job.deepspeed_keys import require_known
from multinode.core.job.job import LlamaFactoryJob
from multinode.errors import JobError

__all__ = ["DeepSpeedEdit", "diff_deepspeed", "edit_deepspeed", "fit_batch", "fixed_edits", "parse_deepspeed_edits"]

_OPTION = "--deepspeed-set"
_DOTTED = re.compile(r"\w+(?:\.\w+)*", re.ASCII)
_BLANKS = " \t\r\n"
_BLANK = re.compile(f"[{_BLANKS}]*")
# It only tells where a value ends; a number may be longer than Python's are.
_DECODER = json.JSONDecoder(strict=False, parse_int=str, parse_float=str)
_STAGE = ("zero_optimization", "stage")
_STAGES = range(4)
# Keys of the YAML, with what the Trainer takes where it is silent.
_BATCH, _ACCUMULATION = ("per_device_train_batch_size", 8), ("gradient_accumulation_steps", 1)


class DeepSpeedEdit(msgspec.Struct, frozen=True, kw_only=True):
    """One value to set.

    Attributes:
        path: the groups, then the key.
        value: plain data of JSON.
    """

    path: tuple[str, ...]
    value: Any


class _Member(NamedTuple):
    """Where a member of an object stands: the beginning of its key, beginning and end of its value."""

    key: int
    start: int
    end: int


def parse_deepspeed_edits(texts: Iterable[str]) -> tuple[DeepSpeedEdit, ...]:
    """`a.b=value` each; a value is read as YAML, of which JSON is a part.

    Raises:
        JobError: one is not that, or JSON has no such value.
    """
    return tuple(_parse(text) for text in texts)


def edit_deepspeed(text: str, edits: Iterable[DeepSpeedEdit]) -> str:
    """The JSON with the edits applied in their order; groups that are missing are made.

    Keys of stage 3 stay when the stage is lowered: DeepSpeed takes them, `auto` among them, at every stage and does not
    hand them to the optimizers of the others; what only stage 3 can do, a partial offload, it refuses (release 0.19.8).

    Args:
        text: a JSON object.
        edits: what is to be set.

    Raises:
        JobError: a path leads through a value that is no group, would write over a group, or names an unknown key.
    """
    try:
        for edit in edits:
            text = _write(text, _skip(text, 0), edit, 0)
    except RecursionError:
        raise JobError("the DeepSpeed JSON is nested too deeply to be edited") from None
    return text


def fixed_edits(config: DeepSpeedConfig, *, per_device_batch: int, accumulation: int, workers: int) -> tuple[str, ...]:
    """What has to change in a JSON that fixes the batch of a step, as `parse_deepspeed_edits` reads it.

    The Trainer refuses to start where the JSON contradicts it; what is left to it (`auto`) or absent needs no edit.

    Args:
        config: the JSON.
        per_device_batch: samples of a worker's micro-batch.
        accumulation: micro-batches a step.
        workers: of all nodes.
    """
    wanted = {
        "train_micro_batch_size_per_gpu": per_device_batch,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": per_device_batch * accumulation * workers,
    }
    return tuple(f"{key}={value}" for key, value in wanted.items() if config.fixed.get(key, value) != value)


def fit_batch(job: LlamaFactoryJob, workers: int) -> LlamaFactoryJob:
    """The job with what its DeepSpeed JSON fixes of the batch as its YAML and so many workers make it.

    The same job where the JSON fixes nothing of it, there is none, or the YAML's own figures cannot be read.
    """
    config = parse_deepspeed(job.deepspeed_text) if job.deepspeed_text is not None else None
    batch, accumulation = (job.config.get(key, default) for key, default in (_BATCH, _ACCUMULATION))
    if config is None or job.deepspeed_text is None or type(batch) is not int or type(accumulation) is not int:
        return job
    edits = fixed_edits(config, per_device_batch=batch, accumulation=accumulation, workers=workers)
    if not edits:
        return job
    text = edit_deepspeed(job.deepspeed_text, parse_deepspeed_edits(edits))
    return msgspec.structs.replace(job, deepspeed_text=text)


def diff_deepspeed(before: str, after: str, source: str) -> str:
    """What changed, as a unified diff; empty where nothing did. `source` is the path of the user's file."""
    old, new = (text.removesuffix("\n").split("\n") for text in (before, after))
    return "\n".join(
        difflib.unified_diff(old, new, fromfile=source, tofile=source, tofiledate="for this run alone", lineterm="")
    )


def _parse(text: str) -> DeepSpeedEdit:
    name, value = parse_assignment(_OPTION, text, "zero_optimization.overlap_comm=true", _DOTTED)
    path = tuple(name.split("."))
    try:
        _render(value)
    except (TypeError, ValueError):
        raise JobError(
            f"{_OPTION} {name}: JSON has no such value", hint=f"a number, text, true, false or null: {_OPTION} {name}=5"
        ) from None
    if path == _STAGE and (type(value) is not int or value not in _STAGES):
        raise JobError(f"{_OPTION} {name}: ZeRO has no stage {value!r}", hint="0, 1, 2 or 3")
    return DeepSpeedEdit(path=path, value=value)


def _write(text: str, at: int, edit: DeepSpeedEdit, depth: int) -> str:
    """The text with the edit made in the object that begins at `at`, `depth` groups down its path."""
    members = _members(text, at)
    member = members.get(edit.path[depth])
    if member is None:
        require_known(edit.path, depth)
        return _insert(text, at, members.values(), {edit.path[depth]: _nest(edit.path[depth + 1 :], edit.value)})
    name, found = ".".join(edit.path[: depth + 1]), text[member.start : member.end]
    inner = edit.path[depth + 1 :]
    if inner and found.startswith("{"):
        return _write(text, member.start, edit, depth + 1)
    if inner and found != "null":
        raise JobError(
            f"{_OPTION} {'.'.join(edit.path)}: {name} is {found} in the JSON, and no group",
            hint=f"set it itself: {_OPTION} {name}=VALUE",
        )
    value = _nest(inner, edit.value)
    if found.startswith("{") and not (value is None or isinstance(value, dict)):
        raise JobError(
            f"{_OPTION} {name}={_render(value)}: {name} is a group in the JSON, and all its keys would be lost",
            hint=f"set a key of it: {_OPTION} {name}.KEY=VALUE",
        )
    return text[: member.start] + _render(value) + text[member.end :]


def _insert(text: str, at: int, members: Iterable[_Member], new: dict[str, Any]) -> str:
    """The text with a member more, behind the last one of the object that begins at `at` and indented like it."""
    written = _render(new)[1:-1]
    last = max(members, key=lambda member: member.end, default=None)
    if last is None:
        return f"{text[: at + 1]}{written}{text[at + 1 :]}"
    blanks = text[len(text[: last.key].rstrip(_BLANKS)) : last.key]
    return f"{text[: last.end]},{blanks or ' '}{written}{text[last.end :]}"


def _members(text: str, at: int) -> dict[str, _Member]:
    """By key, the members of the object that begins at `at`; of a key that stands twice the last, as JSON is read."""
    members = {}
    at = _skip(text, at + 1)
    while text[at] != "}":
        name, end = _DECODER.raw_decode(text, at)
        start = _skip(text, _skip(text, end) + 1)
        members[name] = _Member(at, start, _DECODER.raw_decode(text, start)[1])
        at = _skip(text, members[name].end)
        if text[at] == ",":
            at = _skip(text, at + 1)
    return members


def _skip(text: str, at: int) -> int:
    """The next place that is not blank."""
    match = _BLANK.match(text, at)
    return match.end() if match else at


def _nest(path: Iterable[str], value: Any) -> Any:
    """The value as it stands below a path."""
    for name in reversed(tuple(path)):
        value = {name: value}
    return value


def _render(value: Any) -> str:
    return json.dumps(value, allow_nan=False)
