"""with_variables: the text of a hostfile with environment variables on every node's line."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from multinode.cluster.hostfile import BYTE_ORDER_MARK, count_slots
from multinode.cluster.hostfile_line import raw_words


def with_variables(text: str, variables: Mapping[str, str]) -> str:
    """The text of a valid hostfile with these variables added to every node's line."""
    if (counts := count_slots(text)) is not None:
        # With settings on its lines, a repeated name would be an error.
        text = "".join(f"{name} slots={count}\n" for name, count in counts.items())
    mark = BYTE_ORDER_MARK if text.startswith(BYTE_ORDER_MARK) else ""
    lines = text.removeprefix(mark).split("\n")
    return mark + "\n".join(_with_variables(line, variables) for line in lines)


def _with_variables(line: str, variables: Mapping[str, str]) -> str:
    words = list(raw_words(line.removesuffix("\r")))
    if not words:
        return line
    end = words[-1].end()
    for word in reversed(words):
        key = "".join(shlex.split(word[0])).partition("=")[0]
        if key.startswith("env.") and key.removeprefix("env.") in variables:
            before = line[: word.start()].rstrip()
            end -= word.end() - len(before)
            line = before + line[word.end() :]
    added = "".join(f" env.{name}={shlex.quote(value)}" for name, value in variables.items())
    return line[:end] + added + line[end:]
