"""LLaMA-Factory: `llamafactory-cli train` starts a bare `torchrun` itself, from variables."""

from __future__ import annotations

import re

from multinode.errors import UsageError
from multinode.job.engines.engine import Engine, EngineKind
from multinode.job.engines.place import JOB_FILE
from multinode.job.job import Job, TrainingJob
from multinode.records.plan import Place, Rendezvous

_PACKAGE = "llamafactory"
# From this release on the node's rank is read from NODE_RANK; before, from RANK (LLaMA-Factory's launcher).
_NODE_RANK_SINCE = (0, 9, 1)


class _LlamaFactory(EngineKind):
    packages = (_PACKAGE,)
    splits_words = True
    assumed = "versions: unknown, so both RANK and NODE_RANK are set, for LLaMA-Factory before 0.9.1"

    def why_not(self, job: Job) -> UsageError | None:
        if isinstance(job, TrainingJob) and job.kind.engine == _PACKAGE:
            return None
        what = f"a {job.kind.title} training job" if isinstance(job, TrainingJob) else "a script"
        return UsageError(
            f"the llamafactory engine needs a LLaMA-Factory YAML; this is {what}",
            hint="use multinode launch train.yaml, or another --engine",
        )

    def argv(
        self, engine: Engine, rendezvous: Rendezvous, place: Place, job: Job, env: dict[str, str]
    ) -> tuple[str, ...]:
        return ("llamafactory-cli", "train", f"{place.run_dir}/{JOB_FILE}")

    def variables(self, engine: Engine, rendezvous: Rendezvous, place: Place) -> dict[str, str]:
        names = ["NODE_RANK", *(["RANK"] if reads_rank(place.packages.get(_PACKAGE)) else [])]
        return {
            "NNODES": str(rendezvous.nnodes),
            **dict.fromkeys(names, str(place.node_rank)),
            "NPROC_PER_NODE": str(place.nproc),
            # Without it, LLaMA-Factory silently ignores NNODES where a node has one GPU, and every node trains alone
            # (LlamaFactory#8729).
            "FORCE_TORCHRUN": "1",
        }


ENGINE = _LlamaFactory()


def reads_rank(version: str | None) -> bool:
    """Whether this release of LLaMA-Factory reads the node's rank from RANK, or might (unknown version)."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version or "")
    return numbers is None or tuple(int(n) for n in numbers.groups()) < _NODE_RANK_SINCE
