"""Log text as a person reads it, and what it says of the time before the first step. The log itself stays raw."""

from __future__ import annotations

import re

__all__ = ["FIRST_STEP", "clean_log", "last_lines", "next_stage", "only_rank"]

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|.)")
_RANK = re.compile(r"\[rank(\d{1,9})\]")


def clean_log(text: str) -> str:
    """The text as a terminal would have left it: what a carriage return overwrote is gone, escapes are removed."""
    return "\n".join(_clean_line(line) for line in text.split("\n"))


def last_lines(text: str, count: int) -> str:
    """The last `count` lines that say something."""
    lines = [line for line in clean_log(text).split("\n") if line.strip()]
    return "\n".join(lines[-count:])


def only_rank(text: str, rank: int) -> str:
    """Without the lines that begin with the mark of another rank, as torch sets it: `[rank3]: ...`."""
    marked = ((line, _RANK.match(line)) for line in text.split("\n"))
    return "\n".join(line for line, mark in marked if mark is None or int(mark[1]) == rank)


def _clean_line(line: str) -> str:
    drawn = [part for part in line.split("\r") if part.strip()]
    kept = _ESCAPE.sub("", drawn[-1]) if drawn else ""
    return "".join(char if char.isprintable() or char == "\t" else " " for char in kept)


FIRST_STEP = "first step"
# In the words of LLaMA-Factory, Hugging Face and DeepSpeed.
_STAGES = (
    ("tokenisation", re.compile(r"Running tokenizer|Tokenizing|Converting format of dataset|Generating \w+ split")),
    ("model load", re.compile(r"Loading (?:checkpoint shards|weights)|loading weights file|Instantiating \w+ model")),
    ("compiling", re.compile(r"Loading extension module|Building extension module|ninja: ")),
    (FIRST_STEP, re.compile(r"\*{3,} Running training \*{3,}|Total optimization steps")),
)
_PERCENT = re.compile(r"\d{1,3}%")
_LOG = "log: "
_READ_CHARS = 4096
_SHOWN_CHARS = 48


def next_stage(stage: str, log: str) -> str:
    """The stage after this piece of log: the last that it names, else the one before; before any, its last line."""
    lines = last_lines(log[-_READ_CHARS:], _READ_CHARS).split("\n")
    for line in reversed(lines):
        name = next((name for name, words in _STAGES if words.search(line)), None)
        if name is not None:
            percent = _PERCENT.search(line)
            return f"{name} {percent[0]}" if percent is not None else name
    if lines[-1] and (not stage or stage.startswith(_LOG)):
        line = " ".join(lines[-1].split())
        return _LOG + (line if len(line) <= _SHOWN_CHARS else line[: _SHOWN_CHARS - 3] + "...")
    return stage
