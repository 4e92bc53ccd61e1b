"""refuse_averaging: what of a job is known beforehand not to be averaged between nodes. Pure."""

from __future__ import annotations

from multinode.errors import UsageError
from multinode.job.job import Job, LlamaFactoryJob
from multinode.records.averaging import Averaging


def refuse_averaging(
    averaging: Averaging, job: Job, *, sender: str | None, grad_compress: str | None, profile: bool
) -> None:
    """Refuse what is known beforehand not to work; the rest the workers refuse before their first step.

    Args:
        averaging: what is asked for.
        job: what is trained.
        sender: what sends the gradients in DDP's place; None is DDP, or unknown.
        grad_compress: what `--grad-compress` asks for.
        profile: whether the workers get the instrumentation.

    Raises:
        UsageError: the job cannot be averaged between nodes.
    """
    option = averaging.option
    if not profile:
        raise UsageError(f"{option} needs the instrumentation, which --no-profile leaves out")
    if grad_compress is not None:
        raise UsageError(
            f"{option}: gradients stay on their node, and --grad-compress {grad_compress} would compress them there",
            hint="--sync-dtype fp16 is of what is sent between nodes",
        )
    if sender is not None:
        raise UsageError(
            f"{option}: it works with DDP, and {sender} trains this job",
            hint="train under DDP: --set deepspeed=null, --set fsdp=null",
        )
    reason = _why_not(job) if isinstance(job, LlamaFactoryJob) else None
    if reason is not None:
        raise UsageError(f"{option}: {reason[0]}", hint=reason[1])


def _why_not(job: LlamaFactoryJob) -> tuple[str, str] | None:
    """Why a LLaMA-Factory job cannot be averaged, and what to do; None where it can."""
    config = job.config
    if config.get("fp16") is True:
        return "fp16 scales its loss, and a node whose gradients overflow would leave out a step alone", "bf16: true"
    optim = str(config.get("optim") or "")
    layered = [name for name in ("galore_layerwise", "apollo_layerwise", "use_badam") if config.get(name) is True]
    if layered or "lomo" in optim or "layerwise" in optim:
        return (
            f"{layered[0] if layered else optim} updates parameters one by one, without an optimizer step",
            "another optimizer",
        )
    return None
