"""Devices that the job's torch finds: whether it has a GPU, its kernels' architectures, and those of the GPUs.

Only torch can tell: with forward-compatibility libraries it runs on a driver that is too old for its CUDA. Importing
torch takes seconds, so an answer with GPUs is cached for its environment. An answer without GPUs is not cached, since
its cause may be fixed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping
from typing import Any, Optional

from ..channel import Record
from ..files import replace_file
from ..programs import Query, QueryFailed

_MARK = "multinode-devices:"
_MOST_KEPT = 16
_MOST_DEVICES = 64
_LONGEST = 500
# Variables that decide which libraries and GPUs torch loads.
_DECIDES = re.compile(r"(LD|CUDA|NVIDIA|PYTHON|TORCH|PYTORCH|HIP|HSA|ROCR)_?")
_SCRIPT = f"""
import sys; sys.path[:] = [p for p in sys.path if p]
import json, warnings
found, said = [], []
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    available = torch.cuda.is_available()
    kernels = torch.cuda.get_arch_list() if available else []
    if available:
        for number in range(torch.cuda.device_count()):
            try:
                properties = torch.cuda.get_device_properties(number)
                found.append([properties.name, properties.major, properties.minor])
            except Exception as error:
                said.append(str(error))
    said += [str(warning.message) for warning in caught if "CUDA" in str(warning.message)]
if not available and not said:
    try:
        torch.cuda.init()
    except Exception as error:
        said.append(str(error))
print("\\n{_MARK}" + json.dumps({{"available": available, "kernels": kernels, "gpus": found, "said": said[:1]}}))
"""


def query_devices(python: str, cwd: Optional[str], env: Mapping[str, str], deadline_s: float) -> Query:
    """Ask the interpreter for its devices, with the job's variables."""
    # With an order set, nothing warns about the GPUs' order: such a warning would be taken for the reason.
    variables = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", **env}
    return Query([python, "-c", _SCRIPT], deadline_s=deadline_s, cwd=cwd, env=variables)


def parse_devices(text: str) -> Record:
    """The answer of `query_devices`, with the fields of TorchDevices.

    Raises:
        QueryFailed: the text has no answer.
    """
    lines = [line[len(_MARK) :] for line in text.splitlines() if line.startswith(_MARK)]
    try:
        answer: dict[str, Any] = json.loads(lines[-1])
        said = [_line(str(text)) for text in answer["said"]]
        return {
            "available": bool(answer["available"]),
            "reason": said[0] if said else None,
            "kernels": [str(kernel) for kernel in answer["kernels"]],
            "gpus": [
                {"name": str(name), "capability": [int(major), int(minor)]}
                for name, major, minor in answer["gpus"][:_MOST_DEVICES]
            ],
        }
    except (LookupError, ValueError, TypeError) as error:
        raise QueryFailed("the interpreter did not return its GPUs") from error


def _line(text: str) -> str:
    return " ".join(text.split())[:_LONGEST]


class AnswerCache:
    """Cache of this node's answers to one question, by everything that determines them."""

    def __init__(self, home: str, name: str) -> None:
        self._path = os.path.join(home, ".multinode", f"{name}.json")

    def key(self, env: Mapping[str, str], *parts: object) -> str:
        """The key of these parts and of the variables that matter to torch."""
        variables = {**{name: value for name, value in os.environ.items() if _DECIDES.match(name)}, **env}
        return hashlib.sha256(json.dumps([parts, sorted(variables.items())]).encode()).hexdigest()

    def get(self, key: str) -> Optional[Record]:
        """The answer that is cached for a key; None if there is none."""
        value = self._read().get(key)
        return value if isinstance(value, dict) else None

    def put(self, key: str, value: Record) -> None:
        """Cache an answer, and keep the newest others; if that fails, the next probe asks torch again."""
        answers = {name: old for name, old in self._read().items() if name != key}
        kept = {**dict(list(answers.items())[1 - _MOST_KEPT :]), key: value}
        with contextlib.suppress(OSError):
            os.makedirs(os.path.dirname(self._path), mode=0o700, exist_ok=True)
            replace_file(self._path, json.dumps(kept).encode())

    def _read(self) -> Record:
        with contextlib.suppress(OSError, ValueError), open(self._path, "rb") as file:
            answers = json.loads(file.read())
            if isinstance(answers, dict):
                return answers
        return {}
