"""next_stage: what a job does before its first step, as its log tells it. Pure."""

from __future__ import annotations

import re

from multinode.core.run.log import last_lines

__all__ = ["FIRST_STEP", "next_stage"]

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
