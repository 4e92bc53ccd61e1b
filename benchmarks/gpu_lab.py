"""What the parts of the GPU report share: a lab of two nodes on this machine, its runs, and what they are held against.

The nodes have a GPU each, or share one by CUDA MPS (`gpu_sharing.py`). Without a GPU the parts rehearse.
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

from gpu_sharing import CONTROL, Mps, Sharing, Skipped, shared
from step_arithmetic import Known

from multinode.lab.network import SWITCH_NAMESPACE, parse_lab_rate
from multinode.lab.state import DATA_IFNAME, SSHD
from multinode.stats.estimate import Estimate, of_repeats, ratio
from tests.equipment.gpus import count_gpus

ROOT = Path(__file__).resolve().parents[1]
KNOWN_TRUTH = str(ROOT / "benchmarks" / "known_truth.py")
REHEARSES = shutil.which("nvidia-smi") is None
# Pass limits: of known truth, the bytes of a NIC, and nccl-test.
WITHIN, BYTES_WITHIN, NETWORK_WITHIN = 0.05, 0.01, 0.03
BEYOND = "beyond its bound"
# In network namespaces of their own, which nothing outlives.
ABILITIES: dict[str, tuple[str, ...]] = {
    "network namespaces": ("unshare", "--net", "true"),
    "veth": ("unshare", "--net", "ip", "link", "add", "veth0", "type", "veth", "peer", "name", "veth1"),
    "tbf": (
        *("unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root"),
        *("tbf", "rate", "1gbit", "burst", "64k", "latency", "50ms"),
    ),
    "netem": ("unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "loss", "100%"),
    "sshd": (SSHD, "-V"),
    "nftables": ("unshare", "--net", "nft", "add", "table", "t"),
    "MPS": (CONTROL, "-v"),
    "GPU": (
        "nvidia-smi",
        "--query-gpu=name,driver_version,clocks.sm,power.draw,mig.mode.current",
        "--format=csv,noheader",
    ),
}
LAB_NEEDS = ("network namespaces", "veth", "sshd", "nftables")
_COMMAND_S = 400.0
_PROVOKED_S = 120.0
_STEPS = "12" if REHEARSES else "25"
_MARK = ("--env", f"GPU_REPORT={os.getpid()}")
# To make a context by, and to keep it until it is told to end.
_CONTEXT = "import sys, torch; torch.zeros(1, device='cuda'); print('made', flush=True); sys.stdin.read()"
# A table that turns away what comes in on the training network; established connections time out on it.
_DROP = (
    "table inet lost {{ chain input {{ type filter hook input priority 0; policy accept; "
    'iifname "{ifname}" drop; }}; }}'
)


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


def require(*abilities: str) -> None:
    """See that this machine has them.

    Raises:
        Skipped: it lacks one.
    """
    for name in abilities:
        answer = can(*ABILITIES[name])
        if not answer.startswith("yes"):
            raise Skipped(f"it needs {name}: {answer.removeprefix('no: ')}")


def loss_by() -> str:
    """What loses packets here."""
    return "tc netem" if can(*ABILITIES["netem"]).startswith("yes") else "nftables, as this kernel has no netem"


def why_not(strategy: str) -> str | None:
    """Why a strategy of known_truth.py is left out of a rehearsal."""
    if not REHEARSES:
        return None
    if strategy in {"own-stream", "ddp-no-look"}:
        return "a host has no streams, and waits for its own computation"
    # DeepSpeed compiles on its first start.
    return "left out of the rehearsal" if strategy.startswith("zero") and strategy != "zero2" else None


def known(figure: Any) -> Any:
    """A figure of a document, or None if it is unknown."""
    return None if isinstance(figure, dict) and figure.get("is") == "unknown" else figure


class Run(NamedTuple):
    """A run that ended, and its summary."""

    run_id: str
    summary: dict[str, Any]
    own_ms: float | None = None  # the median step by the script's own clock

    @property
    def step_ms(self) -> float:
        """The median step."""
        return float(self.summary["step_time_ms"]["median"]["value"])

    def part_ms(self, *names: str) -> float | None:
        """The sum of parts of the mean step; None if one is unknown."""
        mean = self.summary["split"]["mean"]
        parts = [float(part) for name in names if (part := known(mean.get(name))) is not None]
        return sum(parts) if len(parts) == len(names) else None


class Row(NamedTuple):
    """A row of a table, and whether it keeps a bound of the report."""

    cells: list[str]
    keeps: bool

    @property
    def judged(self) -> list[str]:
        """The cells, and what the page says of the bound."""
        return [*self.cells, "kept" if self.keeps else BEYOND]


def passed(rows: Sequence[Row]) -> bool:
    """Whether the part succeeded: a rehearsal names what is beyond its bound, and fails for nothing of it."""
    return REHEARSES or (bool(rows) and all(row.keeps for row in rows))


def truth_row(name: str, run: Run, known: Known) -> Row:
    """What was told of a training beside what is known of it by arithmetic."""
    told = {
        "compute": (run.part_ms("compute_ms"), known.compute_ms),
        "exposed": (run.part_ms("exposed_ms", "wait_ms"), known.exposed_ms),
    }
    errors = [value / truth - 1 if value is not None else None for value, truth in told.values()]
    cells = [name, f"{known.step_ms:.1f}", _ms(run.own_ms), f"{run.step_ms:.1f}"]
    for (value, truth), error in zip(told.values(), errors, strict=True):
        cells += [f"{truth:.1f}", _ms(value), "unknown" if error is None else f"{error:+.1%}"]
    return Row(cells, all(error is not None and abs(error) <= WITHIN for error in errors))


def bytes_row(name: str, summary: dict[str, Any]) -> Row:
    """The bytes of a run by its calls, by the formula, and by the NIC; one that is unknown keeps no bound."""
    told = summary["comm"]["bytes_per_step"]
    calls, expected, nic = (known(told[key]) for key in ("calls", "expected", "nic"))
    apart = nic / expected - 1 if nic and expected else None
    cells = [name, *(megabytes(value) for value in (calls, expected, nic))]
    cells += [
        "unknown" if apart is None else f"{apart:+.1%}",
        "; ".join(each["message"] for each in summary["comm"]["findings"]),
    ]
    return Row(cells, apart is not None and abs(apart) <= BYTES_WITHIN)


def cost_row(name: str, times: tuple[Estimate, Estimate], limit: float) -> Row:
    """Step times with and without hooks, in turns, and their ratio, which stays below the limit."""
    cost = ratio(*times)
    of = f"{cost.value - 1:+.1%} ({cost.low - 1:+.1%} to {cost.high - 1:+.1%})"
    with_hooks, without = times
    cells = [name, f"{without.value:.2f}", f"{with_hooks.value:.2f}", of, f"< {limit:.0%}"]
    return Row(cells, cost.value - 1 < limit)


class Expected(NamedTuple):
    """How a failure has to be told."""

    ranks: tuple[int | None, ...]  # the workers that may be blamed; None: no one is
    says: str  # a regular expression of the cause
    status: str = "failed"


def failure_row(name: str, run: dict[str, Any], expected: Expected) -> Row:
    """What a run's document tells of its end, beside what is expected: status, worker and cause."""
    failure = run["first_failure"]
    # A run that goes on after a stall has that alone to tell.
    told = failure or next(iter(run["stalls"][-1:]), None)
    text = " ".join(str(told["message"]).split()) if told else "nothing"
    keeps = (
        run["status"] == expected.status
        and (told or {}).get("rank") in expected.ranks
        and re.search(expected.says, text) is not None
    )
    blamed = "-" if told is None or told["rank"] is None else str(told["rank"])
    return Row(
        [name, run["status"], blamed, *(word.replace("|", "\\|") for word in (text, f"`{expected.says}`"))], keeps
    )


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
    """Virtual nodes with a link between them, taken down again.

    Args:
        home: for files of its own.
        nodes: how many.
        shaped: whether the link has to have a rate.
        honest: whether the times of one node may not be those of waiting for the other's computation on one GPU.

    Raises:
        Skipped: this machine cannot have such a lab.
    """

    def __init__(self, home: Path, nodes: int = 2, *, shaped: bool = True, honest: bool = True) -> None:
        self._home, self._nodes = home, nodes
        self._shaped, self._honest = shaped, honest
        self._exits = contextlib.ExitStack()
        self.sharing = Sharing(words="")

    def __enter__(self) -> Self:
        require(*LAB_NEEDS, *(("tbf",) if self._shaped else ()))
        gpus = 0 if REHEARSES else count_gpus()
        with contextlib.ExitStack() as exits:
            self.sharing, mps = exits.enter_context(shared(self._nodes, gpus, honest=self._honest))
            exits.callback(self._multinode, "lab", "down", "--force", may_fail=True)
            made = ["--nodes", str(self._nodes), "--slots", "1", "--rate", "1gbit" if self._shaped else "none"]
            if REHEARSES:
                self._multinode("lab", "up", *made)
            else:
                shares = [word for directory in self.sharing.directories for word in ("--share", directory)]
                self._check([sys.executable, "-m", "tests.equipment.command", "up", "--gpus", *made, *shares])
            if mps is not None:
                for rank in range(self._nodes):
                    self._require_mps(f"node{rank}", mps)
            self._exits = exits.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def train(self, rate: str, *words: str, name: str, options: Sequence[str] = ()) -> Run:
        """A training of known truth at this rate."""
        if "zero" in " ".join(words):
            self.compile_deepspeed()
        self.set_rate(rate)
        traced = ("--trace", "3") if "--trace" in options else ()
        # A window comes after the warm-up, and needs steps around it.
        steps = "25" if traced else _STEPS
        return self.launch(KNOWN_TRUTH, *words, "--steps", steps, name=name, options=traced)

    def compile_deepspeed(self) -> None:
        """Compile what DeepSpeed needs on CPUs, in a folder of this checkout; each node would do it anew."""
        if REHEARSES:
            command = [sys.executable, str(ROOT / "scripts" / "compile_deepspeed.py")]
            environ = os.environ | dict(self._variables())
            subprocess.run(command, cwd=ROOT, env=environ, timeout=_COMMAND_S, check=False)

    def set_rate(self, rate: str) -> None:
        """Give each node's link this rate; on a machine that cannot shape it stays as fast as it is."""
        if self._shaped or parse_lab_rate(rate) is None:
            self._multinode("lab", "rate", "all", rate)

    def launch(self, *words: str, name: str, options: Sequence[str] = ()) -> Run:
        """A script on all nodes."""
        return self._run(name, "launch", *self._job(), *options, "--json", "--", *words)

    def fine_tune(self, rate: str, *words: str, name: str) -> Run:
        """A training of LLaMA-Factory: these options and its YAML."""
        self.set_rate(rate)
        return self._run(name, "launch", *self._job(), "--json", *words)

    def both_alone(self, *words: str) -> tuple[Run, Run]:
        """Two one-node trainings at once: on one GPU each has half of it, and of its memory's bandwidth and power."""
        started = [self._start("launch", *self._job(rank), "--json", *words) for rank in (0, 1)]
        runs = [self._keep_run(f"alone-{number}", process) for number, process in enumerate(started)]
        return runs[0], runs[1]

    def predict(self, rate: str, runs: Sequence[Run]) -> Estimate | None:
        """The step time at a rate, in ms, from runs that were made before; None if it cannot be predicted."""
        link = ("--link", rate, "--nodes", "2", "--link-measured", "10gbit")
        text = self._multinode("predict", *(run.run_id for run in runs), *link, "--json", may_fail=True)
        try:
            first = json.loads(text)["scenarios"][0]
            step_ms, (value, low, high) = (
                first["step_time_ms"],
                map(first["samples_per_s"].get, ("value", "low", "high")),
            )
            return Estimate(value=step_ms, low=step_ms * value / high, high=step_ms * value / low)
        except (ValueError, LookupError, TypeError):
            return None

    def contrast(self, rate: str, *words: str) -> dict[str, Any]:
        """The document of a contrast of one node with both at a rate."""
        self.set_rate(rate)
        steps = ("--steps", "8" if REHEARSES else "30")
        text = self._multinode("contrast", *self._job(), *steps, "--fresh", "--json", *words)
        document: dict[str, Any] = json.loads(text)
        place = _place()
        (place / f"contrast-{rate}.contrast").write_text(text)
        return document

    def nccl_test(self, rate: str) -> tuple[float, float]:
        """The best busbw at a rate, and what raw TCP carries, in GB/s."""
        self.set_rate(rate)
        sizes = ("-b", "1M", "-e", "8M" if REHEARSES else "64M", "-n", "5")
        found = json.loads(self._multinode("nccl-test", *self._job(), *sizes, "--json", may_fail=True))
        best = max(row["busbw_gb_per_s"] for row in found["rows"])
        return best, found["tcp_gb_per_s"] or found["ceiling_gb_per_s"] or float("nan")

    def in_turns(self, *words: str, pairs: int) -> tuple[Estimate, Estimate]:
        """The step by the script's own clock, in ms, with and without hooks: pairs of runs, each in the other order."""
        steps = "40" if REHEARSES else "200"
        times: dict[bool, list[float]] = {True: [], False: []}
        for pair in range(pairs):
            for hooked in (True, False) if pair % 2 == 0 else (False, True):
                profiles = () if hooked else ("--no-profile",)
                job = ("launch", *self._job(), *profiles, "--json", "--", *words, "--steps", steps)
                # A worker of gloo may abort as it exits, after its last step.
                text = self._multinode(*job, may_fail=True)
                own_ms = self._own_ms(json.loads(text)["run_id"])
                if own_ms is None:
                    raise RuntimeError(f"{' '.join(words)} prints no median step")
                times[hooked].append(own_ms)
        return of_repeats(times[True]), of_repeats(times[False])

    def fail(self, *words: str, options: Sequence[str] = ()) -> dict[str, Any]:
        """The document of a training that fails or hangs."""
        # A check would refuse a wrong interface.
        return _document(self._start("launch", *self._job(), *options, "--json", *words))

    def lose_packets(self, *words: str, options: Sequence[str], file: str, lost_s: float) -> dict[str, Any]:
        """The document of a training all of whose packets are lost for a while, once it has written a file."""
        process = self._start("launch", *self._job(), *_MARK, *options, "--json", *words)
        if _wait_for_worker(process, file):
            with self._packets_lost("node1"):
                time.sleep(lost_s)
        return _document(process)

    def restart(self, *words: str, file: str) -> dict[str, Any]:
        """The document of a training whose rank 1 is killed once it has written a file, and that is restarted."""
        process = self._start("launch", *self._job(), *_MARK, "--restarts", "1", "--json", *words)
        worker = _wait_for_worker(process, file)
        if worker is not None:
            os.kill(worker, signal.SIGKILL)
        return _document(process)

    @contextlib.contextmanager
    def _packets_lost(self, node: str) -> Iterator[None]:
        """All packets from and to a node are lost on its training network."""
        inside = ("ip", "netns", "exec")
        if loss_by() == "tc netem":
            ends = ((f"mn-{node}", DATA_IFNAME), (SWITCH_NAMESPACE, f"data{node.removeprefix('node')}"))
            for namespace, ifname in ends:
                loss = ("root", "netem", "loss", "100%")
                self._check([*inside, namespace, "tc", "qdisc", "replace", "dev", ifname, *loss])
            try:
                yield
            finally:
                self.set_rate("1gbit" if self._shaped else "none")
            return
        others = [f"mn-node{rank}" for rank in range(self._nodes)]
        for namespace in others:
            self._check([*inside, namespace, "nft", _DROP.format(ifname=DATA_IFNAME)])
        try:
            yield
        finally:
            for namespace in others:
                self._check([*inside, namespace, "nft", "delete", "table", "inet", "lost"])

    def _require_mps(self, node: str, mps: Mps) -> None:
        """See that a context that is made on a node is one of the daemon's clients."""
        command = (*("lab", "exec", node, "--", "env"), *(f"{key}={value}" for key, value in self._variables()))
        process = self._start(*command, sys.executable, "-c", _CONTEXT, stdin=subprocess.PIPE)
        said = process.stdout.readline() if process.stdout else ""
        clients = mps.clients() if said else []
        process.communicate(timeout=_COMMAND_S)
        if not clients:
            raise Skipped(f"a context on {node} is no client of CUDA MPS, so that contexts would be time-sliced")

    def _variables(self) -> list[tuple[str, str]]:
        compiled = {"TORCH_EXTENSIONS_DIR": str(ROOT / "assets" / "torch_extensions")} if REHEARSES else {}
        return list({"OMP_NUM_THREADS": "1", **compiled, **self.sharing.variables}.items())

    def _job(self, node_rank: int | None = None) -> tuple[str, ...]:
        """Options of what runs a job on all nodes, or on one."""
        env = (word for name, value in self._variables() for word in ("--env", f"{name}={value}"))
        return ("--hosts", self._hosts(node_rank), *env, "--no-check")

    def _hosts(self, node_rank: int | None = None) -> str:
        """A hostfile of all nodes, or of one, each with its GPU."""
        lines = Path("/run/multinode/lab/hostfile").read_text().splitlines()
        ranks = range(self._nodes) if node_rank is None else (node_rank,)
        nodes = [next(line for line in lines if line.startswith(f"node{rank} ")) for rank in ranks]
        gpus = [f" gpus={self.sharing.gpus[rank]}" if self.sharing.gpus else "" for rank in ranks]
        hosts = self._home / f"nodes-{'-'.join(map(str, ranks))}.hosts"
        shared_lines = [line for line in lines if line and not line.startswith("node")]
        hosts.write_text("\n".join([*shared_lines, *map(str.__add__, nodes, gpus)]) + "\n")
        return str(hosts)

    def _own_ms(self, run_id: str) -> float | None:
        told = re.findall(r"median step: ([\d.]+) ms", self._multinode("logs", run_id, may_fail=True))
        return float(told[-1]) if told else None

    def _run(self, name: str, *words: str) -> Run:
        return self._keep_run(name, self._start(*words))

    def _keep_run(self, name: str, process: subprocess.Popen[str]) -> Run:
        text, _ = process.communicate(timeout=_COMMAND_S)
        told = json.loads(text)
        path = Path(told["directory"]) / "summary.json"
        summary = json.loads(path.read_text())
        if known(summary["step_time_ms"]) is None:
            raise RuntimeError(f"{name} has no measured step: {(told['first_failure'] or {}).get('message')}")
        shutil.copy(path, _place() / f"{name}.json")
        return Run(told["run_id"], summary, self._own_ms(told["run_id"]))

    def _start(self, *words: str, stdin: int | None = None) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "multinode", *words]
        return subprocess.Popen(command, cwd=ROOT, stdin=stdin, stdout=subprocess.PIPE, text=True)

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


def _wait_for_worker(process: subprocess.Popen[str], file: str) -> int | None:
    """The worker of rank 1 of this process's job, once it has written the file; None if the job ends before."""
    deadline = time.monotonic() + _COMMAND_S
    while process.poll() is None and time.monotonic() < deadline:
        written = [pid for pid in _workers() if Path(f"/proc/{pid}/root{file}").exists()]
        if written:
            # Its own children have its environment, and came after it.
            return min(written)
        time.sleep(0.05)
    return None


def _workers() -> Iterator[int]:
    """Processes of rank 1 that have the mark of this part's jobs in their environment."""
    # A launcher may have the rank of its node, and has no local one.
    wanted = {_MARK[1].encode(), b"RANK=1", b"LOCAL_RANK=0"}
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if wanted <= set(path.read_bytes().split(b"\0")):
                yield int(path.parent.name)


def _document(process: subprocess.Popen[str]) -> dict[str, Any]:
    text, _ = process.communicate(timeout=_COMMAND_S)
    document: dict[str, Any] = json.loads(text)
    return document


def _place() -> Path:
    place = _keep() / os.environ.get("PART", "part")
    place.mkdir(parents=True, exist_ok=True)
    return place


def _keep() -> Path:
    return Path(os.environ.get("KEEP", "gpu-report.records"))


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
