"""JobEnvironment: what stands around a job on every node, whatever the job is: variables and a prelude. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from multinode.cluster.cluster import Cluster
from multinode.cluster.hostfile import check_variable
from multinode.errors import UsageError

_THREADS = "OMP_NUM_THREADS"


class JobEnvironment(msgspec.Struct, frozen=True, kw_only=True):
    """Variables and setup commands of a job, the same on every node.

    Attributes:
        env: variables; they win over the hostfile's.
        forwarded: names among them whose values come from the controller's own environment, and are never shown.
        prelude: shell text that runs before the job, in the job's shell; None is none.
    """

    env: dict[str, str] = {}
    forwarded: tuple[str, ...] = ()
    prelude: str | None = None


def parse_job_environment(variables: Iterable[str], prelude: str | None, environ: Mapping[str, str]) -> JobEnvironment:
    """From `NAME=VALUE` and `NAME`, which is looked up in `environ`; the last of a name counts.

    Raises:
        UsageError: one is neither, or a name is not set here.
    """
    env: dict[str, str] = {}
    forwarded: dict[str, None] = {}
    for text in variables:
        name, equals, value = text.partition("=")
        if not check_variable(name):
            # The text may be a value that lost its name, so it is not repeated.
            raise UsageError("--env: this is neither NAME nor NAME=VALUE", hint="for example --env HF_TOKEN")
        forwarded.pop(name, None)
        if not equals:
            if name not in environ:
                raise UsageError(
                    f"--env {name}: it is not set here, so there is nothing to forward",
                    hint=f"export {name}=..., or --env {name}=VALUE",
                )
            value = environ[name]
            forwarded[name] = None
        if "\0" in value:
            raise UsageError(f"--env {name}: the value holds a NUL character")
        env[name] = value
    text = (prelude or "").strip()
    if "\0" in text:
        raise UsageError("--setup holds a NUL character")
    return JobEnvironment(env=env, forwarded=tuple(forwarded), prelude=text or None)


def with_same_threads(environment: JobEnvironment, cluster: Cluster, workers: Sequence[int]) -> JobEnvironment:
    """One thread per worker for runs that are to be compared, unless the user or the hostfile says how many.

    torchrun gives each of several workers one thread of OpenMP, and one that is alone on its node as many as there are
    cores: the same worker would compute differently (torch.distributed.run, `OMP_NUM_THREADS`).

    Args:
        environment: of all runs.
        cluster: their nodes.
        workers: on a node, of each run.
    """
    said = _THREADS in environment.env or any(_THREADS in node.env for node in cluster.nodes)
    if said or max(workers, default=1) == 1:
        return environment
    return msgspec.structs.replace(environment, env=environment.env | {_THREADS: "1"})
