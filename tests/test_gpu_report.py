"""The report on a GPU: its page, which keeps what it has, and the environment that it runs in, with few packages."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gpu import test_train as gpu_trainings

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "scripts")]
from gpu_lab import Run, provoke, told_of, truth_row  # noqa: E402 - they are no package
from gpu_report import _DAY, _parts  # noqa: E402
from provoked import PROVOKED  # noqa: E402

DEADLINE_S = 100.0
REQUIREMENTS = ROOT / "tests" / "gpu" / "requirements.txt"
# What a machine with a GPU may have beside torch, and what is carried there.
FEW = ("torch", *(line for line in REQUIREMENTS.read_text().splitlines() if not line.startswith("#")))
PARTS = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {scripts!r})
from gpu_report import Part, main, report
def python(text):
    return (sys.executable, "-c", "import os, sys, time; from pathlib import Path; " + text)
parts = {{
    "one": Part("The first", python("print('as it comes'); Path(os.environ['SECTION']).write_text('| a | 1 |')")),
    "two": Part("The second", python("print('before'); raise KeyError('kind')")),
    "three": Part("The third", python("print('## The first')")),
    "late": Part("The late one", python("print('waits', flush=True); time.sleep(600)"), 5.0),
    "killed": Part("The killed one", python("print(os.getpid(), flush=True); time.sleep(600)")),
}}
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
sys.exit(report(parts, {names!r}, Path({output!r})))
"""


def start(output: Path, *names: str) -> subprocess.Popen[str]:
    script = PARTS.format(scripts=str(ROOT / "scripts"), names=list(names), output=str(output))
    return subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)


def run(output: Path, *names: str) -> tuple[int, str]:
    """The exit code, and the page."""
    process = start(output, *names)
    process.communicate(timeout=DEADLINE_S)
    return process.returncode, output.read_text()


def test_a_part_that_fails_leaves_those_around_it(tmp_path: Path) -> None:
    code, page = run(tmp_path / "page.md", "one", "two", "three")
    assert code == 1
    assert page.startswith("# multinode on a GPU\n\nFailed: two.\n")
    assert "## The first\n\n| a | 1 |\n" in page
    second = page[page.index("## The second") : page.index("## The third")]
    assert re.match(r"## The second\n\nFailed: it ended with code 1 after \d+ s\.\n\n```\nbefore\n", second)
    assert "KeyError: 'kind'" in second
    assert (tmp_path / "page.md.one.log").read_text() == "as it comes\n"
    # Nothing else is left there.
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "page.md",
        *(f"page.md.{name}.log" for name in ("one", "three", "two")),
    ]


def test_calls_with_one_page_add_up_and_a_part_that_is_run_again_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    assert run(page, "two")[0] == 1
    # The page says what has failed, whichever call it was in.
    assert run(page, "one")[0] == 1
    page.write_text(page.read_text().replace("KeyError", "what it was"))
    code, text = run(page, "one")
    assert code == 1
    assert text.index("## The first") < text.index("## The second")
    assert "what it was: 'kind'" in text
    assert text.count("## The first") == 1


def test_a_part_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    code, page = run(tmp_path / "page.md", "late", "one")
    assert code == 1
    assert "## The late one\n\nFailed: it took longer than 5 s.\n\n```\nwaits\n```\n" in page
    assert "## The first\n\n| a | 1 |\n" in page


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed_in_the_middle_the_page_has_what_came_before(tmp_path: Path, number: signal.Signals) -> None:
    output = tmp_path / "page.md"
    process = start(output, "one", "killed", "three")
    log = tmp_path / "page.md.killed.log"
    began = time.monotonic()
    while not (log.exists() and log.read_text().endswith("\n")):
        assert time.monotonic() - began < DEADLINE_S
        time.sleep(0.05)
    os.kill(process.pid, number)
    process.communicate(timeout=DEADLINE_S)
    page = output.read_text()
    assert "## The first\n\n| a | 1 |\n" in page
    assert page.startswith("# multinode on a GPU\n\nFailed: killed.\n")
    assert "Failed: it was not ended; its output so far is in `page.md.killed.log`." in page
    part = int(log.read_text())
    if number == signal.SIGKILL:
        # Nobody was left to end it.
        os.kill(part, signal.SIGKILL)
    while Path(f"/proc/{part}").exists():
        assert time.monotonic() - began < DEADLINE_S
        time.sleep(0.05)


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with those few packages and what they need."""
    home = tmp_path_factory.mktemp("bare") / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True, timeout=DEADLINE_S)
    (site,) = (home / "lib").glob("python*/site-packages")
    linked: set[str] = set()
    left = [*FEW]
    while left:
        name = left.pop()
        if name in linked:
            continue
        linked.add(name)
        found = metadata.distribution(name)
        needed = [requirement for requirement in found.requires or [] if ";" not in requirement]
        left += [re.split(r"[^\w.-]", requirement)[0] for requirement in needed]
        for top in {Path(str(file)).parts[0] for file in found.files or []} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(found.locate_file(top))))
    return home / "bin" / "python"


def call(bare: Path, folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The script, where nvidia-smi names one GPU."""
    smi = folder / "nvidia-smi"
    smi.write_text("#!/bin/sh\ncase $* in -L) echo GPU 0 ;; *) echo 'NVIDIA H100, 81559 MiB, 580.1, [N/A]' ;; esac\n")
    smi.chmod(0o755)
    environ = {"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(folder), "PYTHON": str(bare), **env}
    command = [str(ROOT / "scripts" / "gpu-report"), *arguments]
    return subprocess.run(
        command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def test_with_few_packages_it_says_what_it_does(bare: Path, tmp_path: Path) -> None:
    done = call(bare, tmp_path, "--help")
    assert (done.returncode, "--part NAME" in done.stdout) == (0, True), done.stderr


def test_what_is_carried_on_pythonpath_is_found(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "carried" / "torch").mkdir(parents=True)
    (tmp_path / "carried" / "torch" / "__init__.py").write_text("raise ImportError('the carried one')\n")
    page = tmp_path / "page.md"
    done = call(bare, tmp_path, "--part", "machine", "--output", str(page), PYTHONPATH=str(tmp_path / "carried"))
    assert "the carried one" in page.read_text(), done.stderr


@pytest.mark.torch
def test_with_few_packages_the_machine_is_told_and_every_test_is_collected(bare: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    done = call(bare, tmp_path, "--part", "machine", "--output", str(page))
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert text.startswith("# multinode on a GPU\n\nEverything below succeeded.\n\n## The machine\n")
    rows = dict(re.findall(r"^\| (.*?) \| (.*) \|$", text, re.MULTILINE))
    assert rows["GPU"] == "NVIDIA H100, 81559 MiB, 580.1, [N/A]"
    # Each on a line of its own; this torch has neither.
    assert (rows["CUDA of torch"], rows["NCCL of torch"]) == ("None", "None")
    assert rows["torch"] == metadata.version("torch")
    collected = subprocess.run(
        [
            bare,
            "-m",
            "pytest",
            "--collect-only",
            "-q",
            "-p",
            "no:cacheprovider",
            "-W",
            "default",
            "-m",
            "gpu",
            "tests/gpu",
        ],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert collected.returncode == 0, collected.stdout + collected.stderr
    assert len(re.findall(r"^tests/gpu/\S+::", collected.stdout, re.MULTILINE)) >= 18


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_the_test_of_compressed_gradients_compares_a_training_with_and_one_without(kind: str) -> None:
    # What needs a GPU runs here on figures alone.
    trained: list[str | None] = []

    def train(*_: str, grad_compress: str | None = None) -> SimpleNamespace:
        trained.append(grad_compress)
        counted = SimpleNamespace(nic=50e6 if grad_compress else 100e6)
        return SimpleNamespace(summary=SimpleNamespace(comm=SimpleNamespace(bytes_per_step=counted)))

    gpu_trainings.test_compressed_gradients_halve_what_is_sent(train, kind)
    assert trained == [None, kind]


@pytest.mark.parametrize(("shown_ms", "agrees"), [(3.0, True), (6.0, False)])
def test_the_test_of_exposed_communication_looks_at_the_trace(shown_ms: float, *, agrees: bool) -> None:
    def train(*_: str, trace_steps: int | None = None) -> SimpleNamespace:
        worker = SimpleNamespace(step_ms=10.0)
        trace = SimpleNamespace(exposed_ms=shown_ms, workers=[worker], missing={}, agreement="")
        comm = SimpleNamespace(exposed_share=0.3, missing={})
        return SimpleNamespace(summary=SimpleNamespace(trace=trace if trace_steps else None, comm=comm))

    with contextlib.nullcontext() if agrees else pytest.raises(AssertionError):
        gpu_trainings.test_exposed_communication_is_what_a_trace_shows(train, "ddp")


def test_every_kept_failure_has_what_provokes_it() -> None:
    kept = (ROOT / "tests" / "gpu" / "h100" / "failures.jsonl").read_text().splitlines()
    assert {json.loads(line)["case"] for line in kept} == PROVOKED.keys()
    for name, provoked in PROVOKED.items():
        compile(provoked.script, name, "exec")


@pytest.mark.torch
@pytest.mark.thorough
@pytest.mark.parametrize("case", sorted(name for name, provoked in PROVOKED.items() if not provoked.needs_gpu))
def test_a_failure_that_needs_no_gpu_is_provoked_and_told(case: str, tmp_path: Path) -> None:
    log = provoke(tmp_path / f"{case}.py", PROVOKED[case].script)
    assert "it went on" not in log
    assert told_of(log), log


def test_the_day_is_rehearsed_without_a_gpu(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    command = [sys.executable, str(ROOT / "scripts" / "gpu_report.py"), "--rehearse", "--part", "allows"]
    # An empty PATH has neither nvidia-smi nor what would make an interface.
    environ = os.environ | {"PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--output", str(page)], env=environ, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "| GPU | no: nvidia-smi is not here |" in page.read_text()
    assert "Computation: a sleeping host (rehearsal)." in page.read_text()
    names = {name: part.title for name, part in _parts().items()}
    assert list(names)[:10] == list(_DAY)
    assert {"llamafactory", "failures"} <= names.keys()


def test_a_row_of_known_truth_is_what_the_step_would_be_shorter_without_the_network() -> None:
    def run(step_ms: float, exposed_ms: float | None, wait_ms: float) -> Run:
        mean = {"exposed_ms": exposed_ms, "wait_ms": wait_ms, "compute_ms": 60.0}
        return Run("r", {"step_time_ms": {"median": step_ms}, "split": {"mean": mean}})

    row = truth_row("ddp", run(100.0, 36.0, 2.0), run(65.0, 4.0, 1.0))
    assert row.cells == ["ddp", "100.0", "60.0", "38.0", "40.0", "-5.0%"]
    assert row.error == pytest.approx(-0.05)
    assert truth_row("ddp", run(100.0, None, 2.0), run(65.0, 4.0, 1.0)).error == 1.0
