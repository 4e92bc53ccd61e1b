"""Framework: what multinode knows of a program that trains by the keys of a file, or by options of a command.

Everything else reads a training by its arguments (`TrainingJob.arguments`): its keys under the names that the Trainer
and LLaMA-Factory have for them. A framework translates its own keys into these, and changes back.
"""

from __future__ import annotations

import functools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

from multinode.errors import UsageError
from multinode.job.frameworks import FRAMEWORKS, Names
from multinode.job.settings import TrainingSettings

MODEL = "model_name_or_path"
OF_LLAMAFACTORY = frozenset(
    {
        *("overwrite_output_dir", "predict_with_generate", "do_predict", "early_stopping_steps", "plot_loss"),
        *("use_asft_loss", "data_shared_file_system"),
    }
)
"""Arguments that no other framework has."""


class Framework(ABC):
    """What multinode knows of one.

    Attributes:
        name: as runs store it.
        title: as people write it.
        verbs: what the command trains, by the word behind its name; the first is that of a file alone.
        tools: programs that its engine needs on the nodes, with the package that has each.
        engine: what starts its workers unless another engine is asked for.
        defaults: what it trains with where its keys are silent.
        names: its own key of an argument, where that has another name.
        lacks: arguments that it does not have.
        telltales: keys beside its model's that tell its file from other frameworks'; empty where the model's does.
        has_file: whether its workers read a file; otherwise they get its keys as options.
        loose_numbers: whether it reads 1e-5 in a file as a number, as OmegaConf does; to PyYAML it is text, which the
            type of its argument makes a number.
        makes_data: whether multinode can generate its data (`--synthetic`).
        builder: source of what builds its model on a node, for counting (model/model_count.py); empty is the usual.
        command_modules: modules that are its command: `python -m MODULE VERB`.
        file_option: the option of its command that names the file of keys; None if the file follows the verb.
        needs_file: whether its command takes a file, and options beside it alone.
        says_verb: whether its keys say what is trained; otherwise the command does.
        passes_options: whether its command passes options to the launcher that it starts; those behind `--` always.
        engine_option: the option of its command that chooses this launcher.
        own_options: options that are its own though the launcher has them, too.
        resumes: whether its argument `resume_from_checkpoint` has it go on from there; otherwise a hook of the worker
            gives the Trainer the checkpoint.
        for_restarts: keys with which it saves where `output_dir` says, and chooses no checkpoint itself.
    """

    name: str
    title: str
    verbs: tuple[str, ...] = ("train",)
    tools: ClassVar[Mapping[str, str]] = {}
    engine: str = "torchrun"
    defaults: TrainingSettings = TrainingSettings()
    names: ClassVar[Mapping[str, str]] = {}
    lacks: frozenset[str] = frozenset()
    telltales: frozenset[str] = frozenset()
    has_file: bool = True
    loose_numbers: bool = False
    makes_data: bool = False
    builder: str = ""
    command_modules: tuple[str, ...] = ()
    file_option: str | None = None
    needs_file: bool = False
    says_verb: bool = True
    passes_options: bool = False
    engine_option: str | None = None
    own_options: frozenset[str] = frozenset()
    resumes: bool = True
    for_restarts: ClassVar[Mapping[str, Any]] = {}

    @property
    def programs(self) -> tuple[str, ...]:
        """Commands that start it; none of one whose trainings are scripts."""
        return FRAMEWORKS.get(self.name, Names()).commands

    @property
    def packages(self) -> tuple[str, ...]:
        """Distributions that it needs on the nodes, beside torch."""
        return FRAMEWORKS.get(self.name, Names()).packages

    @property
    def model(self) -> str:
        """Its key of the model, which every training has."""
        return self.names.get(MODEL, MODEL)

    def recognises(self, config: Mapping[str, Any]) -> bool:
        """Whether these can be the keys of its training."""
        return self.model in config and (not self.telltales or not self.telltales.isdisjoint(config))

    def reads(self, script: str) -> bool:
        """Whether a script with this text takes its keys as options."""
        return False

    def refusal(self, config: Mapping[str, Any], source: str) -> UsageError | None:
        """Why multinode starts no such training, though it is one; None if it does."""
        return None

    @abstractmethod
    def command(self, verb: str, path: str) -> str:
        """The command that people type for a file."""

    @abstractmethod
    def module(self, verb: str) -> str:
        """The module that its workers run."""

    def program(self, verb: str) -> tuple[str, ...]:
        """What its workers run: torchrun, accelerate and DeepSpeed's launcher spell a module alike."""
        return ("--module", self.module(verb))

    def verb_of(self, program: str) -> str | None:
        """What is trained by a path or a module behind a launcher; None if that is not its program."""
        name = program.removesuffix(".py").replace("/", ".")
        return next((verb for verb in self.verbs if f".{name}".endswith(f".{self.module(verb)}")), None)

    def file_words(self, file: str) -> tuple[str, ...]:
        """How its workers are given the file of their keys."""
        return (file,)

    def variables(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Variables that its keys set for the workers; those of the user win."""
        return {}

    def options(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The keys that are options of its program."""
        return config

    def arguments(self, config: Mapping[str, Any], verb: str) -> dict[str, Any]:
        """Its keys as arguments; a key that has no other name keeps its own."""
        names = {own: name for name, own in self.names.items()}
        return {names.get(key, key): value for key, value in config.items()}

    def changed(self, config: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Changes of arguments as changes of its own keys, but for those that it lacks; None unsets a key."""
        return {self.names.get(name, name): value for name, value in arguments.items() if name not in self.lacks}

    def checks_keys(self, variables: Iterable[str]) -> bool:
        """Whether a node can tell which of its keys are unknown, with these variables."""
        return False

    def data(self, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """What its data are called: paths, or names on a hub."""
        return tuple(
            name.partition("#")[0] for key in ("dataset", "eval_dataset") for name in listed(arguments.get(key))
        )

    def dataset_paths(self, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """Paths of its data that must exist on every node, whatever they look like."""
        return ()

    def datasets(self, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """Names that its list of datasets must have."""
        return ()

    def verb_for(self, config: Mapping[str, Any]) -> str:
        """What the keys of a file alone train."""
        return self.verbs[0]

    def flag_words(self, flags: Sequence[str]) -> tuple[str, ...]:
        """Options as typed, as its workers read them behind their file; none if they read the file alone."""
        return tuple(flags)

    def read_flags(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The keys of a command's options, of which one without a value is true."""
        return dict(given)

    def accumulation(self, batch: int | None, workers: int) -> int:
        """Accumulation steps where its keys are silent."""
        return self.defaults.gradient_accumulation_steps or 1

    def accelerate_file(self, config: Mapping[str, Any]) -> str | None:
        """The path of the accelerate configuration that its keys name; None if they name none."""
        return None

    def deepspeed_text(self, named: str) -> str | None:
        """The DeepSpeed JSON that it has itself under a name; None if a name is a path."""
        return None

    def holds_out(self, arguments: Mapping[str, Any]) -> bool:
        """Whether it can evaluate on samples that it does not train on."""
        return False


@functools.cache
def find_framework(name: str) -> Framework:
    """The framework of this name, one of `FRAMEWORKS` or `script`."""
    found: Framework = import_module(f"multinode.job.frameworks.{name}").FRAMEWORK
    return found


def every_framework() -> tuple[Framework, ...]:
    """All frameworks."""
    return tuple(map(find_framework, FRAMEWORKS))


def frameworks_named(word: str) -> tuple[Framework, ...]:
    """The frameworks to which a command, a path or a module may belong by its name."""
    parts = set(re.split(r"[/.]", word))
    return tuple(find_framework(name) for name, own in FRAMEWORKS.items() if parts & {name, *own.commands})


def frameworks_of_scripts() -> tuple[Framework, ...]:
    """The frameworks without a command, whose trainings are scripts."""
    return tuple(find_framework(name) for name, own in FRAMEWORKS.items() if not own.commands)


def option_words(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys as options of a command, as HfArgumentParser reads them; a key that is None has none."""
    words: list[str] = []
    for key, value in config.items():
        if value is None or value == []:
            continue
        values = value if isinstance(value, list | tuple) else (value,)
        words += [f"--{key}", *(json.dumps(part) if isinstance(part, dict | list) else str(part) for part in values)]
    return tuple(words)


def option_keys(words: Sequence[str]) -> tuple[str, ...]:
    """The keys that words of a command name as options, in their order."""
    return tuple(word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--"))


def without_options(words: Sequence[str], names: Collection[str]) -> tuple[str, ...]:
    """Words of a command without the options of these names, and their values."""
    kept: list[str] = []
    is_left_out = False
    for word in words:
        if word.startswith("--"):
            is_left_out = option_keys([word])[0] in names
        if not is_left_out:
            kept.append(word)
    return tuple(kept)


def listed(value: object) -> tuple[str, ...]:
    """The names in a value: a list, or text with commas."""
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else []
    return tuple(part.strip() for part in parts if isinstance(part, str) and part.strip())


def adapter_targets(value: object) -> str:
    """The modules of an adapter, as LLaMA-Factory names them; empty leaves them to peft."""
    names = listed(value)
    return "all" if "all-linear" in names else ",".join(names)
