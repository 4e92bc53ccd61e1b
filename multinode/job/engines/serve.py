"""serve: vLLM or SGLang, started once on each node, with the node's rank and node 0's address as its own options."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from multinode.cluster.quoting import bracketed
from multinode.errors import UsageError
from multinode.job.engines.engine import Engine, EngineKind
from multinode.job.engines.place import run_module
from multinode.job.job import Form, Job, ScriptJob
from multinode.records.plan import Place, Rendezvous


class _Server(NamedTuple):
    """A program that serves a model.

    Attributes:
        program: the words that start it, as in `ScriptJob`.
        port: on which it answers unless `--port` names another.
        meets_by: its option with address and port of node 0 in one word; None if it has one option for each.
        only_works: its option on nodes that answer no requests; None if it knows them by their rank.
    """

    form: Form
    program: tuple[str, ...]
    port: int
    meets_by: str | None = None
    only_works: str | None = None


# Options of `vllm serve` (0.12: vllm/engine/arg_utils.py, ParallelConfig) and of `sglang.launch_server` (ServerArgs).
_VLLM = _Server("executable", ("vllm", "serve"), 8000, only_works="--headless")
_SGLANG = _Server("module", ("sglang.launch_server",), 30000, meets_by="--dist-init-addr")
# Their variables with the address by which other nodes reach a node.
_ADDRESSES = ("VLLM_HOST_IP", "SGLANG_HOST_IP")


class _Serve(EngineKind):
    starts_workers = False
    ends = False

    def why_not(self, job: Job) -> UsageError | None:
        if _find(job) is not None:
            return None
        return UsageError(
            "the serve engine starts vllm serve or python -m sglang.launch_server",
            hint="for example: multinode launch -- vllm serve MODEL --tensor-parallel-size 2",
        )

    def argv(
        self, engine: Engine, rendezvous: Rendezvous, place: Place, job: Job, env: dict[str, str]
    ) -> tuple[str, ...]:
        server, words = _find(job), job.program
        argv = run_module(place, *words) if server is not None and server.form == "module" else words
        if server is None or rendezvous.nnodes == 1:
            return argv
        words = ("--nnodes", str(rendezvous.nnodes), "--node-rank", str(place.node_rank))
        if server.meets_by is None:
            words += ("--master-addr", rendezvous.addr, "--master-port", str(rendezvous.port))
        else:
            words += (server.meets_by, f"{bracketed(rendezvous.addr)}:{rendezvous.port}")
        if server.only_works is not None and place.node_rank:
            words += (server.only_works,)
        return argv + words

    def variables(self, engine: Engine, rendezvous: Rendezvous, place: Place) -> dict[str, str]:
        return dict.fromkeys(_ADDRESSES, place.endpoint.addr) if place.endpoint.addr is not None else {}

    def serves(self, place: Place, job: Job) -> int | None:
        server = _find(job)
        return _port(job.program, server.port) if server is not None and place.node_rank == 0 else None


ENGINE = _Serve()


def _find(job: Job) -> _Server | None:
    if not isinstance(job, ScriptJob):
        return None
    for server in (_VLLM, _SGLANG):
        if job.form == server.form and job.argv[: len(server.program)] == server.program:
            return server
    return None


def _port(words: Sequence[str], usual: int) -> int:
    """The last `--port` among these words."""
    parts = [part for word in words for part in word.split("=", 1)]
    given = [value for name, value in itertools.pairwise(parts) if name == "--port" and value.isdecimal()]
    return int(given[-1]) if given else usual
