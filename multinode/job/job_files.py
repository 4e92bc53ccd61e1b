"""The files of a job: reading its keys, DeepSpeed JSON and change; its paths on the nodes' disks, by purpose."""

from __future__ import annotations

import contextlib
import itertools
import shlex
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from multinode.decoding import decode_json
from multinode.errors import JobError, UsageError
from multinode.job.frameworks.framework import frameworks_of_scripts, listed
from multinode.job.job import (
    Job,
    ScriptJob,
    TrainingCommand,
    TrainingJob,
    is_setting,
    job_paths,
    named_paths,
    override_job,
    override_text,
    parse_flags,
    parse_overrides,
    parse_training,
)
from multinode.levers.levers import NONE, LeverFields, Levers, read_levers
from multinode.records.benchmark import Benchmark
from multinode.records.files import exists, nearest_path, read_text

if TYPE_CHECKING:
    from multinode.job.code_tree import CodeTree
    from multinode.job.deepspeed import DeepSpeedEdit
    from multinode.job.engines.engine import Engine

_Job = TypeVar("_Job")

_MODELS = ("model_name_or_path", "adapter_name_or_path")
_DATASET_DIR, _DATASET_LIST = "dataset_dir", "dataset_info.json"
# What a training writes, and where it goes on from; the others it only reads.
_WRITTEN = ("output_dir", "resume_from_checkpoint", "logging_dir", "cache_dir", "tokenized_path")
_READ = (
    *(*_MODELS, "ref_model", "ref_model_adapters", "reward_model", "reward_model_adapters", "media_dir"),
    "fsdp_config",
)
# Where Hugging Face's datasets keep what they have prepared, unless a variable moves it (its HF_HOME).
_CACHE = "~/.cache/huggingface/datasets"


class JobFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The paths of a job, as it names them."""

    needed: tuple[str, ...] = ()  # must exist on every node
    named: tuple[str, ...] = ()  # arguments of a script that are paths on the controller: it may read or write them
    module: str | None = None  # to be importable on every node
    program: str | None = None  # to be found on the PATH of every node
    output: str | None = None
    cache: str | None = None
    compared: tuple[str, ...] = ()  # what of `needed` must be equal on all nodes
    datasets: tuple[str, ...] = ()  # names of the datasets in dataset_info.json
    model: str | None = None  # directory of the model; None if it comes from a hub

    @property
    def looked_at(self) -> tuple[str, ...]:
        """All paths that a probe checks."""
        others = (path for path in (self.output, self.cache) if path is not None)
        return tuple(dict.fromkeys([*self.needed, *self.named, *others]))


def job_files(job: Job | Benchmark | None, code: CodeTree | None = None) -> JobFiles:
    """The files of a job but for those that are copied; none where there is no job, or none is known of."""
    files = JobFiles()
    if isinstance(job, TrainingJob):
        files = _training_files(job)
    elif isinstance(job, ScriptJob) and job.argv:
        files = _script_files(job)
    if code is None:
        return files
    copied = _copied((*files.needed, *files.named), code)
    return msgspec.structs.replace(
        files,
        needed=tuple(path for path in files.needed if path not in copied),
        named=tuple(path for path in files.named if path not in copied),
        module=None if files.module is None or _holds_module(code, files.module) else files.module,
        compared=tuple(path for path in files.compared if path not in copied),
        model=None if files.model in copied else files.model,
    )


def _script_files(job: ScriptJob) -> JobFiles:
    program = job.argv[0]
    deepspeed = _deepspeed_path(job) or ""
    configuration = (deepspeed,) if deepspeed.endswith(".json") or deepspeed in job.local_paths else ()
    named = tuple(path for path in job.local_paths if path not in configuration)
    if job.form == "module":
        return JobFiles(needed=configuration, compared=configuration, named=named, module=program)
    if job.form == "executable" and "/" not in program:
        return JobFiles(needed=configuration, compared=configuration, named=named, program=program)
    # An engine that starts any program may find it on PATH.
    needed = (*((program,) if "/" in program or program.endswith(".py") else ()), *configuration)
    return JobFiles(needed=needed, compared=needed, named=named)


def _holds_module(code: CodeTree, module: str) -> bool:
    path = module.replace(".", "/")
    return code.holds(f"{path}.py") or code.holds(f"{path}/__main__.py")


def _deepspeed_path(job: ScriptJob) -> str | None:
    """What a script's or its launcher's options name as the DeepSpeed JSON."""
    words = [
        part
        for word in (*job.options, *job.argv[1:])
        for part in (word.split("=", 1) if word.startswith("--") else [word])
    ]
    return next((value for key, value in itertools.pairwise(words) if key in _DEEPSPEED_OPTIONS), None)


def may_be_paths(job: Job | Benchmark | None) -> tuple[str, ...]:
    """What a job names that is a path where a node has it, and else the name of a model on a hub."""
    return named_paths(job) if isinstance(job, TrainingJob) else ()


def outside_code(job: TrainingJob, code: CodeTree, cwd: str, there: Collection[str]) -> dict[str, Any]:
    """The arguments whose relative paths mean the node's own directory, not the copy of the code, with absolute ones.

    What is written does, so that no checkpoint is in the copy; what is read does if the copy lacks it.

    `cwd` is the node's own directory, `there` are paths that it has in it.
    """
    paths = {*job_paths(job), *there}
    lacking = paths - _copied(paths, code)

    def place(key: str, path: str) -> str:
        is_path = key in _WRITTEN or path.partition("#")[0] in lacking
        return f"{cwd.rstrip('/')}/{path}" if is_path and not path.startswith(("/", "~")) else path

    placed = {}
    config = job.arguments
    if job.kind.dataset_paths(config):
        config = {_DATASET_DIR: job.settings.dataset_dir, **config}
    data = ("dataset", "eval_dataset") if job.kind.data(config) else ()
    for key in (*_WRITTEN, *_READ, _DATASET_DIR, *data):
        value: Any = config.get(key)
        made: Any = None
        if isinstance(value, str) and value:
            made = ",".join(place(key, part.strip()) for part in value.split(","))
        elif isinstance(value, list):
            made = [place(key, part) if isinstance(part, str) else part for part in value]
        if made is not None and made != value:
            placed[key] = made
    return placed


def require_copied(job: Job | Benchmark, code: CodeTree) -> None:
    """Refuse a script that the job could not find in the copy.

    Raises:
        UsageError: it would not be there.
    """
    programs = _program_paths(job) if isinstance(job, TrainingJob) else ()
    for path in job_files(job, code).needed:
        if (isinstance(job, ScriptJob) or path in programs) and not path.startswith(("/", "~")):
            raise UsageError(
                f"--copy-code: {path} is not among the copied files of {code.source}, where the job runs",
                hint="check whether git ignores it: git status --ignored",
            )


def _copied(paths: Collection[str], code: CodeTree) -> set[str]:
    """The paths that the copy has; it has a directory of datasets if it has its list of them."""
    lists = {path: f"{path.rstrip('/')}/{_DATASET_LIST}" for path in paths}
    return {path for path in paths if code.holds(lists[path] if lists[path] in paths else path)}


def _training_files(job: TrainingJob) -> JobFiles:
    needed, given = (*_program_paths(job), *job_paths(job)), job.arguments
    models = [path for key in _MODELS for path in listed(given.get(key)) if path in needed]
    folder = given.get(_DATASET_DIR, job.settings.dataset_dir)
    # Synthetic data travel with the plan and are prepared in the run's directory.
    has_data = job.synthetic is None and bool(listed(given.get("dataset")))
    datasets = job.kind.datasets(given) if job.synthetic is None else ()
    output = _text(given.get("output_dir"))
    return JobFiles(
        needed=needed,
        named=tuple(path for path in job.local_paths if path not in (*needed, output)),
        output=output,
        cache=_text(given.get("cache_dir")) or (_CACHE if has_data else None),
        compared=tuple(dict.fromkeys([*_program_paths(job), *models, *([folder] if folder in needed else [])])),
        datasets=tuple(dict.fromkeys(datasets)),
        model=models[0] if models and models[0] == given.get(_MODELS[0]) else None,
    )


def _program_paths(job: TrainingJob) -> tuple[str, ...]:
    return tuple(word for word in job.program[:1] if "/" in word or word.endswith(".py"))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


# Of the Trainer, of DeepSpeed's own `add_config_arguments`, and of accelerate.
_DEEPSPEED_OPTIONS = frozenset({"--deepspeed", "--deepspeed_config", "--deepspeed_config_file"})


def load_job(
    path: Path,
    overrides: tuple[str, ...] = (),
    deepspeed_edits: tuple[DeepSpeedEdit, ...] = (),
    text: str | None = None,
    *,
    like: TrainingCommand | None = None,
) -> TrainingJob:
    """A training, with the edited DeepSpeed JSON that travels with it; the user's file is unchanged.

    Args:
        path: the YAML.
        overrides: `KEY=VALUE` of it.
        deepspeed_edits: of its DeepSpeed JSON.
        text: its content, if it has been read; None reads the file.
        like: the command that starts it; None recognises the framework by the keys.

    Raises:
        UsageError: a file cannot be read.
        JobError: a file is invalid, or there is no JSON to edit.
    """
    if text is None:
        text = read_text(path, "the job", "give the YAML of a training job, or put your own script after --")
    like = like or TrainingCommand()
    job = parse_training(text, str(path), overrides, like=like)
    if like.framework is None and not job.kind.says_verb:
        command = f"multinode launch -- {job.kind.command(job.kind.verbs[0], str(path))}"
        others = ", ".join(job.kind.verbs[1:])
        raise JobError(f"{path} names no {job.kind.title} command", hint=f"for example {command}; or {others}")
    local = tuple(named for named in named_paths(job) if exists(Path(named)))
    if like.program:
        words = (word for value in job.config.values() for word in listed(value))
        local += tuple(word for word in words if word not in local and _is_named_path(word))
    return _with_deepspeed(msgspec.structs.replace(job, local_paths=local), path, deepspeed_edits)


def load_command(
    like: TrainingCommand, overrides: tuple[str, ...] = (), deepspeed_edits: tuple[DeepSpeedEdit, ...] = ()
) -> TrainingJob:
    """The training of a command, whose keys are in a file, in options, or in both; options win."""
    wrong = next((key for key in parse_flags(like.flags, like.name) if not is_setting(f"{key}=")), None)
    if wrong is not None:
        raise JobError(f"--{wrong} of {like.name} is not supported as an option", hint="set it in the file")
    if like.config is None:
        return load_job(Path(like.name), overrides, deepspeed_edits, "", like=like)
    return load_job(Path(like.config), overrides, deepspeed_edits, like=like)


def load_script(
    script: ScriptJob, overrides: tuple[str, ...] = (), deepspeed_edits: tuple[DeepSpeedEdit, ...] = ()
) -> Job:
    """A script, with the DeepSpeed JSON that its options name, and those of its arguments that are paths here.

    Its files stay where they are. One whose options are the keys of a framework is a training of that.

    Raises:
        UsageError: it has no keys that could be changed.
    """
    trained = _trained_by_script(script)
    if trained is not None:
        return load_command(trained, overrides, deepspeed_edits)
    if overrides or deepspeed_edits:
        option = "--set" if overrides else "--deepspeed-set"
        raise UsageError(f"{option} changes a YAML job; this is a script", hint="use the script's own arguments")
    values = (word.partition("=")[2] if word.startswith("-") else word for word in script.argv[1:])
    local = tuple(dict.fromkeys(value for value in values if _is_named_path(value)))
    return _with_named_json(msgspec.structs.replace(script, local_paths=local), _deepspeed_path(script))


def _trained_by_script(script: ScriptJob) -> TrainingCommand | None:
    """The training of a script on this disk whose options are the keys of a framework; None if they are not."""
    program, *words = script.argv or ("",)
    if script.form != "script" or not program.endswith(".py") or not (words and words[0].startswith("--")):
        return None
    try:
        text = Path(program).read_text(errors="replace")
    except OSError:
        return None
    kind = next((kind for kind in frameworks_of_scripts() if kind.reads(text)), None)
    if kind is None:
        return None
    return TrainingCommand(
        framework=kind.name, program=(program,), options=script.options, flags=tuple(words), name=program
    )


def _is_named_path(text: str) -> bool:
    """Whether it names something on this disk; a plain word may do so by chance."""
    return any(mark in text.strip("./") for mark in "/.") and "://" not in text and exists(Path(text).expanduser())


def with_accelerate_json(job: Job, accelerate: Mapping[str, Any]) -> Job:
    """Add DeepSpeed's JSON to a script whose accelerate configuration names it."""
    settings = accelerate.get("deepspeed_config")
    named = settings.get("deepspeed_config_file") if isinstance(settings, dict) else None
    return _with_named_json(job, named) if isinstance(job, ScriptJob) and job.deepspeed_text is None else job


def with_sharding(job: _Job, engine: Engine | None) -> _Job:
    """The job with the sharding of accelerate's configuration added, in the Trainer's keys. For reading only."""
    if engine is None or not engine.accelerate:
        return job
    from multinode.job.engines.accelerate import with_accelerate

    return with_accelerate(job, engine.accelerate)


def _with_named_json(job: ScriptJob, named: object) -> ScriptJob:
    try:
        text = read_text(Path(named), "the DeepSpeed configuration", "") if isinstance(named, str) else None
    except UsageError:
        return job
    return msgspec.structs.replace(job, deepspeed_text=text)


def _with_deepspeed(job: TrainingJob, path: Path, edits: tuple[DeepSpeedEdit, ...]) -> TrainingJob:
    named = job.arguments.get("deepspeed")
    if not isinstance(named, str):
        if edits:
            raise _nothing_to_edit(path, written_out=named is not None)
        return job
    own = job.kind.deepspeed_text(named)
    if own is None and job.program and not edits and not any(map(exists, (Path(named), path.parent / named))):
        # As a script's own, it may be on the nodes alone.
        return job
    path_text, text = (Path(named), own) if own is not None else _read_deepspeed(named, path)
    if not edits:
        return msgspec.structs.replace(job, deepspeed_text=text)
    from multinode.job.deepspeed import diff_deepspeed, edit_deepspeed

    edited = edit_deepspeed(text, edits)
    return msgspec.structs.replace(
        job, deepspeed_text=edited, deepspeed_diff=diff_deepspeed(text, edited, str(path_text))
    )


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
    """The JSON named by `deepspeed:`, relative to the working directory, as its framework does, or to the YAML."""
    candidates = [Path(named), path.parent / named]
    chosen = next((candidate for candidate in candidates if exists(candidate)), candidates[0])
    hint = f"`deepspeed:` in {path} names it; multinode looks for it here, then next to {path}"
    text = read_text(chosen, "the DeepSpeed configuration", hint)
    try:
        decode_json(text, dict)
    except msgspec.DecodeError as error:
        raise JobError(f"{chosen} is not a JSON object: {error}", hint=hint) from None
    except RecursionError:
        raise JobError(f"{chosen} is nested too deeply", hint=hint) from None
    return chosen, text


def absent_files(paths: Iterable[str]) -> dict[str, str | None]:
    """Paths of a job that do not exist on this machine, each with the most similar name there, if any."""
    return {path: nearest_path(Path(path)) for path in paths if not exists(Path(path).expanduser())}


_Count = Annotated[int, Meta(ge=1, le=1_000_000)]


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change that can be applied automatically."""

    overrides: tuple[str, ...] = ()  # `KEY=VALUE` for `--set`
    deepspeed: tuple[str, ...] = ()  # `DOTTED.KEY=VALUE` for `--deepspeed-set`
    levers: Levers = NONE
    env: dict[str, str] = {}  # for `--env`
    nodes: int | None = None  # number of first nodes of the hostfile to use; None is unchanged
    workers_per_node: int | None = None  # None is unchanged

    @property
    def options(self) -> str:
        """As options of `multinode launch`, quoted for a shell."""
        words = [
            *(("--nodes", str(self.nodes)) if self.nodes is not None else ()),
            *(("--workers-per-node", str(self.workers_per_node)) if self.workers_per_node is not None else ()),
            *self.levers.options,
            *(word for override in self.overrides for word in ("--set", override)),
            *(word for edit in self.deepspeed for word in ("--deepspeed-set", edit)),
            *(word for name, value in self.env.items() for word in ("--env", f"{name}={value}")),
        ]
        return shlex.join(words)

    def joined(self, second: Change) -> Change:
        """Both changes; the second wins."""
        return Change(
            overrides=(*self.overrides, *second.overrides),
            # A job without DeepSpeed has no configuration to edit.
            deepspeed=(*(() if "deepspeed=null" in second.overrides else self.deepspeed), *second.deepspeed),
            levers=self.levers.joined(second.levers),
            env={**self.env, **second.env},
            nodes=second.nodes if second.nodes is not None else self.nodes,
            workers_per_node=second.workers_per_node or self.workers_per_node,
        )


def changed_job(job: TrainingJob, change: Change) -> TrainingJob:
    """The job with the settings of a change.

    Raises:
        UsageError: it has no DeepSpeed JSON that could be edited.
        JobError: an edit is wrong.
    """
    from multinode.job.deepspeed import edit_deepspeed, parse_deepspeed_edits

    changed = override_job(job, parse_overrides(change.overrides))
    if changed.arguments.get("deepspeed") is None:
        return msgspec.structs.replace(changed, deepspeed_text=None, deepspeed_diff=None)
    if not change.deepspeed:
        return changed
    if changed.deepspeed_text is None:
        raise UsageError(f"{job.config_path} names no DeepSpeed JSON that multinode can edit")
    text = edit_deepspeed(changed.deepspeed_text, parse_deepspeed_edits(change.deepspeed))
    return msgspec.structs.replace(changed, deepspeed_text=text)


class _ChangeFile(LeverFields, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab"):
    """The file: options of `launch` by name."""

    nodes: _Count | None = None
    workers_per_node: _Count | None = None
    set_: dict[str, Any] = msgspec.field(name="set", default_factory=dict)
    deepspeed_set: dict[str, Any] = msgspec.field(default_factory=dict)
    env: dict[str, str] = msgspec.field(default_factory=dict)


_CHANGE_HINT = f"its keys are options of launch: {', '.join(_ChangeFile.__struct_encode_fields__)}"


def parse_change(text: str, source: object) -> Change:
    """A change from its file; `source` is its path, for messages.

    Raises:
        UsageError: it is not YAML, or has an unknown key or an invalid value.
    """
    from multinode.job.deepspeed import parse_deepspeed_edits
    from multinode.strict_yaml import decode_yaml

    try:
        file = decode_yaml(text, _ChangeFile, source, _CHANGE_HINT)
    except UsageError as error:
        raise UsageError(error.message, hint=_respelled(text) or error.hint) from None
    try:
        change = Change(
            overrides=tuple(override_text(key, value) for key, value in file.set_.items()),
            deepspeed=tuple(override_text(key, value) for key, value in file.deepspeed_set.items()),
            levers=read_levers(file),
            env=file.env,
            nodes=file.nodes,
            workers_per_node=file.workers_per_node,
        )
        parse_overrides(change.overrides)
        parse_deepspeed_edits(change.deepspeed)
    except UsageError as error:
        raise UsageError(f"{source}: {error.message}", hint=error.hint) from None
    return change


def _respelled(text: str) -> str | None:
    """The line that says what keys of before said; None if there are none."""
    from multinode.levers.former import respell_average
    from multinode.strict_yaml import YamlError, parse_yaml

    with contextlib.suppress(YamlError):
        keys = parse_yaml(text)
        average = respell_average(keys) if isinstance(keys, dict) else None
        return f"average: {average}" if average is not None else None
    return None


def change_text(change: Change, comment: str) -> str:
    """A change as a file, with a comment on its origin."""
    from multinode.job.deepspeed import parse_deepspeed_edits
    from multinode.strict_yaml import dump_yaml

    options = {
        "nodes": change.nodes,
        "workers-per-node": change.workers_per_node,
        **change.levers.given,
        "set": parse_overrides(change.overrides),
        "deepspeed-set": {".".join(edit.path): edit.value for edit in parse_deepspeed_edits(change.deepspeed)},
        "env": change.env,
    }
    written = {name: value for name, value in options.items() if value}
    # A comment ends with its line.
    text = " ".join(comment.split())
    return f"# {text}\n{dump_yaml(written) if written else '{}' + chr(10)}"
