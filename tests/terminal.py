"""left_on_screen: a terminal, as far as a live table uses one."""

from __future__ import annotations

import re

__all__ = ["left_on_screen"]


def left_on_screen(printed: str, width: int = 80) -> list[str]:
    """The lines of a terminal of this width after all of it was printed."""
    lines, row, column = [""], 0, 0

    def go_down() -> None:
        nonlocal row, column
        row, column = row + 1, 0
        lines.extend([""] * (row + 1 - len(lines)))

    for code, text in re.findall(r"(\x1b\[[?\d;]*[A-Za-z]|[\r\n])|([^\x1b\r\n]+)", printed):
        if code == "\n":
            go_down()
        elif code == "\r":
            column = 0
        elif code.endswith("A"):
            row = max(0, row - int(code[2:-1] or 1))
        elif code.endswith("K"):
            lines[row] = ""
        for char in text:
            if column == width:
                go_down()
            lines[row] = lines[row][:column].ljust(column) + char + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]
