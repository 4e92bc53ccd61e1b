"""What the parts of the GPU report share: a lab of two nodes on this machine, its runs, and what they are held against.

With a GPU the nodes share it by CUDA MPS, each with half of it: time-sliced contexts would wait for one another, and no
time would be honest. Without one the parts rehearse.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

ROOT = Path(__file__).resolve().parents[1]
KNOWN_TRUTH = str(ROOT / "benchmarks" / "known_truth.py")
REHEARSES = shutil.which("nvidia-smi") is None
# Pass limits: of exposed communication, the bytes of a NIC, and nccl-test.
WITHIN, BYTES_WITHIN, NETWORK_WITHIN = 0.05, 0.01, 0.03
ABILITIES: dict[str, tuple[str, ...]] = {
    "veth": ("ip", "link", "add", "gpuday0", "type", "veth", "peer", "name", "gpuday1"),
    "tbf": ("tc", "qdisc", "add", "dev", "gpuday0", "root", "tbf", "rate", "1gbit", "burst", "64k", "latency", "50ms"),
    "veth is gone again": ("ip", "link", "del", "gpuday0"),
    "network namespaces": ("unshare", "--net", "true"),
    "sshd": ("/usr/sbin/sshd", "-V"),
    "nftables": ("nft", "--version"),
    "MPS": ("nvidia-cuda-mps-control", "-v"),
    "GPU": (
        "nvidia-smi",
        "--query-gpu=name,driver_version,clocks.sm,power.draw,mig.mode.current",
        "--format=csv,noheader",
    ),
}
ARITHMETIC = (
    "known: the step, less the step on an unshaped link, plus what was exposed there. DDP by arithmetic: with a bucket "
    "of 2 MB for each of four layers of 10 ms, 17 ms per bucket at 1 Gbit/s leave 38 ms exposed."
)
TRAININGS: dict[str, tuple[str, ...]] = {
    "LoRA, rank 8": ("--set", "finetuning_type=lora", "--set", "lora_rank=8"),
    "full, ZeRO-2 with overlap_comm": ("--set", "deepspeed=configs/deepspeed/tiny_z2_config.json"),
    "full, ZeRO-3 with overlap_comm": ("--set", "deepspeed=configs/deepspeed/tiny_z3_config.json"),
}
_COMMAND_S = 400.0
_PROVOKED_S = 120.0
_STEPS = "12" if REHEARSES else "25"
_HALF = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}


def can(*command: str) -> str:
    """What a command of this machine answers, on one line, or why it does not."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return f"no: {command[0]} is not here"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no: {error}"
    said = " ".join((done.stdout + done.stderr).split())[:200]
    return f"yes {said}".strip() if done.returncode == 0 else f"no: {said}"


def computation() -> str:
    """What computes in the parts with known truth."""
    return "a sleeping host (rehearsal)" if REHEARSES else "torch.cuda._sleep under MPS"


def why_not(strategy: str) -> str | None:
    """Why a strategy of known_truth.py cannot be shown here."""
    if not REHEARSES:
        return None if shutil.which("nvidia-cuda-mps-control") else "without MPS contexts are time-sliced"
    if strategy in {"own-stream", "ddp-no-look"}:
        return "a host has no streams, and waits for its own computation"
    # DeepSpeed compiles on its first start.
    return "left out of the rehearsal" if strategy.startswith("zero") and strategy != "zero2" else None


class Run(NamedTuple):
    """A run that ended, and its summary."""

    run_id: str
    summary: dict[str, Any]

    @property
    def step_ms(self) -> float:
        """The median step."""
        return float(self.summary["step_time_ms"]["median"])

    def part_ms(self, *names: str) -> float | None:
        """The sum of parts of the mean step; None if one is unknown."""
        mean = self.summary["split"]["mean"] or {}
        parts = [float(mean[name]) for name in names if mean.get(name) is not None]
        return sum(parts) if len(parts) == len(names) else None


class TruthRow(NamedTuple):
    """A row of the table of known truth."""

    cells: list[str]
    error: float


def truth_row(strategy: str, slow: Run, fast: Run) -> TruthRow:
    """What was told of a strategy on a shaped link, beside what is known from the unshaped one."""
    told, rest = (run.part_ms("exposed_ms", "wait_ms") for run in (slow, fast))
    compute = slow.part_ms("compute_ms")
    known = slow.step_ms - fast.step_ms + (rest or 0.0)
    error = told / known - 1 if told is not None and known > 0 else 1.0
    cells = [strategy, f"{slow.step_ms:.1f}", *(_ms(value) for value in (compute, told, known)), f"{error:+.1%}"]
    return TruthRow(cells, error)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table in Markdown."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def megabytes(value: float | None) -> str:
    """Bytes in MB."""
    return "-" if value is None else f"{value / 1e6:.2f}"


def kept(part: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The summaries that an earlier part left, by the names of its runs."""
    for path in sorted((_keep() / part).glob("*.json")):
        yield path.stem, json.loads(path.read_text())


class Lab:
    """Virtual nodes with a shaped link between them, taken down again."""

    def __init__(self, home: Path, nodes: int = 2) -> None:
        self._home, self._nodes = home, nodes
        self._hosts = ("--hosts", "lab")

    def __enter__(self) -> Self:
        made = ["--nodes", str(self._nodes), "--slots", "1", "--rate", "1gbit"]
        if REHEARSES:
            self._multinode("lab", "up", *made)
        else:
            self._check([sys.executable, "-m", "tests.equipment.command", "up", "--gpus", *made])
        return self

    def __exit__(self, *_: object) -> None:
        self._multinode("lab", "down", "--force")

    def train(self, rate: str, *words: str, name: str, options: Sequence[str] = ()) -> Run:
        """A training of known truth at this rate."""
        if REHEARSES and "zero" in " ".join(words):
            # Each node would compile it.
            self._check([sys.executable, str(ROOT / "scripts" / "compile_deepspeed.py")], may_fail=True)
        self._multinode("lab", "rate", "all", rate)
        traced = ("--trace", "3") if "--trace" in options else ()
        # A window comes after the warm-up, and needs steps around it.
        steps = "25" if traced else _STEPS
        return self.launch(KNOWN_TRUTH, *words, "--steps", steps, name=name, options=traced)

    def launch(self, *words: str, name: str, options: Sequence[str] = ()) -> Run:
        """A script on all nodes."""
        nodes = ("--nodes", str(self._nodes), "--no-check")
        return self._run(name, "launch", *self._hosts, *nodes, *self._env(), *options, "--json", "--", *words)

    def fine_tune(self, rate: str, *, nodes: int, name: str, options: Sequence[str] = ()) -> Run:
        """LLaMA-Factory's training of the tiny model, or of the one that $MAIN_JOB names."""
        self._multinode("lab", "rate", "all", rate)
        count = ("--nodes", str(nodes))
        job = (*self._tiny(), *options)
        return self._run(name, "launch", *self._hosts, *count, *self._env(), "--no-check", "--json", *job)

    def both_alone(self) -> tuple[Run, Run]:
        """Two one-node trainings at once: on one GPU each has half of it, and of its memory's bandwidth and power."""
        lines = Path("/run/multinode/lab/hostfile").read_text().splitlines()
        shared = [line for line in lines if line and not line.startswith("node")]
        started = []
        for node in ("node0", "node1"):
            own = next(line for line in lines if line.startswith(node))
            hosts = self._home / f"{node}.hosts"
            hosts.write_text("\n".join([*shared, own]) + "\n")
            command = ("launch", "--hosts", str(hosts), *self._env(), "--no-check", "--json", *self._tiny())
            started.append(self._start(*command))
        runs = [self._keep_run(f"alone-{number}", process) for number, process in enumerate(started)]
        return runs[0], runs[1]

    def predict(self, rate: str, runs: Sequence[Run]) -> tuple[float, float, float]:
        """The step time at a rate, in ms, with its interval, from runs that were made before."""
        link = ("--link", rate, "--nodes", "2", "--link-measured", "10gbit")
        text = self._multinode("predict", *(run.run_id for run in runs[-2:]), *link, "--json", may_fail=True)
        try:
            first = json.loads(text)["scenarios"][0]
            step_ms, samples_per_s, (low, high) = (first[key] for key in ("step_time_ms", "samples_per_s", "interval"))
            return step_ms, step_ms * samples_per_s / high, step_ms * samples_per_s / low
        except (ValueError, LookupError, TypeError):
            return float("nan"), float("nan"), float("nan")

    def nccl_test(self, rate: str) -> tuple[float, float]:
        """The best busbw at a rate, and what raw TCP carries, in GB/s."""
        self._multinode("lab", "rate", "all", rate)
        sizes = ("-b", "1M", "-e", "8M" if REHEARSES else "64M", "-n", "5")
        found = json.loads(self._multinode("nccl-test", *self._hosts, *sizes, "--json", may_fail=True))
        best = max(row["busbw_gb_per_s"] for row in found["rows"])
        return best, found["tcp_gb_per_s"] or found["ceiling_gb_per_s"] or float("nan")

    def in_turns(self, *words: str) -> tuple[float, float]:
        """The median ms of a step by the script's own clock, with and without hooks, in turns: ABBA, rehearsed AB."""
        steps = "40" if REHEARSES else "200"
        times: dict[bool, list[float]] = {True: [], False: []}
        for hooked in (True, False) if REHEARSES else (True, False, False, True):
            profiles = () if hooked else ("--no-profile",)
            command = ("launch", *self._hosts, *self._env(), "--no-check", *profiles, "--json", "--")
            run_id = json.loads(self._multinode(*command, *words, "--steps", steps))["run_id"]
            told = re.findall(r"median step: ([\d.]+) ms", self._multinode("logs", run_id))
            times[hooked].append(float(told[-1]))
        return min(times[True]), min(times[False])

    def failure(self, *words: str, options: Sequence[str] = (), cut_s: float = 0.0) -> str:
        """How a training that fails, or hangs, is told."""
        hang = ("--hang-timeout", "20" if REHEARSES else "15", "--on-hang", "stop")
        # A check would refuse a wrong interface.
        command = ("launch", *self._hosts, *self._env(), "--no-check", *hang, *options, "--json", "--", *words)
        process = self._start(*command)
        if cut_s:
            time.sleep(5.0)
            self._multinode("lab", "rate", "node1", "8kbit", may_fail=True)
            time.sleep(cut_s)
            self._multinode("lab", "rate", "node1", "1gbit", may_fail=True)
        text, _ = process.communicate(timeout=_COMMAND_S)
        run = json.loads(text)
        failure = run["first_failure"]
        stalls = "; ".join(str(stall.get("sentence") or stall.get("message") or "") for stall in run["stalls"])
        return " ".join(f"{failure['node']}: {failure['message']}".split()) if failure else stalls or run["status"]

    def _tiny(self) -> tuple[str, ...]:
        self._check([sys.executable, str(ROOT / "scripts" / "make_tiny.py")])
        job = os.environ.get("MAIN_JOB", "configs/tiny_sft.yaml")
        lora = ("--set", "finetuning_type=lora", "--set", f"max_steps={_STEPS}")
        return (*lora, job)

    def _env(self) -> tuple[str, ...]:
        env = {"OMP_NUM_THREADS": "1", **({"DS_ACCELERATOR": "cpu"} if REHEARSES else _HALF)}
        return tuple(word for name, value in env.items() for word in ("--env", f"{name}={value}"))

    def _run(self, name: str, *words: str) -> Run:
        return self._keep_run(name, self._start(*words))

    def _keep_run(self, name: str, process: subprocess.Popen[str]) -> Run:
        text, _ = process.communicate(timeout=_COMMAND_S)
        told = json.loads(text)
        path = Path(told["directory"]) / "summary.json"
        summary = json.loads(path.read_text())
        place = _keep() / os.environ.get("PART", "part")
        place.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place / f"{name}.json")
        return Run(told["run_id"], summary)

    def _start(self, *words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "multinode", *words]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def _multinode(self, *words: str, may_fail: bool = False) -> str:
        return self._check([sys.executable, "-m", "multinode", *words], may_fail=may_fail)

    def _check(self, command: Sequence[str], *, may_fail: bool = False) -> str:
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=_COMMAND_S, check=not may_fail
        )
        return done.stdout


def told_of(log: str) -> str:
    """What `explain` says of a log, on one line."""
    done = subprocess.run(
        [sys.executable, "-m", "multinode", "explain"],
        input=log, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    return re.sub(r"\s+", " ", lines[0])[:200] if lines else ""


def provoke(path: Path, script: str) -> str:
    """The log of a script under torchrun on two ranks."""
    path.write_text(script)
    # With a port of 0 torchrun's workers would wait for one another there.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
    log = path.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(_PROVOKED_S)
        except subprocess.TimeoutExpired:
            output.write(b"multinode-gpu: it went on\n")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return log.read_text(errors="replace")


def _keep() -> Path:
    return Path(os.environ.get("KEEP", "gpu-report.records"))


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
