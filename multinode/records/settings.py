"""multinode.toml in the working directory: defaults for the command line."""

from __future__ import annotations

import functools
import logging
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


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    defaults: Defaults = Defaults()


def load_settings(cwd: Path) -> Settings:
    """The settings of a directory; empty without multinode.toml, or if another user could have written it."""
    path = cwd / _FILE
    try:
        stat = path.stat()
    except FileNotFoundError:
        return Settings()
    return _read(path, (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))


@functools.lru_cache(maxsize=1)
def _read(path: Path, _version: tuple[int, ...]) -> Settings:
    if _is_ignored(path):
        return Settings()
    text = read_text(path, "the settings file")
    try:
        return convert(_renamed(tomllib.loads(text)), Settings)
    except (ValueError, RecursionError, msgspec.ValidationError) as error:  # tomllib's errors are ValueErrors
        raise UsageError(
            f"{path}: {error}", hint="known keys are hosts, job, setup, fan_out and ssh under [defaults]"
        ) from None


def _is_ignored(path: Path) -> bool:
    stranger = describe_stranger(path)
    if stranger is not None:
        _LOG.warning("ignored: %s %s (%s)", path, stranger, ownership_fix(path))
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
        "no job was given", hint=f"name one: {', '.join(seen) if seen else 'a LLaMA-Factory YAML, or -- train.py'}"
    )
