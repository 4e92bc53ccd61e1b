"""Record the runs of recorded.tar.xz: at least one of each kind, on two lab nodes. Needs root.

    scripts/isolate .venv/bin/python -m tests.screens.record_runs [CHECKOUT]

`CHECKOUT` is a checkout of the commit that records, with a .venv of its own. Default: this one. Run ids and paths
are replaced by neutral ones.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ARCHIVE = Path(__file__).with_name("recorded.tar.xz")
_REPOSITORY = Path(__file__).parents[2]
_NEUTRAL = "/home/user/multinode"
_YAML = "configs/tiny_sft.yaml"
_SCRIPT = "-- configs/ddp_tiny.py"
_ONE_EACH = "--workers-per-node 1"
_STAND_IN = "--env PYTHONPATH={checkout}/tests/lab/stand_in"
_DEADLINE_S = 900


class Recording(NamedTuple):
    """A run to make: `{NAME}` in its command is the id of an earlier one.

    With `stop_at`, it is interrupted when the workers of its part of this number have recorded as many samples.
    """

    name: str
    command: str
    rate: str = "1gbit"
    code: int = 0
    stop_at: tuple[int, int] | None = None


RECORDINGS = (
    Recording("nccltest", "nccl-test all_reduce all_gather -b 64K -e 4M -f 8 -n 5"),
    Recording("nccltestfailed", "nccl-test --backend nccl --no-check", code=1),
    Recording("one", f"launch --nodes 1 --workers-per-node 2 {_YAML} --set max_steps=20"),
    Recording("two", f"launch {_ONE_EACH} {_YAML} --set max_steps=20"),
    Recording("script", f"launch {_ONE_EACH} {_SCRIPT} --steps 40"),
    Recording("failed", f"launch {_ONE_EACH} {_SCRIPT} --steps 40 --fail-at 20", code=1),
    Recording("stopped", f"launch {_ONE_EACH} {_SCRIPT} --steps 100000", code=130, stop_at=(1, 100)),
    Recording("restarted", f"launch {_ONE_EACH} {_STAND_IN} --restarts 1 -- tests/lab/fails_once.py --steps=40"),
    Recording("contrast", f"contrast {_YAML} --steps 10", rate="100mbit"),
    Recording("contraststopped", f"contrast {_SCRIPT} --steps 300", code=130, stop_at=(2, 40)),
    Recording("contrastfailed", f"contrast {_SCRIPT} --steps 30 --fail-at 5", code=1),
    Recording("sweep", f"sweep {_YAML} --grid per_device_train_batch_size=1,2 --nodes 1,2 {_ONE_EACH} --steps 8"),
    Recording(
        "sweepstopped",
        f"sweep {_YAML} {_STAND_IN} --grid finetuning_type=lora,full --nodes 1,2 {_ONE_EACH} --steps 8",
        code=130,
        stop_at=(3, 4),
    ),
    Recording(
        "tune",
        f"tune {_YAML} {_ONE_EACH} --steps 12 --seeds 1 --candidates 1 --eval-samples 8 --budget 1h",
        rate="100mbit",
    ),
    Recording("tunestopped", f"tune {_YAML} {_ONE_EACH} --steps 8 --seeds 1 --budget 1h", code=130, stop_at=(2, 20)),
    Recording("tunefrom", "tune --judge speed --from {contrast} --candidates 1", rate="100mbit"),
    Recording("bench", "bench --only matmul,memory --dtype fp32 --size 512 --seconds 0.2"),
    Recording("benchstopped", "bench --only matmul --dtype fp32 --size 512 --seconds 1", code=130, stop_at=(2, 1)),
    Recording("import", "import configs/figures/published_batches.csv"),
)


class Recorder:
    """Makes the runs with a checkout's own command."""

    def __init__(self, checkout: Path, runs: Path) -> None:
        self.checkout = checkout
        self.runs = runs
        self.ids: dict[str, str] = {}

    def call(self, *arguments: str) -> None:
        """A command that has to succeed."""
        subprocess.run(self._argv(arguments), cwd=self.checkout, check=True, timeout=_DEADLINE_S)

    def record(self, one: Recording) -> None:
        """Make the run."""
        self.call("lab", "rate", "all", one.rate)
        before = self._begun()
        verb, *words = one.command.format(checkout=self.checkout, **self.ids).split()
        hosts = () if verb == "import" else ("--hosts", "lab")
        argv = self._argv((verb, *hosts, *words))
        env = os.environ | {"MULTINODE_RUNS": str(self.runs), "TZ": "UTC"}
        sys.stderr.write(f"--- {one.name}: {' '.join(argv[3:])}\n")
        with subprocess.Popen(argv, cwd=self.checkout, env=env) as process:
            if one.stop_at is not None:
                self._wait(process, before, one.stop_at)
                process.send_signal(signal.SIGINT)
            code = process.wait(timeout=_DEADLINE_S)
        made = self._begun() - before
        if code != one.code or not made:
            sys.stderr.write(f"--- {one.name} ended with {code} instead of {one.code}\n")
        if made:
            self.ids[one.name] = min(made, key=len)

    def _argv(self, arguments: Sequence[str]) -> list[str]:
        return [str(self.checkout / ".venv/bin/python"), "-m", "multinode", *arguments]

    def _begun(self) -> set[str]:
        return {path.parent.name for path in self.runs.glob("*/run.json")}

    def _wait(self, process: subprocess.Popen[bytes], before: set[str], stop_at: tuple[int, int]) -> None:
        parts, lines = stop_at
        end = time.monotonic() + _DEADLINE_S
        while process.poll() is None and time.monotonic() < end:
            begun = sorted(
                (path for path in self.runs.glob("*/plan.json") if path.parent.name not in before),
                key=lambda path: path.stat().st_mtime_ns,
            )
            if len(begun) >= parts:
                texts = [path.read_bytes() for path in begun[-1].parent.glob("samples/node-*/rank-*.jsonl")]
                if sum(text.count(b"\n") for text in texts) >= lines:
                    return
            time.sleep(0.2)

    def pack(self, archive: Path) -> None:
        """All runs as one archive, under neutral names."""
        names = {
            str(self.runs): f"{_NEUTRAL}/runs",
            str(self.checkout): _NEUTRAL,
            tempfile.gettempdir() + "/": "/tmp/",
            "/root": "/home/user",
            **{run_id: f"20260101-{name}" for name, run_id in self.ids.items()},
        }

        def neutral(data: bytes) -> bytes:
            for name, other in names.items():
                data = data.replace(name.encode(), other.encode())
            return data

        # Only figures are shown of the parts of an interrupted series.
        thinned = tuple(f"{self.ids[one.name]}-" for one in RECORDINGS if one.stop_at is not None)
        with tarfile.open(archive, "w:xz", preset=9) as tar:
            for path in sorted(self.runs.rglob("*")):
                name = str(path.relative_to(self.runs))
                if not path.is_file() or path.name == "lock" or (name.startswith(thinned) and "/samples/" in name):
                    continue
                data = neutral(path.read_bytes())
                info = tarfile.TarInfo(neutral(name.encode()).decode())
                info.size, info.mtime, info.mode = len(data), path.stat().st_mtime, 0o600
                tar.addfile(info, io.BytesIO(data))


def main() -> None:
    """Make a lab, the runs, and the archive."""
    # A shell's background commands ignore it, and what they start would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    checkout = Path(sys.argv[1]).resolve() if sys.argv[1:] else _REPOSITORY
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="multinode-record-") as place:
        recorder = Recorder(checkout, Path(place) / "runs")
        subprocess.run([recorder.checkout / ".venv/bin/python", "scripts/make_tiny.py"], cwd=checkout, check=True)
        recorder.call("lab", "up", "--nodes", "2", "--rate", "1gbit")
        try:
            for one in RECORDINGS:
                recorder.record(one)
        finally:
            recorder.call("lab", "down", "--force")
        recorder.pack(ARCHIVE)


if __name__ == "__main__":
    main()
