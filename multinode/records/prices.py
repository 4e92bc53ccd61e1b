"""The file of prices, read."""

from __future__ import annotations

from pathlib import Path

from multinode.cluster.prices import Prices, parse_prices
from multinode.records.files import read_text


def load_prices(path: Path) -> tuple[Prices, str]:
    """The prices and the file's text, verbatim."""
    text = read_text(
        path,
        "the prices file",
        "start from configs/figures/gpu_prices.yaml, which multinode init --example writes",
    )
    return parse_prices(text, str(path)), text
