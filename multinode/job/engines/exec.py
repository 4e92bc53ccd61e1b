"""exec: any program, started once on each node, with its place in the cluster in the environment."""

from __future__ import annotations

from multinode.errors import UsageError
from multinode.job.engines.engine import Engine, EngineKind
from multinode.job.engines.place import program_words
from multinode.job.job import Job, ScriptJob, TrainingJob
from multinode.records.plan import Place, Rendezvous


class _Exec(EngineKind):
    starts_workers = False

    def why_not(self, job: Job) -> UsageError | None:
        if not isinstance(job, TrainingJob):
            return None
        return UsageError(
            f"the exec engine runs a program; this is a {job.kind.title} training job",
            hint="remove --engine, or put the program after --",
        )

    def argv(
        self, engine: Engine, rendezvous: Rendezvous, place: Place, job: Job, env: dict[str, str]
    ) -> tuple[str, ...]:
        return job.argv if isinstance(job, ScriptJob) else program_words(place, job)

    def variables(self, engine: Engine, rendezvous: Rendezvous, place: Place) -> dict[str, str]:
        # The names are torchrun's. RANK, LOCAL_RANK and WORLD_SIZE belong to a worker: whoever starts the workers sets
        # them.
        return {
            "NNODES": str(rendezvous.nnodes),
            "NODE_RANK": str(place.node_rank),
            "NPROC_PER_NODE": str(place.nproc),
        }


ENGINE = _Exec()
