"""Trainings of LLaMA-Factory in the GPU report: the rows of benchmarks/h100.md, and the job that is predicted."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# As their records in tests/gpu/h100 say: settings of the engine, `auto` what LLaMA-Factory fills in.
_ENGINE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": "auto"},
}
_ZERO: dict[int, dict[str, Any]] = {
    2: {"reduce_bucket_size": 20_000_000, "allgather_bucket_size": 20_000_000, "reduce_scatter": True},
    3: {
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_reuse_distance": 1_000_000_000,
    },
}


def assets(shape: str) -> Path:
    """Model, tokenizer and samples of a shape of scripts/make_tiny.py, made if need be."""
    folder = ROOT / "assets" / shape
    subprocess.run([sys.executable, ROOT / "scripts" / "make_tiny.py", folder, shape], cwd=ROOT, check=True)
    return folder


def with_settings(*job: str, **settings: object) -> tuple[str, ...]:
    """A job, such as its YAML, with other values of its keys, as `launch` takes it."""
    return (*job, *(word for key, value in settings.items() for word in ("--set", f"{key}={value}")))


def zero_json(folder: Path, stage: int, *, overlap: bool) -> Path:
    """DeepSpeed's configuration of a stage."""
    zero = {"stage": stage, "contiguous_gradients": True, "overlap_comm": overlap, **_ZERO[stage]}
    path = folder / f"zero{stage}{'-overlap' if overlap else ''}.json"
    path.write_text(json.dumps(_ENGINE | {"zero_optimization": zero}))
    return path


def h100_rows(folder: Path, model: Path, steps: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each row of LLaMA-Factory's table in benchmarks/h100.md: its name, and the job.

    Args:
        folder: for DeepSpeed's configurations.
        model: what `assets` made; of the shape `h100` it is the page's.
        steps: of each training.
    """
    common: dict[str, object] = {
        "model_name_or_path": model / "model",
        "dataset_dir": model / "data",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "cutoff_len": 512,
        "max_samples": 100,
        "max_steps": steps,
        "bf16": "true",
    }
    lora = {"finetuning_type": "lora", "lora_rank": 8}
    yield "LoRA, rank 8", with_settings("configs/tiny_sft.yaml", **common, **lora)
    for stage in (2, 3):
        zero = {"finetuning_type": "full", "deepspeed": zero_json(folder, stage, overlap=True)}
        yield f"full, ZeRO-{stage} with overlap_comm", with_settings("configs/tiny_sft.yaml", **common, **zero)


def main_job(folder: Path, model: Path) -> tuple[str, ...]:
    """The job whose step time is predicted: LoRA SFT with ZeRO-2 of what `assets` made."""
    return with_settings(
        "configs/tiny_sft.yaml",
        model_name_or_path=model / "model",
        dataset_dir=model / "data",
        finetuning_type="lora",
        deepspeed=zero_json(folder, 2, overlap=False),
    )
