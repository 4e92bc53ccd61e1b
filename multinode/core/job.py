"""Job: what is to be trained: a LLaMA-Factory YAML, or a script for torchrun. Parsing and rendering; reads no files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec
import yaml

from multinode.errors import JobError

__all__ = [
    "Job",
    "LlamaFactoryJob",
    "ScriptJob",
    "describe_job",
    "is_llamafactory",
    "job_paths",
    "parse_llamafactory",
    "parse_overrides",
    "render_job",
]

# Keys that only a LLaMA-Factory training has, beside the model that it must name.
_TELLTALES = frozenset({"stage", "finetuning_type", "do_train", "template", "dataset", "dataset_dir"})
_MODEL = "model_name_or_path"
# Keys whose value is a path where it looks like one; a name of a hub looks like `owner/name`.
_PATH_KEYS = (_MODEL, "adapter_name_or_path", "dataset_dir", "media_dir", "tokenizer_name_or_path")
_LOCAL = re.compile(r"(?:/|\.{1,2}/|~/)")
_MAX_NODES = 10_000


class LlamaFactoryJob(msgspec.Struct, frozen=True, kw_only=True, tag="llamafactory"):
    """A LLaMA-Factory training.

    Attributes:
        config_path: the YAML as the user named it.
        text: its text, verbatim.
        config: its content with the overrides applied.
        overridden: keys that an override has set.
        deepspeed_text: the DeepSpeed JSON that it names, verbatim; None where it names none.
        local_paths: keys whose value is a path on the controller too.
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


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML that refuses duplicate keys and documents that unfold without bound."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._nodes = 0

    def construct_object(self, node: Any, deep: bool = False) -> Any:  # noqa: FBT001, FBT002 - yaml's signature
        """Construct, and count: aliases of aliases would otherwise unfold for ever."""
        self._nodes += 1
        if self._nodes > _MAX_NODES:
            raise yaml.constructor.ConstructorError(None, None, "it unfolds to too many values", node.start_mark)
        return super().construct_object(node, deep=deep)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:  # noqa: FBT001, FBT002 - as above
        """A mapping in which no key stands twice."""
        seen = set()
        for key, _ in node.value:
            name = self.construct_object(key, deep=True)
            if isinstance(name, str) and name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"the key {name!r} stands twice", key.start_mark)
            seen.add(name if isinstance(name, str) else id(key))
        return super().construct_mapping(node, deep=deep)


def parse_llamafactory(text: str, source: str, overrides: Iterable[str] = ()) -> LlamaFactoryJob:
    """A LLaMA-Factory job from its YAML and `key=value` overrides.

    Raises:
        JobError: the YAML is wrong (with file and line), or is not a LLaMA-Factory training.
    """
    config = _parse_yaml(text, source)
    changed = parse_overrides(overrides)
    if not is_llamafactory(config | changed):
        raise JobError(
            f"{source} is no LLaMA-Factory training: it lacks {_MODEL}, or any of {', '.join(sorted(_TELLTALES))}",
            hint="a script of your own: multinode launch -- train.py",
        )
    return LlamaFactoryJob(config_path=source, text=text, config=config | changed, overridden=tuple(changed))


def is_llamafactory(config: dict[str, Any]) -> bool:
    """Whether these are the keys of a LLaMA-Factory training."""
    return _MODEL in config and not _TELLTALES.isdisjoint(config)


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """`key=value` pairs; a value is read as YAML, so `3` is a number and `true` a truth.

    Raises:
        JobError: one is not `key=value`, or its value is not YAML.
    """
    changed: dict[str, Any] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not re.fullmatch(r"\w+", key) or not value:
            raise JobError(f"--set {override!r} is not KEY=VALUE", hint="for example --set max_steps=100")
        try:
            changed[key] = yaml.load(value, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader, made stricter
        except yaml.YAMLError as error:
            raise JobError(f"--set {key}: {value!r} is not a YAML value") from error
    return changed


def job_paths(job: LlamaFactoryJob) -> tuple[str, ...]:
    """Paths that must exist on every node: what the job reads and what does not travel with it."""
    paths = []
    for key in _PATH_KEYS:
        value = job.config.get(key)
        if isinstance(value, str) and (_LOCAL.match(value) or key in job.local_paths):
            paths.append(value)
    folder = job.config.get("dataset_dir")
    if isinstance(folder, str) and folder in paths:
        paths.append(f"{folder.rstrip('/')}/dataset_info.json")
    return tuple(dict.fromkeys(paths))


def describe_job(job: Job) -> str:
    """The job in a few words."""
    if isinstance(job, ScriptJob):
        return " ".join(job.argv[:1])
    name = job.config_path.rsplit("/", 1)[-1]
    how = [str(job.config[key]) for key in ("stage", "finetuning_type") if key in job.config]
    return f"{name} ({' '.join(['LLaMA-Factory', *how])})"


def render_job(job: LlamaFactoryJob, deepspeed_path: str | None) -> str:
    """The YAML that travels: verbatim where nothing changes, else written anew and saying so in its first line."""
    if not job.overridden and deepspeed_path is None:
        return job.text
    config = job.config if deepspeed_path is None else job.config | {"deepspeed": deepspeed_path}
    changed = [*job.overridden, *(["deepspeed"] if deepspeed_path is not None else [])]
    first = f"# {job.config_path} with these keys changed by multinode: {', '.join(changed)}\n"
    return first + yaml.safe_dump(config, sort_keys=False, allow_unicode=True)


def _parse_yaml(text: str, source: str) -> dict[str, Any]:
    try:
        config = yaml.load(text, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader, made stricter
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark is not None else source
        raise JobError(f"{where}: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise JobError(f"{source}: not YAML: {error}") from error
    if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
        raise JobError(f"{source}: a training's YAML is a list of `key: value` lines, and this is not")
    return config
