"""Which tests are run for a mutant, and in which order."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from mutants import Mutant, reaching_lines
from mutation_record import Recorded

# What runs in other processes: part of a module's path below multinode/, and the tests of its area, the cheapest first.
# `*` as in a shell; {name} is the module's name.
_AREAS = (
    (
        r"worker/(collectives|traffic)",
        ("worker/test_traffic*", "worker/test_hooks", "lab/test_profile"),
    ),
    (
        r"worker/(stacks|compiler)",
        ("node/test_diagnose", "worker/test_timing", "worker/test_hooks", "lab/test_stall"),
    ),
    (r"worker/nics", ("worker/test_nics",)),
    (
        r"worker/(phases|forward|steps)",
        ("worker/test_timing", "worker/test_hooks"),
    ),
    (
        r"worker/",
        ("worker/test_{name}*", "worker/test_hooks", "worker/test_robust", "lab/test_profile"),
    ),
    (
        r"node/(?:\w+/)?(supervis|lease|sentinel|rundir|runs|status|job|stop|processes)",
        (
            "node/test_{name}*",
            "node/test_supervis*",
            "node/test_stop",
            "node/test_runs",
            "node/test_prelude",
            "lab/test_lifecycle",
            "lab/test_launch_faults",
        ),
    ),
    (
        r"node/(?:\w+/)?(collectives|nccl_)",
        ("node/test_{name}*", "node/test_collectives", "lab/test_nccl_test"),
    ),
    (r"node/bench/device_", ("node/test_{name}*", "node/test_device_bench", "lab/test_bench")),
    (r"node/(?:\w+/)?(diagnose|stacks)", ("node/test_{name}*", "node/test_diagnose", "lab/test_stall")),
    (r"node/(?:\w+/)?connect", ("node/test_{name}*", "node/test_connectivity", "lab/test_connectivity")),
    (
        r"node/(?:\w+/)?(main|channel|follow|sampler|fetch)",
        ("node/test_{name}*", "node/test_main", "node/test_follow", "node/test_sampler", "lab/test_launch"),
    ),
    (r"node/", ("node/test_{name}*", "node/test_probe", "lab/test_check_faults")),
    (
        r"launch/",
        ("launch/test_*", "lab/test_launch", "lab/test_launch_faults", "lab/test_stall", "lab/test_lifecycle"),
    ),
    (r"lab/network", ("lab/test_lab_rate", "lab/test_lab_shaping", "lab/test_lab_lifecycle")),
    (r"lab/", ("lab/test_lab_{name}*", "lab/test_lab_nodes", "lab/test_lab_lifecycle")),
    (r"cli/lab", ("lab/test_lab_*", "lab/test_fault_table")),
    (r"(cli|workflows)/try_advice", ("lab/test_contrast",)),
    (r"(cli|workflows)/", ("lab/test_{name}*",)),
    (r"preflight/", ("lab/test_check_faults",)),
)


@dataclasses.dataclass(frozen=True)
class Choice:
    """The recorded tests that are run for a mutant."""

    tests: Sequence[str]  # in the order of their run
    seconds: float  # how long they took when they were recorded
    left_out: int  # how many more reach it


def choose(mutant: Mutant, recorded: Recorded, root: Path, *, most: int, most_s: float) -> Choice:
    """Up to `most` tests that together took up to `most_s`: one of each file first, and half from files about it."""
    reaching = _reaching(mutant, recorded, root)
    naming = _files_naming(root, mutant.path)
    own = {test for test in reaching if _file(test) in naming}
    chosen: list[str] = []
    seconds = 0.0
    for tests, share in ((own, 0.5), (reaching - own, 1.0), (own, 1.0)):
        for test in _in_turn(tests - set(chosen), recorded.durations):
            if len(chosen) < share * most and seconds + recorded.durations[test] <= share * most_s:
                chosen.append(test)
                seconds += recorded.durations[test]
    return Choice(chosen, seconds, len(reaching) - len(chosen))


def area_files(root: Path, path: str) -> list[str]:
    """The test files of the area, as far as this checkout has them."""
    name = Path(path).stem
    below = path.partition("/")[2]
    patterns = next((patterns for part, patterns in _AREAS if re.match(part, below)), ())
    found = (
        file.relative_to(root).as_posix()
        for pattern in patterns
        for file in sorted(root.glob(f"tests/{pattern.format(name=name)}.py"))
    )
    return list(dict.fromkeys(found))


def _reaching(mutant: Mutant, recorded: Recorded, root: Path) -> set[str]:
    """The tests that run the line, or what needs it where it runs on import."""
    lines, inside = reaching_lines((root / mutant.path).read_text(), mutant.line)
    tests = recorded.tests_of(mutant.path, lines)
    if tests or inside:
        return tests
    naming = _files_naming(root, mutant.path)
    return recorded.tests_of(mutant.path, recorded.lines_of(mutant.path)) or {
        test for test in recorded.durations if _file(test) in naming
    }


def _files_naming(root: Path, path: str) -> set[str]:
    package, _, name = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__").rpartition(".")
    named = re.compile(rf"\b{re.escape(package)}(\.| import .*\b){name}\b")
    return {
        file.relative_to(root).as_posix() for file in (root / "tests").rglob("*.py") if named.search(file.read_text())
    }


def _in_turn(tests: set[str], durations: dict[str, float]) -> list[str]:
    """The cheapest of each file, then the next of each."""
    ordered = sorted(tests, key=lambda test: (durations[test], test))
    by_file: dict[str, list[str]] = {}
    for test in ordered:
        by_file.setdefault(_file(test), []).append(test)
    rounds = itertools.zip_longest(*by_file.values())
    return [test for one_each in rounds for test in one_each if test is not None]


def _file(test: str) -> str:
    return test.split("::", maxsplit=1)[0]
