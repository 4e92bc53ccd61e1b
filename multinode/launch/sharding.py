"""How a job shards its training: what its checkpoints consist of, and which settings save them on every node. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from multinode.decoding import decode_json
from multinode.job.deepspeed import DeepSpeedEdit, edit_deepspeed, parse_deepspeed
from multinode.job.engines.accelerate import fsdp_version
from multinode.job.engines.engine import Engine, choose_engine
from multinode.job.job import Job, change_arguments
from multinode.job.restrictions import gradient_sender, node_groups_of
from multinode.launch.checkpoints import WHOLE, Layout

# Without it, DeepSpeed saves what all ranks have in common on node 0 only.
_LOCAL_STORAGE = ("checkpoint", "use_node_local_storage")
_SHARDED = "SHARDED_STATE_DICT"


def library_of(job: Job, engine: Engine | None) -> str | None:
    """What shards the training, in words; None if every worker has all of it."""
    engine = engine or choose_engine(job)
    return gradient_sender(job, engine) or engine.kind.sharded_by


def layout_of(job: Job, engine: Engine | None = None) -> Layout | str:
    """Which files the Trainer's checkpoints of a job consist of, or why that is unknown."""
    library = library_of(job, engine) or _library_of_options(job)
    if library is None:
        return WHOLE
    if "FSDP" in library:
        return _layout_of_fsdp(job, engine)
    config = parse_deepspeed(job.deepspeed_text)
    if library != "DeepSpeed" or (config is None and not _names_deepspeed(job)):
        return f"it is unknown which {library} checkpoint is complete"
    if config is None:
        return "its DeepSpeed settings are not in a JSON file on this machine: name one, as in `deepspeed: FILE`"
    groups = node_groups_of(job, {}, {})
    reasons = (
        (config.stage == 0, "its DeepSpeed JSON has no ZeRO stage: it is unknown which checkpoint is complete"),
        (config.offload_optimizer == "nvme", "its optimizer state is on NVMe, whose files are not checked"),
        (groups is not None, f"{groups}: it is unknown which rank saves which shard"),
    )
    reason = next((reason for applies, reason in reasons if applies), None)
    if reason is not None:
        return reason
    saves_scheduler = "scheduler" not in _settings(job)
    return Layout(library="DeepSpeed", stage=config.stage, saves_scheduler=saves_scheduler)


def _layout_of_fsdp(job: Job, engine: Engine | None) -> Layout | str:
    """`fully_shard` saves by default what torch.distributed.checkpoint lists in its metadata."""
    accelerate = engine.accelerate if engine is not None else {}
    # Its launcher decides over the Trainer's options.
    given = (job.trainer_options if accelerate.get("distributed_type") != "FSDP" else accelerate).get("fsdp_config")
    if isinstance(given, str):
        try:
            given = decode_json(given, dict[str, Any])
        except msgspec.MsgspecError:
            return "its fsdp_config names a file: put the settings of that file into the YAML"
    groups = node_groups_of(job, accelerate, {})
    saved = (accelerate.get("fsdp_config") or {}).get("fsdp_state_dict_type", _SHARDED)
    reasons = (
        (
            fsdp_version(given) == 1,
            "it is unknown which checkpoint of FSDP 1 is complete: use `fsdp_config: {version: 2}`",
        ),
        (
            str(saved).upper() != _SHARDED,
            f"it is unknown which checkpoint is complete with fsdp_state_dict_type: {saved}",
        ),
        (groups is not None, f"{groups}: it is unknown which rank saves which shard"),
    )
    reason = next((reason for applies, reason in reasons if applies), None)
    return Layout(library="FSDP") if reason is None else reason


def saved_on_each_node(job: Job) -> Job:
    """The job, so that each node saves on its own disk all that its ranks load; the user's own settings are kept.

    Not for nodes that share the directory: they would write the same files at the same time (DeepSpeed#5452).
    """
    if "save_on_each_node" not in job.arguments:
        job = change_arguments(job, {"save_on_each_node": True})
    group, key = _LOCAL_STORAGE
    text = job.deepspeed_text
    if text is None or not job.arguments.get("deepspeed") or key in (_settings(job).get(group) or {}):
        return job
    edit = DeepSpeedEdit(path=_LOCAL_STORAGE, value=True)
    return msgspec.structs.replace(job, deepspeed_text=edit_deepspeed(text, (edit,)))


def output_dir_of(job: Job) -> str | None:
    """Where the Trainer saves checkpoints; None if the job does not name it as the Trainer does."""
    folder = job.trainer_options.get("output_dir")
    return folder if isinstance(folder, str) else None


def _library_of_options(job: Job) -> str | None:
    return "FSDP" if job.trainer_options.get("fsdp") else "DeepSpeed" if _names_deepspeed(job) else None


def _names_deepspeed(job: Job) -> bool:
    return job.deepspeed_text is not None or bool(job.trainer_options.get("deepspeed"))


def _settings(job: Job) -> dict[str, Any]:
    return decode_json(job.deepspeed_text or "{}", dict[str, Any])
