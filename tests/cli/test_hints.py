"""What a message tells people to type can be typed: every option that the source speaks of exists."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

from multinode.cli.main import build_app
from multinode.cli.verbs import VERBS, load_verb

ROOT = Path(__file__).parents[2] / "multinode"
# Of docker, pip, git, nvidia-smi, du, Slurm, accelerate, torchrun, TRL, Ansible; of a script; CSS.
OTHERS = {
    "--arguments", "--batch", "--config_file", "--cpus", "--cpus-per-task", "--force-reinstall", "--gpus",
    "--ipc", "--its", "--job", "--list", "--max-depth", "--max-restarts", "--memory", "--privileged", "--query-gpu",
    "--shm-size", "--ulimit", "--yaml", "--card", "--faint", "--ink", "--line", "--paper",
    "--clear-groups", "--gpus-per-node", "--jobid", "--nodelist", "--ntasks", "--overlap", "--regid", "--reuid",
    "--time", "--logdir", "--cap-add", "--device", "--exclude", "--mem", "--signal", "--chdir", "--cpu-bind", "--input",
    "--mpi", "--no-kill", "--nodes", "--unbuffered", "--ignored", "--init", "--numa-binding", "--stage", "--local-rank",
    "--key", "--use-env", "--index-url", "--config",
}  # fmt: skip
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_TYPED = re.compile(r"multinode ([a-z-]+)((?: (?!multinode)[^;:,()`]*)?)")


def options_by_verb() -> dict[str, set[str]]:
    def of(command: Any) -> set[str]:
        inner = command.commands.values() if isinstance(command, TyperGroup) else ()
        own = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        return own.union({"--help", "--help-all"}, *map(of, inner))

    verbs = {name: of(load_verb(name)) for name in VERBS}
    return verbs | {"": of(typer.main.get_command(build_app())).union(*verbs.values())}


OPTIONS = options_by_verb()


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Every text of a module that is prose and no docstring; one with values in it as one text."""
    tree = ast.parse(path.read_text())
    inner: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            inner.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            inner |= {id(part) for part in node.values}
            yield node.lineno, "".join(str(p.value) if isinstance(p, ast.Constant) else "X" for p in node.values)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            yield node.lineno, node.value


@pytest.mark.parametrize("folder", sorted(path.name for path in ROOT.iterdir() if path.is_dir()))
def test_every_option_that_a_message_names_exists(folder: str) -> None:
    found = [
        (f"{path.relative_to(ROOT)}:{line}", text)
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in texts(path)
        if " " in text
    ]
    told = [(where, "", text) for where, text in found]
    told += [(where, verb, rest) for where, text in found for verb, rest in _TYPED.findall(text) if verb in OPTIONS]
    # What stands behind ` -- ` is a script's own.
    asked = {(where, verb, one) for where, verb, text in told for one in _OPTION.findall(text.partition(" -- ")[0])}
    assert [(where, verb, one) for where, verb, one in asked if one not in OPTIONS[verb] | OTHERS] == []
