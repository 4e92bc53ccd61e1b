"""A script of the user's, as a framework of which nothing is known: it has no keys, and sees to its own checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from multinode.job.frameworks.framework import Framework
from multinode.job.settings import UNKNOWN_SETTINGS


class _Script(Framework):
    name = "script"
    title = "script"
    defaults = UNKNOWN_SETTINGS
    has_file = False
    resumes = False

    def recognises(self, config: Mapping[str, Any]) -> bool:
        return False

    def command(self, verb: str, path: str) -> str:
        return f"torchrun {path}"

    def module(self, verb: str) -> str:
        return ""

    def changed(self, config: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {}


FRAMEWORK = _Script()
