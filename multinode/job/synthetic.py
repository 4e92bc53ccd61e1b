"""Synthetic data for a LLaMA-Factory training: every sample has exactly `cutoff_len` tokens; no dataset is read.

Pre-training (`stage: pt`) cuts the tokens of a batch of lines into blocks of cutoff_len. A few lines travel with the
plan, and dataset_info.json repeats them. Written for LLaMA-Factory 0.9.x.
"""

from __future__ import annotations

import json
from math import ceil

import msgspec

from multinode.errors import JobError, UsageError
from multinode.job.job import Job, Synthetic, TrainingJob, benchmark_job, override_job
from multinode.job.settings import PLAIN_STAGES
from multinode.records.plan import PlanFile

DATASET = "synthetic"
"""Name of the dataset."""

_FOLDER = "synthetic"
_TEXT = "text.txt"
# Keys that select the data and how samples are made.
_DATA = (
    "dataset",
    "dataset_dir",
    "eval_dataset",
    "eval_on_each_dataset",
    "interleave_probs",
    "max_samples",
    "media_dir",
    "mix_strategy",
    "neat_packing",
    # With `packing` in the YAML, LLaMA-Factory shortens the length by a token; without it, stage pt packs anyway.
    "packing",
    "streaming",
    "tokenized_path",
    "val_size",
)
# Keys of other stages, or keys that would split the few lines or wait for them differently.
_BESIDES = (
    "compute_accuracy",
    "data_shared_file_system",
    "mask_history",
    "preprocessing_num_workers",
    "train_on_prompt",
)
# Keys of stage sft that change its computation.
_SFT_ONLY = ("use_asft_loss", "use_dft_loss", "use_eaft_loss", "use_hyper_parallel")

# A word is at least one token unless the tokenizer merges words, which the margin allows for. More than 1.6 tokens per
# word make two samples of a row, which does no harm.
_WORDS_A_TOKEN = 1.25
_LONGEST_LINE = 512
_LINES = 16
# Prepared in seconds; a longer training goes through the data several times.
_MOST_TOKENS, _MOST_ROWS = 1 << 22, 1 << 13
# Common words: one token each in nearly every vocabulary.
_VOCABULARY = (
    "the of and to in that is was for on are with as be at one have this from by not but some what there we can out "
    "other were all your when up use word how said an each she which do their time if will way about many then them "
    "would write like so these her long make thing see him two has look more day could go come did my sound no most "
    "number who over know water than call first people may down side been now find any new work part take get place "
    "made live where after back little only round man year came show every good me give our under name very through "
    "just form much great think say help low line before turn cause same mean differ move right boy old too does tell"
)
# A full-period generator (Numerical Recipes); the data are the same on every node and in every run.
_MULTIPLIER, _INCREMENT, _MODULUS = 1664525, 1013904223, 1 << 32


def with_synthetic(job: Job, *, rows: int | None = None) -> TrainingJob:
    """Return a copy of the training job that uses synthetic data, does not evaluate, and writes no output.

    Call this function after all other changes to the job, because multinode does not check later changes.

    `rows` is the minimum number of samples. If None, it is derived from `max_steps` and the workers of the plan.

    Raises:
        UsageError: the job is a script. Scripts read their own data.
        JobError: the stage is not supported, cutoff_len is invalid, `--set` sets the data, or `max_steps` is missing.
    """
    if not isinstance(job, TrainingJob) or not job.kind.makes_data:
        what = f"a {job.kind.title} training job" if isinstance(job, TrainingJob) else "a script"
        raise UsageError(
            f"--synthetic generates data for a LLaMA-Factory YAML; this is {what}",
            hint="use the script's own arguments" if what == "a script" else "name a small dataset in the YAML",
        )
    _refuse(job)
    if rows is None and _steps(job) == 0:
        raise JobError(
            f"{job.config_path}: synthetic data has no epochs, and max_steps is not set",
            hint="use --set max_steps=50",
        )
    kept = {key: value for key, value in job.config.items() if key not in {*_DATA, *_BESIDES}}
    dropped = [key for key in job.config if key not in kept]
    batch = {"stage": "pt", "dataset": DATASET, "preprocessing_batch_size": _lines_a_row(_length(job))}
    made = override_job(benchmark_job(msgspec.structs.replace(job, config=kept)), batch)
    return msgspec.structs.replace(
        made, synthetic=Synthetic(rows=rows), overridden=tuple(dict.fromkeys([*made.overridden, *dropped]))
    )


def synthetic_files(job: TrainingJob, data: Synthetic, workers: int) -> tuple[PlanFile, ...]:
    """The lines and their dataset_info.json."""
    length = _length(job)
    lines = _lines_a_row(length)
    entry = {
        "file_name": _TEXT,
        "columns": {"prompt": "text"},
        "num_samples": _rows(job, data, workers) * lines,
    }
    return (
        PlanFile(path=f"{_FOLDER}/dataset_info.json", text=json.dumps({DATASET: entry}, indent=2) + "\n"),
        PlanFile(path=f"{_FOLDER}/{_TEXT}", text=_text(ceil(length * _WORDS_A_TOKEN / lines))),
    )


def synthetic_paths(run_dir: str) -> dict[str, str]:
    """Where the job's YAML finds the files on a node, by key."""
    return {"dataset_dir": f"{run_dir}/{_FOLDER}"}


def synthetic_environment(run_dir: str) -> dict[str, str]:
    """Variables that keep the cache of Hugging Face datasets in the run's directory."""
    return {"HF_DATASETS_CACHE": f"{run_dir}/{_FOLDER}/cache"}


def _refuse(job: TrainingJob) -> None:
    stage = job.config.get("stage", job.settings.stage)
    if job.settings.stage not in PLAIN_STAGES:
        raise JobError(
            f"{job.config_path}: --synthetic supports the stages sft and pt; this one is {stage}",
            hint="measure the same model and method with --set stage=sft",
        )
    alone = next((key for key in _SFT_ONLY if job.config.get(key)), None)
    if alone is not None:
        raise JobError(
            f"{job.config_path}: --synthetic trains in stage pt, which does not support {alone}",
            hint=f"measure without it: --set {alone}=false",
        )
    named = next((key for key in _DATA if key in job.overridden and job.config.get(key) not in (None, DATASET)), None)
    if named is not None:
        raise JobError(f"--set {named} chooses the data, but --synthetic generates it", hint="use only one of them")
    _length(job)


def _length(job: TrainingJob) -> int:
    length = job.settings.cutoff_len
    if length is None:
        raise JobError(
            f"{job.config_path}: cutoff_len: {json.dumps(job.config['cutoff_len'])} is not a number of tokens",
            hint="use --set cutoff_len=2048",
        )
    return length


def _rows(job: TrainingJob, data: Synthetic, workers: int) -> int:
    settings = job.settings
    batch = (settings.per_device_train_batch_size or 0) * (settings.gradient_accumulation_steps or 0)
    step = batch * workers or 1
    if data.rows is not None:
        return ceil(data.rows / step) * step
    most = min(_MOST_TOKENS // _length(job), _MOST_ROWS) // step
    return max(min(_steps(job) or most, most), 1) * step


def _lines_a_row(length: int) -> int:
    return ceil(length * _WORDS_A_TOKEN / _LONGEST_LINE)


def _text(words: int) -> str:
    state, lines, vocabulary = 1, [], _VOCABULARY.split()
    for _ in range(_LINES):
        line = []
        for _ in range(words):
            state = (state * _MULTIPLIER + _INCREMENT) % _MODULUS
            line.append(vocabulary[(state >> 16) % len(vocabulary)])
        lines.append(" ".join(line))
    return "\n".join(lines) + "\n"


def _steps(job: TrainingJob) -> int:
    steps = job.config.get("max_steps")
    return steps if type(steps) is int and steps > 0 else 0
