from __future__ import annotations

from typing import Any

import msgspec

from multinode.check.gpus import check_gpus_free, check_leftovers
from multinode.check.rule import Inspection
from multinode.cluster.cluster import Node
from multinode.cluster.facts import Gpu, GpuProcess, RunProcess
from tests import make

from .inspecting import but, expect, inspection, only, silent


def gpu(*processes: GpuProcess, used: float | None = 400.0, index: int = 0) -> Gpu:
    name = "NVIDIA GeForce RTX 4090"
    return Gpu(index=index, name=name, memory_total_mib=24564.0, memory_used_mib=used, processes=processes)


def process(**changes: Any) -> GpuProcess:
    everything: dict[str, Any] = {"pid": 4711, "user": "eve", "command": "python3", "memory_mib": 10240.0}
    return GpuProcess(**{**everything, **changes})


def on_b(*gpus: Gpu, **changes: Any) -> Inspection:
    return but(inspection(), "b", gpus=gpus, **changes)


def test_free_gpus_have_no_finding() -> None:
    for known in (inspection(), inspection(facts={}), on_b(gpu()), on_b(gpu(used=None))):
        silent(check_gpus_free(known), check_leftovers(known))


def test_somebody_elses_process_is_named_with_what_it_holds() -> None:
    said = "GPU 0 is in use by python3 (pid 4711, user eve, 10 GiB), with 10.4 GiB of its 24 GiB"
    expect(check_gpus_free(on_b(gpu(process(), used=10600.0))), "warning", "b", said)


def test_a_desktop_that_draws_is_not_in_the_way() -> None:
    # As an RTX 4080 SUPER with a desktop shows it, driver 595.71.05.
    drawing = process(pid=2165, command="kwin_wayland", memory_mib=25.0)
    silent(check_gpus_free(on_b(gpu(drawing, used=611.0))))


def test_a_full_gpu_is_an_error() -> None:
    said = "GPU 0 is full: python3 (pid 4711, user eve, 22.5 GiB) uses 23 GiB of its 24 GiB"
    expect(check_gpus_free(on_b(gpu(process(memory_mib=23000.0), used=23600.0))), "error", "b", said)


def test_memory_that_nobody_seems_to_hold_is_told_as_such() -> None:
    expect(check_gpus_free(on_b(gpu(used=9000.0))), "warning", "b", "by processes of other users")
    hidden = gpu(process(user=None, command=None, memory_mib=None), used=None)
    said = "a process (pid 4711), with an unknown part of its 24 GiB"
    expect(check_gpus_free(on_b(hidden)), "warning", "b", said)


def test_a_gpu_that_the_job_does_not_use_may_be_busy() -> None:
    hostfile = make.cluster("a", Node(name="b", gpus=(0,)))
    known = on_b(gpu(), gpu(process(), used=23600.0, index=1))
    silent(check_gpus_free(msgspec.structs.replace(known, cluster=hostfile)))
    assert only(check_gpus_free(known)).message.startswith("GPU 1")


def left(pid: int, *, supervised: bool = False, run_id: str = "20250101-sft.1") -> RunProcess:
    return RunProcess(pid=pid, run_id=run_id, command="python3", supervised=supervised)


def test_leftovers_of_a_run_come_with_the_command_that_ends_them() -> None:
    finding = expect(check_leftovers(on_b(gpu(), run_processes=(left(70), left(71)))), "warning", "b")
    assert finding.message.startswith("2 processes of run 20250101-sft left behind (python3)")
    assert finding.hint == "on b:\nkill -9 70 71"


def test_leftovers_that_hold_a_gpu_are_an_error_and_said_once() -> None:
    ours = process(pid=70, run_id="20250101-sft.1", memory_mib=23000.0)
    known = on_b(gpu(ours, used=23600.0), run_processes=(left(70),))
    silent(check_gpus_free(known))
    finding = only(check_leftovers(known))
    assert (finding.severity, "1 process of run 20250101-sft left" in finding.message) == ("error", True)
    assert "on GPU 0:" in finding.message
    assert finding.hint == "on b:\nkill -9 70"


def test_a_run_that_goes_on_is_noted_and_on_the_jobs_gpus_a_warning() -> None:
    going = (left(70, supervised=True),)
    finding = only(check_leftovers(on_b(gpu(), run_processes=going)))
    assert (finding.severity, "run 20250101-sft is still running (b)" in finding.message) == ("note", True)
    assert "\nmultinode stop 20250101-sft" in str(finding.hint)
    assert "kill" not in str(finding.hint)
    holding = on_b(gpu(process(pid=70, run_id="20250101-sft.1")), run_processes=going)
    assert only(check_leftovers(holding)).severity == "warning"


def test_a_run_that_goes_on_everywhere_is_noted_once() -> None:
    known = inspection("abc")
    for rank, name in enumerate("abc"):
        known = but(known, name, run_processes=(left(70, supervised=True, run_id=f"sft.{rank}"),))
    finding = only(check_leftovers(known))
    assert (finding.node, finding.message.startswith("run sft is still running (a, b and c)")) == (None, True)


def test_two_runs_are_two_findings() -> None:
    both = (left(70), left(80, run_id="other.1", supervised=True))
    assert [one.severity for one in check_leftovers(on_b(run_processes=both))] == ["warning", "note"]
