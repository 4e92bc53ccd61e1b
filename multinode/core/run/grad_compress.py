"""Gradient compression as it is asked for: what can be compressed, and in which words the workers are told.

What then happens in a worker is the instrumentation's (agent/instrument/multinode_compress.py).
"""

from __future__ import annotations

from multinode.core.job.job import Job, LlamaFactoryJob
from multinode.core.run.engines import Engine
from multinode.errors import UsageError

__all__ = ["compression_environment", "refuse_compression"]

_KINDS = ("fp16", "bf16")
# Read by the instrumentation.
_VARIABLE = "MULTINODE_GRAD_COMPRESS"
# What accelerate's configuration calls the ways in which not DDP sends the gradients.
_NOT_DDP = frozenset({"DEEPSPEED", "FSDP", "MEGATRON_LM"})


def compression_environment(kind: str | None) -> dict[str, str]:
    """Variables that tell a node's workers; none where nothing is to be compressed."""
    return {} if kind is None else {_VARIABLE: kind}


def refuse_compression(kind: str, job: Job, engine: Engine, *, profile: bool) -> None:
    """Refuse what is known beforehand not to work; what shows in the workers alone, their notes say.

    Args:
        kind: what was asked for.
        job: the training.
        engine: what starts its workers.
        profile: whether the workers are instrumented.

    Raises:
        UsageError: there is no such compression, or not DDP sends the gradients, or nobody could ask it to.
    """
    option = f"--grad-compress {kind}"
    if kind.lower() == "powersgd":
        raise UsageError(
            f"{option}: PowerSGD aborts on gloo, where its collectives of two buckets cross",
            hint="--grad-compress fp16 or bf16 halves fp32 gradients",
        )
    if kind not in _KINDS:
        raise UsageError(f"{option}: there is no such compression", hint=f"one of {', '.join(_KINDS)}")
    if not profile:
        raise UsageError(
            f"{option} needs the instrumentation, which --no-profile leaves out",
            hint="leave --no-profile out: what it records also tells whether gradients were compressed",
        )
    sender = _sender(job, engine)
    if sender is not None:
        raise UsageError(
            f"{option}: it works on DDP's gradients, and {sender} sends those of this job",
            hint="DeepSpeed has communication_data_type in its JSON, FSDP the reduce dtype of its mixed precision; or "
            "train under DDP: --set deepspeed=null, --set fsdp=null",
        )


def _sender(job: Job, engine: Engine) -> str | None:
    """What sends the gradients in DDP's place, by the job's own files; None where these name nothing else."""
    if isinstance(job, LlamaFactoryJob):
        if job.config.get("deepspeed"):
            return "DeepSpeed"
        if job.config.get("fsdp"):
            return "FSDP"
    kind = engine.accelerate.get("distributed_type")
    return f"accelerate with {kind}" if kind in _NOT_DDP else None
