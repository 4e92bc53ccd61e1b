"""fingerprint: of everything that decides a sweep's figures, so that the same command finds what it began. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from multinode.cluster.cluster import Node
from multinode.job.job import Job, LlamaFactoryJob
from multinode.job.planning import LaunchOptions
from multinode.secret_values import is_secret

_LENGTH = 32
_NO_MATTER = frozenset(
    {"price", "price_gpu", "price_purchase", "price_purchase_gpu", "user", "port", "key", "jump", "ssh_config"}
    | {"slurm_job"}
)


def fingerprint(
    jobs: Mapping[str, Job], nodes: tuple[Node, ...], options: LaunchOptions, measured: Mapping[str, Any]
) -> str:
    """The same text for the same jobs, nodes, options and way of measuring; it tells nothing of what it was made from.

    A price, a port of SSH or a secret that changes leaves the figures as they are, and so the fingerprint.

    Args:
        jobs: of every cell, by its label.
        nodes: those that the grid uses.
        options: how each cell is laid out.
        measured: the grid and how its cells are measured, as plain data.
    """
    environment = options.environment
    document = {
        "jobs": {label: _trained(job) for label, job in jobs.items()},
        "nodes": [_placed(one) for one in nodes],
        "engine": options.engine,
        "grad_compress": options.grad_compress,
        "env": _without_secrets(environment.env),
        "prelude": environment.prelude,
        "measured": _with_texts(dict(measured)),
    }
    return hashlib.sha256(msgspec.json.encode(document, order="sorted")).hexdigest()[:_LENGTH]


def _trained(job: Job) -> tuple[Any, ...]:
    """What of a job decides what is trained; not where its file lies."""
    return (job.text, _with_texts(job.config), job.deepspeed_text) if isinstance(job, LlamaFactoryJob) else job.argv


def _with_texts(value: Any) -> Any:
    """The same with texts for keys: YAML's may be of any kind, as those of `max_memory: {0: 20GiB}`, and JSON's not."""
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, dict):
        return {
            key if isinstance(key, str) else f"{type(key).__name__} {key!r}": _with_texts(one)
            for key, one in value.items()
        }
    return [_with_texts(one) for one in value] if isinstance(value, list | tuple) else value


def _placed(node: Node) -> dict[str, Any]:
    """All that a line of the hostfile says, but what it costs and how SSH gets there: a key that is new counts."""
    said = {name: value for name, value in msgspec.structs.asdict(node).items() if name not in _NO_MATTER}
    return said | {"env": _without_secrets(node.env)}


def _without_secrets(env: Mapping[str, str]) -> dict[str, str | None]:
    return {name: None if is_secret(name) else value for name, value in env.items()}
