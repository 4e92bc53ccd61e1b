"""scripts/lab-fault and scripts/lab-up: this equipment by hand."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from multinode.decoding import convert
from multinode.errors import MultinodeError
from multinode.lab.cluster import down_lab, require_lab, up_lab
from multinode.lab.network import parse_lab_rate
from multinode.lab.state import LabSpec
from tests.equipment.faults import Fault, clear_faults, list_faults, make_fault
from tests.equipment.gpus import GPU_ENVIRONMENT, count_gpus, gpu_files
from tests.equipment.slurm import start_slurm, with_slurm

_USAGE = """\
scripts/lab-fault                                 say what is broken
scripts/lab-fault NODE|all KIND [FIELD=VALUE ...] break one thing, until it is cleared
scripts/lab-fault clear [NODE]                    repair it, newest first

"""


def main() -> int:
    """Do what the first word says with the others."""
    verb, *words = sys.argv[1:]
    try:
        return up(words) if verb == "up" else fault(words)
    except (MultinodeError, msgspec.ValidationError) as error:
        hint = getattr(error, "hint", None)
        print(f"error: {error}" + (f"\n  hint: {hint}" if hint else ""), file=sys.stderr)  # noqa: T201 - a command
        return 2


def fault(words: Sequence[str]) -> int:
    """Make, list or clear faults, and say which."""
    match words:
        case ["-h" | "--help" | "help", *_]:
            sys.stdout.write(_USAGE + "".join(map(_describe, get_args(Fault))))
            return 0
        case []:
            require_lab()
            done = list_faults()
        case ["clear", *nodes]:
            done = clear_faults(require_lab(), *nodes[:1])
        case [node, kind, *pairs]:
            names = [one.name for one in require_lab().nodes] if node == "all" else [node]
            asked = {"kind": kind} | {name: value for name, _, value in (pair.partition("=") for pair in pairs)}
            kinds: Any = tuple[Fault, ...]
            done = convert([asked | {"node": name} for name in names], kinds, strict=False)
            for one in done:
                make_fault(require_lab(), one)
        case _:
            sys.stderr.write(_USAGE)
            return 2
    sys.stdout.writelines(f"{one.node}: {one.describe()}\n" for one in done)
    return 0


def up(words: Sequence[str]) -> int:
    """Make a lab with Slurm on its nodes, or whose nodes share this machine's GPUs."""
    parser = argparse.ArgumentParser(prog="scripts/lab-up", description=up.__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rate", type=parse_lab_rate, default=1.0, help="as of multinode lab up")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--slurm", action="store_true", help="slurmctld on node0; each slot is a GPU to it")
    parser.add_argument("--gpus", action="store_true", help="NCCL takes the nodes for different machines")
    parser.add_argument("--share", action="append", default=[], metavar="DIR", help="which the nodes see as it is here")
    asked = parser.parse_args(words)
    spec = LabSpec(node_count=asked.nodes, rate_gbit_per_s=asked.rate, slots=asked.slots, python=sys.executable)
    if asked.gpus:
        spec = msgspec.structs.replace(
            spec,
            slots=min(asked.slots, count_gpus()),
            job_env=GPU_ENVIRONMENT,
            shared_files=gpu_files(Path("/"), Path("/proc/self/mounts").read_text()),
        )
    spec = msgspec.structs.replace(spec, shared_files=(*spec.shared_files, *asked.share))
    lab = up_lab(with_slurm(spec) if asked.slurm else spec, measure=False)
    try:
        if asked.slurm:
            start_slurm(lab)
    except BaseException:
        down_lab()
        raise
    sys.stdout.write(f"{len(lab.nodes)} nodes are up: {lab.hostfile}\n")
    return 0


def _describe(kind: type[Fault]) -> str:
    fields = [f"{name}=" for name in kind.__struct_fields__ if name != "node"]
    return f"  {' '.join([str(kind.__struct_config__.tag), *fields])}\n      {(kind.__doc__ or '').splitlines()[0]}\n"


if __name__ == "__main__":
    sys.exit(main())
