"""Writes docs/reference/json.md; with --check, says whether it is current; with --schemas DIR, the JSON schemas there.

The schemas are those of the structs that are encoded: every struct below `multinode` with a `schema` field. They are
not kept: the site and the sdist get them from here.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from reference_pages import field_comments, write_or_check

import multinode
from multinode.records.samples import Sample

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
# Who writes a document; one that is missing here is an error.
_WRITTEN_BY = {
    "multinode.advise/3": "`multinode advise --json`",
    "multinode.bench/3": "`multinode bench --json`, `bench.json` of a run",
    "multinode.check/2": "`multinode check --json`",
    "multinode.comparison/2": "`multinode compare --json`, except for training runs, nccl-tests and tables",
    "multinode.contrast/5": "`multinode contrast --json`, `multinode compare --json`, `contrast.json` of a run",
    "multinode.copy/3": "`multinode copy --json`",
    "multinode.early-verdict/2": "`early-verdict.json` of a run, and a key in the output of `launch`, `attach` and "
    "`show` with `--json`",
    "multinode.explain/2": "`multinode explain --json`",
    "multinode.grid/3": "`grid.json` of a sweep",
    "multinode.lab/2": "`multinode lab up --json`, `multinode lab status --json`, and the lab's own record",
    "multinode.launch/2": "`launch`, `attach`, `stop` and `show` with `--json`",
    "multinode.nccl-test/3": "`multinode nccl-test --json`, `nccl-test.json` of a run",
    "multinode.nccl-test-read/2": "`multinode nccl-test --read --json`",
    "multinode.notice/2": "the webhook of `multinode launch --notify` and `multinode attach --notify`",
    "multinode.plan/2": "`multinode launch --dry-run --json`, `plan.json` of a run",
    "multinode.predict/3": "`multinode predict --json`",
    "multinode.run/2": "`run.json` of a run",
    "multinode.runs/2": "`multinode runs --json`",
    "multinode.sample/1": "a line of `samples/node-N.jsonl` of a run",
    "multinode.stall/2": "`stall.json` of a run that hung",
    "multinode.summary/3": "`summary.json` of a run",
    "multinode.tune/3": "`multinode nccl-test --tune --json`, `tune.json` of a run",
    "multinode.tuning/3": "`multinode tune --json`, `multinode tune --dry-run --json`, `tuning.json` of a run",
    "multinode.sweep/3": "`multinode sweep --json`, `multinode show --format json`, `sweep.json` of a run",
}
_HEADER = """\
# JSON documents

<!-- Written by scripts/make_contract_reference.py. -->

The field `schema` of a document contains the name and the version of its schema. Within a version, multinode may add
fields, but does not rename or remove any. An unknown figure is `{"is": "unknown", "reason": ...}`. The name of a field
includes its unit (`_s`, `_ms`, `_bytes`, `_mib`, `_gbit_per_s`). `time_s` is Unix time. Values that look like secrets
are redacted.

| `schema` | written by | JSON schema |
|---|---|---|
"""
_FOOTER = """
`multinode logs --json`, `multinode report --json`, `multinode init --json` and `multinode clean --json` print small
documents that have no JSON schema. They contain names, paths and the actions taken.
"""


def main() -> int:
    """Write the page or compare it; or write the schemas."""
    if sys.argv[1:2] == ["--schemas"]:
        folder = Path(sys.argv[2])
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in render_schemas().items():
            (folder / name).write_text(text)
        return 0
    return write_or_check({REFERENCE / "json.md": _render_page()}, __doc__)


def render_schemas() -> dict[str, str]:
    """The text of each JSON schema by the name of its file."""
    return {
        file: json.dumps(_schema(struct), indent=1, sort_keys=True) + "\n"
        for files in _schema_files().values()
        for file, struct in files.items()
    }


def _schema(struct: Any) -> dict[str, Any]:
    """With the comment on each field as its description."""
    schema = msgspec.json.schema(struct)
    for part in schema["$defs"].values():
        for field, text in (
            _field_comments().get((part.get("title"), frozenset(part.get("properties", ()))), {}).items()
        ):
            part["properties"][field].setdefault("description", text)
    return schema


@functools.cache
def _field_comments() -> dict[tuple[str | None, frozenset[str]], dict[str, str]]:
    """By the name of a struct and its fields in JSON: what the comments on or above its fields say."""
    return {
        (struct.__name__, frozenset(struct.__struct_encode_fields__) | _tag(struct)): _comments_in_json(struct)
        for struct in _below(msgspec.Struct)
        if struct.__module__.startswith("multinode.")
    }


def _tag(struct: type[msgspec.Struct]) -> set[str]:
    field = struct.__struct_config__.tag_field
    return {field} if field else set()


def _comments_in_json(struct: type[msgspec.Struct]) -> dict[str, str]:
    names = dict(zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True))
    parts = (
        part for part in reversed(struct.__mro__) if issubclass(part, msgspec.Struct) and part is not msgspec.Struct
    )
    comments = (item for part in parts for item in field_comments(inspect.getsource(part)).items())
    return {names[name]: text for name, text in comments if name in names}


def _render_page() -> str:
    rows = []
    for name, files in _schema_files().items():
        links = ", ".join(f"[{file.removesuffix('.json')}](schemas/{file})" for file in files)
        rows.append(f"| `{name}` | {_WRITTEN_BY[name]} | {links} |\n")
    return _HEADER + "".join(rows) + _FOOTER


def _schema_files() -> dict[str, dict[str, Any]]:
    """The struct of each file, by the schema that it is of."""
    types: dict[str, list[Any]] = {"multinode.sample/1": [Sample]}
    for struct in _structs():
        types.setdefault(_schema_name(struct), []).append(struct)
    files: dict[str, dict[str, Any]] = {}
    for name, found in sorted(types.items()):
        stem = name.removeprefix("multinode.").replace("/", "-")
        files[name] = {f"{stem}.{one.__name__}.json" if len(found) > 1 else f"{stem}.json": one for one in found}
    return files


def _structs() -> list[type[msgspec.Struct]]:
    """Those with a schema, in the order of their names."""
    for module in pkgutil.walk_packages(multinode.__path__, "multinode."):
        if not module.name.startswith(("multinode.node", "multinode.worker")) and not module.name.endswith("__main__"):
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
