"""Reading a job's files: the YAML, and the DeepSpeed JSON that it names."""

from __future__ import annotations

from pathlib import Path

import msgspec

from multinode.core.job import LlamaFactoryJob, named_paths, parse_llamafactory
from multinode.errors import JobError
from multinode.store.text_file import read_text

__all__ = ["load_job"]


def load_job(path: Path, overrides: tuple[str, ...] = ()) -> LlamaFactoryJob:
    """A LLaMA-Factory job, with the DeepSpeed JSON that travels with it.

    Raises:
        UsageError: a file cannot be read.
        JobError: a file is wrong.
    """
    text = read_text(path, "the job", "a LLaMA-Factory YAML; a script of your own goes after --")
    job = parse_llamafactory(text, str(path), overrides)
    local = tuple(named for named in named_paths(job) if _exists(Path(named)))
    return msgspec.structs.replace(job, deepspeed_text=_read_deepspeed(job, path), local_paths=local)


def _read_deepspeed(job: LlamaFactoryJob, path: Path) -> str | None:
    """The JSON that `deepspeed:` names: from the working directory, as LLaMA-Factory does, else beside the YAML."""
    named = job.config.get("deepspeed")
    if not isinstance(named, str):
        return None
    candidates = [Path(named), path.parent / named]
    found = next((candidate for candidate in candidates if _exists(candidate)), candidates[0])
    hint = f"`deepspeed:` in {path} names it; it is looked for here, then beside that file"
    text = read_text(found, "the DeepSpeed configuration", hint)
    try:
        msgspec.json.decode(text, type=dict)
    except msgspec.DecodeError as error:
        raise JobError(f"{found} is not a JSON object: {error}", hint=hint) from None
    except RecursionError:
        raise JobError(f"{found} is nested too deeply", hint=hint) from None
    return text


def _exists(path: Path) -> bool:
    """Whether a path that a stranger wrote is there; a text that cannot be a path is not."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
