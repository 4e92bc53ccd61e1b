#!/usr/bin/env python3
"""Counts the lines of ours that `multinode launch` imports: for its plan, and for a run of two workers on this machine.

scripts/count_imports.py [--list]: with the modules.
"""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

_SCRIPT = "print('step')\n"
_WORK = {
    "plan of a script": ("launch", "--dry-run", "--", "train.py"),
    "plan of a YAML": ("launch", "--dry-run", str(Path(__file__).resolve().parent.parent / "configs/tiny_sft.yaml")),
    "run of a script": ("launch", "--no-check", "--", "train.py"),
    "checked run of a script": ("launch", "--", "train.py"),
}


def main() -> int:
    """Print a line for each command; with words, be that command."""
    if len(sys.argv) > 1 and sys.argv[1] == "launch":
        return _launch(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(_SCRIPT)
        Path(folder, "hosts.txt").write_text(f"127.0.0.1 slots=2 python={sys.executable}\n")
        for name, words in _WORK.items():
            lines = _lines_of(words, folder)
            print(f"{name}: {sum(lines.values()):,} lines in {len(lines)} modules")
            if sys.argv[1:] == ["--list"]:
                print("\n".join(f"{number:7,} {module}" for module, number in sorted(lines.items())))
    return 0


def _lines_of(words: Sequence[str], folder: str) -> dict[str, int]:
    printed = subprocess.run(
        [sys.executable, __file__, *words], cwd=folder, check=True, capture_output=True, text=True
    ).stdout
    return {name: int(number) for name, number in map(str.split, printed.splitlines())}


def _launch(words: Sequence[str]) -> int:
    from multinode import api
    from multinode.cli.main import run

    if "--dry-run" not in words:
        connect = api.connect
        # Without SSH, which this machine need not have.
        vars(api)["connect"] = lambda cluster, **_: connect(cluster, local=True)
    sys.argv = ["multinode", "launch", "--hosts", "hosts.txt", *words[1:]]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        run()
    print("\n".join(_imported()))
    return 0


def _imported() -> Iterator[str]:
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] == "multinode" and file is not None:
            yield f"{name} {Path(file).read_text().count(chr(10))}"


if __name__ == "__main__":
    sys.exit(main())
