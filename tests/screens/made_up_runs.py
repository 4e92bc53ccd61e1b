"""Stored runs with figures that no lab has: GPUs, prices, published tables, tuned NCCL settings.

Their figures are those of the tests of each subject.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from multinode.records.run import Failure, Run
from multinode.records.run_directory import RunDirectory
from multinode.sweep.measure import build_table
from multinode.tune.judge import judge
from tests import make
from tests.bench.made_up_bench import report as bench_report
from tests.bench.test_screen import GPUS
from tests.contrast.contrasts import CONTRAST, CONTRAST_RUN, CURVE
from tests.network.test_screen import CHANGES, LIKE, SLOW, WELL
from tests.profile.observing import RUN, SUMMARY, store_observed
from tests.sweep.cells import PUBLISHED, SWEEP_RUN
from tests.sweep.stored_sweep import store_sweep
from tests.tune.test_measured_screens import TUNED
from tests.tune.test_tuning_screen import TUNINGS

__all__ = ["NAMES", "store_made_up"]

_FAILURE = Failure(
    node="box2",
    node_rank=1,
    rank=3,
    exit_code=1,
    message="rank 3: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    hint="use a smaller per_device_train_batch_size",
    log_tail="  File train.py, line 12, in step\n    loss.backward()",
    kind="out_of_gpu_memory",
    cause="the GPU has no room for the activations of this batch",
    consequences=("box1: connection closed by peer",),
)
NAMES = (
    *("launch", "failed", "stopped", "lost", "contrast", "curve", "sweep", "table"),
    *("bench", "scan", "slowscan", "tune", "tuning"),
)
"""Of the runs, each of which is `20260101-NAME`."""


def store_made_up(root: Path) -> None:
    """All of them, the last one named the newest."""
    _store_trained(root, "launch")
    _store_trained(root, "failed", status="failed", first_failure=_FAILURE)
    _store_trained(root, "stopped", status="stopped")
    _store(root, "lost", RUN, status="lost")
    _store(root, "contrast", CONTRAST_RUN).write("contrast.json", CONTRAST)
    _store(root, "curve", CONTRAST_RUN).write("contrast.json", CURVE)
    build_table(store_sweep(root, _run_id("sweep")), root)
    _store(root, "table", SWEEP_RUN, kind="import", nodes=(), world_size=0).write(
        "sweep.json", _named("table", PUBLISHED)
    )
    _store(root, "bench", RUN, kind="bench").write("bench.json", _named("bench", bench_report(*GPUS)))
    scans = {"scan": msgspec.structs.replace(WELL, like=LIKE, changes=CHANGES), "slowscan": SLOW}
    for name, scan in scans.items():
        _store(root, name, RUN, kind="nccl-test").write("nccl-test.json", _named(name, scan))
    _store(root, "tune", RUN, kind="tune").write("tune.json", _named("tune", TUNED))
    _store(root, "tuning", RUN, kind="tuning").write("tuning.json", _named("tuning", judge(*TUNINGS["winner"])))
    for place, path in enumerate(sorted(root.glob("*/run.json"), key=_order)):
        os.utime(path, (1.8e9 + place, 1.8e9 + place))


def _run_id(name: str) -> str:
    return f"20260101-{name}"


def _named(name: str, result: Any) -> Any:
    return msgspec.structs.replace(result, run_id=_run_id(name))


def _order(path: Path) -> tuple[int, str]:
    name = path.parent.name.removeprefix(_run_id(""))
    return (NAMES.index(name) if name in NAMES else -1, name)


def _store(root: Path, name: str, run: Run, **changes: Any) -> RunDirectory:
    return make.store(root, _run_id(name), run=msgspec.structs.replace(run, run_id=_run_id(name), **changes))


def _store_trained(root: Path, name: str, **changes: Any) -> None:
    run = msgspec.structs.replace(RUN, run_id=_run_id(name), **changes)
    store_observed(root, run, summary=_named(name, SUMMARY))
