"""The job's software: its interpreter with its packages, keys of its YAML that LLaMA-Factory lacks, programs on PATH.

Reads metadata and sources, and imports no packages. A non-interactive shell runs no conda set-up, and many .bashrc
files return early in it. So programs are looked for on the job's PATH first, and then in the user's interactive shell.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import resource
import shlex
import sys
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NamedTuple, Optional, TypeVar, Union

from ..channel import Record
from ..files import read_text, try_read
from ..processes import boot_id
from ..programs import Query, QueryFailed, find_program, is_program
from .cgroups import MemoryReader, read_meminfo
from .unknown import WITHOUT_CUDA, Unknown, found

_T = TypeVar("_T")

_PYTHON_S = 15.0
_SHELL_S = 5.0
_MOST_PATH_CHARACTERS = 1000
_MOST_KEYS = 1000
_PACKAGES = (
    "torch",
    "llamafactory",
    "ms-swift",
    "axolotl",
    "transformers",
    "accelerate",
    "deepspeed",
    "peft",
    "trl",
    "datasets",
    "bitsandbytes",
    "flash-attn",
)
# Wheels of NCCL, by the major version of torch's CUDA.
_NCCL_WHEELS = {"11": "nvidia-nccl-cu11", "12": "nvidia-nccl-cu12", "13": "nvidia-nccl-cu13"}
_CUDA_VERSION = re.compile(r"""^cuda\b[^=\n]*=\s*['"](\d+)(\.[\d.]+)?['"]""", re.MULTILINE)
# Marks the answer of a script, so that output of a sitecustomize is skipped. Scripts run under Python 3.8 and later.
# Their first lines remove the working directory from sys.path: it is not part of the installation.
_MARK = "multinode-answer:"
# The script finds metadata by directory names: importlib.metadata takes twice as long as starting the interpreter.
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
wanted, modules, keys, found = set(sys.argv[1].split()), sys.argv[2].split(), sys.argv[3:], {{}}
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
# A module is found as `python -m` finds it, first in the working directory, and without running its packages.
def is_module(name):
    from importlib.machinery import PathFinder
    first, *rest = name.split(".")
    try:
        spec = PathFinder.find_spec(first, [os.getcwd()]) or find_spec(first)
        for part in rest:
            spec = spec and PathFinder.find_spec(part, spec.submodule_search_locations or [])
        if spec and spec.submodule_search_locations is not None:
            spec = PathFinder.find_spec("__main__", spec.submodule_search_locations)
    except (AttributeError, ImportError, OSError, TypeError, ValueError):
        return True
    return spec is not None
absent = [name for name in modules if not is_module(name)]
print("\\n{_MARK}" + json.dumps({{**answer, "unknown": unknown, "trouble": trouble, "absent": absent}}))
"""


class Installed(NamedTuple):
    """Versions and packages of the job's interpreter."""

    python_version: str
    packages: dict[str, str]
    cuda_version: Union[str, Unknown]
    nccl_version: Union[str, Unknown]
    torch_build: Optional[str]  # text of torch/version.py, which identifies the build; None without torch


def find_interpreter(python: Optional[str], path: str, cwd: Optional[str] = None) -> str:
    """Absolute path of the job's interpreter.

    Args:
        python: the requested interpreter, as a path or a name on PATH; None tries `.venv` in `cwd`, then python3, then
            python.
        path: PATH of the job.
        cwd: directory of the job.

    Raises:
        LookupError: there is none.
    """
    if python is None:
        own = find_program(os.path.join(cwd, ".venv/bin/python"), path) if cwd is not None else None
        program = own or find_program("python3", path) or find_program("python", path)
        return _known(program, "neither python3 nor python is on PATH")
    # Links are not resolved: the target of a virtual environment's link is an interpreter outside the environment.
    home, full = os.path.expanduser("~"), os.path.expanduser(python)
    program = find_program(full, path, home)
    if program is None and os.path.isdir(os.path.join(home, full)):
        # The user named an environment instead of its interpreter.
        inside = find_program(os.path.join(full, "bin", "python"), path, home)
        way = f"its interpreter is {python.rstrip('/')}/bin/python" if inside else "it has no bin/python"
        raise LookupError(f"{python} is a directory: {way}")
    return _known(program, f"{python} does not exist or is not executable")


def query_packages(python: str, cwd: Optional[str], keys: Sequence[str] = (), modules: Sequence[str] = ()) -> Query:
    """Ask the interpreter for its version and packages, in the job's environment and without -I.

    It also tells which of these YAML keys its LLaMA-Factory does not know, and which of these modules it does not find.
    """
    words = " ".join((*_PACKAGES, *_NCCL_WHEELS.values()))
    argv = [python, "-c", _SCRIPT, words, " ".join(modules), *keys[:_MOST_KEYS]]
    return Query(argv, deadline_s=_PYTHON_S, cwd=cwd)


def parse_packages(text: str) -> Installed:
    """Versions and packages in the answer of `query_packages`.

    Raises:
        QueryFailed: the text has no answer.
    """
    try:
        return _read_packages(_answer(text))
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise QueryFailed("the interpreter did not return its packages") from error


def parse_unknown(text: str) -> dict[str, Optional[str]]:
    """Unknown keys in the answer of `query_packages`, each with the argument whose name is most similar, or None.

    Raises:
        QueryFailed: the interpreter could not tell, or the text has no answer.
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


def parse_absent(text: str) -> list[str]:
    """Modules that the interpreter does not find, in the answer of `query_packages`.

    Raises:
        QueryFailed: the text has no answer.
    """
    try:
        return [str(name) for name in _answer(text)["absent"]]
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise QueryFailed("the interpreter did not return modules") from error


def find_tools(names: list[str], python: Optional[str], path: str) -> dict[str, str]:
    """Absolute paths of the programs that are found beside the interpreter or along `path`."""
    folders = os.pathsep.join(([os.path.dirname(python)] if python else []) + [path])
    places = {name: find_program(name, folders) for name in names}
    return {name: place for name, place in places.items() if place is not None}


def query_interactive(names: list[str]) -> Query:
    """Ask the user's shell, started as in a terminal, where these programs are."""
    shell = pwd.getpwuid(os.getuid()).pw_shell or "/bin/sh"
    # `command -v` is POSIX; for a missing program it prints nothing.
    script = "; ".join(f"command -v {shlex.quote(name)}" for name in names)
    return Query([shell, "-lic", f"{script}; true"], deadline_s=_SHELL_S)


def parse_tools(text: str, names: list[str]) -> dict[str, str]:
    """Absolute paths in the output of `query_interactive`; greetings, aliases and functions are skipped."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        name = os.path.basename(line)
        if name in names and len(line) < _MOST_PATH_CHARACTERS and line.startswith("/") and is_program(line):
            values.setdefault(name, line)
    return values


def _answer(text: str) -> dict[str, Any]:
    lines = [line[len(_MARK) :] for line in text.splitlines() if line.startswith(_MARK)]
    answer: dict[str, Any] = json.loads(lines[-1])
    return answer


def _read_packages(data: dict[str, Any]) -> Installed:
    packages = {str(name): str(version) for name, version in data["packages"].items()}
    wheels = {major: packages.pop(name) for major, name in _NCCL_WHEELS.items() if name in packages}
    version = str(data["python_version"])
    built = _CUDA_VERSION.search(data["torch"] or "")
    if built is None:
        no_cuda = Unknown("torch is not installed" if data["torch"] is None else WITHOUT_CUDA)
        return Installed(version, packages, no_cuda, no_cuda, data["torch"])
    cuda = "".join(filter(None, built.groups()))
    nccl = wheels.get(built.group(1)) or Unknown("torch was installed without an NCCL wheel")
    return Installed(version, packages, cuda, nccl, data["torch"])


_GIB = 1 << 30
_SHM = "/dev/shm"  # noqa: S108 - it is looked at, nothing is put there
_LIMITS = {
    "open_files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
    "locked_memory_bytes": resource.RLIMIT_MEMLOCK,
}
# Parts of a control group's path by the software that creates it. Kubernetes is first: it uses one of the others.
_GROUPS = {"kubernetes": "kubepods", "docker": "docker", "podman": "libpod", "containerd": "containerd", "lxc": "lxc"}
_LONGEST_NAME = 200
_KIND = re.compile(r"[a-z][a-z0-9._-]{0,31}")


def read_machine() -> Record:
    """Facts of the machine by the names of NodeFacts."""
    readers: dict[str, Callable[[], Any]] = {
        "user": lambda: pwd.getpwuid(os.getuid()).pw_name,
        "boot_id": lambda: _known(boot_id(), "the kernel shows no boot id"),
        "machine_id": lambda: _known(read_text("/etc/machine-id"), "/etc/machine-id is empty"),
        "processor": lambda: _known(read_processor_name(), "the kernel does not report it"),
        "memory_total_gib": lambda: read_meminfo().total / _GIB,
        "memory_available_gib": lambda: MemoryReader().read().available / _GIB,
        "memory_limit_gib": lambda: _known(MemoryReader().limit(), "no limit below the machine's memory") / _GIB,
        "disk_free_gib": _read_disk_free_gib,
        "shm_total_gib": lambda: os.statvfs(_SHM).f_blocks * os.statvfs(_SHM).f_frsize / _GIB,
        "shm_free_gib": lambda: os.statvfs(_SHM).f_bavail * os.statvfs(_SHM).f_frsize / _GIB,
        "container": lambda: find_container(dict(os.environ)),
        "ssh_address": _read_ssh_address,
    }
    facts: Record = {
        "hostname": os.uname().nodename,
        "architecture": os.uname().machine,
        "home": os.path.expanduser("~"),
        "cores": len(os.sched_getaffinity(0)),
        "agent_python": ".".join(map(str, sys.version_info[:3])),
        "limits": {name: _soft_limit(number) for name, number in _LIMITS.items()},
    }
    return {**facts, **{name: found(read) for name, read in readers.items()}}


def read_processor_name(path: str = "/proc/cpuinfo") -> Optional[str]:
    """The kernel's name of the processors, on one line; None if it has no name, as on ARM."""
    # Only the first core is read: the kernel takes a while to list many cores with their frequencies.
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return " ".join(value.split())[:_LONGEST_NAME] or None
    return None


def find_container(env: dict[str, str], root: str = "/") -> str:
    """The kind of container that we are in, by our environment and files below `root`.

    Raises:
        LookupError: there is no sign of a container.
    """
    groups = try_read(os.path.join(root, "proc/1/cgroup")) or ""
    # SSH does not pass on the environment of the container's start; its first process still has it.
    entries = (try_read(os.path.join(root, "proc/1/environ")) or "").split("\0")
    env = {**dict(entry.split("=", 1) for entry in entries if "=" in entry), **env}
    if "KUBERNETES_SERVICE_HOST" in env:
        return "kubernetes"
    for kind, part in _GROUPS.items():
        if part in groups:
            return kind
    container = env.get("container") or try_read(os.path.join(root, "run/systemd/container")) or ""
    if _KIND.fullmatch(container.strip()):
        return container.strip()
    for kind, mark in (("docker", ".dockerenv"), ("podman", "run/.containerenv")):
        if os.path.exists(os.path.join(root, mark)):
            return kind
    raise LookupError("no sign of a container")


def _soft_limit(number: int) -> Optional[int]:
    soft, _ = resource.getrlimit(number)
    return None if soft == resource.RLIM_INFINITY else soft


def _known(value: Optional[_T], otherwise: str) -> _T:
    if not value:
        raise LookupError(otherwise)
    return value


def _read_disk_free_gib() -> float:
    path = os.path.expanduser("~/.multinode")
    stat = None
    with contextlib.suppress(FileNotFoundError):
        stat = os.statvfs(path)
    stat = stat or os.statvfs(os.path.dirname(path))
    return stat.f_bavail * stat.f_frsize / _GIB


def _read_ssh_address() -> str:
    words = os.environ.get("SSH_CONNECTION", "").split()
    if len(words) != 4:  # noqa: PLR2004 - client address and port, our address and port (ssh(1))
        raise OSError("SSH_CONNECTION is not set")
    return words[2]


_MATTERS = re.compile(
    r"RANK|WORLD_SIZE|NNODES|NPROC_PER_NODE|(CUDA|ROCR|HIP|ASCEND_RT)_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|ZE_AFFINITY_MASK"
    r"|(LOCAL_|NODE_|GROUP_)(RANK|WORLD_SIZE)|(MASTER_|PET_|NCCL_|GLOO_|HCCL_|CCL_|TORCH).*|FI_TCP_IFACE|PYTHONHOME",
    re.DOTALL,
)
# Names of secrets: all that the controller knows (secret_values.py), and a few more.
_SECRET = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|(API|ACCESS)_?KEY|PRIVATE|AUTHORIZATION|WEBHOOK|_PWD(?![A-Z])",
    re.IGNORECASE,
)
_MOST_VARIABLES = 256
_MOST_BYTES = 1 << 16
# NCCL truncates lines of its files at this length.
_MOST_CHARACTERS = 1023

_SYSTEM_FILE = "/etc/nccl.conf"
_USER_FILE = ".nccl.conf"


def select_variables(env: dict[str, str]) -> dict[str, str]:
    """Variables that would change a run; one that looks like a secret never leaves the node."""
    matter = ((name, value) for name, value in env.items() if _MATTERS.fullmatch(name) and not _SECRET.search(name))
    return {name[:_MOST_CHARACTERS]: value[:_MOST_CHARACTERS] for name, value in islice(matter, _MOST_VARIABLES)}


def read_nccl_files(
    env: dict[str, str], home: Optional[str] = None, system_file: str = _SYSTEM_FILE
) -> dict[str, dict[str, str]]:
    """Variables in NCCL's configuration files by path, in the order in which NCCL reads them: the first value wins.

    Args:
        env: the environment, which may name another file than the user's own.
        home: the user's home directory; None looks it up in the password database, as NCCL does, and not in HOME.
        system_file: the file for all users.
    """
    own = env.get("NCCL_CONF_FILE") or os.path.join(home or _find_home(), _USER_FILE)
    texts = {path: _read(path) for path in (own, system_file)}
    return {path: select_variables(parse_nccl_file(text)) for path, text in texts.items() if text is not None}


def read_deepspeed_env(home: str) -> dict[str, str]:
    """Variables in ~/.deepspeed_env; empty if there is no such file."""
    return select_variables(parse_deepspeed_env(_read(os.path.join(home, ".deepspeed_env")) or ""))


def parse_nccl_file(text: str) -> dict[str, str]:
    """NAME=value lines as NCCL reads them: blanks are kept, and the first line of a name wins."""
    values: dict[str, str] = {}
    for line in text.split("\n"):
        name, sign, value = line.partition("=")
        if sign and not line.startswith("#"):
            values.setdefault(name, value)
    return values


def parse_deepspeed_env(text: str) -> dict[str, str]:
    """NAME=value lines as DeepSpeed's launcher reads them: the last line of a name wins."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {name.strip(): value.strip() for name, sign, value in pairs if sign}


def _find_home() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return os.path.expanduser("~")


def _read(path: str) -> Optional[str]:
    # Reading anything but a regular file, such as a pipe, might never end.
    if not os.path.isfile(path):
        return None
    try:
        with open(path, "rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        # If we may not read it, NCCL may not either, and continues without it.
        return None
