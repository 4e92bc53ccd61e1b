"""Where a worker stands, from the Python stack that faulthandler or py-spy printed of it. Pure."""

from __future__ import annotations

import re

import msgspec

# CPython's faulthandler:   File "/home/a/train.py", line 12 in main
_FAULTHANDLER = re.compile(r'^  File "(?P<path>[^"]*)", line (?P<line>\d+|\?\?\?) in (?P<name>.+)$')
# py-spy dump:     main (train.py:12)
_PY_SPY = re.compile(r"^    (?P<name>\S.*) \((?P<path>.*?)(?::(?P<line>\d+))?\)$")
_THREAD = re.compile(r"^(?:Current thread|Thread) ")
# py-spy shortens paths by what stands on sys.path.
_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|/lib/python\d|^<frozen|multinode_agent/|^(?:torch|transformers|accelerate|deepspeed)/"
)
_COLLECTIVE_FILES = re.compile(
    r"torch/distributed/(?:distributed_c10d|rendezvous|_functional_collectives)|deepspeed/comm/"
)
_BACKWARD_FILES = re.compile(r"torch/autograd/|torch/_tensor\.py$")
_SYNCHRONIZE_FILES = re.compile(r"torch/(?:cuda|accelerator|xpu|npu)/")
_CONSTRUCTOR = re.compile(r"torch/nn/parallel/distributed\.py$")


class Frame(msgspec.Struct, frozen=True):
    """One call."""

    path: str
    line: str
    name: str

    @property
    def function(self) -> str:
        """The name alone, where py-spy puts the class before it."""
        return self.name.rpartition(".")[2]

    @property
    def place(self) -> str:
        """`main (train.py:12)`."""
        return f"{self.name} ({self.path.rpartition('/')[2]}:{self.line})"


class Standpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker's main thread stands.

    Attributes:
        waits_in: the collective, `backward` or `synchronize`: what cannot end before the other ranks get there.
        place: the call in words, for a worker that waits in none of these.
    """

    waits_in: str | None
    place: str


def parse_main_thread(stack: str) -> tuple[Frame, ...]:
    """Frames of the main thread, innermost first; empty where there is none to be read.

    faulthandler prints the youngest thread first and so the main thread last; py-spy names it.
    """
    blocks: list[list[str]] = []
    for line in stack.splitlines():
        if _THREAD.match(line):
            blocks.append([line])
        elif blocks:
            blocks[-1].append(line)
    if not blocks:
        return ()
    named = [block for block in blocks if "MainThread" in block[0]]
    lines = (named or blocks[-1:])[0][1:]
    matches = (_FAULTHANDLER.match(line) or _PY_SPY.match(line) for line in lines)
    return tuple(Frame(match["path"], match["line"] or "?", match["name"]) for match in matches if match is not None)


def standpoint(frames: tuple[Frame, ...]) -> Standpoint | None:
    """Where these frames, innermost first, stand; None without frames."""
    if not frames:
        return None
    return Standpoint(waits_in=_waits_in(frames), place=_place(frames))


def _waits_in(frames: tuple[Frame, ...]) -> str | None:
    collective = [frame.function for frame in frames if _COLLECTIVE_FILES.search(frame.path)]
    # The innermost function of the interface: wrappers and private ones stand on either side of it.
    for name in collective:
        if not name.startswith("_") and name not in {"wrapper", "inner"}:
            return name
    for pattern, word in (
        (_BACKWARD_FILES, "backward"),
        (_SYNCHRONIZE_FILES, "synchronize"),
        (_CONSTRUCTOR, "the start of DistributedDataParallel"),
    ):
        if any(pattern.search(frame.path) and _fits(frame.function, word) for frame in frames):
            return word
    return None


def _fits(name: str, word: str) -> bool:
    return name == "__init__" if word.startswith("the start") else name in {word, "_engine_run_backward"}


def _place(frames: tuple[Frame, ...]) -> str:
    """The innermost call, and the user's own one where that is another."""
    own = next((frame for frame in frames if not _LIBRARY.search(frame.path)), None)
    if own is None or own == frames[0]:
        return frames[0].place
    return f"{frames[0].place}, called from {own.place}"
