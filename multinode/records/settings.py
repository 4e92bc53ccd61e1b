"""multinode.toml of the working directory, over the user's own: defaults for the command line, and names of hosts."""

from __future__ import annotations

import functools
import logging
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec

from multinode.decoding import convert
from multinode.errors import UsageError
from multinode.node.files import describe_stranger
from multinode.records.files import ownership_fix, read_text

_LOG = logging.getLogger(__name__)
_FILE = "multinode.toml"
_DEFAULT_JOB = "configs/default.yaml"


SshClient = Literal["openssh", "fabric"]


class Defaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[defaults]` table: a hostfile (or `lab`), a job, and setup commands that run before it on every node."""

    hosts: str | None = None
    job: str | None = None
    setup: str | None = None
    fan_out: Annotated[int, msgspec.Meta(ge=1, le=1024)] | None = None  # number of nodes contacted at the same time
    ssh: SshClient | None = None  # the SSH client


class _SettingsFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file."""

    defaults: Defaults = Defaults()
    hosts: dict[str, str] = {}  # what `--hosts @NAME` stands for, by NAME


class Settings(_SettingsFile, frozen=True, kw_only=True):
    """What both files say."""

    hosts_file: str = _FILE  # which has the default hosts


def load_settings(cwd: Path) -> Settings:
    """The settings of a directory over the user's.

    A file is left out if another user could have written it.
    """
    return _read(*((path, _version(path)) for path in (user_file(), cwd / _FILE)))


def user_file() -> Path:
    """The settings of the user: multinode.toml in $XDG_CONFIG_HOME, else in ~/.config."""
    named = os.environ.get("XDG_CONFIG_HOME", "")
    # A relative path is invalid: https://specifications.freedesktop.org/basedir-spec.
    folder = named if named.startswith("/") else os.path.expanduser("~/.config")  # noqa: PTH111 - of a user without a home
    return Path(folder, _FILE)


def _version(path: Path) -> tuple[int, ...] | None:
    try:
        stat = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


@functools.lru_cache(maxsize=1)
def _read(*files: tuple[Path, tuple[int, ...] | None]) -> Settings:
    users, directorys = (_parse(path) if version is not None else _SettingsFile() for path, version in files)
    given = {name: value for name, value in msgspec.structs.asdict(directorys.defaults).items() if value is not None}
    return Settings(
        defaults=msgspec.structs.replace(users.defaults, **given),
        hosts=users.hosts | directorys.hosts,
        hosts_file=str(files[0][0]) if users.defaults.hosts and directorys.defaults.hosts is None else _FILE,
    )


def _parse(path: Path) -> _SettingsFile:
    if _is_ignored(path):
        return _SettingsFile()
    text = read_text(path, "the settings file")
    try:
        return convert(_renamed(tomllib.loads(text)), _SettingsFile)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:  # tomllib's errors are ValueErrors
        raise UsageError(
            f"{path}: {error}",
            hint="known keys are hosts, job, setup, fan_out and ssh under [defaults], and any name under [hosts]",
        ) from None


def _is_ignored(path: Path) -> bool:
    stranger = describe_stranger(path)
    if stranger is not None:
        _LOG.warning("%s is ignored: it %s (%s)", path, stranger, ownership_fix(path))
    return stranger is not None


def _renamed(table: dict[str, Any]) -> dict[str, Any]:
    """`setup` was called `prelude`, and files that have that are still read."""
    defaults = table.get("defaults")
    if isinstance(defaults, dict) and "prelude" in defaults:
        defaults.setdefault("setup", defaults.pop("prelude"))
    return table


def find_fan_out(environ: Mapping[str, str], settings: Settings) -> int | None:
    """Nodes contacted at the same time: $MULTINODE_FAN_OUT, or the settings'; None without either.

    Raises:
        UsageError: the variable is not such a number.
    """
    text = environ.get("MULTINODE_FAN_OUT")
    if not text:
        return settings.defaults.fan_out
    try:
        return convert({"fan_out": int(text)}, Defaults).fan_out
    except ValueError:  # msgspec.ValidationError is one
        raise UsageError(f"$MULTINODE_FAN_OUT is {text!r}: expected a number of nodes, 1 to 1024") from None


def find_ssh_client(environ: Mapping[str, str], settings: Settings) -> SshClient | None:
    """The SSH client: $MULTINODE_SSH, or the settings'; None without either.

    Raises:
        UsageError: the variable names an unknown client.
    """
    text = environ.get("MULTINODE_SSH")
    if not text:
        return settings.defaults.ssh
    try:
        return convert({"ssh": text}, Defaults).ssh
    except msgspec.ValidationError:
        raise UsageError(f"$MULTINODE_SSH is {text!r}: expected {' or '.join(get_args(SshClient))}") from None


def default_job(settings: Settings, cwd: Path) -> Path:
    """The default job: the settings', or configs/default.yaml.

    Raises:
        UsageError: there is neither; the message lists the configurations in the directory.
    """
    if settings.defaults.job is not None:
        return Path(settings.defaults.job).expanduser()
    if (cwd / _DEFAULT_JOB).is_file() and not _is_ignored(cwd / _DEFAULT_JOB):
        return Path(_DEFAULT_JOB)
    seen = sorted(str(path.relative_to(cwd)) for path in (cwd / "configs").glob("*.yaml"))
    raise UsageError(
        "no job was given", hint=f"name one: {', '.join(seen) if seen else 'the YAML of a job, or -- train.py'}"
    )
