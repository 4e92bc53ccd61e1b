"""The SSH configuration as OpenSSH itself reads it: `Include`, `Match` and all, which paramiko knows in part."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
from pathlib import Path

import paramiko
from fabric.connection import derive_shorthand

__all__ = ["resolve_ssh_config"]

_DEADLINE_S = 10.0
# What a connection is made from; OpenSSH tells every other setting too, with words that paramiko does not know.
_READ = frozenset(
    {
        "forwardagent",
        "hostname",
        "identitiesonly",
        "identityfile",
        "port",
        "proxycommand",
        "proxyjump",
        "user",
        "userknownhostsfile",
    }
)
_UNSET = "none"
_DEFAULT_KEY = re.compile(r"~/\.ssh/id_(?:rsa|dsa|ecdsa|ed25519|xmss)(?:_sk)?")


def resolve_ssh_config(host: str, jump: str | None, path: Path | None) -> paramiko.SSHConfig | None:
    """What `ssh -G` says of a host and of all hosts that it is reached through; None where there is no OpenSSH.

    Args:
        host: as a person would name it to `ssh`.
        jump: the jump host that is named for it, if any.
        path: the configuration file; None is the user's and the system's.

    Raises:
        paramiko.ConfigParseError: OpenSSH refuses the configuration.
    """
    program = shutil.which("ssh")
    if program is None:
        return None
    command = [program, "-G", *(["-F", str(path)] if path is not None else []), "--"]
    left = [host, *_hops(jump)]
    settings: dict[str, list[tuple[str, str]]] = {}
    while left:
        name = left.pop()
        if name not in settings:
            settings[name] = _ask(command, name)
            left += _hops(dict(settings[name]).get("proxyjump"))
    lines = (f"Host {name}\n" + "".join(f" {key} {value}\n" for key, value in of) for name, of in settings.items())
    return paramiko.SSHConfig.from_text("".join(lines))


def _ask(command: list[str], host: str) -> list[tuple[str, str]]:
    try:
        ended = subprocess.run(
            [*command, host],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise paramiko.ConfigParseError(f"ssh -G {host} did not answer within {_DEADLINE_S:.0f} s") from None
    if ended.returncode != 0:
        raise paramiko.ConfigParseError(" ".join(ended.stderr.split()) or f"ssh -G {host} failed")
    found = [(key, value) for key, _, value in (line.partition(" ") for line in ended.stdout.splitlines())]
    told = [(key, value) for key, value in found if key in _READ and value != _UNSET]
    only = ("identitiesonly", "yes") in told
    return [(key, value) for key, value in told if not _is_default(key, value) or (only and key == "identityfile")]


def _is_default(key: str, value: str) -> bool:
    """Whether it is what holds without a configuration, too: those keys are looked for anyway, and tried once."""
    if key == "identityfile":
        return _DEFAULT_KEY.fullmatch(value) is not None
    own = Path(pwd.getpwuid(os.getuid()).pw_dir) / ".ssh" / "known_hosts"
    return key == "userknownhostsfile" and value == f"{own} {own}2"


def _hops(jump: str | None) -> list[str]:
    hops = [] if jump is None or jump == _UNSET else jump.split(",")
    return [host for host in (derive_shorthand(hop)["host"] for hop in hops) if host]
