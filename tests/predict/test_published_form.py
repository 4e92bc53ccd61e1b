from __future__ import annotations

from pathlib import Path

import pytest

from multinode.errors import UsageError
from multinode.predict.request import load_published_benchmarks

SEED = Path(__file__).parent.parent.parent / "configs" / "figures" / "two_boxes_lora.yaml"


def test_the_sample_file_is_read() -> None:
    found = load_published_benchmarks(SEED)
    assert (found.strategy, found.network.payload_mb_per_s) == ("zero2", 100)
    assert found.several_nodes is not None


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("strategy: zero2", "strategy: zero9", ":22: 'strategy': Invalid"),
        ("per_device_batch: 1", "per_device_batch: 0", "'per_device_batch': Expected"),
        ("  runtime_s: 7200", "  runtime_h: 2", "'single_node': 'runtime_h': Object contains unknown"),
        ("    rank: 8", "    rank: -8", "'model': 'lora': 'rank': Expected"),
        ("accumulation: 1", "accumulation: .inf", "'accumulation': Expected"),
        ("overlap: false", "overlap: no way", "'overlap': Expected"),
        ("title: Qwen", "title: [", "expected"),
    ],
)
def test_a_wrong_line_is_an_error_with_its_place(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "figures.yaml"
    text = SEED.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(UsageError) as refused:
        load_published_benchmarks(path)
    assert refused.value.message.startswith(str(path))
    assert said in refused.value.message
    assert "two_boxes_lora.yaml" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("  runtime_s: 7200", "  runtime: 7200", "did you mean 'runtime_s'? Known keys: nodes, workers_per_node"),
        ("  payload_mb_per_s: 100", "  gbits_per_s: 1", "did you mean 'gbit_per_s'? Known keys: gbit_per_s, nics"),
        ("accumulation: 1", "zzz: 1", "Known keys: title, model, strategy"),
    ],
)
def test_an_unknown_key_is_told_with_those_that_there_are(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "figures.yaml"
    path.write_text(SEED.read_text().replace(old, new))
    with pytest.raises(UsageError) as refused:
        load_published_benchmarks(path)
    hint = refused.value.hint or ""
    assert hint.startswith(said)
    assert "two_boxes_lora.yaml" in hint


@pytest.mark.parametrize("text", ["", "[]", "seven"])
def test_what_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "figures.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match="Expected `object`"):
        load_published_benchmarks(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        load_published_benchmarks(tmp_path / "none.yaml")
