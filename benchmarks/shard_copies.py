"""What copying shards to the next node in the background adds to a step: blocks of one training with and without it.

Run as root, with a lab of two nodes up and nothing else on the machine; 20 pairs take half an hour:

    multinode lab up --nodes 2 --rate 1gbit
    .venv/bin/python benchmarks/shard_copies.py --pairs 20

The training is ZeRO-2 with a save every 10 steps. In every other block, its controller neither looks for checkpoints
nor copies their shards; the order within a pair changes from one to the next, so that drift of the machine hits both
alike. A block begins some seconds after the change, which a copy under way takes to end. Compared are the mean times of
the first worker's steps, without those that save: the copying goes on beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from command import JOB, REPOSITORY, SHAPE

from multinode.cli import main as command_line
from multinode.launch import restarts
from multinode.launch.shard_copies import Seen, ShardCopies
from multinode.stats.estimate import of_repeats

EVERY = 10
# Once a checkpoint is safe, the controller looks every 15 s: a block has as many looks as every other.
_LOOKS_S = 15.0
_SETTLE_S = 5.0
_START_S = 400.0
# Where a file of this name is, nothing is copied.
_SWITCH = "MULTINODE_COPIES_OFF"


def main() -> None:
    """Measure and print one JSON document, and a line for each pair on stderr."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20, help="at least 2")
    parser.add_argument("--looks", type=int, default=2, help="how often the controller looks in a block")
    asked = parser.parse_args()
    pairs = []
    with tempfile.TemporaryDirectory(prefix="multinode-copies-") as folder, _training(Path(folder)) as samples:
        for number in range(asked.pairs):
            order = (False, True) if number % 2 else (True, False)
            ms = {copies: _block(Path(folder), samples, asked.looks * _LOOKS_S, copies=copies) for copies in order}
            pairs.append({"without_ms": ms[False], "with_ms": ms[True], "ratio": ms[True] / ms[False]})
            print(f"{number + 1}: {json.dumps(pairs[-1])}", file=sys.stderr, flush=True)
        copied = len((Path(folder) / "copied").read_text().splitlines())
    ratios = [pair["ratio"] for pair in pairs]
    mean = of_repeats(ratios)
    document = {
        "schema": "multinode.benchmark.shard_copies/2",
        "job": JOB,
        "block_s": asked.looks * _LOOKS_S,
        "pairs": pairs,
        "copied_parts": copied,
        "median_ratio": statistics.median(ratios),
        "mean_ratio": mean.value,
        "interval_95": [mean.low, mean.high],
    }
    print(json.dumps(document, indent=1))


class _Switched(ShardCopies):
    """Copies only while no file says otherwise, and notes what it copied."""

    def __init__(self, look: Any, copy: Any, **rest: Any) -> None:
        off = Path(os.environ[_SWITCH])

        def look_if_on() -> Seen:
            return {} if off.exists() else look()

        def copy_and_note(checkpoint: str, copied: Any, over: Any) -> None:
            copy(checkpoint, copied, over)
            with off.with_name("copied").open("a") as notes:
                notes.write(f"{time.time()} {checkpoint} {copied.source} {copied.target}\n")

        super().__init__(look_if_on, copy_and_note, **rest)


@contextlib.contextmanager
def _training(folder: Path) -> Iterator[Path]:
    """A training on the lab, one worker on each node, that is stopped at the end; the first worker's samples."""
    settings = {
        "max_steps": 1000000,
        "save_strategy": "steps",
        "save_steps": EVERY,
        "save_total_limit": 4,
        "output_dir": f"/var/tmp/{folder.name}",  # noqa: S108 - on the lab's own nodes
        "deepspeed": "configs/deepspeed/ds_z2_config.json",
    }
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    with (folder / "launch.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, "launch", JOB, *SHAPE, "--restarts", "1", "--shard-copies", "1", *words],
            cwd=REPOSITORY,
            env=os.environ | {"MULTINODE_RUNS": str(folder), _SWITCH: str(folder / "off")},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        deadline = time.monotonic() + _START_S
        while not (folder / "copied").exists():
            if process.poll() is not None:
                raise SystemExit((folder / "launch.log").read_text())
            if time.monotonic() > deadline:
                raise SystemExit(f"nothing was copied within {_START_S:.0f} s: {(folder / 'launch.log').read_text()}")
            time.sleep(0.5)
        (samples,) = folder.glob("*/samples/node-0/rank-*.jsonl")
        yield samples
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(_START_S)


def _block(folder: Path, samples: Path, length_s: float, *, copies: bool) -> float:
    """Mean time in ms of the steps of a block that do not save."""
    off = folder / "off"
    if copies:
        off.unlink(missing_ok=True)
    else:
        off.touch()
    time.sleep(_SETTLE_S)
    began_s = time.time()
    time.sleep(length_s)
    # What is not here yet comes within a second.
    time.sleep(1.0)
    times_ms = []
    for line in samples.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            sample = json.loads(line)
            took_ms = sample.get("step_time_us", 0) / 1e3
            if sample["kind"] == "step" and took_ms and sample["time_s"] - took_ms / 1e3 >= began_s:
                times_ms += [took_ms] if sample["step"] % EVERY not in {0, 1} else []
    if not times_ms:
        raise SystemExit(f"no step within a block: {(folder / 'launch.log').read_text()}")
    return statistics.fmean(times_ms)


if __name__ == "__main__":
    if sys.argv[1:2] == ["launch"]:
        vars(restarts)["ShardCopies"] = _Switched
        command_line.run()
    main()
