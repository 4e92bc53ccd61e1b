"""Reading an accelerate configuration of the user's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from multinode.core.run.engines import parse_accelerate
from multinode.store.text_file import read_text

__all__ = ["load_accelerate"]


def load_accelerate(path: Path) -> dict[str, Any]:
    """Its keys.

    Raises:
        UsageError: it cannot be read, or is no such configuration.
    """
    return parse_accelerate(read_text(path, "the accelerate configuration"), str(path))
