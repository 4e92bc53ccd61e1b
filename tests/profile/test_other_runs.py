from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from multinode.profile.observed import observe
from multinode.profile.other_runs import read_other_runs
from multinode.profile.throughput import read_model_work, utilisation_of
from multinode.records.run_directory import RunDirectory
from multinode.records.samples import ModelSample
from tests import make
from tests.bench.made_up_bench import on_cpu, on_gpu, part, report, speed
from tests.model.trainings import FULL, TINY, training_job
from tests.profile.observing import RUN
from tests.profile.test_utilisation import SPEED, on_gpus

FUTURE = "NVIDIA GeForce RTX 9090"


def bench(root: Path, run_id: str, *tflops: float) -> RunDirectory:
    """A stored bench of one GPU a node, each with a small and a large product."""
    parts = [
        part(node, on_gpu([speed("matmul", rate / 2, size=1024), speed("matmul", rate)], name=FUTURE))
        for node, rate in enumerate(tflops)
    ]
    processor = part(len(tflops), on_cpu([speed("matmul", 900.0)], name=FUTURE))
    return make.store(
        root,
        run_id,
        run=msgspec.structs.replace(RUN, run_id=run_id),
        bench=msgspec.structs.replace(report(*parts, processor), run_id=run_id),
    )


def test_the_fastest_product_of_the_latest_bench_stands_in_for_an_unknown_peak(tmp_path: Path) -> None:
    bench(tmp_path, "20260102-aa", 50.0)
    directory = bench(tmp_path, "20260103-bb", 200.0, 220.0)
    torn = make.store(tmp_path, "20260104-cc", run=RUN)
    torn.path.joinpath("bench.json").write_text("torn")
    (peak,) = read_other_runs(directory, make.plan("a", "b", workers=2)).benched
    assert (peak.gpu, peak.dtype, peak.run_id) == (FUTURE, "bf16", "20260103-bb")
    assert peak.tflops == pytest.approx(210.0, rel=0.01)
    nodes = [
        msgspec.structs.replace(
            node,
            samples=tuple(
                msgspec.structs.replace(sample, device_name=FUTURE)
                for sample in node.samples
                if isinstance(sample, ModelSample)
            ),
        )
        for node in on_gpus([0], [1]).nodes
    ]
    observed = observe("r", nodes)
    work = read_model_work(training_job(FULL), TINY)
    assert utilisation_of(work, observed, SPEED).mfu is None
    told = utilisation_of(work, observed, SPEED, [peak])
    assert told.mfu == pytest.approx(told.model_tflops / peak.tflops)
    assert "bench 20260103-bb" in told.denominator
