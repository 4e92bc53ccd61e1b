"""Parts of the GPU report that are no tests: each writes its section, in Markdown, to the file that $SECTION names."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

from multinode.bench.measure import bench
from multinode.cli.run_page import load_report, report_markdown
from multinode.contrast.measure import ContrastRequest, contrast
from multinode.job.job import ScriptJob
from multinode.launch.context import ExecuteOptions, RunContext
from multinode.launch.launch import launch
from multinode.records.benchmark import DeviceTest
from multinode.transport.local import LocalTransport
from tests.gpu.one_gpu import TRAIN, launch_of

_QUERY_S = 60
# No GPU holds a batch of this many rows of 4096 numbers.
_TOO_LARGE = 1 << 28
_TORCH = """
import time
began = time.monotonic()
import torch
took_s = time.monotonic() - began
print(torch.version.cuda)
print(".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None)
print(f"{took_s:.1f}")
"""


def main() -> int:
    """The exit code: 1 where the part did not do what it should."""
    (name,) = sys.argv[1:]
    with tempfile.TemporaryDirectory(prefix="multinode-gpu-") as folder:
        text, succeeded = _PARTS[name](Path(folder))
    Path(os.environ["SECTION"]).write_text(text)
    return 0 if succeeded else 1


def _machine(_: Path) -> tuple[str, bool]:
    """Versions, and what makes a first start slow or a figure differ."""
    rows = list(_rows())
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]), True


def _rows() -> Iterator[tuple[str, object]]:
    fields = "name,memory.total,memory.used,driver_version,mig.mode.current"
    for line in _ask("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader").splitlines():
        yield "GPU", line
    yield "Python", platform.python_version()
    yield "kernel", platform.release()
    cuda, nccl, import_s = (_ask(sys.executable, "-c", _TORCH).splitlines() + [None] * 3)[:3]
    yield "CUDA of torch", cuda
    yield "NCCL of torch", nccl
    yield "seconds to import torch", import_s
    began = time.monotonic()
    socket.getfqdn()
    yield "seconds to look up the machine's own name", f"{time.monotonic() - began:.1f}"
    yield from _memory()
    for name in ("multinode", "torch", "transformers", "deepspeed", "accelerate", "llamafactory", "nvidia-ml-py"):
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _memory() -> Iterator[tuple[str, object]]:
    """By NVML's two ways, of the first GPU: the second is nvidia-smi's."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        first = pynvml.nvmlDeviceGetMemoryInfo(handle)
        second = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except Exception as error:  # noqa: BLE001 - one row of the page, whatever the driver or the module lacks
        yield "memory by NVML", f"unknown: {error}"
        return
    yield "MiB in use by NVML, versions 1 and 2", f"{first.used >> 20}, {second.used >> 20}"


def _ask(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_S, check=False)
    return done.stdout.strip() if done.returncode == 0 else f"unknown: {done.stderr.strip()[-200:]}"


def _bench(home: Path) -> tuple[str, bool]:
    execute = ExecuteOptions(kind="bench", lease_s=60.0)
    with _Runs(home) as context:
        bench(launch_of(DeviceTest(), nodes=1, execute=execute, run_id="bench"), ("alone",), context)
        return report_markdown(load_report(context.runs, ["bench"])), True


def _out_of_memory(home: Path) -> tuple[str, bool]:
    job = ScriptJob(argv=(str(TRAIN), "--batch", str(_TOO_LARGE), "--width", "4096"))
    with _Runs(home) as context:
        failure = launch(launch_of(job, run_id="oom"), context).run.first_failure
    if failure is None:
        return "a batch that no GPU holds has been trained", False
    if failure.kind != "out_of_gpu_memory":
        return f"told as {failure.kind}: {failure.message}", False
    return f"`{failure.message}`\n\n{failure.hint}", True


def _contrast(home: Path) -> tuple[str, bool]:
    job = ScriptJob(argv=(str(TRAIN), "--width", "2048", "--steps", "40"))
    with _Runs(home) as context:
        contrast(launch_of(job, run_id="contrast"), context, ContrastRequest(mode="scale-out"))
        return report_markdown(load_report(context.runs, ["contrast"])), True


class _Runs:
    """A context whose nodes and runs are below a directory."""

    def __init__(self, home: Path) -> None:
        self._context = RunContext(LocalTransport(home), home / "runs")

    def __enter__(self) -> RunContext:
        return self._context

    def __exit__(self, *_: object) -> None:
        self._context.agent.close()


_PARTS: dict[str, Callable[[Path], tuple[str, bool]]] = {
    "machine": _machine,
    "bench": _bench,
    "oom": _out_of_memory,
    "contrast": _contrast,
}


if __name__ == "__main__":
    sys.exit(main())
