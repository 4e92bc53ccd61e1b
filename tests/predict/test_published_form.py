from __future__ import annotations

import re
from pathlib import Path

from multinode.errors import MultinodeError
from multinode.predict.request import load_published_benchmarks
from tests.golden import Golden, error_of

SEED = Path(__file__).parent.parent.parent / "configs" / "figures" / "two_boxes_lora.yaml"


def test_the_sample_file_is_read() -> None:
    found = load_published_benchmarks(SEED)
    assert (found.strategy, found.network.payload_mb_per_s) == ("zero2", 100)
    assert found.several_nodes is not None


def test_a_wrong_file_is_refused_with_the_place(tmp_path: Path, golden: Golden) -> None:
    seed = SEED.read_text()
    path = tmp_path / "figures.yaml"
    changes = (
        ("strategy: zero2", "strategy: zero9"),
        ("per_device_batch: 1", "per_device_batch: 0"),
        ("    rank: 8", "    rank: -8"),
        ("accumulation: 1", "accumulation: .inf"),
        ("overlap: false", "overlap: no way"),
        ("  runtime_s: 7200", "  runtime: 7200"),
        ("  payload_mb_per_s: 100", "  gbits_per_s: 1"),
        ("accumulation: 1", "zzz: 1"),
        *(("payload_mb_per_s: 100", f"gbit_per_s: {rate}") for rate in ("100GB/s", "fast", "0x100G", "2x")),
    )
    assert [old for old, _ in changes if old not in seed] == []
    texts = {new.strip(): seed.replace(old, new) for old, new in changes} | {text: text for text in ("", "[]", "seven")}

    def refusal(text: str) -> MultinodeError:
        path.write_text(text)
        return error_of(load_published_benchmarks, path)

    refused = {case: refusal(text) for case, text in texts.items()}
    refused["no file"] = error_of(load_published_benchmarks, tmp_path / "none.yaml")
    golden.check_errors("refused_figures", refused, tmp_path)


def test_what_is_no_yaml_is_refused_with_its_place(tmp_path: Path) -> None:
    """The words are the parser's."""
    path = tmp_path / "figures.yaml"
    path.write_text(SEED.read_text().replace("title: Qwen", "title: ["))
    assert re.match(rf"{re.escape(str(path))}:\d+: ", error_of(load_published_benchmarks, path).message)
