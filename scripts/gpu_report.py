"""Try multinode on this machine's GPU, part by part, and write one Markdown page.

The page has the versions, the figures, and what failed; nothing of it names the machine or its user. It is rewritten
before and after each part, and keeps the parts that it has and that are not asked for: several short calls with one
--output make one page. What a part prints stands beside the page as it comes, in PAGE.PART.log.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).resolve().parents[1]
# A machine may be lent for ten minutes at a time.
_PART_S = 470.0
_END_S = 30.0
_TEST_S = 180
_TAIL_LINES = 40
# The last cell of a row whose figure exceeds what the report allows it (benchmarks/gpu_lab.py).
_BEYOND = "beyond its bound"


# What has a truth to be held against, most trust per minute first.
_DAY = {
    "allows": "What the machine allows",
    "truth": "Known truth",
    "bytes": "Bytes of each node",
    "network": "The network against raw TCP",
    "main": "LLaMA-Factory, predicted and measured",
    "overhead": "What the hooks cost",
    "windows": "Counters and traces",
    "launch-bound": "Where the host sets the pace",
    "clock": "Bench, with clock and power",
    "new-failures": "Failures on a shaped link",
}


class Part(NamedTuple):
    """One part of the report."""

    title: str  # its heading on the page
    # run in the checkout. Its last lines become the section, unless it writes that to `$SECTION`.
    command: tuple[str, ...]
    deadline_s: float = _PART_S  # after which it is ended


def main() -> int:
    """The exit code: 1 where a part on the page failed, or did not end."""
    parts = _parts()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("gpu-report.md"), help="the page (gpu-report.md)")
    parser.add_argument(
        "--part", action="append", choices=list(parts), metavar="NAME", help=f"this part alone: {', '.join(parts)}"
    )
    parser.add_argument("--rehearse", action="store_true", help="the parts with known truth alone, also without a GPU")
    options = parser.parse_args()
    # What ends a job ends the part that runs, too, and the page stays.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return report(parts, options.part or list(_DAY if options.rehearse else parts), options.output)


def report(parts: dict[str, Part], names: Sequence[str], output: Path) -> int:
    """Run these parts, each by its name, and write the page; returns as `main`."""
    output = output.absolute()
    sections = _read_page(output, parts)
    for name in dict.fromkeys(names):
        part = parts[name]
        log = output.with_name(f"{output.name}.{name}.log")
        sections[part.title] = f"Failed: it was not ended; its output so far is in `{log.name}`."
        _write_page(output, parts, sections)
        _say(f"{name} ...")
        began = time.monotonic()
        sections[part.title] = _run(part, log)
        _say(f"{name}: {time.monotonic() - began:.0f} s")
        _write_page(output, parts, sections)
    _say(f"{_outcome(parts, sections)} The page: {output}")
    return 1 if _that_begin("Failed: ", parts, sections) else 0


def _run(part: Part, log: Path) -> str:
    """The section: what the part wrote for it, else the end of its output."""
    section = log.with_suffix(".section")
    section.unlink(missing_ok=True)
    page = log.name.removesuffix(".log").rpartition(".")
    env = os.environ | {
        "SECTION": str(section),
        "KEEP": str(log.with_name(f"{page[0]}.records")),
        "PART": page[2],
        "PYTHONUNBUFFERED": "1",
    }
    began = time.monotonic()
    with (
        log.open("wb") as file,
        _started(part, env) as process,
    ):
        for line in process.stdout or ():
            file.write(line)
            file.flush()
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
        code = process.wait()
    took_s, written = time.monotonic() - began, section.read_text() if section.exists() else ""
    section.unlink(missing_ok=True)
    if code == 0:
        return written or _tail(log)
    late = took_s >= part.deadline_s
    why = f"it took longer than {part.deadline_s:.0f} s" if late else f"it ended with code {code} after {took_s:.0f} s"
    return "\n\n".join(filter(None, (f"Failed: {why}.", written, _tail(log))))


@contextlib.contextmanager
def _started(part: Part, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """The part's process; all that it started ends when its time is up, and when nobody waits for it any more."""
    process = subprocess.Popen(
        part.command,
        cwd=_ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )

    def end(number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)

    timer = threading.Timer(part.deadline_s, end, [signal.SIGTERM])
    killer = threading.Timer(part.deadline_s + _END_S, end, [signal.SIGKILL])
    for each in (timer, killer):
        each.daemon = True
        each.start()
    try:
        yield process
    except BaseException:
        end(signal.SIGKILL)
        process.wait()
        raise
    finally:
        timer.cancel()
        killer.cancel()


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    return "\n".join(["```", *(line.replace("```", "'''") for line in lines), "```"])


def _read_page(output: Path, parts: dict[str, Part]) -> dict[str, str]:
    """The sections of the page that is there, by title."""
    sections: dict[str, str] = {}
    title, titles = None, {part.title for part in parts.values()}
    for line in output.read_text().splitlines() if output.exists() else ():
        if line.startswith("## ") and line[3:] in titles:
            title = line[3:]
            sections[title] = ""
        elif title is not None:
            sections[title] += line + "\n"
    return {title: text.strip() for title, text in sections.items()}


def _write_page(output: Path, parts: dict[str, Part], sections: dict[str, str]) -> None:
    """All at once: a page that is half written would lose what came before."""
    titles = [part.title for part in parts.values() if part.title in sections]
    head = f"# multinode on a GPU\n\n{_outcome(parts, sections)}\n"
    text = "\n".join([head, *(f"## {title}\n\n{sections[title]}\n" for title in titles)])
    new = output.with_name(f"{output.name}.new")
    new.write_text(text)
    new.replace(output)


def _that_begin(word: str, parts: dict[str, Part], sections: dict[str, str]) -> list[str]:
    return [name for name, part in parts.items() if sections.get(part.title, "").startswith(word)]


def _outcome(parts: dict[str, Part], sections: dict[str, str]) -> str:
    """What failed, was skipped, or is beyond a bound, by part."""
    failed, skipped = (_that_begin(word, parts, sections) for word in ("Failed: ", "Skipped: "))
    beyond = {name: sections.get(part.title, "").count(f"| {_BEYOND} |") for name, part in parts.items()}
    counts = ", ".join(f"{name} {count}" for name, count in beyond.items() if count)
    told = [
        f"Failed: {', '.join(failed)}." if failed else "",
        f"Skipped: {', '.join(skipped)}." if skipped else "",
        f"Rows beyond their bound: {sum(beyond.values())} ({counts})." if counts else "",
    ]
    return " ".join(filter(None, told)) or "Everything below succeeded."


def _say(text: str) -> None:
    sys.stderr.write(f"gpu-report: {text}\n")
    sys.stderr.flush()


def _parts() -> dict[str, Part]:
    """By name, in the order in which they run: the short ones that explain the others first."""
    own = (sys.executable, str(_ROOT / "benchmarks" / "gpu_parts.py"))
    return {
        **{name: Part(title, (*own, name)) for name, title in _DAY.items()},
        "machine": Part("The machine", (*own, "machine")),
        "train": Part("Trainings of two ranks", _pytest("tests/gpu/test_train.py", "-k", "not sleeps")),
        "desyncs": Part("A rank that breaks step", (*own, "desyncs")),
        "hang": Part("A rank that sleeps", _pytest("tests/gpu/test_train.py", "-k", "sleeps")),
        "measure": Part("nccl-test, bench and the sampler", _pytest("tests/gpu/test_measure.py")),
        "zero": Part("DeepSpeed's ZeRO", _pytest("tests/gpu/test_zero.py")),
        "bench": Part("Bench", (*own, "bench")),
        "oom": Part("Out of memory", (*own, "oom")),
        "llamafactory": Part("LLaMA-Factory", (*own, "llamafactory")),
        "failures": Part("Provoked failures", (*own, "failures")),
    }


def _pytest(*arguments: str) -> tuple[str, ...]:
    # In its order, and warnings of a torch that this project does not pin are not failures.
    options = ("-v", "-p", "no:cacheprovider", "-p", "no:randomly", "-W", "default", "--timeout", str(_TEST_S))
    return (sys.executable, "-m", "pytest", *options, "-m", "gpu", *arguments)


if __name__ == "__main__":
    sys.exit(main())
