"""load_published_benchmarks: a YAML of published figures, as `predict --from` takes it; strict about every key."""

from __future__ import annotations

from pathlib import Path

from multinode.core.prediction.published_benchmarks import PublishedBenchmarks
from multinode.core.text.strict_yaml import decode_yaml
from multinode.store.text_file import read_text

__all__ = ["load_published_benchmarks"]

_HINT = "a file to start from: configs/figures/two_boxes_lora.yaml"


def load_published_benchmarks(path: Path) -> PublishedBenchmarks:
    """The figures of a file.

    Raises:
        UsageError: it cannot be read, is not YAML, or a key is unknown, missing or of the wrong kind; the message has
            its place.
    """
    return decode_yaml(read_text(path, "the file of figures", _HINT), PublishedBenchmarks, path, _HINT)
