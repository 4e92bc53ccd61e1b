"""~/.multinode on the node, where only we may write, and the directories of runs in it.

The modules that write a file own its content.
"""

from __future__ import annotations

import json
import os
import re
from typing import Optional

from .channel import AgentError, Record
from .files import describe_stranger, replace_file, user_name

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# The controller accepts the same names (launch/tracker.py).
_SAMPLES_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.jsonl")
_BLOCK_BYTES = 1024


class RunDir:
    """One run's directory.

    Raises:
        AgentError: the run id is not valid.
    """

    def __init__(self, run_id: str) -> None:
        if not is_run_id(run_id):
            raise AgentError(f"not a run id: {run_id!r}", hint="letters, digits, dot, dash and underscore")
        self.run_id = run_id
        self.path = os.path.join(os.path.expanduser("~"), ".multinode", "runs", run_id)
        self.log = os.path.join(self.path, "log")  # the job's stdout and stderr, raw
        self.samples = os.path.join(self.path, "samples")  # directory of JSONL files

    def exists(self) -> bool:
        """Whether the run has a directory on this node."""
        return os.path.isdir(self.path)

    def created_s(self) -> float:
        """When the run was created, by the clock of the file system; 0 if unknown."""
        try:
            return os.stat(os.path.join(self.path, "request.json")).st_mtime
        except OSError:
            return 0.0

    def read(self, name: str) -> Optional[Record]:
        """A JSON object of the run; None if it is absent, or cannot be read right now."""
        try:
            with open(os.path.join(self.path, name), "rb") as file:
                data = json.loads(file.read())
        except (OSError, ValueError):
            return None
        return data if isinstance(data, dict) else None

    def write(self, name: str, data: Record) -> None:
        """Replace a JSON file atomically.

        On a full disk, an existing file is overwritten in place instead: files are padded to whole blocks, so this
        needs no new space. A reader that sees half of it gets None from `read`, and reads again.
        """
        text = json.dumps(data).encode()
        text = text.ljust((len(text) // _BLOCK_BYTES + 1) * _BLOCK_BYTES - 1) + b"\n"
        path = os.path.join(self.path, name)
        try:
            replace_file(path, text)
        except OSError:
            if not _overwrite(path, text):
                raise

    def add_file(self, relative: str, text: str) -> None:
        """Write a file that the request carries, mode 0600."""
        # O_EXCL: a request must not replace one of our own files.
        with open(
            os.open(self._place(relative), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
        ) as file:
            file.write(text)

    def add_link(self, relative: str, target: str) -> None:
        """Put a symbolic link to `target` where `add_file` would put the file; raises as `add_file`."""
        os.symlink(target, self._place(relative))

    def _place(self, relative: str) -> str:
        parts = relative.split("/")
        if not relative or os.path.isabs(relative) or ".." in parts or "\0" in relative:
            raise AgentError(f"the file {relative!r} would lie outside the run directory")
        path = os.path.join(self.path, relative)
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        return path


def is_run_id(name: str) -> bool:
    """Whether the name is a valid run id, which cannot be taken for a path."""
    return _RUN_ID.fullmatch(name) is not None


def is_samples_name(name: str) -> bool:
    """Whether a file in the directory of samples is sent to the controller."""
    return _SAMPLES_NAME.fullmatch(name) is not None


def open_run(run_id: str) -> RunDir:
    """The directory of a run that exists.

    Raises:
        AgentError: no such run on this node.
    """
    run = RunDir(run_id)
    if not run.exists():
        raise AgentError(f"no run {run_id} on this node", hint="multinode runs")
    return run


def _overwrite(path: str, text: bytes) -> bool:
    try:
        fd = os.open(path, os.O_WRONLY)
    except OSError:
        return False
    try:
        return os.fstat(fd).st_size == len(text) and os.pwrite(fd, text, 0) == len(text)
    except OSError:
        return False
    finally:
        os.close(fd)


# `agent` and `code` hold programs that run as us; `runs` holds the files that control our runs.
_FOLDERS = ("", "agent", "runs", "code")


def check_home() -> None:
    """Check that only we or root can write to the directories of the agent, the code and the runs.

    Raises:
        AgentError: somebody else can write there.
    """
    for name in _FOLDERS:
        path = os.path.join(os.path.expanduser("~"), ".multinode", name).rstrip("/")
        try:
            stranger = describe_stranger(path)
        except OSError:
            continue
        if stranger is not None:
            owns = f"chmod go-w {path}" if "others" in stranger else f"sudo chown -R {user_name(os.getuid())} {path}"
            raise AgentError(
                f"{path} {stranger}; anyone who can write there could run programs as you",
                hint=f"check that nobody changed it: ls -lR {path}; then: {owns}",
            )
