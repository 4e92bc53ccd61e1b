"""Run the tests on a GPU, a bench, a run into a real out-of-memory error and a contrast; write one Markdown page.

The page has the versions, the figures, and what failed; nothing of it names the machine or its user.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from multinode.core.job.job import ScriptJob
from multinode.core.measure.benchmark import DeviceTest
from multinode.errors import MultinodeError
from multinode.launch.request import ExecuteOptions
from multinode.transport.local import LocalTransport
from multinode.workflows.bench import bench
from multinode.workflows.comparison.contrast import ContrastRequest, contrast
from multinode.workflows.report import load_report, report_markdown
from multinode.workflows.run.context import RunContext
from multinode.workflows.run.launch import launch
from tests.gpu.one_gpu import TRAIN, launch_of

_TESTS = "tests/gpu"
_TESTS_S = 1800
_QUERY_S = 60
_TAIL_LINES = 40
# No GPU holds a batch of this many rows of 4096 numbers.
_TOO_LARGE = 1 << 28


class PartFailed(Exception):
    """A part of the report did not do what it should; the message is Markdown."""


def main() -> int:
    """The exit code: 1 where a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu-report.md"), help="the page (gpu-report.md)")
    options = parser.parse_args()
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="multinode-gpu-") as folder:
        home = Path(folder)
        parts = [_section(title, make, home, failed) for title, make in _PARTS.items()]
    head = f"# multinode on a GPU\n\n{_outcome(failed)}\n\n{_versions()}\n"
    options.output.write_text("\n".join([head, *parts]))
    _say(f"{_outcome(failed)} The page: {options.output}")
    return 1 if failed else 0


def _outcome(failed: list[str]) -> str:
    return f"Failed: {', '.join(failed)}." if failed else "Everything below succeeded."


def _section(title: str, make: Callable[[Path], str], home: Path, failed: list[str]) -> str:
    _say(f"{title} ...")
    began = time.monotonic()
    try:
        text = make(home)
    except (MultinodeError, PartFailed, OSError, subprocess.SubprocessError) as error:
        failed.append(title)
        text = f"Failed: {error}"
    _say(f"{title}: {time.monotonic() - began:.0f} s")
    return f"## {title}\n\n{text}\n"


def _versions() -> str:
    gpus = _ask("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    torch = _ask(sys.executable, "-c", "import torch; print(torch.version.cuda, *torch.cuda.nccl.version(), sep='.')")
    cuda, _, nccl = torch.replace(".", " ", 1).partition(" ")
    names = ("multinode", "torch", "transformers", "deepspeed", "accelerate", "llamafactory")
    rows = [
        *(("GPU", line) for line in gpus.splitlines()),
        ("Python", platform.python_version()),
        ("kernel", platform.release()),
        ("CUDA and NCCL of torch", f"{cuda} {nccl}"),
        *((name, version) for name in names if (version := _version(name)) is not None),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _ask(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=_QUERY_S, check=True).stdout.strip()


def _run_tests(_: Path) -> str:
    # Warnings of a torch that this project does not pin are not failures.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "-m", "gpu", _TESTS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=_TESTS_S, check=False)
    text = "```\n" + "\n".join(ended.stdout.splitlines()[-_TAIL_LINES:]) + "\n```"
    if ended.returncode != 0:
        raise PartFailed(f"pytest ended with code {ended.returncode}\n\n{text}")
    return text


def _bench(home: Path) -> str:
    execute = ExecuteOptions(kind="bench", lease_s=60.0)
    with _Runs(home) as context:
        bench(launch_of(DeviceTest(), nodes=1, execute=execute, run_id="bench"), ("alone",), context)
        return report_markdown(load_report(context.runs, ["bench"]))


def _out_of_memory(home: Path) -> str:
    job = ScriptJob(argv=(str(TRAIN), "--batch", str(_TOO_LARGE), "--width", "4096"))
    with _Runs(home) as context:
        failure = launch(launch_of(job, run_id="oom"), context).run.first_failure
    if failure is None:
        raise PartFailed("a batch that no GPU holds has been trained")
    if failure.kind != "out_of_gpu_memory":
        raise PartFailed(f"told as {failure.kind}: {failure.message}")
    return f"`{failure.message}`\n\n{failure.hint}"


def _contrast(home: Path) -> str:
    job = ScriptJob(argv=(str(TRAIN), "--width", "2048", "--steps", "40"))
    with _Runs(home) as context:
        contrast(launch_of(job, run_id="contrast"), context, ContrastRequest(mode="scale-out"))
        return report_markdown(load_report(context.runs, ["contrast"]))


class _Runs:
    """A context whose nodes and runs are below a directory."""

    def __init__(self, home: Path) -> None:
        self._context = RunContext(LocalTransport(home), home / "runs")

    def __enter__(self) -> RunContext:
        return self._context

    def __exit__(self, *_: object) -> None:
        self._context.agent.close()


def _say(text: str) -> None:
    sys.stderr.write(f"gpu-report: {text}\n")


_PARTS: dict[str, Callable[[Path], str]] = {
    "Tests": _run_tests,
    "Bench": _bench,
    "Out of memory": _out_of_memory,
    "One rank alone and two over sockets on the same GPU": _contrast,
}


if __name__ == "__main__":
    sys.exit(main())
