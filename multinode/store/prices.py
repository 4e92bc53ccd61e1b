"""load_prices: a YAML of prices, as `--prices` takes it."""

from __future__ import annotations

from pathlib import Path

from multinode.core.cluster.prices import Prices, parse_prices
from multinode.store.text_file import read_text

__all__ = ["load_prices"]


def load_prices(path: Path) -> tuple[Prices, str]:
    """The prices and the file's text, verbatim.

    Raises:
        UsageError: it cannot be read, or a line of it is wrong; the message has its place.
    """
    text = read_text(path, "the prices file", "a file to start from: configs/figures/gpu_prices.yaml")
    return parse_prices(text, str(path)), text
