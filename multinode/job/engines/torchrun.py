"""torchrun: starts the workers of a script, of LLaMA-Factory, or of a benchmark."""

from __future__ import annotations

import msgspec

from multinode.cluster.quoting import Command, bracketed
from multinode.job.engines.engine import Engine, EngineKind
from multinode.job.engines.place import node_command, program_words, run_module
from multinode.job.job import Job
from multinode.records.benchmark import Benchmark, DeviceTest
from multinode.records.plan import Place, Rendezvous

_RUN = "torch.distributed.run"


class _Torchrun(EngineKind):
    def argv(
        self, engine: Engine, rendezvous: Rendezvous, place: Place, job: Job, env: dict[str, str]
    ) -> tuple[str, ...]:
        module = "torch.distributed.launch" if engine.passes_local_rank else _RUN
        return _torchrun(rendezvous, place, program_words(place, job), module)


ENGINE = _Torchrun()


def benchmark_command(
    rendezvous: Rendezvous, place: Place, test: Benchmark, agent: str | None, env: dict[str, str]
) -> Command:
    """A benchmark on one node: torchrun on the agent's own archive, with the request in the environment.

    `agent` is the archive's path on the node; None is its name, for a plan that nothing was asked for.
    """
    request = msgspec.json.encode(msgspec.to_builtins(test) | {"addr": place.endpoint.addr}).decode()
    program = "devices" if isinstance(test, DeviceTest) else "collectives"
    argv = _torchrun(rendezvous, place, (agent or "agent.pyz", program))
    return node_command(rendezvous, place, argv, {}, env | {"MULTINODE_REQUEST": request})


def _torchrun(rendezvous: Rendezvous, place: Place, program: tuple[str, ...], module: str = _RUN) -> tuple[str, ...]:
    """A script under torch.distributed.run with a static rendezvous.

    Static, by IP: c10d with an IP endpoint fails if the hostname resolves to loopback (docs/adr/0005). torchrun joins
    address and port, so an IPv6 address needs brackets; in MASTER_ADDR it does not.
    """
    return run_module(
        place,
        module,
        f"--nnodes={rendezvous.nnodes}",
        f"--node-rank={place.node_rank}",
        f"--nproc-per-node={place.nproc}",
        f"--master-addr={bracketed(rendezvous.addr)}",
        f"--master-port={rendezvous.port}",
        *program,
    )
