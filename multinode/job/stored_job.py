"""Reading a job's files: the YAML and its DeepSpeed JSON; which of its paths exist here."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable
from pathlib import Path

import msgspec

from multinode.decoding import decode_json
from multinode.errors import JobError, UsageError
from multinode.job.deepspeed import DeepSpeedEdit, diff_deepspeed, edit_deepspeed
from multinode.job.job import LlamaFactoryJob, ScriptJob, named_paths, parse_llamafactory
from multinode.records.files import read_text

# Of the Trainer, and of DeepSpeed's own `add_config_arguments`.
_DEEPSPEED_OPTIONS = frozenset({"--deepspeed", "--deepspeed_config"})


def load_job(
    path: Path, overrides: tuple[str, ...] = (), deepspeed_edits: tuple[DeepSpeedEdit, ...] = ()
) -> LlamaFactoryJob:
    """A LLaMA-Factory job, with the edited DeepSpeed JSON that travels with it; the user's file is unchanged.

    Raises:
        UsageError: a file cannot be read.
        JobError: a file is invalid, or there is no JSON to edit.
    """
    text = read_text(path, "the job", "give a LLaMA-Factory YAML; your own script goes after --")
    job = parse_llamafactory(text, str(path), overrides)
    local = tuple(named for named in named_paths(job) if _exists(Path(named)))
    return _with_deepspeed(msgspec.structs.replace(job, local_paths=local), path, deepspeed_edits)


def load_script(argv: tuple[str, ...]) -> ScriptJob:
    """A script, with the DeepSpeed JSON that its options name; it stays where it is."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--") else [word])]
    named = next((value for key, value in itertools.pairwise(words) if key in _DEEPSPEED_OPTIONS), None)
    try:
        text = read_text(Path(named), "the DeepSpeed configuration", "") if named is not None else None
    except UsageError:
        text = None
    return ScriptJob(argv=argv, deepspeed_text=text)


def _with_deepspeed(job: LlamaFactoryJob, path: Path, edits: tuple[DeepSpeedEdit, ...]) -> LlamaFactoryJob:
    named = job.config.get("deepspeed")
    if not isinstance(named, str):
        if edits:
            raise _nothing_to_edit(path, written_out=named is not None)
        return job
    found, text = _read_deepspeed(named, path)
    edited = edit_deepspeed(text, edits)
    diff = diff_deepspeed(text, edited, str(found)) if edits else None
    return msgspec.structs.replace(job, deepspeed_text=edited, deepspeed_diff=diff)


def _nothing_to_edit(path: Path, *, written_out: bool) -> JobError:
    if written_out:
        return JobError(
            f"--deepspeed-set edits a DeepSpeed JSON, but {path} has its DeepSpeed settings inline",
            hint="put them into a JSON file, and name it: `deepspeed: FILE`",
        )
    return JobError(
        f"--deepspeed-set edits a DeepSpeed JSON, but {path} names none",
        hint="name one for this run: --set deepspeed=FILE",
    )


def _read_deepspeed(named: str, path: Path) -> tuple[Path, str]:
    """The JSON named by `deepspeed:`, relative to the working directory, as in LLaMA-Factory, or to the YAML."""
    candidates = [Path(named), path.parent / named]
    found = next((candidate for candidate in candidates if _exists(candidate)), candidates[0])
    hint = f"`deepspeed:` in {path} names it; multinode looks for it here, then next to {path}"
    text = read_text(found, "the DeepSpeed configuration", hint)
    try:
        decode_json(text, dict)
    except msgspec.DecodeError as error:
        raise JobError(f"{found} is not a JSON object: {error}", hint=hint) from None
    except RecursionError:
        raise JobError(f"{found} is nested too deeply", hint=hint) from None
    return found, text


def absent_files(paths: Iterable[str]) -> dict[str, str | None]:
    """Those of a job's paths that do not exist on this machine, each with the most similar name there, if any."""
    return {path: _nearest(Path(path)) for path in paths if not _exists(Path(path).expanduser())}


def _nearest(path: Path) -> str | None:
    try:
        names = [beside.name for beside in path.parent.iterdir()]
    except (OSError, ValueError):
        return None
    near = difflib.get_close_matches(path.name, names, n=1)
    return str(path.with_name(near[0])) if near else None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
