"""How long `explain` takes to read logs of 1 GB, and the most memory it takes: python benchmarks/read_log.py [--mib N].

Three logs: healthy steps with one failure in the middle, one whose every tenth line has the words error and NCCL, and
one line without an end. A fourth, of words at random, is what dedupes worst.
"""

from __future__ import annotations

import argparse
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from multinode.diagnose.log_words import read_log

_FAILURE = (
    "[rank3]: Traceback (most recent call last):\n"
    "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has 79.10 GiB in use\n"
)


def _steps(number: int) -> str:
    loss = 4 / (1 + number / 1e4)
    return f"{{'loss': {loss:.4f}, 'grad_norm': {loss / 3:.3f}, 'learning_rate': 2e-05, 'epoch': {number / 1e5:.3f}}}\n"


def _healthy(number: int) -> str:
    return f"INFO step {number}: no error so far, NCCL ring is up\n" if number % 10 == 0 else _steps(number)


def _endless(number: int) -> str:
    return f" {number * 7919 % 99991}:token"


_WORDS = [
    "".join(random.Random(seed).choices("etaoinshrdlu", k=2 + seed % 9))  # noqa: S311 - a text, no secret
    for seed in range(20_000)
]


def _noise(number: int) -> str:
    return " ".join(random.Random(number).choices(_WORDS, k=14)) + "\n"  # noqa: S311 - a text, no secret


_LOGS: dict[str, Callable[[int], str]] = {
    "steps": _steps,
    "error and NCCL": _healthy,
    "one line": _endless,
    "random words": _noise,
}


def _pieces(make: Callable[[int], str], size_bytes: int) -> Iterator[str]:
    """The log; a failure stands in its middle."""
    written, number, failed = 0, 0, False
    while written < size_bytes:
        piece = "".join(make(number + one) for one in range(2000))
        if not failed and written > size_bytes / 2:
            failed = True
            piece += _FAILURE if piece.endswith("\n") else _FAILURE.replace("\n", " ")
        number += 2000
        written += len(piece)
        yield piece


def main() -> None:
    """Write each log, and read it in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1000, help="size of each log")
    parser.add_argument("--read", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        _read(Path(options.read))
        return
    with tempfile.TemporaryDirectory(dir=Path.home() / ".cache") as folder:
        for name, make in _LOGS.items():
            path = Path(folder) / "log"
            with path.open("w") as file:
                file.writelines(_pieces(make, options.mib << 20))
            print(f"{name:16}", end="", flush=True)
            subprocess.run([sys.executable, __file__, "--read", str(path)], check=True)


def _read(path: Path) -> None:
    began, busy = time.perf_counter(), time.process_time()
    with path.open("rb") as file:
        reading = read_log(file)
    took_s, busy_s = time.perf_counter() - began, time.process_time() - busy
    word = reading.cause()
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    what = f"line {word.line}: {word.error.id if word.error else word.text}" if word is not None else "nothing"
    print(f"{path.stat().st_size / 1e9:.2f} GB in {took_s:5.1f} s ({busy_s:.1f} s of CPU), {peak_mib:.0f} MiB: {what}")


if __name__ == "__main__":
    main()
