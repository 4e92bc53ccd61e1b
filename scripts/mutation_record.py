"""Records which tests run which lines of multinode/, and how long each takes: what scripts/mutation_sample chooses by.

Runs in the environment of the checkout that it records; a line that only another process runs is not seen.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

DURATIONS = "durations.json"
LINES = "lines.coverage"
# A fixture serves other tests of its file, too: what runs before or after a test is run by its file.
_BETWEEN = ":between"
_LEFT_OUT = ("lab", "gpu", "browser", "thorough")


class Recorder:
    """A pytest plugin: tells coverage.py what runs, and notes what passed, and how long it took."""

    def __init__(self, measured: coverage.Coverage) -> None:
        self.durations: dict[str, float] = defaultdict(float)
        self.failed: list[str] = []
        self._measured = measured

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what runs for long and in other processes."""
        left_out = [item for item in items if _is_left_out(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """What runs between two tests belongs to the file."""
        self._measured.switch_context(item.nodeid.split("::")[0] + _BETWEEN)
        yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """What runs inside a test belongs to the test."""
        self._measured.switch_context(item.nodeid)
        yield
        self._measured.switch_context(item.nodeid.split("::")[0] + _BETWEEN)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how long each phase took."""
        self.durations[report.nodeid] += report.duration
        if report.failed:
            self.failed.append(report.nodeid)


def main() -> int:
    """Run the tests, and write both files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("folder", type=Path, help="where both files are written")
    parser.add_argument("arguments", nargs="*", help="for pytest")
    options = parser.parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(options.root))
    lines = folder / LINES
    lines.unlink(missing_ok=True)
    measured = coverage.Coverage(data_file=str(lines), config_file=False, source=[str(options.root / "multinode")])
    recorder = Recorder(measured)
    measured.start()
    code = pytest.main([f"--rootdir={options.root}", *options.arguments], plugins=[recorder])
    measured.stop()
    measured.save()
    passed = {name: round(time, 3) for name, time in recorder.durations.items() if name not in recorder.failed}
    (folder / DURATIONS).write_text(json.dumps({"passed": passed, "failed": sorted(set(recorder.failed))}, indent=1))
    with (folder / "report.txt").open("w") as report:
        percent = measured.report(file=report)
    print(f"{len(passed)} tests passed, {len(set(recorder.failed))} failed; they run {percent:.2f}% of multinode/")
    return 0 if code in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED} else int(code)


class Recorded:
    """What was recorded."""

    def __init__(self, folder: Path, root: Path) -> None:
        written = json.loads((folder / DURATIONS).read_text())
        self.durations: dict[str, float] = written["passed"]
        self.failed: list[str] = written["failed"]
        self._root = root
        self._data = coverage.CoverageData(str(folder / LINES))
        self._data.read()

    def tests_of(self, path: str, lines: set[int]) -> set[str]:
        """The tests that run one of these lines; of a line that a fixture runs, all tests of its file."""
        contexts = self._data.contexts_by_lineno(str(self._root / path))
        names = {name for line in lines for name in contexts.get(line, []) if name}
        files = {name.removesuffix(_BETWEEN) for name in names if name.endswith(_BETWEEN)}
        return {name for name in self.durations if name in names or name.split("::")[0] in files}

    def lines_of(self, path: str) -> set[int]:
        """All lines of a module that were run."""
        return set(self._data.lines(str(self._root / path)) or ())


def _is_left_out(item: pytest.Item) -> bool:
    markers = {marker.name for marker in item.iter_markers()}
    is_of_nodes = item.nodeid.startswith(("tests/node/", "tests/worker/"))
    return not markers.isdisjoint(_LEFT_OUT) or ("torch" in markers and is_of_nodes)


if __name__ == "__main__":
    sys.exit(main())
