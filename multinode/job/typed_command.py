"""TypedCommand: a training as people start it elsewhere, taken apart into its launcher, options, program and variables.

The table of launchers is `launchers`. Reads no files and asks no node.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from multinode.cluster.accelerators import NVIDIA, VISIBLE_DEVICES
from multinode.cluster.cluster import Cluster, Node
from multinode.errors import UsageError
from multinode.findings.finding import Finding
from multinode.findings.rule import RuleGroup
from multinode.job import launchers
from multinode.job.engines.engine import OF_SCRIPT, find_kind
from multinode.job.engines.place import STRAY_VARIABLES
from multinode.job.frameworks import FRAMEWORKS
from multinode.job.frameworks.framework import Framework, frameworks_named
from multinode.job.job import Form, ScriptJob, TrainingCommand, is_setting
from multinode.job.launchers import Launcher, OptionMeaning
from multinode.secret_values import hides, redact_words
from multinode.units import format_count, format_list

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.ASCII | re.DOTALL)
_INTERPRETER = re.compile(r"python(?:\d+(?:\.\d+)*)?", re.ASCII)
_COMMANDS = frozenset(name for own in FRAMEWORKS.values() for name in own.commands)
_MODULE = "python -m "
_CONFIGS = (".yaml", ".yml", ".json")
# Of the interpreter, by option: the variable that does the same.
_VARIABLE_OF = {
    "-B": "PYTHONDONTWRITEBYTECODE=1",
    "-O": "PYTHONOPTIMIZE=1",
    "-OO": "PYTHONOPTIMIZE=2",
    "-W": "PYTHONWARNINGS=...",
    "-X": "PYTHONFAULTHANDLER=1",
    "-s": "PYTHONNOUSERSITE=1",
    "-v": "PYTHONVERBOSE=1",
}
_SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ksh"})
# In front of a command, and of no meaning on a node: multinode outlives no terminal by itself, and measures time.
_DROPPED = frozenset({"env", "nohup", "time"})
_CONDAS = frozenset({"conda run", "mamba run", "micromamba run"})
_CONDA_FLAGS = frozenset({"--no-capture-output", "--live-stream", "-v", "--dev"})
_UV_FLAGS = frozenset({"--no-sync", "--frozen", "--locked", "--offline"})
# What LLaMA-Factory's launcher and torchrun read besides the variables that are removed from every job.
_PLACE_VARIABLES = frozenset({"FORCE_TORCHRUN", "MIN_NNODES", "MAX_NNODES"})
# Of torchrun, for as many workers as the node has devices; nothing where a variable was not set.
_ALL_DEVICES = frozenset({"", "auto", "gpu", "cpu", "xpu"})
_OF_VARIABLES = {"NNODES": launchers.NODES, "NPROC_PER_NODE": launchers.WORKERS}
REPLACED = RuleGroup("Parts of a command that multinode replaces")
_NOHUP = REPLACED.rule("nohup", about="nohup", message="nohup: use --detach to run in the background")
_SETUP = REPLACED.rule("environment", about="conda run or uv run", message="{program} is replaced by --setup {setup}")


class Stated(NamedTuple):
    """What a command says of where and on how many workers it runs."""

    meaning: OptionMeaning
    word: str  # as typed: `--nnodes=2`, `NODE_RANK=0`
    value: str  # empty if none was given, as by a variable that is not set


class TypedCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A command, taken apart.

    Attributes:
        engine: what starts the workers; None is the job's default.
        passes_local_rank: whether torchrun gives scripts `--local-rank=N`.
        script: the program; None for the training of a framework.
        training: how a framework's training is started; None for a script.
        settings: `KEY=VALUE` after the YAML.
        env: variables in front of it.
        python: the interpreter that it names by its path or version; None is the nodes' own.
        setup: shell commands that select its environment; None is none.
        accelerate_config: path of accelerate's configuration.
        accelerate: keys of that configuration which options set.
        stated: what it says of nodes, workers and GPUs.
        notes: what is left out of it, for the user.
    """

    engine: str | None = None
    passes_local_rank: bool = False
    script: ScriptJob | None = None
    training: TrainingCommand | None = None
    settings: tuple[str, ...] = ()
    env: dict[str, str] = {}
    python: str | None = None
    setup: str | None = None
    accelerate_config: str | None = None
    accelerate: dict[str, Any] = {}
    stated: tuple[Stated, ...] = ()
    notes: tuple[Finding, ...] = ()

    @property
    def hosts(self) -> str | None:
        """The hostfile that it names."""
        return next((fact.value for fact in self.stated if fact.meaning is launchers.HOSTS and fact.value), None)


def read_command(words: tuple[str, ...], engine: str | None = None, front: str = "multinode launch") -> TypedCommand:
    """Take a command apart.

    Args:
        words: the command as typed.
        engine: the engine that was asked for; None leaves the choice to the command. One that starts no workers
            starts it as it is.
        front: the command line in front of `--`, for hints.

    Raises:
        UsageError: it is empty, it starts a program that is no training or that multinode cannot start, one of its
            options has no counterpart, or it names another launcher than the engine.
    """
    kind = find_kind(engine) if engine is not None else None
    if kind is not None and not kind.starts_workers and engine not in launchers.OF_ENGINE:
        return TypedCommand(engine=engine, script=ScriptJob(argv=words, form="executable"))
    if not words:
        raise UsageError("no script follows --", hint=f"{front} -- train.py --its --arguments")
    return _Reader(words, engine, front).read()


class _Reader:
    """Takes words from the front; what they say is collected in `found`, fields of the command by name."""

    def __init__(self, words: tuple[str, ...], engine: str | None, front: str) -> None:
        self._all = words
        self._words = list(words)
        self._engine = engine
        self._front = front
        self._form: Form = "script"
        self._env: dict[str, str] = {}
        self._stated: list[Stated] = []
        self._notes: list[Finding] = []
        self._found: dict[str, Any] = {}

    def read(self) -> TypedCommand:
        while self._skip_wrapper():
            pass
        if not self._words:
            raise UsageError(
                f"no program follows {shlex.join(redact_words(self._all))}", hint=f"{self._front} -- train.py"
            )
        self._read_program(*self._read_launcher())
        return TypedCommand(
            engine=self._engine,
            env=self._env,
            stated=tuple(self._stated),
            notes=tuple(self._notes),
            **self._found,
        )

    def _skip_wrapper(self) -> bool:
        """Take one thing that stands in front of the program; False if the program comes next."""
        word, two = self._words[0], " ".join(self._words[:2])
        assigned = _ASSIGNMENT.fullmatch(word)
        if assigned is not None:
            self._words.pop(0)
            self._take_variable(assigned[1], assigned[2])
        elif word in _DROPPED:
            if word == "nohup":
                self._notes.append(_NOHUP.found(None))
            self._words.pop(0)
            self._refuse_options(word)
        elif two in _CONDAS:
            del self._words[:2]
            self._take_setup(two, f"conda activate {shlex.quote(self._read_conda(two))}")
        elif two == "uv run":
            del self._words[:2]
            while self._words and self._words[0] in _UV_FLAGS:
                self._words.pop(0)
            self._refuse_options(two, "run uv sync on the nodes, then remove the options of uv run")
            self._take_setup(two, ". .venv/bin/activate")
        else:
            return False
        return bool(self._words)

    def _take_setup(self, program: str, setup: str) -> None:
        self._found["setup"] = setup
        self._notes.append(_SETUP.found(None, program=program, setup=shlex.quote(setup)))

    def _take_variable(self, name: str, value: str) -> None:
        word = f"{name}={value}"
        if name in _OF_VARIABLES:
            self._stated.append(Stated(_OF_VARIABLES[name], word, value))
        elif name in _PLACE_VARIABLES or _is_stray(name):
            self._stated.append(Stated(launchers.RANK, word, value))
        else:
            self._env[name] = value
            if name in VISIBLE_DEVICES:
                self._stated.append(Stated(launchers.DEVICES, word, value))

    def _refuse_options(self, program: str, hint: str = "remove it") -> None:
        if self._words and self._words[0].startswith("-"):
            raise UsageError(f"{program} {self._words[0]} is not supported", hint=hint)

    def _read_conda(self, program: str) -> str:
        """Name or path of the environment."""
        place = None
        while self._words and self._words[0].startswith("-"):
            name, _, value = self._words.pop(0).partition("=")
            if name in {"-n", "--name", "-p", "--prefix"}:
                place = value or (self._words.pop(0) if self._words else None)
            elif name not in _CONDA_FLAGS:
                raise UsageError(f"{program} {name} is not supported", hint="remove it")
        if place is None:
            raise UsageError(f"{program} names no environment", hint=f"{program} -n NAME ..., or --setup")
        return place

    def _read_launcher(self) -> tuple[Launcher, str]:
        """The launcher and its name; the words behind it are left. Without one, the engine's own."""
        word = self._words[0]
        program = word.rpartition("/")[2]
        if _INTERPRETER.fullmatch(program):
            self._take_interpreter(word)
            if self._words[:1] == ["-m"]:
                self._words.pop(0)
                found = self._find_launcher(_MODULE, self._words)
                if found is not None:
                    return found
                self._form = "module"
            return self._own_launcher(), "python"
        if self._find_framework(program, self._words[1:]) is not None:
            self._words[0] = program
            if "/" in word:
                self._found["python"] = f"{word.rpartition('/')[0]}/python"
            return self._own_launcher(), ""
        found = self._find_launcher("", [program, *self._words[1:]])
        if found is not None:
            if "/" in word:
                self._found["python"] = f"{word.rpartition('/')[0]}/python"
            return found
        if not word.startswith("-") and not word.endswith((".py", *_CONFIGS)):
            self._refuse_program(program)
        return self._own_launcher(), ""

    def _find_launcher(self, begin: str, words: list[str]) -> tuple[Launcher, str] | None:
        for count in (2, 1):
            name = begin + " ".join(words[:count])
            launcher = launchers.LAUNCHERS.get(name)
            if launcher is not None:
                if self._engine not in {None, launcher.engine}:
                    raise UsageError(
                        f"--engine is {self._engine}, but the command starts {name}",
                        hint=f"remove --engine, or {name}",
                    )
                del self._words[:count]
                return launcher, name
        return None

    def _find_framework(self, program: str, rest: Sequence[str]) -> tuple[Framework, str] | None:
        """The framework whose command this is, and what it trains; None if it is no command of one.

        Raises:
            UsageError: it trains nothing.
        """
        kind = next((kind for kind in frameworks_named(program) if program in kind.programs), None)
        if kind is None:
            return None
        verb = rest[0] if rest else ""
        if verb not in kind.verbs:
            raise UsageError(
                f"{f'{program} {verb}'.strip()} is not started: {launchers.NO_TRAINING}",
                hint=f"to train with {kind.title}: {', '.join(f'{program} {known}' for known in kind.verbs)}",
            )
        return kind, verb

    def _own_launcher(self) -> Launcher:
        """The launcher of the engine that was asked for, without its name in front."""
        return launchers.OF_ENGINE.get(self._engine or OF_SCRIPT, launchers.OF_ENGINE[OF_SCRIPT])

    def _take_interpreter(self, word: str) -> None:
        self._words.pop(0)
        if word not in {"python", "python3"}:
            self._found["python"] = word
        while self._words[:1] == ["-u"]:
            self._words.pop(0)
        following = self._words[0] if self._words else ""
        if following == "-c" or following in {"", "-"}:
            raise UsageError(
                f"{word} {following} starts no script".replace("  ", " "), hint="write the code into a file"
            )
        if following.startswith("-") and following != "-m":
            name = next((known for known in sorted(_VARIABLE_OF, reverse=True) if following.startswith(known)), None)
            instead = f"set its variable: --env {_VARIABLE_OF[name]}" if name is not None else "remove it"
            raise UsageError(f"the option {following} of {word} is not passed to the workers", hint=instead)

    def _refuse_program(self, program: str) -> None:
        """Say why a program is not started, with a command line that starts the training.

        Raises:
            UsageError: always.
        """
        words = list(redact_words(self._words))
        other = launchers.NOT_STARTED.get(program)
        if other is not None:
            given = {
                "program": shlex.join(_inner_program(words[1:])),
                "verb": words[1] if len(words) > 1 else "sft",
                "rest": shlex.join(words[2:]),
            }
            shown = f"{program} {words[1]}" if not other.line and len(words) > 1 else program
            line = " ".join(filter(None, (other.option, other.line.format(**given))))
            hint = f"{self._line} {line}".strip() if line else None
            raise UsageError(f"{shown} is not started: {other.why}", hint=hint)
        as_it_is = f"{self._line} --engine exec -- {shlex.join(words)}"
        if program in _SHELLS and words[1:2] == ["-c"]:
            inner = shlex.join(_inner_program(_split(" ".join(words[2:3]))))
            raise UsageError(
                f"{program} -c is not supported: give the command itself",
                hint=f"{self._line} -- {inner}; or run it unchanged, once on each node: {as_it_is}",
            )
        raise UsageError(
            f"{program} is neither a Python script nor a launcher that multinode supports",
            hint="to start it once on each node, with NODE_RANK, NNODES, NPROC_PER_NODE, MASTER_ADDR and MASTER_PORT "
            f"set: {as_it_is}",
        )

    @property
    def _line(self) -> str:
        """The command line in front of `--`, with the variables and the size that stood in front of the program."""
        words: list[str] = []
        for name, value in self._env.items():
            words += ["--env", name if hides(name, value) else f"{name}={value}"]
        workers = next((fact.value for fact in self._stated if fact.meaning is launchers.WORKERS and fact.value), None)
        words += ["--workers-per-node", workers] if workers is not None else []
        return " ".join((self._front, *map(shlex.quote, words)))

    def _read_program(self, launcher: Launcher, name: str) -> None:
        """The launcher's options, then the program or the YAML."""
        if name and name != "python":
            self._engine = launcher.engine
            if launcher.is_program:
                self._found["script"] = self._read_itself(launcher, name)
                return
        options = self._read_options(launcher, name or launcher.engine)
        if not self._words:
            raise UsageError(
                f"no program follows {shlex.join(redact_words(self._all))}", hint=f"{self._front} -- train.py"
            )
        first, *rest = self._words
        trained = self._find_training(first, rest)
        if trained is not None:
            kind, verb, program = trained
            self._read_training(kind, verb, program, rest[len(program) == 0 :], options)
        elif self._form == "script" and first.endswith(_CONFIGS):
            wrong = next((word for word in rest if not is_setting(word)), None)
            if wrong is not None:
                raise UsageError(f"{wrong!r} after {first} is not KEY=VALUE", hint=f"{self._front} {first} max_steps=9")
            self._found |= {
                "training": TrainingCommand(config=first, options=tuple(options)),
                "settings": tuple(rest),
            }
        else:
            self._found["script"] = ScriptJob(argv=tuple(self._words), options=tuple(options), form=self._form)

    def _find_training(self, first: str, rest: Sequence[str]) -> tuple[Framework, str, tuple[str, ...]] | None:
        """The framework of a program, what it trains, and the program as typed if that was no command of its own."""
        command = self._find_framework(first, rest) if self._form == "script" else None
        if command is not None:
            return (*command, ())
        for kind in frameworks_named(first):
            if self._form == "module" and first in kind.command_modules and rest[:1] and rest[0] in kind.verbs:
                return kind, rest[0], ()
            verb = kind.verb_of(first) if self._form == "module" or first.endswith(".py") else None
            if verb is not None:
                return kind, verb, ("--module", first) if self._form == "module" else (first,)
        return None

    def _read_training(
        self, kind: Framework, verb: str, program: tuple[str, ...], words: Sequence[str], options: Sequence[str]
    ) -> None:
        """The file of a training's keys, and those that are options."""
        left = list(words)
        own: list[str] = []
        if kind.passes_options:
            own, left = self._split_options(kind, left)
        config = None
        at = next((at for at, word in enumerate(left) if word.partition("=")[0] == kind.file_option), None)
        files = [word for word in left if word.endswith(_CONFIGS)] if kind.needs_file else []
        if at is not None:
            config = left[at].partition("=")[2] or next(iter(left[at + 1 : at + 2]), None)
            del left[at : at + (1 if "=" in left[at] else 2)]
        elif left and left[0].endswith(_CONFIGS):
            config = left.pop(0)
        elif len(files) == 1:
            config = files[0]
            left.remove(config)
        elif kind.needs_file:
            name = f"{kind.programs[0]} {verb}"
            raise UsageError(f"{name} names no file", hint=f"{self._front} -- {kind.command(verb, 'train.yaml')}")
        settings = tuple(itertools.takewhile(is_setting, left))
        self._found |= {
            "training": TrainingCommand(
                framework=kind.name,
                verb=verb,
                program=program,
                options=(*options, *own),
                config=config,
                flags=tuple(left[len(settings) :]),
                name=f"{kind.programs[0]} {verb}",
            ),
            "settings": settings,
        }

    def _split_options(self, kind: Framework, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """The options that a framework's command passes to its launcher, and those that it keeps."""
        passed: list[str] = []
        kept: list[str] = []
        queue, behind = list(words), False
        while queue:
            word = queue.pop(0)
            name, _, given = word.partition("=")
            following = queue[0] if queue and not queue[0].startswith("-") else ""
            if word == "--":
                behind = True
                continue
            if name == kind.engine_option:
                self._engine = self._engine or given or following
                queue = queue if given else queue[1:]
                continue
            launcher = launchers.OF_ENGINE[self._engine if self._engine in launchers.OF_ENGINE else kind.engine]
            known = launcher.options.get(launchers.option_name(word)) if word.startswith("--") else None
            if not behind and name.lstrip("-").replace("-", "_") in kind.own_options:
                known = None
            option = [word, following] if known and known.takes_value and not given and following else [word]
            queue = queue[len(option) - 1 :]
            if known is None and not behind:
                kept.append(word)
            elif known is None or known.meaning.is_passed:
                passed += option
            else:
                self._take_option(
                    known.meaning, option, given or (following if len(option) > 1 else ""), launcher.engine
                )
        return passed, kept

    def _read_options(self, launcher: Launcher, name: str) -> list[str]:
        """The options that are the launcher's own; the others are taken."""
        own: list[str] = []
        self._found["passes_local_rank"] = launcher.passes_local_rank
        # LLaMA-Factory has none: what stands there are arguments of the training.
        while launcher.options and self._words and self._words[0].startswith("-"):
            word = self._words.pop(0)
            if word == "--":
                break
            known = launchers.find_option(launcher, word)
            if known is None and not word.startswith("--"):
                other = launchers.same_option(launcher, word)
                raise UsageError(f"{name} has no option {word}", hint=f"write {other}" if other else None)
            # Whether a value follows an option of a newer release shows in what does.
            follows = bool(self._words) and not _may_be_program(self._words[0])
            words, value = self._take_value(word, takes_value=follows if known is None else known.takes_value)
            if known is None or known.meaning.is_passed:
                own += words
            else:
                self._form = known.meaning.form or self._form
                self._take_option(known.meaning, words, value, name)
        return own

    def _read_itself(self, launcher: Launcher, name: str) -> ScriptJob:
        """A launcher that starts no other program, without the options that the hostfile replaces."""
        kept = name.removeprefix(_MODULE).split()
        while self._words:
            word = self._words.pop(0)
            known = launcher.options.get(launchers.option_name(word)) if word.startswith("-") else None
            if known is None:
                kept.append(word)
            else:
                self._take_option(known.meaning, *self._take_value(word, takes_value=known.takes_value), name)
        return ScriptJob(argv=tuple(kept), form="module" if name.startswith(_MODULE) else "executable")

    def _take_option(self, meaning: OptionMeaning, words: list[str], value: str, launcher: str) -> None:
        if meaning.kind == "refused":
            raise UsageError(f"multinode does not support the option {words[0]} of {launcher}", hint=meaning.hint)
        if meaning.kind in {"place", "size"}:
            self._stated.append(Stated(meaning, " ".join(words), value))
        elif meaning is launchers.USE_ENV:
            self._found["passes_local_rank"] = False
        elif meaning is launchers.CONFIG:
            self._found["accelerate_config"] = value or None
        elif meaning.configures:
            self._found["accelerate"] = {**self._found.get("accelerate", {}), **meaning.configures}

    def _take_value(self, word: str, *, takes_value: bool) -> tuple[list[str], str]:
        """The words of an option, and its value; a variable that is not set leaves none."""
        if "=" in word:
            return [word], word.partition("=")[2]
        if takes_value and self._words and not self._words[0].startswith("-"):
            value = self._words.pop(0)
            return [word, value], value
        return [word], ""


def _is_stray(name: str) -> bool:
    return any(
        name.startswith(stray.removesuffix("*")) if stray.endswith("*") else name == stray for stray in STRAY_VARIABLES
    )


def _may_be_program(word: str) -> bool:
    return word.startswith("-") or word.endswith((".py", *_CONFIGS))


def _inner_program(words: Sequence[str]) -> list[str]:
    """The training behind another launcher's words: from the first word on that multinode could start."""
    for at, word in enumerate(words):
        program = word.rpartition("/")[2]
        two = " ".join((program, *words[at + 1 : at + 2]))
        is_launcher = bool({program, two} & launchers.LAUNCHERS.keys()) or program in _COMMANDS
        if _INTERPRETER.fullmatch(program) or program.endswith(".py") or is_launcher:
            return list(words[at:])
    return ["train.py"]


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return []


def starts_program(word: str) -> bool:
    """Whether a word in the place of a YAML begins a command: a script, a launcher, a shell, a variable in front."""
    program = word.rpartition("/")[2]
    names = {name.split()[0] for name in (*launchers.LAUNCHERS, *launchers.NOT_STARTED, *_CONDAS)}
    return (
        program.endswith((".py", ".sh"))
        or _INTERPRETER.fullmatch(program) is not None
        or program in {*names, *_COMMANDS, *_SHELLS, *_DROPPED, "env", "uv"}
    )


class Settled(NamedTuple):
    """What the nodes and a command say together."""

    workers_per_node: int | None  # None leaves it to the hostfile
    env: dict[str, str]  # the command's variables, without those that the hostfile replaces
    replaced: tuple[str, ...]  # words of the command for which the hostfile stands


def settle(command: TypedCommand, cluster: Cluster, *, nodes: int | None = None, workers: int | None = None) -> Settled:
    """Compare what a command says of nodes, workers and GPUs with the hostfile, which decides, as do our own options.

    Where both are silent, the command's number of workers holds.

    Args:
        command: as it was read.
        cluster: the nodes of the hostfile.
        nodes: how many of them our option asks for; None if none does.
        workers: the workers per node that our option asks for; None if none does.

    Raises:
        UsageError: they contradict each other.
    """
    count = len(cluster.nodes) if nodes is None else nodes
    used = cluster.first(count).nodes
    slots = [len(node.gpus) if node.gpus is not None else node.slots for node in used]
    known = [each for each in slots if each is not None] if workers is None else [workers] * count
    env, stated = dict(command.env), workers
    for fact in command.stated:
        if fact.meaning is launchers.NODES and nodes is None:
            _require_nodes(fact, cluster)
        elif fact.meaning is launchers.DEVICES and _names(fact):
            env = _settle_devices(fact, env, used, cluster.source)
        if workers is not None or fact.meaning.kind != "size":
            continue
        each = _workers_of(fact, known, count, cluster.source)
        if each is not None and any(slots != each for slots in known):
            raise _unequal(fact, each, known, cluster.source)
        stated = stated or each
    return Settled(
        workers_per_node=None if workers is None and known else stated,
        env=env,
        replaced=tuple(fact.word for fact in command.stated if fact.meaning.kind == "place"),
    )


def _require_nodes(fact: Stated, cluster: Cluster) -> None:
    """`--nnodes=2`, or `--nnodes=1:4` of an elastic job; a README's 1 says nothing."""
    there = len(cluster.nodes)
    match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", fact.value, re.ASCII)
    if match is None:
        if fact.value:
            raise UsageError(f"{fact.word} is not a number of nodes", hint=fact.meaning.hint)
        return
    least, most = int(match[1]), int(match[2] or match[1])
    if most > 1 and not least <= there <= most:
        few = f"use the first {most}: --nodes {most}" if most < there else f"use all of them: --nodes {there}"
        raise UsageError(
            f"{fact.word} does not match {cluster.source}, which has {format_count(there, 'node')}",
            hint=f"{few}; or add nodes to the hostfile" if most > there else few,
        )


def _names(fact: Stated) -> list[str]:
    return [] if fact.value == "all" else [name for name in fact.value.split(",") if name]


def _settle_devices(fact: Stated, env: dict[str, str], nodes: Sequence[Node], source: str) -> dict[str, str]:
    """The job's variables with these GPUs; `gpus=` of the hostfile, which must name the same ones, stands for them."""
    given = [",".join(map(str, node.gpus)) for node in nodes if node.gpus is not None]
    if any(gpus != fact.value for gpus in given):
        raise UsageError(
            f"{fact.word} does not match {source}, which has gpus={next(gpus for gpus in given if gpus != fact.value)}",
            hint=f"write gpus={fact.value} there, or remove {fact.word}",
        )
    if len(given) == len(nodes):
        return {name: value for name, value in env.items() if name not in VISIBLE_DEVICES}
    return env if any(name in env for name in VISIBLE_DEVICES) else env | {NVIDIA.visible[0]: fact.value}


def _workers_of(fact: Stated, known: Sequence[int], nodes: int, source: str) -> int | None:
    """Workers of each node by what a command says; None if it leaves them to the node, or agrees as a whole."""
    if fact.meaning is launchers.DEVICES:
        # More GPUs than workers do no harm.
        named = len(_names(fact))
        return None if not named or (known and max(known) <= named) else named
    if fact.value in _ALL_DEVICES:
        return None
    if not re.fullmatch(r"[1-9]\d{0,5}", fact.value, re.ASCII):
        raise UsageError(f"{fact.word} is not a number of workers", hint=fact.meaning.hint)
    count = int(fact.value)
    if fact.meaning is launchers.WORKERS:
        return count
    if len(known) == nodes and sum(known) == count:
        return None
    if count % nodes:
        raise UsageError(
            f"{fact.word} counts the workers of all nodes, but {source} has {format_count(nodes, 'node')}, which "
            "cannot share them equally",
            hint=f"use --workers-per-node {max(count // nodes, 1)}, or remove {fact.word}",
        )
    return count // nodes


def _unequal(fact: Stated, each: int, known: Sequence[int], source: str) -> UsageError:
    slots = format_list([str(count) for count in dict.fromkeys(known)], 4)
    total = " on all nodes together" if fact.meaning is launchers.PROCESSES else ""
    fix = f"use --workers-per-node {each}" if each <= min(known) else f"set slots={each} on each line of {source}"
    if fact.meaning is launchers.DEVICES:
        fix = f"set gpus={fact.value} on each line of {source}"
    return UsageError(
        f"{fact.word} requests {format_count(each, 'worker')} on each node{total and f' ({fact.value}{total})'}, but "
        f"{source} has {slots} slots per node",
        hint=f"{fix}, or remove {fact.word} to use the slots of the hostfile",
    )
