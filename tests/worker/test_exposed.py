"""Exposed communication on a GPU: what hooks tell of replayed trainings, beside what the replays know of themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from multinode.records.progress import StepRecords
from multinode.records.samples import DdpSample, DeviceWaitSample, StepSample

from .gloo_pair import Told, run_pair

pytestmark = pytest.mark.torch

ROOT = Path(__file__).resolve().parents[2]
STEPS = 16
# A step's time with the network as it is, less that with one that takes no time: without hooks, then hooked.
WATCHED = f"""
import importlib.util, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {str(ROOT)!r})
import torch, torch.distributed as dist
torch.distributed.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from tests import cuda_stand_in
gpu = cuda_stand_in.install()
from tests.worker import cuda_replays
from tests.worker.cuda_replays import *
make = lambda: REPLAY
whole = length_ms(make(), 6, network_speed=1.0)
truth_ms = whole - length_ms(make(), 6, network_speed=float("inf"))
traffic = worker.traffic.Traffic(steps, guard)
ddp_hooks = worker.ddp.hooks(steps, guard, traffic)
for name, hook in traffic.hooks():
    if name in sys.modules or importlib.util.find_spec(name):
        hook(importlib.import_module(name))
cuda_stand_in.hand_on()
class Reducers:
    DistributedDataParallel = cuda_replays.Ddp
ddp_hooks[0][1](Reducers)
step = make()
begun_ms = end_ms()
for number in range({STEPS}):
    step()
    steps.step("optimizer")
hooked_ms = (end_ms() - begun_ms) / {STEPS}
for _ in range(2):
    gpu.await_on_host(end_ms() + 1.0)
    steps.step("optimizer")
tell([truth_ms, whole, hooked_ms])
"""
# The same up to where a training begins, which then captures some of its steps.
CAPTURED = (
    WATCHED[: WATCHED.index("step = make()")]
    + """
step = make()
for number in range(6):
    step()
    gpu.is_capturing = number in (2, 3)
    steps.step("optimizer")
    gpu.is_capturing = False
for _ in range(2):
    gpu.await_on_host(end_ms() + 1.0)
    steps.step("optimizer")
tell([truth_ms])
"""
)


def test_a_step_that_is_captured_in_a_graph_is_no_step_and_its_capture_goes_on(tmp_path: Path) -> None:
    (told,) = run_pair(
        tmp_path / "run", CAPTURED.replace("REPLAY", "zero12([15.0], [30.0], stage=2, overlap=True)"), workers=1
    )
    # Asking an event whether it has come to pass ends a capture.
    assert "multinode:" not in told.stderr, told.stderr
    assert [one.step for one in told.samples if isinstance(one, StepSample)] == [1, 2, 3, 4, 5, 6]
    assert sum(isinstance(one, DeviceWaitSample) for one in told.samples) == 4


def replay(folder: Path, call: str, script: str = WATCHED, last: int = STEPS) -> tuple[float, dict[int, StepRecords]]:
    """What a step's communication costs, in ms, and what was recorded of each step up to the last but one."""
    told: Told = run_pair(folder, script.replace("REPLAY", call), workers=1, warm=True)[0]
    assert "multinode:" not in told.stderr, told.stderr
    truth_ms, whole_ms, hooked_ms = told.said
    # Hooks delay nothing.
    assert hooked_ms == pytest.approx(whole_ms, rel=0.02)
    found: dict[int, StepRecords] = {}
    for sample in told.samples:
        if isinstance(sample, StepSample | DdpSample | DeviceWaitSample):
            found.setdefault(sample.step, StepRecords()).take(sample)
    return truth_ms, {step: one for step, one in found.items() if 2 < step < last}


SLOW_BUCKETS = "[10.0] * 4, [12.0] * 4"
UNITS = "[(2.0, 4.0, 1.0, 3.0)] * 8"
GATHERS = "[(2.0, 4.0, 1.5)] * 8"
FAST = "[(0.2, 0.4, 1.0)] * 30"
SLOW_GATHERS = "[(1.0, 2.0, 3.0)] * 20"


@pytest.mark.parametrize(
    ("call", "source"),
    [
        pytest.param(f"fsdp1({UNITS})", "device", id="fsdp1"),
        pytest.param("fsdp1([(0.5, 1.0, 3.0, 5.0)] * 4)", "device", id="fsdp1-slow-network"),
        pytest.param(f"fsdp2({UNITS})", "device", id="fsdp2"),
        pytest.param("fsdp2([(0.5, 1.0, 3.0, 5.0)] * 32)", "device", id="fsdp2-32-units-slow-network"),
        pytest.param(f"zero12({SLOW_BUCKETS}, stage=1, overlap=True)", "device", id="zero1-overlap"),
        pytest.param(
            f"zero12({SLOW_BUCKETS}, stage=1, overlap=False, micro_batches=4)", "device", id="zero1-accumulates"
        ),
        pytest.param(
            f"zero12({SLOW_BUCKETS}, stage=1, overlap=True, micro_batches=4)", "device", id="zero1-overlap-accumulates"
        ),
        pytest.param("zero12([15.0], [30.0], stage=2, overlap=True)", "device", id="zero2-one-bucket-overlap"),
        pytest.param(f"zero12({SLOW_BUCKETS}, stage=2, overlap=True)", "device", id="zero2-four-buckets-overlap"),
        pytest.param("zero12([10.0] * 4, [4.0] * 4, stage=2, overlap=True)", "device", id="zero2-four-buckets-hidden"),
        pytest.param(f"zero12({SLOW_BUCKETS}, stage=2, overlap=False)", "device", id="zero2-four-buckets"),
        pytest.param(
            f"zero12({SLOW_BUCKETS}, stage=2, overlap=True, contiguous=False)",
            "device",
            id="zero2-overlap-not-contiguous",
        ),
        pytest.param(f"zero3({SLOW_GATHERS}, [30.0], overlap=True)", "device", id="zero3-one-reduction-overlap"),
        pytest.param(f"zero3({GATHERS}, [9.0] * 4, overlap=True)", "device", id="zero3-four-reductions-overlap"),
        pytest.param(f"zero3({FAST}, [3.0] * 8, overlap=True, prefetch=3)", "device", id="zero3-prefetch-overlap"),
        pytest.param(f"zero3({GATHERS}, [9.0] * 4, overlap=False)", "device", id="zero3"),
        # More waits than a step is expected to have, by full fine-tuning with accumulation.
        pytest.param(
            "accumulated(fsdp2([(0.5, 1.0, 3.0, 5.0)] * 80), 4)", "device", id="fsdp2-80-units-4-micro-batches"
        ),
        pytest.param("accumulated(fsdp2([(0.2, 0.4, 1.0, 1.0)] * 32), 64)", "device", id="fsdp2-64-micro-batches"),
        # What computes on a stream of its own is not waited for.
        pytest.param("on_a_stream_of_its_own(45.0, 5.0, 1, 'stream')", "device", id="own-stream-synchronized"),
        pytest.param("on_a_stream_of_its_own(45.0, 5.0, 1, 'device')", "device", id="own-stream-device-synchronized"),
        pytest.param("on_a_stream_of_its_own(20.0, 5.0, 3, 'stream')", "device", id="own-stream-three-calls"),
        pytest.param("on_a_stream_of_its_own(20.0, 5.0, 3, 'event')", "device", id="own-stream-waited-for-by-stream"),
        pytest.param("by_the_accelerator(20.0, 8.0)", "device", id="accelerator-stream"),
        pytest.param("ddp([5.0] * 4, [8.0] * 4)", "ddp", id="ddp"),
        pytest.param("ddp([5.0] * 4, [1.0] * 4)", "ddp", id="ddp-hidden"),
    ],
)
def test_exposed_communication_is_what_the_step_would_be_shorter_without_it(
    tmp_path: Path, call: str, source: str
) -> None:
    truth_ms, found = replay(tmp_path / "run", call)
    told_ms = [(one.exposed_us(source, host_waits=False) or 0.0) / 1000 for one in found.values()]
    # Half a percent of a small truth is what launching takes.
    assert told_ms == pytest.approx([truth_ms] * (STEPS - 3), rel=0.02, abs=0.05)


def test_waits_inside_a_node_and_between_nodes_are_two_figures(tmp_path: Path) -> None:
    of_four = 'import os\nos.environ |= {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}\n'
    truth_ms, found = replay(tmp_path / "run", "tensor_parallel(8, 1.0, 33.0)", of_four + WATCHED)
    assert truth_ms == pytest.approx(41.0, rel=0.01)
    waits = [one.wait for one in found.values() if one.wait is not None]
    assert [wait.wait_us / 1000 for wait in waits] == pytest.approx([truth_ms] * (STEPS - 3), rel=0.02)
    assert [wait.local_us / 1000 for wait in waits] == pytest.approx([8.0] * (STEPS - 3), rel=0.02)


def test_ddp_s_counters_are_read_in_one_iteration_of_64_where_a_loop_never_looks_at_its_loss(tmp_path: Path) -> None:
    script = WATCHED.replace(f"range({STEPS})", "range(200)").replace(f"/ {STEPS}", "/ 200")
    truth_ms, found = replay(tmp_path / "run", "ddp([5.0] * 4, [8.0] * 4, looks=False)", script, last=201)
    late = {step: one.exposed_us("ddp", host_waits=False) for step, one in found.items() if step > 11 and one.ddp}
    assert set(late) == {64, 128, 192}
    told_ms = [(exposed_us or 0.0) / 1000 for exposed_us in late.values()]
    assert told_ms == pytest.approx([truth_ms] * 3, rel=0.02, abs=0.05)


def test_a_torch_that_has_its_public_functions_alone_is_timed_as_well(tmp_path: Path) -> None:
    # Of the private ones, which are quicker, our hooks do without; what torch's own Python calls stays below it.
    made = "traffic = worker.traffic"
    script = WATCHED.replace(made, f"worker.collectives._quick = lambda torch: None\n{made}")
    truth_ms, found = replay(tmp_path / "run", "zero3([(1.0, 2.0, 3.0)] * 4, [9.0] * 2, overlap=True)", script)
    told_ms = [(one.exposed_us("device", host_waits=False) or 0.0) / 1000 for one in found.values()]
    assert told_ms == pytest.approx([truth_ms] * (STEPS - 3), rel=0.02, abs=0.05)


def test_torch_asks_for_the_accelerators_streams_where_hooks_are() -> None:
    """Of a new torch: what is copied from the module, or asked of C++, would not be seen."""
    for path in (Path(torch.__file__).parent / "distributed").rglob("*.py"):
        text = path.read_text(encoding="utf-8", errors="replace")
        assert "from torch.accelerator" not in text, path
        assert "_accelerator_getStream" not in text, path


def test_a_wait_that_nothing_of_python_sees_leaves_the_step_unknown(tmp_path: Path) -> None:
    # 20 of 21 calls were timed, and 30 of 32 ms are in the other.
    truth_ms, found = replay(tmp_path / "run", "unseen(15.0, 30.0)")
    assert truth_ms > 30.0
    waits = [one.wait for one in found.values()]
    assert {(wait.calls, wait.of_calls) for wait in waits if wait is not None} == {(20, 21)}
    assert [one.exposed_us("device", host_waits=False) for one in found.values()] == [None] * (STEPS - 3)
