"""Job: what is to be trained: a LLaMA-Factory YAML, or a script for torchrun. Parsing and rendering; reads no files."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from multinode.core.training_yaml import WrongYaml, dump_yaml, parse_yaml
from multinode.errors import JobError

__all__ = [
    "Job",
    "LlamaFactoryJob",
    "ScriptJob",
    "describe_job",
    "is_llamafactory",
    "job_paths",
    "named_paths",
    "parse_llamafactory",
    "parse_overrides",
    "render_job",
]

# Keys that only a LLaMA-Factory training has, beside the model that it must name.
_TELLTALES = frozenset({"stage", "finetuning_type", "do_train", "template", "dataset", "dataset_dir"})
_MODEL = "model_name_or_path"
# Keys that may hold a path, several of them with commas between, or else a name of the hub such as `owner/name`.
_PATH_KEYS = (
    _MODEL,
    "adapter_name_or_path",
    "media_dir",
    "ref_model",
    "ref_model_adapters",
    "resume_from_checkpoint",
    "reward_model",
    "reward_model_adapters",
)
_LOCAL = re.compile(r"/|\.{1,2}(?:/|$)|~(?:/|$)")
# Where LLaMA-Factory looks for datasets when the YAML does not say.
_DATASET_DIR = "data"
_NULLS = frozenset({"null", "Null", "NULL", "~"})


class LlamaFactoryJob(msgspec.Struct, frozen=True, kw_only=True, tag="llamafactory"):
    """A LLaMA-Factory training.

    Attributes:
        config_path: the YAML as the user named it.
        text: its text, verbatim.
        config: its content with the overrides applied.
        overridden: keys that an override has set.
        deepspeed_text: the DeepSpeed JSON that it names, verbatim; None where it names none.
        local_paths: those of `named_paths` that are there on the controller, which tells a path from a hub's name.
    """

    config_path: str
    text: str
    config: dict[str, Any]
    overridden: tuple[str, ...] = ()
    deepspeed_text: str | None = None
    local_paths: tuple[str, ...] = ()


class ScriptJob(msgspec.Struct, frozen=True, kw_only=True, tag="script"):
    """A script under torchrun.

    Attributes:
        argv: the script, then its arguments.
    """

    argv: tuple[str, ...]


Job = LlamaFactoryJob | ScriptJob


def parse_llamafactory(text: str, source: str, overrides: Iterable[str] = ()) -> LlamaFactoryJob:
    """A LLaMA-Factory job from its YAML and `key=value` overrides. `source` is its path, for messages.

    Raises:
        JobError: the YAML is wrong (with file and line), or is not a LLaMA-Factory training.
    """
    config = _parse_mapping(text, source)
    changed = parse_overrides(overrides)
    if not is_llamafactory(config | changed):
        lacking = _MODEL if _MODEL not in config | changed else f"any of {', '.join(sorted(_TELLTALES))}"
        raise JobError(
            f"{source} is not a LLaMA-Factory training: it lacks {lacking}",
            hint="a script of your own: multinode launch -- train.py",
        )
    return LlamaFactoryJob(config_path=source, text=text, config=config | changed, overridden=tuple(changed))


def is_llamafactory(config: dict[str, Any]) -> bool:
    """Whether these are the keys of a LLaMA-Factory training."""
    return _MODEL in config and not _TELLTALES.isdisjoint(config)


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """`key=value` pairs; a value is read as YAML, so `3` is a number and `true` a truth. The last of a key counts.

    Raises:
        JobError: one is not `key=value`, its value is not YAML, or is nothing.
    """
    changed: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not re.fullmatch(r"\w+", key, re.ASCII):
            raise JobError(f"--set {override!r} is not KEY=VALUE", hint="for example --set max_steps=100")
        try:
            changed[key] = parse_yaml(text)
        except WrongYaml as wrong:
            raise JobError(
                f"--set {key}: {text!r} is not a YAML value: {wrong}", hint=f"text is quoted: --set {key}='\"...\"'"
            ) from None
        if changed[key] is None and text.strip() not in _NULLS:
            raise JobError(f"--set {override!r} sets {key} to nothing", hint=f"if that is meant: --set {key}=null")
    return changed


def named_paths(job: LlamaFactoryJob) -> tuple[str, ...]:
    """What the job reads from disk, and what may as well be the name of a model on a hub."""
    return tuple(dict.fromkeys([*_possible_paths(job.config), *_dataset_paths(job.config)]))


def job_paths(job: LlamaFactoryJob) -> tuple[str, ...]:
    """Paths that must exist on every node: what the job reads from disk and what does not travel with it."""
    paths = [path for path in _possible_paths(job.config) if _LOCAL.match(path) or path in job.local_paths]
    paths += _dataset_paths(job.config)
    deepspeed = job.config.get("deepspeed")
    if isinstance(deepspeed, str) and job.deepspeed_text is None:
        paths.append(deepspeed)
    return tuple(dict.fromkeys(paths))


def describe_job(job: Job) -> str:
    """The job in a few words."""
    if isinstance(job, ScriptJob):
        return " ".join(job.argv[:1])
    name = job.config_path.rsplit("/", 1)[-1]
    how = [str(job.config[key]) for key in ("stage", "finetuning_type") if key in job.config]
    return f"{name} ({' '.join(['LLaMA-Factory', *how])})"


def render_job(job: LlamaFactoryJob, deepspeed_path: str | None) -> str:
    """The YAML that travels: verbatim where nothing changes, else written anew and saying so in its first line.

    `deepspeed_path` is where the DeepSpeed JSON lies on the node; None where none travels.
    """
    if not job.overridden and deepspeed_path is None:
        return job.text
    config = job.config if deepspeed_path is None else job.config | {"deepspeed": deepspeed_path}
    changed = dict.fromkeys([*job.overridden, *(["deepspeed"] if deepspeed_path is not None else [])])
    # A file's name may hold anything; a comment ends with its line.
    name = "".join(char if char.isprintable() else "?" for char in job.config_path)
    return f"# {name} with these keys changed by multinode: {', '.join(changed)}\n" + dump_yaml(config)


def _possible_paths(config: dict[str, Any]) -> Iterator[str]:
    for key in _PATH_KEYS:
        value = config.get(key)
        if isinstance(value, str):
            yield from (part.strip() for part in value.split(",") if part.strip())


def _dataset_paths(config: dict[str, Any]) -> tuple[str, ...]:
    folder = config.get("dataset_dir", _DATASET_DIR if "dataset" in config else None)
    if not isinstance(folder, str) or folder == "ONLINE" or folder.startswith("REMOTE:"):
        return ()
    return (folder, f"{folder.rstrip('/')}/dataset_info.json")


def _parse_mapping(text: str, source: str) -> dict[str, Any]:
    try:
        config = parse_yaml(text)
    except WrongYaml as wrong:
        hint = "indent with spaces" if r"\t" in str(wrong) else None
        where = source if wrong.line is None else f"{source}:{wrong.line}"
        raise JobError(f"{where}: {wrong}", hint=hint) from None
    if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
        raise JobError(
            f"{source}:1: lines of `key: value` were expected, and this holds {_kind(config)}",
            hint="a script of your own: multinode launch -- train.py",
        )
    return config


def _kind(data: Any) -> str:
    if data is None:
        return "nothing"
    if isinstance(data, dict):
        return "a key that is not text"
    return "a list" if isinstance(data, list) else "a single value"
