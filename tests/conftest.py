"""For all tests: random examples, order and slowest of the files, golden files, and an environment left as found."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.golden import Golden

# tests/gpu run on machines that have few packages.
with contextlib.suppress(ImportError):
    import pytest_randomly

    # It loads every installed package's seeder, and DeepSpeed's imports torch and itself into the tests' own process.
    pytest_randomly.entrypoint_reseeds = []

# How long this machine takes for an example says nothing about the code: other work shares it.
for _name, _examples in (("quick", 25), ("thorough", 300)):
    settings.register_profile(
        _name, deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=_examples
    )
settings.load_profile("quick")

# Commands honour what is ignored when they start, as under nohup; those that tests start are not to, however we began.
for _number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else signal.SIG_DFL)

ROOT = Path(__file__).parents[1]
# Settings of whoever runs the tests are none of theirs.
os.environ["XDG_CONFIG_HOME"] = "/nonexistent"
# pytest's for each test; torch's when CUDA starts (before 2.9), and when its compiler is imported.
_SET_BY_OTHERS = ("PYTEST_", "CUDA_MODULE_LOADING", "TORCHINDUCTOR_CACHE_DIR")

pytest_plugins = ["pytester"]


_SLOWEST = 3


def pytest_addoption(parser: pytest.Parser) -> None:
    """An option to write golden files."""
    parser.addoption("--update-golden", action="store_true", help="write the golden files as the tests have them now")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """The golden files beside the test."""
    return Golden(request.path.parent / "golden", update=request.config.getoption("--update-golden"))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first: at the end of a parallel run no worker is left with one of them."""
    items.sort(key=lambda item: [item.get_closest_marker(name) is None for name in ("long", "lab", "torch")])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which files took longest."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.location[0]] += report.duration
    slowest = sorted(seconds.items(), key=lambda one: one[1], reverse=True)[:_SLOWEST]
    terminalreporter.write_line("slowest files: " + ", ".join(f"{name} {time_s:.0f} s" for name, time_s in slowest))


@pytest.fixture(scope="session")
def tiny() -> None:
    """What configs/tiny_sft.yaml trains on; parallel sessions make it once, and nobody reads half of it."""
    assets = ROOT / "assets"
    assets.mkdir(exist_ok=True)
    with (assets / "tiny.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run([sys.executable, "scripts/make_tiny.py"], cwd=ROOT, check=True, capture_output=True, timeout=300)


@pytest.fixture(autouse=True)
def leave_as_found() -> Iterator[None]:
    """Fail a test that changes the environment or the working directory, and put both back for those after it."""
    environ, cwd = _environ(), Path.cwd()
    yield
    changed = sorted(name for name, _ in environ.items() ^ _environ().items())
    moved_to = _cwd()
    for name in changed:
        os.environ.pop(name, None)
        if name in environ:
            os.environ[name] = environ[name]
    os.chdir(cwd)
    if changed:
        pytest.fail(f"the test changed the environment and did not put it back: {', '.join(dict.fromkeys(changed))}")
    if moved_to != cwd:
        pytest.fail(f"the test changed the working directory to {moved_to}")


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_SET_BY_OTHERS)}


def _cwd() -> Path | None:
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None
