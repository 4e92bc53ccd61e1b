"""The demo's last word: each link that was tried, what its network gave, and what it did to the training.

Reads the newest nccl-test and contrast of each link from the stored runs; measures nothing.
"""

from __future__ import annotations

from typing import Any

from rich.console import Console

from multinode.report.render.table import make_table
from multinode.store.run_directory import RunDirectory, list_runs, runs_root
from multinode.units import format_rate

TRIED = 2
CONTRAST = "multinode.contrast/2"


def main() -> None:
    """Print the table."""
    directories = [RunDirectory(path) for path in list_runs(runs_root())]
    tests = _newest(directories, "nccl-test.json")
    contrasts = _newest(directories, "contrast.json", CONTRAST)
    table = make_table("The same training with the same two workers, on one node and on two")
    for name in ("network", "all-reduce", "one node", "two nodes", "so two nodes are"):
        table.add_column(name, justify="right", no_wrap=True)
    for test, contrast in zip(tests, contrasts, strict=True):
        table.add_row(
            format_rate(test["link_gbit_per_s"]),
            f"{test['rows'][-1]['busbw_gb_per_s'] * 1000:.1f} MB/s",
            f"{contrast['baseline']['samples_per_s']['value']:.1f} samples/s",
            f"{contrast['candidate']['samples_per_s']['value']:.1f} samples/s",
            _comparison(contrast["speedup"]["value"]),
        )
    Console().print(table)
    print(
        "\nEvery step of this training sends all its gradients over the network. Where that takes longer than the\n"
        "computing, a second node only pays with more workers, a faster network, or less to send."
    )


def _newest(directories: list[RunDirectory], name: str, schema: str | None = None) -> list[dict[str, Any]]:
    """The last that were tried; with a schema, those of earlier releases are left out."""
    found = [result for directory in directories if (result := directory.read(name, dict[str, Any])) is not None]
    return [result for result in found if schema in {None, result.get("schema")}][-TRIED:]


def _comparison(speedup: float) -> str:
    return f"{speedup:.2f} times as fast" if speedup >= 1 else f"{1 / speedup:.1f} times slower"


if __name__ == "__main__":
    main()
