"""load_figures: a YAML of published figures, as `predict --from` takes it; strict about every key."""

from __future__ import annotations

from pathlib import Path

import msgspec

from multinode.core.prediction.figures import Figures
from multinode.core.text.training_yaml import WrongYaml, parse_yaml
from multinode.decoding import convert
from multinode.errors import UsageError
from multinode.store.text_file import read_text

__all__ = ["load_figures"]

_HINT = "a file to start from: configs/figures/two_boxes_lora.yaml"


def load_figures(path: Path) -> Figures:
    """The figures of a file.

    Raises:
        UsageError: it cannot be read, is not YAML, or a key is unknown, missing or of the wrong kind; the message has
            its place.
    """
    text = read_text(path, "the file of figures", _HINT)
    try:
        return convert(parse_yaml(text), Figures)
    except WrongYaml as wrong:
        where = path if wrong.line is None else f"{path}:{wrong.line}"
        raise UsageError(f"{where}: {wrong}", hint=_HINT) from None
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: {error}", hint=_HINT) from None
