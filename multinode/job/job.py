"""Job: a training that is told by keys, or a script, and its environment. Parsing and rendering; reads no files."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from multinode.cluster.cluster import Cluster
from multinode.cluster.hostfile import check_variable
from multinode.errors import JobError, UsageError
from multinode.job.frameworks.framework import (
    MODEL,
    Framework,
    every_framework,
    find_framework,
    listed,
    option_keys,
    option_words,
    without_options,
)
from multinode.job.settings import TrainingSettings
from multinode.secret_values import hides

# Arguments that hold paths, comma-separated, or names on the hub such as `owner/name`.
_PATH_KEYS = (
    MODEL,
    "adapter_name_or_path",
    "media_dir",
    "ref_model",
    "ref_model_adapters",
    "resume_from_checkpoint",
    "reward_model",
    "reward_model_adapters",
)
_LOCAL = re.compile(r"/|\.{1,2}(?:/|$)|~(?:/|$)")
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
# As HfArgumentParser reads options of truth values, and Python numbers; its 1 and 0 are numbers elsewhere.
_TRUTHS = {**dict.fromkeys(("yes", "true", "t", "y"), True), **dict.fromkeys(("no", "false", "f", "n"), False)}
_WHOLE = re.compile(r"0|-?[1-9]\d*", re.ASCII)
_REAL = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?", re.ASCII)
_BRACKETS = re.compile(r"\{.*\}|\[.*\]", re.DOTALL)


class Synthetic(msgspec.Struct, frozen=True, kw_only=True):
    """Synthetic data in place of a dataset."""

    rows: int | None = None  # minimum number of samples; None is as many as the training's steps need


class TrainingJob(msgspec.Struct, frozen=True, kw_only=True, tag="training"):
    """A training job that is configured by the keys of a framework, such as LLaMA-Factory.

    Attributes:
        framework: the framework's name.
        verb: what is trained, of the framework's verbs; empty is the first.
        program: what its workers run, as typed; empty is the framework's own program.
        options: options of the launcher. On the command line of the launcher, they precede the program.
        flags: options as typed behind the program, which win over the file.
        config_path: the file of its keys as named by the user, or the command whose options they are.
        text: the file's text, verbatim; empty without a file.
        config: its keys: the file's, then those of the options, with overrides applied.
        overridden: keys set by overrides.
        deepspeed_text: its DeepSpeed JSON, verbatim but for the edits; None without one.
        deepspeed_diff: the edits as a unified diff; None without edits.
        keeps_output: whether the trained model is kept where its keys say; otherwise it goes to the run's
            directory.
        synthetic: its synthetic data (`with_synthetic`); None if it has its own.
        uncut: its keys before it was shortened for a measurement; None if it was not.
        local_paths: those of `named_paths` that exist on the controller; others may be names on the hub.
    """

    framework: str = "llamafactory"
    verb: str = ""
    program: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
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
    def kind(self) -> Framework:
        """Its framework."""
        return find_framework(self.framework)

    @property
    def training(self) -> TrainingJob | None:
        """It, as its settings are keys that can be read and changed."""
        return self

    @property
    def identity(self) -> tuple[Any, ...]:
        """What makes it another training if it changes, as plain data, but for the files that it names."""
        return self.text, self.config, self.deepspeed_text

    @property
    def command(self) -> TrainingCommand:
        """How it is started."""
        return TrainingCommand(
            framework=self.framework,
            verb=self.verb,
            program=self.program,
            options=self.options,
            flags=self.flags,
            name=self.config_path,
        )

    @property
    def typed(self) -> dict[str, Any]:
        """The keys that its options set."""
        return self.kind.read_flags(parse_flags(self.flags, self.config_path))

    @property
    def given(self) -> dict[str, Any]:
        """Its keys without overrides."""
        return (_parse_mapping(self.text, self.config_path) if self.text else {}) | self.typed

    @property
    def arguments(self) -> dict[str, Any]:
        """Its keys under the names that the Trainer and LLaMA-Factory have for them."""
        return self.kind.arguments(self.config, self.verb)

    @property
    def written(self) -> dict[str, Any]:
        """Its keys as they are written anew: a number that its framework reads as text stays as the user wrote it."""
        if self.kind.loose_numbers or not self.text or not any(isinstance(v, float) for v in self.config.values()):
            return self.config
        plain, changed = _parse_mapping(self.text, self.config_path, plain=True), {*self.typed, *self.overridden}
        own = {key: value for key, value in plain.items() if isinstance(value, str) and key not in changed}
        return {key: own.get(key, value) if isinstance(value, float) else value for key, value in self.config.items()}

    @property
    def takes_checkpoint(self) -> bool:
        """Whether its argument `resume_from_checkpoint` has it go on from there."""
        return self.kind.resumes

    @property
    def trainer_options(self) -> dict[str, Any]:
        """Arguments of the Trainer."""
        return self.arguments

    @property
    def settings(self) -> TrainingSettings:
        """The arguments that have a default."""
        return self.kind.defaults.given(self.arguments)

    def accumulation(self, workers: int) -> int:
        """Micro-batches of a step on so many workers; 1 if that is unknown."""
        given = self.settings
        return given.gradient_accumulation_steps or self.kind.accumulation(given.per_device_train_batch_size, workers)

    def own_name(self, argument: str) -> str:
        """Its own key of an argument."""
        return self.kind.names.get(argument, argument)

    def own_keys(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Changes of arguments as changes of its own keys."""
        return self.kind.changed(self.config, arguments)

    def words(self, file: str) -> tuple[str, ...]:
        """What follows the launcher's name; `file` is where its keys lie on the node."""
        kind = self.kind
        program = self.program or kind.program(self.verb or kind.verb_for(self.config))
        if kind.has_file:
            # On a node, everyone can read a command line.
            secret = [key for key, value in self.typed.items() if hides(key, value)]
            kept = without_options(kind.flag_words(self.flags), {*self.overridden, *secret})
            return (*self.options, *program, *kind.file_words(file), *kept)
        kept = without_options(self.flags, self.overridden)
        typed = option_keys(kept)
        rest = {key: value for key, value in self.written.items() if key not in typed}
        return (*self.options, *program, *kept, *option_words(kind.options(rest)))


Form = Literal["script", "module", "executable"]


class ScriptJob(msgspec.Struct, frozen=True, kw_only=True, tag="script"):
    """A training script, or another program.

    Attributes:
        argv: the program, followed by its arguments.
        form: whether the program is a Python script, a module (as in `python -m`), or an executable.
        options: options of the launcher. On the command line of the launcher, they precede the program.
        local_paths: arguments that are paths on the controller.
        deepspeed_text: the DeepSpeed JSON that the options name, if it is on the controller.
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

    @property
    def kind(self) -> Framework:
        """The framework of which nothing is known."""
        return find_framework("script")

    @property
    def training(self) -> TrainingJob | None:
        """None: it has no keys."""
        return None

    @property
    def program(self) -> tuple[str, ...]:
        """What its workers run."""
        return self.argv

    @property
    def identity(self) -> tuple[Any, ...]:
        """What makes it another training if it changes, as plain data, but for the files that it names."""
        return (self.words,)

    @property
    def arguments(self) -> dict[str, Any]:
        """None: what its own arguments mean is not known."""
        return {}

    @property
    def trainer_options(self) -> dict[str, Any]:
        """Its options, with the word after each, which may be the Trainer's."""
        words = [part for word in self.argv[1:] for part in (word.split("=", 1) if word.startswith("--") else [word])]
        pairs = itertools.pairwise((*words, ""))
        return {name[2:].replace("-", "_"): value for name, value in pairs if name.startswith("--")}

    @property
    def takes_checkpoint(self) -> bool:
        """No: it sees to its checkpoints itself."""
        return self.kind.resumes

    @property
    def settings(self) -> TrainingSettings:
        """All unknown."""
        return self.kind.defaults

    def accumulation(self, workers: int) -> int:
        """1, as it is unknown."""
        return self.kind.accumulation(None, workers)

    def own_name(self, argument: str) -> str:
        """The argument's name, as it has no keys."""
        return self.kind.names.get(argument, argument)

    def own_keys(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """None: it has no keys to change."""
        return self.kind.changed({}, arguments)


Job = TrainingJob | ScriptJob


class TrainingCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A command that starts the training of a framework, taken apart.

    Attributes:
        framework: the framework's name; None where the keys tell it.
        verb: what is trained.
        program: what its workers run, as typed; empty is the framework's own program.
        options: of a launcher in front of it.
        config: the path of the file of its keys; None without one.
        flags: its keys as options.
        name: the command, for people.
    """

    framework: str | None = None
    verb: str = ""
    program: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    config: str | None = None
    flags: tuple[str, ...] = ()
    name: str = ""


def parse_training(
    text: str, source: str, overrides: Iterable[str] = (), *, like: TrainingCommand | None = None
) -> TrainingJob:
    """A training from the keys of a YAML, of options, or of both, and `key=value` overrides.

    Args:
        text: the YAML; empty if there are only options.
        source: its path, for messages.
        overrides: `key=value`.
        like: the command that starts it; None recognises the framework by the keys.

    Raises:
        JobError: the YAML is invalid (with file and line), is no training, or could be that of several frameworks.
        UsageError: multinode starts no training of this framework's version.
    """
    like = like or TrainingCommand()
    # A command may have options alone.
    has_file = bool(text) or like.framework is None or like.config is not None
    config = _parse_mapping(text, source) if has_file else {}
    changed = parse_overrides(overrides)
    kind = find_framework(like.framework) if like.framework is not None else _recognise(config | changed, source)
    config |= kind.read_flags(parse_flags(like.flags, source)) | changed
    refusal = kind.refusal(config, source)
    if refusal is not None:
        raise refusal
    return TrainingJob(
        framework=kind.name,
        verb=like.verb or (kind.verb_for(config) if len(kind.verbs) > 1 else ""),
        program=like.program,
        options=like.options,
        flags=like.flags,
        config_path=source,
        text=text,
        config=config,
        overridden=tuple(changed),
    )


def _recognise(config: Mapping[str, Any], source: str) -> Framework:
    """The framework of these keys.

    Raises:
        JobError: none has them, or several have.
    """
    found = [kind for kind in every_framework() if kind.recognises(config)]
    if len(found) == 1:
        return found[0]
    if found:
        commands = [f"multinode launch -- {kind.command(kind.verbs[0], source)}" for kind in found]
        raise JobError(
            f"{source} may be a configuration for {' or '.join(kind.title for kind in found)}: it has keys of both",
            hint=f"specify which: {', or '.join(commands)}",
        )
    known = [kind for kind in every_framework() if kind.programs]
    close = [kind for kind in known if kind.model in config]
    if close:
        lack, add = f"no key of {' or '.join(kind.title for kind in close)} other than the model", "add one"
        keys = [f"{kind.title} ({', '.join(sorted(kind.telltales))})" for kind in close]
    else:
        lack, add = "no model", "name the model with the key"
        keys = [f"{kind.title} ({kind.model})" for kind in known]
    raise JobError(
        f"{source} is not a training configuration: it has {lack}",
        hint=f"{add} of {', '.join(keys)}; for your own script: multinode launch -- train.py",
    )


_Training = TypeVar("_Training", bound=TrainingJob)
_Job = TypeVar("_Job")


def override_job(job: _Training, changed: Mapping[str, Any]) -> _Training:
    """Copy of the job with these keys of its own set; None is YAML's null, which unsets a key."""
    overridden = dict.fromkeys((*job.overridden, *changed))
    return msgspec.structs.replace(job, config=job.config | dict(changed), overridden=tuple(overridden))


def change_arguments(job: _Job, arguments: Mapping[str, Any]) -> _Job:
    """Copy of the job with these arguments, as far as its framework has them; another job is unchanged."""
    return override_job(job, job.own_keys(arguments)) if isinstance(job, TrainingJob) else job


def set_options(job: Job, **arguments: Any) -> str:
    """Options of `launch` that set these arguments of a job, under its own keys; empty if it has none of them."""
    changed = job.own_keys(arguments)
    return shlex.join(word for key, value in changed.items() for word in ("--set", override_text(key, value)))


def own_overrides(job: TrainingJob, overrides: Iterable[str]) -> tuple[str, ...]:
    """`key=value` of arguments as `key=value` of the job's own keys."""
    return tuple(override_text(key, value) for key, value in job.own_keys(parse_overrides(overrides)).items())


def limit_steps(job: _Job, steps: int) -> _Job:
    """Copy of the job with this number of optimizer steps, with the user's own kept; another job is unchanged."""
    if not isinstance(job, TrainingJob):
        return job
    return msgspec.structs.replace(change_arguments(job, {"max_steps": steps}), uncut=job.uncut or job.config)


def benchmark_job(job: _Job) -> _Job:
    """Copy of the training for measurement only: no evaluation, no reporting, and the user's output is left alone.

    A training would resume from the files in `output_dir`, or overwrite them. A script writes what it writes.
    """
    if not isinstance(job, TrainingJob):
        return job
    given = job.arguments
    without = {key: value for key, value in _FIGURES_ONLY.items() if key in _ON_WHERE_SILENT or key in given}
    return msgspec.structs.replace(change_arguments(job, without), keeps_output=False)


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


def named_paths(job: TrainingJob) -> tuple[str, ...]:
    """What the job reads from disk, including names that may be models or datasets on a hub."""
    arguments = job.arguments
    return tuple(dict.fromkeys([*_possible_paths(job, arguments), *job.kind.dataset_paths(arguments)]))


def job_paths(job: TrainingJob) -> tuple[str, ...]:
    """Paths that must exist on every node: what the job reads from disk and does not travel with it."""
    arguments = job.arguments
    paths = [path for path in _possible_paths(job, arguments) if _LOCAL.match(path) or path in job.local_paths]
    paths += job.kind.dataset_paths(arguments) if job.synthetic is None else ()
    deepspeed = arguments.get("deepspeed")
    if isinstance(deepspeed, str) and job.deepspeed_text is None:
        paths.append(deepspeed)
    return tuple(dict.fromkeys(paths))


def describe_job(job: Job) -> str:
    """The job in a few words."""
    if isinstance(job, ScriptJob):
        return " ".join(job.argv[:1])
    name, kind, given = job.config_path.rsplit("/", 1)[-1], job.kind, job.arguments
    how = [str(given[key]) for key in ("stage", "finetuning_type") if key in given]
    synthetic = ", synthetic data" if job.synthetic is not None else ""
    return f"{name} ({' '.join([kind.title, *how])}{synthetic})"


def parse_flags(words: Sequence[str], command: str) -> dict[str, Any]:
    """The keys of a training from the options of a command: `--stage sft --bf16 --report_to wandb tensorboard`.

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
                f"{word!r} follows {command}, which takes a YAML or options such as --stage sft",
                hint="give the path of a YAML that ends with .yaml, or every argument as --key value",
            )
        else:
            given[next(reversed(given))].append(_flag_value(word))
    return {key: values if len(values) > 1 else values[0] if values else True for key, values in given.items()}


def _flag_value(word: str) -> Any:
    """An option's word: text, unless all of it is a truth value, a number, or data in brackets.

    The type of its field decides in the framework's parser, which is not here. A name may look like a number: 007.
    """
    if word.lower() in _TRUTHS:
        return _TRUTHS[word.lower()]
    if _WHOLE.fullmatch(word):
        return int(word)
    if _REAL.fullmatch(word):
        return float(word)
    if not _BRACKETS.fullmatch(word):
        return word
    try:
        return parse_assignment("", f"value={word}", "")[1]
    except JobError:
        return word


def argument_keys(job: object, variables: Iterable[str] = ()) -> tuple[str, ...]:
    """Keys that a node can look up among those that its framework knows; empty if it accepts any, or for other jobs.

    `variables` are names of the job's variables; some of them change what is accepted.
    """
    if not isinstance(job, TrainingJob) or not job.kind.checks_keys(variables):
        return ()
    return tuple(key for key in job.config if "\0" not in key)


def render_job(job: TrainingJob) -> str:
    """The YAML that travels: verbatim if unchanged; otherwise rewritten, which its first line says."""
    changed = dict.fromkeys((*job.typed, *job.overridden))
    if not changed:
        return job.text
    from multinode.strict_yaml import dump_yaml

    if not job.text:
        return dump_yaml(job.written)
    # A file name may contain anything; a comment ends with its line.
    name = "".join(char if char.isprintable() else "?" for char in job.config_path)
    return f"# {name} with these keys changed by multinode: {', '.join(changed)}\n" + dump_yaml(job.written)


def _possible_paths(job: TrainingJob, arguments: Mapping[str, Any]) -> Iterator[str]:
    for key in _PATH_KEYS:
        yield from listed(arguments.get(key))
    yield from job.kind.data(arguments)


def _parse_mapping(text: str, source: str, *, plain: bool = False) -> dict[str, Any]:
    from multinode.strict_yaml import YamlError, parse_yaml

    try:
        config = parse_yaml(text, plain=plain)
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
    """Environment variables and setup commands of a job. They are the same on every node.

    Attributes:
        env: environment variables. They override variables in the hostfile.
        forwarded: names of variables whose values come from the controller's environment. The values are never printed.
        prelude: setup commands to run before the job, in the same shell. None if there are none.
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
