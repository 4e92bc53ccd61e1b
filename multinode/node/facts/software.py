"""The job's software: its interpreter with its packages, keys of its YAML that LLaMA-Factory lacks, programs on PATH.

Reads metadata and sources and imports nothing of them. A non-interactive shell reads no conda set-up and leaves many
.bashrc files early, so that programs are looked for on the PATH that a job gets, and then in the user's own shell.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

from ..programs import Query, QueryFailed, find_program, is_program

_PYTHON_S = 15.0
_SHELL_S = 5.0
_MOST_PATH_CHARACTERS = 1000
_MOST_KEYS = 1000
_PACKAGES = (
    "torch",
    "llamafactory",
    "transformers",
    "accelerate",
    "deepspeed",
    "peft",
    "trl",
    "datasets",
    "bitsandbytes",
    "flash-attn",
)
# The wheels of NCCL, by the major version of the CUDA that torch was built with.
_NCCL_WHEELS = {"11": "nvidia-nccl-cu11", "12": "nvidia-nccl-cu12", "13": "nvidia-nccl-cu13"}
_CUDA_VERSION = re.compile(r"""^cuda\b[^=\n]*=\s*['"](\d+)(\.[\d.]+)?['"]""", re.MULTILINE)
# Stands before the answer of a script, so that what a sitecustomize prints around it is passed over. Scripts run under
# any Python 3.8+; the directory that one is started in is no part of an installation, hence their first lines.
_MARK = "multinode-answer:"
# Metadata are found by the names of directories: importlib.metadata takes twice as long as the interpreter to start.
_SCRIPT = f"""
import sys; sys.path[:] = [p for p in sys.path if p]
import glob, json, os, re
from importlib.util import find_spec
def version(path):
    for name in ("METADATA", "PKG-INFO", ""):
        try:
            with open(os.path.join(path, name) if name else path, encoding="utf-8", errors="replace") as lines:
                for line in lines:
                    if line.startswith("Version:"):
                        return line[8:].strip()
                    if not line.strip():
                        break
        except OSError:
            pass
wanted, keys, found = set(sys.argv[1].split()), sys.argv[2:], {{}}
for place in sys.path:
    try:
        entries = os.listdir(place)
    except OSError:
        continue
    for entry in entries:
        stem, end = os.path.splitext(entry)
        if end in (".dist-info", ".egg-info"):
            name = re.sub("[-_.]+", "-", stem.split("-")[0]).lower()
            if name in wanted and name not in found:
                told = version(os.path.join(place, entry))
                if told:
                    found[name] = told
torch = None
try:
    # Finding is not importing: torch takes seconds, and its version file holds text enough.
    spec = find_spec("torch")
    with open(os.path.join(os.path.dirname(spec.origin), "version.py"), encoding="utf-8", errors="replace") as file:
        torch = file.read(16384)
except (AttributeError, ImportError, OSError, TypeError, ValueError):
    pass
answer = {{"python_version": sys.version.split()[0], "packages": found, "torch": torch}}
# The arguments are the annotated fields of dataclasses; a few that belong to other commands than a training are among
# them, so that a key may pass here and be refused there, and never the other way about.
known, trouble = set(), None
if keys:
    try:
        own, trainer = (os.path.dirname(find_spec(name).origin) for name in ("llamafactory", "transformers"))
        files = sorted(glob.glob(os.path.join(glob.escape(own), "hparams", "*_args.py")))
        files += [os.path.join(trainer, name) for name in ("training_args.py", "training_args_seq2seq.py")]
        for path in files:
            with open(path, encoding="utf-8", errors="replace") as file:
                source = re.sub('(?s)"{{3}}.*?"{{3}}', "", file.read())
            known.update(re.findall(r"(?m)^(?: {{4}}|\\t)(\\w+) *: *\\S", source))
        # Another layout than that of the releases that we know of.
        if not known >= {{"model_name_or_path", "stage", "cutoff_len", "output_dir", "per_device_train_batch_size"}}:
            trouble = "its arguments were not found in its source"
    except (AttributeError, ImportError, OSError, TypeError, ValueError) as error:
        trouble = "its source cannot be read: %s" % type(error).__name__
# Then extra keys are passed over, or the arguments are another package's.
if any(os.environ.get(name, "").lower() in ("true", "y", "1") for name in ("ALLOW_EXTRA_ARGS", "USE_MCA")):
    known.update(keys)
unknown = {{key: None for key in keys if key not in known}}
if unknown:
    import difflib
    for key in unknown:
        unknown[key] = (difflib.get_close_matches(key, sorted(known), n=1) or [None])[0]
print("\\n{_MARK}" + json.dumps({{**answer, "unknown": unknown, "trouble": trouble}}))
"""


class Installed(NamedTuple):
    """What the job's interpreter has."""

    python_version: str
    packages: dict[str, str]
    cuda_version: Optional[str]
    nccl_version: Optional[str]
    missing: dict[str, str]  # why there is no cuda_version or nccl_version


def find_interpreter(python: Optional[str], path: str) -> tuple[Optional[str], str]:
    """Absolute path of the job's interpreter, or None and the reason.

    Args:
        python: the one that was asked for, as a path or a name on PATH; None takes python3, then python.
        path: PATH of the job.
    """
    if python is None:
        found = find_program("python3", path) or find_program("python", path)
        return found, "neither python3 nor python is on PATH"
    # Links stay as they are: behind the link of a virtual environment lies the interpreter that knows nothing of it.
    home, full = os.path.expanduser("~"), os.path.expanduser(python)
    found = find_program(full, path, home)
    if found is None and os.path.isdir(os.path.join(home, full)):
        # Whoever names an environment means its interpreter.
        inside = find_program(os.path.join(full, "bin", "python"), path, home)
        way = f"its interpreter is {python.rstrip('/')}/bin/python" if inside else "it has no bin/python"
        return None, f"{python} is a directory: {way}"
    return found, f"{python} does not exist or is not executable"


def query_packages(python: str, cwd: Optional[str], keys: Sequence[str] = ()) -> Query:
    """Ask the interpreter, in the job's environment and without -I, for its version and its packages.

    And which of these keys of a training's YAML its LLaMA-Factory does not know.
    """
    words = " ".join((*_PACKAGES, *_NCCL_WHEELS.values()))
    return Query([python, "-c", _SCRIPT, words, *keys[:_MOST_KEYS]], deadline_s=_PYTHON_S, cwd=cwd)


def parse_packages(text: str) -> Installed:
    """The answer's content.

    Raises:
        QueryFailed: there is no answer in it.
    """
    try:
        return _read_packages(_answer(text))
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise QueryFailed("the interpreter did not return its packages") from error


def parse_unknown(text: str) -> dict[str, Optional[str]]:
    """Those keys, each with the argument whose name is nearest, or None.

    Raises:
        QueryFailed: it could not tell, or this is no answer.
    """
    try:
        data = _answer(text)
        trouble = data["trouble"]
        unknown = {str(key): None if near is None else str(near) for key, near in data["unknown"].items()}
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise QueryFailed("the interpreter did not return arguments") from error
    if trouble is not None:
        raise QueryFailed(str(trouble))
    return unknown


def find_tools(names: list[str], python: Optional[str], path: str) -> dict[str, str]:
    """Absolute path of each that is found beside the interpreter, or along `path`."""
    folders = os.pathsep.join(([os.path.dirname(python)] if python else []) + [path])
    found = {name: find_program(name, folders) for name in names}
    return {name: place for name, place in found.items() if place is not None}


def query_interactive(names: list[str]) -> Query:
    """Ask the user's login shell, as a terminal would start it, where these programs are."""
    shell = pwd.getpwuid(os.getuid()).pw_shell or "/bin/sh"
    # `command -v` is POSIX; one that is not found prints nothing, and does not matter.
    script = "; ".join(f"command -v {shlex.quote(name)}" for name in names)
    return Query([shell, "-lic", f"{script}; true"], deadline_s=_SHELL_S)


def parse_tools(text: str, names: list[str]) -> dict[str, str]:
    """Absolute paths in what the shell printed; its greetings, aliases and functions are passed over."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        name = os.path.basename(line)
        if name in names and len(line) < _MOST_PATH_CHARACTERS and line.startswith("/") and is_program(line):
            found.setdefault(name, line)
    return found


def _answer(text: str) -> dict[str, Any]:
    lines = [line[len(_MARK) :] for line in text.splitlines() if line.startswith(_MARK)]
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def _read_packages(data: dict[str, Any]) -> Installed:
    packages = {str(name): str(version) for name, version in data["packages"].items()}
    wheels = {major: packages.pop(name) for major, name in _NCCL_WHEELS.items() if name in packages}
    cuda, nccl, missing = None, None, {}
    built = _CUDA_VERSION.search(data["torch"] or "")
    if built is not None:
        cuda = "".join(filter(None, built.groups()))
        nccl = wheels.get(built.group(1))
    else:
        missing["cuda_version"] = _no_cuda(data["torch"])
    if nccl is None:
        missing["nccl_version"] = missing.get("cuda_version", "torch was installed without an NCCL wheel")
    return Installed(str(data["python_version"]), packages, cuda, nccl, missing)


def _no_cuda(torch: Optional[str]) -> str:
    return "torch is not installed" if torch is None else "torch was built without CUDA"
