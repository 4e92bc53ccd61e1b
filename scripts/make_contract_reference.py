"""Writes docs/reference/json.md and a JSON schema for each document; with --check, says whether all are current.

The schemas are those of the structs that are encoded: every struct below `multinode` with a `schema` field.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

import multinode
from multinode.records.samples import Sample

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
# Who writes a document; one that is missing here is an error.
_WRITTEN_BY = {
    "multinode.advise/1": "`multinode advise --json`, `advice.json` of a run",
    "multinode.bench/1": "`multinode bench --json`, `bench.json` of a run",
    "multinode.check/1": "`multinode check --json`",
    "multinode.contrast/2": "`multinode contrast --json`, `multinode compare --json`, `contrast.json` of a run",
    "multinode.early-verdict/1": "`early-verdict.json` of a run, and a key of what `launch`, `attach` and `show` print",
    "multinode.explain/1": "`multinode explain --json`",
    "multinode.grid/1": "`grid.json` of a sweep",
    "multinode.lab/1": "`multinode lab up --json`, `multinode lab status --json`, and the lab's own record",
    "multinode.launch/1": "`multinode launch --json`, `multinode attach --json`",
    "multinode.nccl-test/1": "`multinode nccl-test --json`, `nccl-test.json` of a run",
    "multinode.notice/1": "the webhook of `multinode launch --notify` and `multinode attach --notify`",
    "multinode.plan/1": "`multinode launch --dry-run --json`, `plan.json` of a run",
    "multinode.predict/1": "`multinode predict --json`",
    "multinode.run/1": "`run.json` of a run",
    "multinode.runs/1": "`multinode runs --json`",
    "multinode.sample/1": "a line of `samples/node-N.jsonl` of a run",
    "multinode.stall/1": "`stall.json` of a run that hung",
    "multinode.summary/1": "`summary.json` of a run",
    "multinode.tune/1": "`multinode nccl-test --tune --json`, `tune.json` of a run",
    "multinode.tuning/1": "`multinode tune --json`, `multinode tune --dry-run --json`, `tuning.json` of a run",
    "multinode.sweep/1": "`multinode sweep --json`, `multinode table --json`, `sweep.json` of a run",
}
_HEADER = """\
# JSON documents

<!-- Written by scripts/make_contract_reference.py. -->

Every document names its schema and version in `schema`. Within a version, fields are added, never renamed or removed.
Unknown values are `null`, with the reason in `missing`. Units are part of names (`_s`, `_ms`, `_bytes`, `_mib`,
`_gbit_per_s`); `time_s` is Unix time. Values that look like secrets are redacted.

| `schema` | written by | JSON schema |
|---|---|---|
"""
_FOOTER = """
`multinode show --json` (`multinode.show/1`) puts together what a run has: `run` ([run](schemas/run-1.json)),
`directory`, and of `summary`, `contrast`, `nccl_test`, `advice`, `sweep`, `bench`, `tune`, `tuning` and `early_verdict`
those that there are.
`multinode logs --json`, `multinode report --json`, `multinode init --json`, `multinode clean --json` and
`multinode lab fault list --json` print small documents of their own: names, paths and what was done.
"""


def main() -> int:
    """Write all files, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file is not current")
    arguments = parser.parse_args()
    folder = REFERENCE / "schemas"
    files = dict(render_files())
    stale = [path for path in sorted(folder.glob("*")) if path not in files]
    changed = [path for path, text in files.items() if not path.is_file() or path.read_text() != text]
    if not arguments.check:
        folder.mkdir(exist_ok=True)
        for path in stale:
            path.unlink()
        for path in changed:
            path.write_text(files[path])
        return 0
    for path in [*stale, *changed]:
        print(f"{path.relative_to(REFERENCE)} is not current: .venv/bin/python scripts/make_contract_reference.py")
    return 1 if stale or changed else 0


def render_files() -> Iterator[tuple[Path, str]]:
    """Every file with its text."""
    types: dict[str, list[Any]] = {"multinode.sample/1": [Sample]}
    for struct in _structs():
        types.setdefault(_schema_name(struct), []).append(struct)
    rows = []
    for name, found in sorted(types.items()):
        links = []
        for one in found:
            suffix = f".{one.__name__}" if len(found) > 1 else ""
            file = f"schemas/{name.removeprefix('multinode.').replace('/', '-')}{suffix}.json"
            yield REFERENCE / file, json.dumps(msgspec.json.schema(one), indent=1, sort_keys=True) + "\n"
            links.append(f"[{Path(file).stem}]({file})")
        rows.append(f"| `{name}` | {_WRITTEN_BY[name]} | {', '.join(links)} |\n")
    yield REFERENCE / "json.md", _HEADER + "".join(rows) + _FOOTER


def _structs() -> list[type[msgspec.Struct]]:
    """Those with a schema, in the order of their names."""
    for module in pkgutil.walk_packages(multinode.__path__, "multinode."):
        if not module.name.startswith("multinode.agent") and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    return sorted({one for one in _below(msgspec.Struct) if _schema_name(one)}, key=lambda one: one.__name__)


def _below(struct: type[msgspec.Struct]) -> Iterator[type[msgspec.Struct]]:
    for one in struct.__subclasses__():
        yield one
        yield from _below(one)


def _schema_name(struct: type[msgspec.Struct]) -> str:
    """What its `schema` is; empty where it has none."""
    fields = struct.__struct_fields__
    defaults = dict(zip(reversed(fields), reversed(struct.__struct_defaults__), strict=False))
    name = defaults.get("schema")
    return name if isinstance(name, str) and name.startswith("multinode.") else ""


if __name__ == "__main__":
    sys.exit(main())
