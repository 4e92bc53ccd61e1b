"""How many small mistakes would the tests find? Makes some in multinode/, one at a time, and runs what reaches each.

First `--record` (once for each checkout): which test runs which line. Then, for each mutant, up to --most-tests and
--most-seconds of those, one of each test file first, half of them from files that name the module. What is left of the
agent, the launch and the lab runs in other processes too: the tests of its area follow, the lab's last. What is done
stands in the results, and is not done again. Give --prefix a command that runs another in namespaces of its own
(unshare): a mutant may kill and delete what its original would not.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mutants import Mutant, draw
from mutation_record import Recorded
from mutation_tests import Choice, area_files, choose

# A run of the tests that were recorded may take this much longer, and a file of an area this long.
_TIMES_LONGER = 3
_MORE_S = 60.0
_AREA_S = 2400.0
_ORIGINAL = "original.json"
_STATES = _KILLED, _TIMEOUT, _SURVIVED, _GONE = "killed", "timeout", "survived", "gone"

# The state, and the test that said so.
_Outcome = tuple[str, str]


def main() -> int:
    """Do what the options say."""
    options = _parser().parse_args()
    options.root, options.data = options.root.resolve(), (options.data or options.root / "build/mutation").resolve()
    options.results = options.results or options.data / "results.jsonl"
    if options.record:
        return _record(options)
    mutants = _load(options.like) if options.like else draw(options.root, options.count, options.seed)
    if options.list:
        for mutant in mutants:
            print(f"{mutant.key}\n{mutant.diff()}")
    elif options.tests_of:
        _print_tests(options, next(mutant for mutant in mutants if mutant.key == options.tests_of))
    elif options.report:
        _report(options.results)
    else:
        # An end by a signal leaves through `finally` as well, a Ctrl-C in the background too.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda received, _: sys.exit(128 + received))
        _run_all(options, mutants)
        _report(options.results)
    return 0


def _parser() -> argparse.ArgumentParser:
    here = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=here, help="the checkout to work on, with its own .venv")
    parser.add_argument("--data", type=Path, help="where recordings are kept (ROOT/build/mutation)")
    parser.add_argument("--results", type=Path, help="JSON lines, one for each mutant (DATA/results.jsonl)")
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=16)
    parser.add_argument("--like", type=Path, help="the mutants of these results, wherever their lines stand now")
    parser.add_argument("--record", action="store_true", help="record which test runs which line; prints the coverage")
    parser.add_argument("--list", action="store_true", help="print the mutants, and run nothing")
    parser.add_argument("--tests-of", metavar="MUTANT", help="print what would be run for one mutant")
    parser.add_argument("--report", action="store_true", help="print what the results say, and run nothing")
    parser.add_argument("--prefix", type=shlex.split, default=[], help="a command in front of every run of tests")
    parser.add_argument("--no-lab", dest="lab", action="store_false", help="leave out the lab's tests")
    parser.add_argument("--most-tests", type=int, default=40)
    parser.add_argument("--most-seconds", type=float, default=120.0)
    parser.add_argument("tests", nargs="*", default=["tests"], help="with --record: the tests")
    return parser


def _record(options: argparse.Namespace) -> int:
    recorder = Path(__file__).with_name("mutation_record.py")
    command = [*options.prefix, _python(options), recorder, options.root, options.data, "--"]
    command += ["-p", "no:randomly", "-q", "-o", "timeout=600", *options.tests]
    return subprocess.run(command, cwd=options.root, check=False).returncode


def _load(results: Path) -> list[Mutant]:
    return [Mutant(**line["mutant"]) for line in _lines(results)]


def _lines(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def _print_tests(options: argparse.Namespace, mutant: Mutant) -> None:
    choice = _choice(options, mutant)
    print(f"{len(choice.tests)} tests, {choice.seconds:.1f} s; {choice.left_out} left out", *choice.tests, sep="\n")
    print("then:", *_area(options, mutant), sep="\n")


def _choice(options: argparse.Namespace, mutant: Mutant) -> Choice:
    recorded = Recorded(options.data, options.root)
    return choose(mutant, recorded, options.root, most=options.most_tests, most_s=options.most_seconds)


def _area(options: argparse.Namespace, mutant: Mutant) -> list[str]:
    return [file for file in area_files(options.root, mutant.path) if options.lab or not file.startswith("tests/lab/")]


def _run_all(options: argparse.Namespace, mutants: Sequence[Mutant]) -> None:
    _restore(options)
    done = {line["key"] for line in _lines(options.results)}
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with options.results.open("a") as results:
        # The quick ones first: those without tests of an area.
        for number, mutant in enumerate(sorted(mutants, key=lambda mutant: len(_area(options, mutant))), 1):
            if mutant.key in done:
                continue
            started = time.monotonic()
            here = _found(options, mutant)
            outcome = _try(options, here) if here else {"status": _GONE}
            line = {"key": mutant.key, **outcome, "took_s": round(time.monotonic() - started, 1)}
            results.write(json.dumps(line | {"mutant": dataclasses.asdict(mutant)}) + "\n")
            results.flush()
            print(f"{number}/{len(mutants)} {line['status']} {mutant.key} {outcome.get('by', '')}", flush=True)


def _found(options: argparse.Namespace, mutant: Mutant) -> Mutant | None:
    path: Path = options.root / mutant.path
    return mutant.found_in(path.read_text()) if path.is_file() else None


def _try(options: argparse.Namespace, mutant: Mutant) -> dict[str, Any]:
    choice = _choice(options, mutant)
    about = {"tests": len(choice.tests), "left_out": choice.left_out}
    if choice.tests:
        with _mutated(options, mutant):
            status, by = _run(options, choice.tests, _TIMES_LONGER * choice.seconds + _MORE_S)
        if status != _SURVIVED:
            return about | {"status": status, "by": by}
    doubtful = list(Recorded(options.data, options.root).failed)
    for file in _area(options, mutant):
        status, by = _try_file(options, mutant, file, doubtful)
        if status != _SURVIVED:
            return about | {"status": status, "by": by, "doubtful": doubtful}
    return about | {"status": _SURVIVED, "area": _area(options, mutant), "doubtful": doubtful}


def _try_file(options: argparse.Namespace, mutant: Mutant, file: str, doubtful: list[str]) -> _Outcome:
    """Its tests were not recorded: one that fails without the mutant as well has found nothing, and is left out."""
    while True:
        with _mutated(options, mutant):
            status, by = _run(options, [file], _AREA_S, doubtful)
        if status != _KILLED or _run(options, [by if "::" in by else file], _AREA_S, doubtful)[0] == _SURVIVED:
            return status, by
        doubtful.append(by)
        if "::" not in by:
            return _SURVIVED, ""


@contextlib.contextmanager
def _mutated(options: argparse.Namespace, mutant: Mutant) -> Iterator[None]:
    """The module with the change in it, and as it was afterwards, whatever happens."""
    path: Path = options.root / mutant.path
    text = path.read_text()
    (options.data / _ORIGINAL).write_text(json.dumps({"path": str(path), "text": text}))
    try:
        _write(path, mutant.apply(text))
        yield
    finally:
        _restore(options)


def _restore(options: argparse.Namespace) -> None:
    """Put back what is mutated, even what a run that was killed has left."""
    kept: Path = options.data / _ORIGINAL
    if kept.is_file():
        original = json.loads(kept.read_text())
        _write(Path(original["path"]), original["text"])
        kept.unlink()


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    # The compiled form of another text of this length, from the same second, would be taken for its own.
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink(missing_ok=True)


def _run(options: argparse.Namespace, tests: Sequence[str], limit_s: float, without: Sequence[str] = ()) -> _Outcome:
    """Whether these tests fail, and which one did."""
    excluded = " and ".join(f"not {name}" for name in _markers(options.root))
    command = [*options.prefix, _python(options), "-m", "pytest", "-x", "-q", "-p", "no:randomly"]
    command += ["-p", "no:cacheprovider", "-m", excluded, *tests]
    command += [f"--deselect={test}" for test in without]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=options.root, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return _TIMEOUT, ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        words = output.read().splitlines()
    failed = [line.split(" ", 1)[1].split(" - ")[0] for line in words if line.startswith(("FAILED ", "ERROR "))]
    # 5: every test of the file was excluded.
    return (_SURVIVED, "") if code in {0, 5} else (_KILLED, failed[0] if failed else f"exit code {code}")


def _markers(root: Path) -> list[str]:
    """The markers of tests that are not run here, those that this checkout knows."""
    known = (root / "pyproject.toml").read_text() if (root / "pyproject.toml").is_file() else ""
    return [name for name in ("gpu", "browser", "thorough") if f'"{name}:' in known]


def _python(options: argparse.Namespace) -> Path:
    own: Path = options.root / ".venv/bin/python"
    return own if own.exists() else Path(sys.executable)


def _report(results: Path) -> None:
    lines, mutants = _lines(results), _load(results)
    counts = Counter((mutant.package, line["status"]) for mutant, line in zip(mutants, lines, strict=True))
    for package in sorted({mutant.package for mutant in mutants}):
        print(f"{package:12}", *(f"{counts[package, status]:4} {status}" for status in _STATES))
    print(f"{'all':12}", *(f"{sum(line['status'] == status for line in lines):4} {status}" for status in _STATES))
    for line, mutant in zip(lines, mutants, strict=True):
        if line["status"] == _SURVIVED:
            print(f"\n{mutant.key}: {line['tests']} tests, {line['left_out']} left out\n{mutant.diff()}")


if __name__ == "__main__":
    sys.exit(main())
