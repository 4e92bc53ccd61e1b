"""Job: a LLaMA-Factory YAML, or a script for torchrun, and its environment. Parsing and rendering; reads no files."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from multinode.cluster.cluster import Cluster
from multinode.cluster.hostfile import check_variable
from multinode.errors import JobError, UsageError

# Keys that only a LLaMA-Factory training has, beside the model, which is required.
_TELLTALES = frozenset({"stage", "finetuning_type", "do_train", "template", "dataset", "dataset_dir"})
_MODEL = "model_name_or_path"
# Keys that hold paths, comma-separated, or names on the hub such as `owner/name`.
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
# One ignores extra keys; the other takes the arguments of another package.
_OTHER_ARGUMENTS = frozenset({"ALLOW_EXTRA_ARGS", "USE_MCA"})

# Turned off in a run that only measures; some are on by default.
_FIGURES_ONLY: dict[str, Any] = {
    "save_strategy": "no",
    "report_to": "none",
    "overwrite_output_dir": True,
    "do_eval": False,
    "do_predict": False,
    "predict_with_generate": False,
    "eval_strategy": "no",
    # It asserts that there are evaluations.
    "early_stopping_steps": None,
    "load_best_model_at_end": False,
    "resume_from_checkpoint": None,
    "plot_loss": False,
    "push_to_hub": False,
}
_ON_WHERE_SILENT = frozenset({"save_strategy", "report_to", "overwrite_output_dir"})


_KEY = re.compile(r"\w+", re.ASCII)
_NULLS = frozenset({"null", "Null", "NULL", "~"})


PLAIN_STAGES = frozenset({"pt", "sft"})
"""Stages that train one model in a forward and a backward pass."""


class LlamaFactorySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Keys of a YAML, with the defaults of LLaMA-Factory and the Trainer (llamafactory 0.9.5, transformers 5.6).

    None is a value of another type, or a number that is not positive.
    """

    stage: str | None = "sft"
    finetuning_type: str | None = "lora"
    lora_rank: int | None = 8
    lora_target: str | None = "all"
    dataset_dir: str | None = "data"
    cutoff_len: int | None = 2048
    per_device_train_batch_size: int | None = 8
    gradient_accumulation_steps: int | None = 1
    learning_rate: float | None = 5e-5
    num_train_epochs: float | None = 3.0
    logging_steps: int | None = 10

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> LlamaFactorySettings:
        """The settings that a YAML gives."""
        values = {}
        for name, default in msgspec.structs.asdict(_DEFAULTS).items():
            value = config.get(name, default)
            fits = type(value) in {type(default), int if isinstance(default, float) else type(default)}
            values[name] = value if fits and (isinstance(value, str) or 0 < value < math.inf) else None
        return cls(**values)


_DEFAULTS = LlamaFactorySettings()


class Synthetic(msgspec.Struct, frozen=True, kw_only=True):
    """Synthetic data in place of a dataset."""

    rows: int | None = None  # minimum number of samples; None is as many as the training's steps need


class LlamaFactoryJob(msgspec.Struct, frozen=True, kw_only=True, tag="llamafactory"):
    """A LLaMA-Factory training.

    Attributes:
        config_path: the YAML as named by the user.
        text: its text, verbatim.
        config: its content with overrides applied.
        overridden: keys set by overrides.
        deepspeed_text: its DeepSpeed JSON, verbatim but for the edits; None without one.
        deepspeed_diff: the edits as a unified diff; None without edits.
        keeps_output: whether the trained model is kept where the YAML says; otherwise it goes to the run's
            directory.
        synthetic: its synthetic data (`with_synthetic`); None if it has its own.
        uncut: its content before it was shortened for a measurement; None if it was not.
        local_paths: those of `named_paths` that exist on the controller; others may be names on the hub.
    """

    config_path: str
    text: str
    config: dict[str, Any]
    overridden: tuple[str, ...] = ()
    deepspeed_text: str | None = None
    deepspeed_diff: str | None = None
    synthetic: Synthetic | None = None
    local_paths: tuple[str, ...] = ()
    keeps_output: bool = True
    uncut: dict[str, Any] | None = None

    @property
    def settings(self) -> LlamaFactorySettings:
        """The keys of its configuration that have a default."""
        return LlamaFactorySettings.read(self.config)


Form = Literal["script", "module", "executable"]


class ScriptJob(msgspec.Struct, frozen=True, kw_only=True, tag="script"):
    """A program of the user's.

    Attributes:
        argv: the program, then its arguments.
        form: whether the program is a Python script, a module as after `python -m`, or any executable.
        options: of the engine's launcher, which stand before the program.
        local_paths: those of its arguments that are paths on the controller.
        deepspeed_text: the DeepSpeed JSON that its options name, where that is on the controller.
    """

    argv: tuple[str, ...]
    form: Form = "script"
    options: tuple[str, ...] = ()
    local_paths: tuple[str, ...] = ()
    deepspeed_text: str | None = None

    @property
    def words(self) -> tuple[str, ...]:
        """What follows the launcher's name: torchrun, accelerate and DeepSpeed's launcher spell these alike."""
        forms = {"script": (), "module": ("--module",), "executable": ("--no_python",)}
        return (*self.options, *forms[self.form], *self.argv)


Job = LlamaFactoryJob | ScriptJob


def parse_llamafactory(text: str, source: str, overrides: Iterable[str] = ()) -> LlamaFactoryJob:
    """A LLaMA-Factory job from its YAML and `key=value` overrides. `source` is its path, for messages.

    Raises:
        JobError: the YAML is invalid (with file and line), or is not a LLaMA-Factory training.
    """
    config = _parse_mapping(text, source)
    changed = parse_overrides(overrides)
    if not is_llamafactory(config | changed):
        has_model = _MODEL in config | changed
        lacking = f"none of its keys ({', '.join(sorted(_TELLTALES))})" if has_model else f"no {_MODEL}"
        raise JobError(
            f"{source} is not a LLaMA-Factory training: it has {lacking}",
            hint=(
                f"add {'one of these keys' if has_model else _MODEL}; for your own script: multinode launch -- train.py"
            ),
        )
    return LlamaFactoryJob(config_path=source, text=text, config=config | changed, overridden=tuple(changed))


def override_job(job: LlamaFactoryJob, changed: dict[str, Any]) -> LlamaFactoryJob:
    """Copy of the job with these keys set; None is YAML's null, which unsets a key."""
    overridden = dict.fromkeys((*job.overridden, *changed))
    return msgspec.structs.replace(job, config=job.config | changed, overridden=tuple(overridden))


def limit_steps(job: LlamaFactoryJob, steps: int) -> LlamaFactoryJob:
    """Copy of the job with this number of optimizer steps; the user's own number is kept."""
    return msgspec.structs.replace(override_job(job, {"max_steps": steps}), uncut=job.uncut or job.config)


def benchmark_job(job: LlamaFactoryJob) -> LlamaFactoryJob:
    """Copy of the training for measurement only: no evaluation, no reporting, and the user's output is left alone.

    A training would resume from the files in `output_dir`, or overwrite them.
    """
    without = {key: value for key, value in _FIGURES_ONLY.items() if key in _ON_WHERE_SILENT or key in job.config}
    return msgspec.structs.replace(override_job(job, without), keeps_output=False)


def is_llamafactory(config: dict[str, Any]) -> bool:
    """Whether these are keys of a LLaMA-Factory training."""
    return _MODEL in config and not _TELLTALES.isdisjoint(config)


def parse_overrides(overrides: Iterable[str]) -> dict[str, Any]:
    """`key=value` pairs; values are YAML (`3` is a number, `true` a boolean). The last one of a key counts."""
    return dict(parse_assignment("--set", override, "max_steps=100") for override in overrides)


def is_setting(word: str) -> bool:
    """Whether a word of a command line is `KEY=VALUE`."""
    name, equals, _ = word.partition("=")
    return bool(equals) and _KEY.fullmatch(name) is not None


def override_text(key: str, value: Any) -> str:
    """The setting as an argument of `launch --set`, on one line."""
    from multinode.strict_yaml import dump_flow_yaml, dump_yaml

    if isinstance(value, list | dict):
        return f"{key}={dump_flow_yaml(value)}"
    return f"{key}={dump_yaml({key: value}).partition(':')[2].strip(' ')}".rstrip("\n")


def parse_assignment(option: str, text: str, example: str, key: re.Pattern[str] = _KEY) -> tuple[str, Any]:
    """The key and the value, read as YAML: `3` is a number, `true` a boolean; JSON is YAML, too.

    `option` is its name for messages, `example` a valid argument for the hint.

    Raises:
        JobError: not `KEY=VALUE`, or the value is not YAML or is empty.
    """
    name, equals, written = text.partition("=")
    if not equals or not key.fullmatch(name):
        raise JobError(f"{option} {text!r} is not KEY=VALUE", hint=f"for example {option} {example}")
    from multinode.strict_yaml import YamlError, parse_yaml

    try:
        value = parse_yaml(written)
    except YamlError as wrong:
        raise JobError(
            f"{option} {name}: {written!r} is not a YAML value: {wrong}",
            hint=f"quote text: {option} {name}='\"...\"'",
        ) from None
    if value is None and written.strip() not in _NULLS:
        raise JobError(f"{option} {text!r} gives {name} no value", hint=f"to set it to null: {option} {name}=null")
    return name, value


def named_paths(job: LlamaFactoryJob) -> tuple[str, ...]:
    """What the job reads from disk, including names that may be models on a hub."""
    return tuple(dict.fromkeys([*_possible_paths(job.config), *_dataset_paths(job.config)]))


def job_paths(job: LlamaFactoryJob) -> tuple[str, ...]:
    """Paths that must exist on every node: what the job reads from disk and does not travel with it."""
    paths = [path for path in _possible_paths(job.config) if _LOCAL.match(path) or path in job.local_paths]
    paths += () if job.synthetic is not None else _dataset_paths(job.config)
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
    synthetic = ", synthetic data" if job.synthetic is not None else ""
    return f"{name} ({' '.join(['LLaMA-Factory', *how])}{synthetic})"


COMMAND_LINE = "llamafactory-cli train"
"""The name of a LLaMA-Factory job whose arguments are options of a command line, in the place of a YAML's path."""


def parse_flags(words: Sequence[str]) -> dict[str, Any]:
    """The keys of a LLaMA-Factory training from options: `--stage sft --bf16 --report_to wandb tensorboard`.

    As Hugging Face's HfArgumentParser reads them: an option alone is true, one with several values is a list.

    Raises:
        JobError: the first word is no option.
    """
    given: dict[str, list[Any]] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            given[name[2:].replace("-", "_")] = [_flag_value(value)] if equals else []
        elif not given:
            raise JobError(
                f"{word!r} follows {COMMAND_LINE}, which takes a YAML or options such as --stage sft",
                hint="give the path of a YAML that ends with .yaml, or every argument as --key value",
            )
        else:
            given[next(reversed(given))].append(_flag_value(word))
    return {key: values if len(values) > 1 else values[0] if values else True for key, values in given.items()}


def _flag_value(word: str) -> Any:
    """A value as YAML has it, so that it means the same in the file that travels; other text is itself."""
    try:
        return parse_assignment("", f"value={word}", "")[1]
    except JobError:
        return word


def argument_keys(job: object, variables: Iterable[str] = ()) -> tuple[str, ...]:
    """Keys that must be arguments of LLaMA-Factory; empty if it accepts any, or for other jobs.

    `variables` are names of the job's variables; two of them change what is accepted.
    """
    if not isinstance(job, LlamaFactoryJob) or not _OTHER_ARGUMENTS.isdisjoint(variables):
        return ()
    return tuple(key for key in job.config if "\0" not in key)


def render_job(job: LlamaFactoryJob, paths: dict[str, str]) -> str:
    """The YAML that travels: verbatim if unchanged; otherwise rewritten, which its first line says.

    `paths` on the node, by key, are those of files that travel, and of the output that is not kept.
    """
    if not job.overridden and not paths:
        return job.text
    from multinode.strict_yaml import dump_yaml

    config = job.config | paths
    changed = dict.fromkeys([*job.overridden, *paths])
    # A file name may contain anything; a comment ends with its line.
    name = "".join(char if char.isprintable() else "?" for char in job.config_path)
    return f"# {name} with these keys changed by multinode: {', '.join(changed)}\n" + dump_yaml(config)


def _possible_paths(config: dict[str, Any]) -> Iterator[str]:
    for key in _PATH_KEYS:
        value = config.get(key)
        if isinstance(value, str):
            yield from (part.strip() for part in value.split(",") if part.strip())


def _dataset_paths(config: dict[str, Any]) -> tuple[str, ...]:
    folder = config.get("dataset_dir", _DEFAULTS.dataset_dir if "dataset" in config else None)
    if not isinstance(folder, str) or folder == "ONLINE" or folder.startswith("REMOTE:"):
        return ()
    return (folder, f"{folder.rstrip('/')}/dataset_info.json")


def _parse_mapping(text: str, source: str) -> dict[str, Any]:
    from multinode.strict_yaml import YamlError, parse_yaml

    try:
        config = parse_yaml(text)
    except YamlError as wrong:
        hint = "indent with spaces" if r"\t" in str(wrong) else None
        raise JobError(wrong.at(source), hint=hint) from None
    if not isinstance(config, dict) or not all(isinstance(key, str) for key in config):
        raise JobError(
            f"{source}:1: expected lines of `key: value`, found {_kind(config)}",
            hint="for your own script: multinode launch -- train.py",
        )
    return config


def _kind(data: Any) -> str:
    if data is None:
        return "nothing"
    if isinstance(data, dict):
        return "a key that is not text"
    return "a list" if isinstance(data, list) else "a single value"


_THREADS = "OMP_NUM_THREADS"


class JobEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """Variables and setup commands of a job, the same on every node.

    Attributes:
        env: variables; they win over the hostfile's.
        forwarded: names whose values come from the controller's environment and are never shown.
        prelude: shell text that runs before the job, in its shell; None is none.
    """

    env: dict[str, str] = {}
    forwarded: tuple[str, ...] = ()
    prelude: str | None = None


def parse_job_environment(variables: Iterable[str], prelude: str | None, environ: Mapping[str, str]) -> JobEnvironment:
    """From `NAME=VALUE`, and `NAME`, which is looked up in `environ`; the last one of a name counts.

    Raises:
        UsageError: an entry is neither, or a name is not set here.
    """
    env: dict[str, str] = {}
    forwarded: dict[str, None] = {}
    for text in variables:
        name, equals, value = text.partition("=")
        if not check_variable(name):
            # The text may be a value without its name, so it is not repeated.
            raise UsageError("--env needs NAME or NAME=VALUE", hint="for example --env HF_TOKEN")
        forwarded.pop(name, None)
        if not equals:
            if name not in environ:
                raise UsageError(
                    f"--env {name}: the variable is not set here",
                    hint=f"export {name}=..., or --env {name}=VALUE",
                )
            value = environ[name]
            forwarded[name] = None
        if "\0" in value:
            raise UsageError(f"--env {name}: the value contains a NUL character")
        env[name] = value
    text = (prelude or "").strip()
    if "\0" in text:
        raise UsageError("--setup contains a NUL character")
    return JobEnvironment(env=env, forwarded=tuple(forwarded), prelude=text or None)


def with_same_threads(environment: JobEnvironment, cluster: Cluster, workers: Sequence[int]) -> JobEnvironment:
    """One thread per worker for runs to be compared, unless the user or the hostfile sets the number.

    torchrun sets OMP_NUM_THREADS to 1 if a node has several workers, and leaves it unset for one: the same worker
    would compute differently.
    """
    is_set = _THREADS in environment.env or any(_THREADS in node.env for node in cluster.nodes)
    if is_set or max(workers, default=1) == 1:
        return environment
    return msgspec.structs.replace(environment, env=environment.env | {_THREADS: "1"})
