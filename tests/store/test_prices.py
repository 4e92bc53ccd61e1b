from __future__ import annotations

from pathlib import Path

import pytest

from multinode.errors import UsageError
from multinode.store.hostfile import load_prices

SAMPLE = Path(__file__).parents[2] / "configs" / "figures" / "gpu_prices.yaml"


def test_the_sample_file_is_read_and_its_text_kept() -> None:
    prices, text = load_prices(SAMPLE)
    found = prices.of_device("NVIDIA GeForce RTX 4090")
    assert found is not None
    assert (prices.currency, found.purchase) == ("CNY", 15000)
    assert text == SAMPLE.read_text()


def test_what_the_sample_has_commented_out_is_right_as_well(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text(SAMPLE.read_text().replace("# nodes:\n#   node1:", "nodes:\n  node1:"))
    assert load_prices(path)[0].nodes["node1"].hourly == 2.8


def test_a_wrong_line_is_named_with_the_path_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text("currency: EUR\nnodes:\n  a: {hourly: cheap}\n")
    with pytest.raises(UsageError) as refused:
        load_prices(path)
    assert refused.value.message.startswith(f"{path}:3: 'nodes': 'a': 'hourly': Expected `float | null`")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"prices file .* does not exist"):
        load_prices(tmp_path / "none.yaml")
