"""load_figures: a YAML of published figures, as `predict --from` takes it; strict about every key."""

from __future__ import annotations

from pathlib import Path

from multinode.core.prediction.figures import Figures
from multinode.core.text.strict_yaml import decode_yaml
from multinode.store.text_file import read_text

__all__ = ["load_figures"]

_HINT = "a file to start from: configs/figures/two_boxes_lora.yaml"


def load_figures(path: Path) -> Figures:
    """The figures of a file.

    Raises:
        UsageError: it cannot be read, is not YAML, or a key is unknown, missing or of the wrong kind; the message has
            its place.
    """
    return decode_yaml(read_text(path, "the file of figures", _HINT), Figures, path, _HINT)
