"""The mutation sample, on a package of one module with one test."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

SCRIPT = Path(__file__).parent.parent / "scripts/mutation_sample.py"
DEADLINE_S = 100.0
MODULE = """\
def is_more(one: int, other: int) -> bool:
    return one > other


def is_untested(one: int) -> bool:
    return one < 5
"""
TESTS = """\
import os
import time

from multinode.core.compare import is_more, is_untested

def test_it() -> None:
    parent = os.getppid()
    while "HANGS" in os.environ and os.getppid() == parent:
        time.sleep(0.05)
    assert is_more(2, 1)
    assert not is_more(1, 1)
    is_untested(3)
"""
KILLED = {"line": 2, "before": "    return one > other", "after": "    return one >= other"}
SURVIVES = {"line": 6, "before": "    return one < 5", "after": "    return one <= 5"}
GONE = {"line": 2, "before": "    return one > another", "after": "    return one >= another"}


class Sample:
    """A checkout, and the script at work on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.module = root / "multinode/core/compare.py"
        for path, text in ((self.module, MODULE), (root / "tests/core/test_compare.py", TESTS)):
            path.parent.mkdir(parents=True)
            path.write_text(text)
        for folder in ("multinode", "multinode/core", "tests", "tests/core"):
            (root / folder / "__init__.py").touch()
        (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["gpu: needs one"]\n')

    def command(self, *arguments: str | Path) -> list[str | Path]:
        return [sys.executable, SCRIPT, "--root", self.root, *arguments]

    def __call__(self, *arguments: str | Path) -> str:
        command = self.command(*arguments)
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def like(self, *mutants: dict[str, object]) -> Path:
        """Results of another checkout, which had these mutants."""
        path = self.root / "like.jsonl"
        place = {"path": "multinode/core/compare.py", "column": 15, "kind": "compare"}
        path.write_text("".join(json.dumps({"mutant": place | mutant}) + "\n" for mutant in mutants))
        return path


@pytest.fixture
def sample(tmp_path: Path) -> Sample:
    sample = Sample(tmp_path)
    assert "1 tests passed, 0 failed; they run 100.00% of multinode/" in sample("--record")
    return sample


def test_a_mutant_is_killed_or_survives_and_the_module_is_as_it_was(sample: Sample) -> None:
    said = sample("--like", sample.like(KILLED, SURVIVES, GONE))

    assert "1/3 killed multinode/core/compare.py:2:15:compare tests/core/test_compare.py::test_it\n" in said
    assert "core            1 killed    0 timeout    1 survived    1 gone\n" in said
    assert "compare.py:6:15:compare: 1 tests, 0 left out\n-    return one < 5\n+    return one <= 5\n" in said
    assert sample.module.read_text() == MODULE


def test_what_is_done_is_not_done_again_and_a_line_is_found_where_it_stands_now(sample: Sample) -> None:
    sample.module.write_text("\n\n" + MODULE)
    sample("--record")
    sample("--like", sample.like(SURVIVES))
    assert "2/2 killed multinode/core/compare.py:2:15:compare" in sample("--like", sample.like(SURVIVES, KILLED))
    results = (sample.root / "build/mutation/results.jsonl").read_text()

    said = sample("--like", sample.like(SURVIVES, KILLED))

    assert said.startswith("core            1 killed    0 timeout    1 survived    0 gone\n")
    assert (sample.root / "build/mutation/results.jsonl").read_text() == results


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_run_leaves_the_module_as_it_was(sample: Sample, number: signal.Signals) -> None:
    environ = os.environ | {"HANGS": "yes"}
    with subprocess.Popen(sample.command("--like", sample.like(KILLED)), env=environ) as process:
        deadline = time.monotonic() + DEADLINE_S
        while sample.module.read_text() in {MODULE, ""} and time.monotonic() < deadline:
            time.sleep(0.05)
        assert "one >= other" in sample.module.read_text()
        while not (tests := psutil.Process(process.pid).children(recursive=True)) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(number)
    if number == signal.SIGKILL:
        # Nobody is left to end its tests.
        for one in tests:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        # Nobody could put it back then: the next run does.
        sample("--like", sample.like(KILLED))
    assert sample.module.read_text() == MODULE


def test_the_drawn_mutants_are_the_same_for_the_same_seed_and_no_docstring_or_annotation_is_among_them(
    sample: Sample,
) -> None:
    sample.module.write_text(
        '"""Docstring."""\n__all__ = ["f"]\n\n\ndef f(one: "int" = 1) -> "int":\n    return one + 1\n'
    )
    listed = {sample("--list", "--count", "9", "--seed", seed) for seed in ("1", "1", "2", "3", "4", "5", "6")}

    assert sample("--list", "--count", "9", "--seed", "1") in listed
    changed = {line for said in listed for line in said.splitlines() if line.startswith("+")}
    assert '+def f(one: "int" = 2) -> "int":' in changed
    assert changed <= {
        '+def f(one: "int" = 2) -> "int":',
        "+    return one - 1",
        "+    return one + 2",
        "+    return None",
    }
