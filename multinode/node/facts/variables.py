"""Variables of this node that would change a run: of the environment, NCCL's files, and DeepSpeed's.

Decides what leaves the node: of those that matter, none whose name looks like that of a secret, and none too long.
"""

from __future__ import annotations

import os
import pwd
import re
from itertools import islice
from typing import Optional

_MATTERS = re.compile(
    r"RANK|WORLD_SIZE|NNODES|NPROC_PER_NODE|(CUDA|ROCR|HIP|ASCEND_RT)_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|ZE_AFFINITY_MASK"
    r"|(LOCAL_|NODE_|GROUP_)(RANK|WORLD_SIZE)|(MASTER_|PET_|NCCL_|GLOO_|HCCL_|CCL_|TORCH).*|FI_TCP_IFACE|PYTHONHOME",
    re.DOTALL,
)
# All that the controller takes for one (secret_values.py), and rather more.
_SECRET = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|(API|ACCESS)_?KEY|PRIVATE|AUTHORIZATION|WEBHOOK|_PWD(?![A-Z])",
    re.IGNORECASE,
)
_MOST_VARIABLES = 256
_MOST_BYTES = 1 << 16
# NCCL cuts what its files say at as much.
_MOST_CHARACTERS = 1023

_SYSTEM_FILE = "/etc/nccl.conf"
_USER_FILE = ".nccl.conf"


def select_variables(env: dict[str, str]) -> dict[str, str]:
    """Those that would change a run; what looks like a secret never leaves the node."""
    matter = ((name, value) for name, value in env.items() if _MATTERS.fullmatch(name) and not _SECRET.search(name))
    return {name[:_MOST_CHARACTERS]: value[:_MOST_CHARACTERS] for name, value in islice(matter, _MOST_VARIABLES)}


def read_nccl_files(
    env: dict[str, str], home: Optional[str] = None, system_file: str = _SYSTEM_FILE
) -> dict[str, dict[str, str]]:
    """What NCCL's configuration files say, by path, in the order in which NCCL reads them: the first that says it wins.

    Args:
        env: the environment, which may name another file than the user's own.
        home: the user's; None asks the system's list of users, as NCCL does, and not HOME.
        system_file: the file for all users.
    """
    own = env.get("NCCL_CONF_FILE") or os.path.join(home or _find_home(), _USER_FILE)
    texts = {path: _read(path) for path in (own, system_file)}
    return {path: select_variables(parse_nccl_file(text)) for path, text in texts.items() if text is not None}


def read_deepspeed_env(home: str) -> dict[str, str]:
    """What ~/.deepspeed_env says; nothing where there is no such file."""
    return select_variables(parse_deepspeed_env(_read(os.path.join(home, ".deepspeed_env")) or ""))


def parse_nccl_file(text: str) -> dict[str, str]:
    """NAME=value lines as NCCL reads them: no blank is taken away, and of two lines with one name the first holds."""
    values: dict[str, str] = {}
    for line in text.split("\n"):
        name, sign, value = line.partition("=")
        if sign and not line.startswith("#"):
            values.setdefault(name, value)
    return values


def parse_deepspeed_env(text: str) -> dict[str, str]:
    """NAME=value lines as DeepSpeed's launcher reads them: the last of two holds."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {name.strip(): value.strip() for name, sign, value in pairs if sign}


def _find_home() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:
        return os.path.expanduser("~")


def _read(path: str) -> Optional[str]:
    # Anything but a file, a pipe for one, might never come to an end.
    if not os.path.isfile(path):
        return None
    try:
        with open(path, "rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        # What we may not read, NCCL may not read either: it goes on without.
        return None
