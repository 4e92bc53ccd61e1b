from __future__ import annotations

from typing import Any

import msgspec

from multinode.check.gpus import check_gpus_free, check_leftovers
from multinode.check.rule import Inspection
from multinode.cluster.cluster import Node
from multinode.cluster.facts import Gpu, GpuProcess, RunProcess
from tests import make
from tests.golden import Golden

from .inspecting import but, check_cases, inspection, silent


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


def left(pid: int, *, supervised: bool = False, run_id: str = "20250101-sft.1") -> RunProcess:
    return RunProcess(pid=pid, run_id=run_id, command="python3", supervised=supervised)


BUSY_SECOND = on_b(gpu(), gpu(process(), used=23600.0, index=1))
HELD_BY_US = on_b(
    gpu(process(pid=70, run_id="20250101-sft.1", memory_mib=23000.0), used=23600.0), run_processes=(left(70),)
)


def test_what_holds_a_gpu_is_named(golden: Golden) -> None:
    hidden = gpu(process(user=None, command=None, memory_mib=None), used=None)
    check_cases(
        golden,
        "occupancy",
        {
            "a process of another user": check_gpus_free(on_b(gpu(process(), used=10600.0))),
            "a process that fills it": check_gpus_free(on_b(gpu(process(memory_mib=23000.0), used=23600.0))),
            "no process is visible": check_gpus_free(on_b(gpu(used=9000.0))),
            "a process about which nothing is known": check_gpus_free(on_b(hidden)),
            "a process on the second GPU": check_gpus_free(BUSY_SECOND),
        },
    )


def test_a_desktop_that_draws_and_a_gpu_that_the_job_does_not_use_are_not_in_the_way() -> None:
    # As an RTX 4080 SUPER with a desktop shows it, driver 595.71.05.
    drawing = process(pid=2165, command="kwin_wayland", memory_mib=25.0)
    silent(check_gpus_free(on_b(gpu(drawing, used=611.0))))
    hostfile = make.cluster("a", Node(name="b", gpus=(0,)))
    silent(check_gpus_free(msgspec.structs.replace(BUSY_SECOND, cluster=hostfile)))


def test_processes_of_a_run_come_with_the_command_that_ends_them(golden: Golden) -> None:
    going = (left(70, supervised=True),)
    everywhere = inspection("abc")
    for rank, name in enumerate("abc"):
        everywhere = but(everywhere, name, run_processes=(left(70, supervised=True, run_id=f"sft.{rank}"),))
    check_cases(
        golden,
        "leftovers",
        {
            "left behind": check_leftovers(on_b(gpu(), run_processes=(left(70), left(71)))),
            "left behind on a GPU": check_leftovers(HELD_BY_US),
            "of a run that is still running": check_leftovers(on_b(gpu(), run_processes=going)),
            "of a run that is still running, on the job's GPU": check_leftovers(
                on_b(gpu(process(pid=70, run_id="20250101-sft.1")), run_processes=going)
            ),
            "of a run that is still running everywhere": check_leftovers(everywhere),
            "of two runs": check_leftovers(on_b(run_processes=(left(70), left(80, run_id="other.1", supervised=True)))),
        },
    )
    # It is said once.
    silent(check_gpus_free(HELD_BY_US))
