"""JobFiles: the paths of a job on the nodes' disks, by purpose. Names only; reads nothing."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from multinode.errors import UsageError
from multinode.job.code_tree import CodeTree
from multinode.job.job import Job, LlamaFactoryJob, ScriptJob, job_paths, named_paths
from multinode.records.benchmark import Benchmark

_MODELS = ("model_name_or_path", "adapter_name_or_path")
_DATASETS = ("dataset", "eval_dataset")
_DATASET_DIR, _DATASET_LIST = "dataset_dir", "dataset_info.json"
# What a training writes, and where it goes on from; the others of LLaMA-Factory's paths it only reads.
_WRITTEN = ("output_dir", "resume_from_checkpoint", "logging_dir", "cache_dir", "tokenized_path")
_READ = (
    *(*_MODELS, "ref_model", "ref_model_adapters", "reward_model", "reward_model_adapters", "media_dir"),
    "fsdp_config",
)
# Where Hugging Face's datasets keep what they have prepared, unless a variable moves it (its HF_HOME).
_CACHE = "~/.cache/huggingface/datasets"


class JobFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The paths of a job, as it names them."""

    needed: tuple[str, ...] = ()  # must exist on every node
    output: str | None = None
    cache: str | None = None
    compared: tuple[str, ...] = ()  # those of `needed` that must be equal on all nodes
    datasets: tuple[str, ...] = ()  # names of the datasets in dataset_info.json
    model: str | None = None  # directory of the model; None if it comes from a hub

    @property
    def looked_at(self) -> tuple[str, ...]:
        """All paths that a probe checks."""
        others = (path for path in (self.output, self.cache) if path is not None)
        return tuple(dict.fromkeys([*self.needed, *others]))


def job_files(job: Job | Benchmark | None, code: CodeTree | None = None) -> JobFiles:
    """The files of a job but for those that are copied; none where there is no job, or none is known of."""
    found = JobFiles()
    if isinstance(job, LlamaFactoryJob):
        found = _llamafactory_files(job)
    elif isinstance(job, ScriptJob) and job.argv and job.argv[0].endswith(".py"):
        found = JobFiles(needed=job.argv[:1], compared=job.argv[:1])
    if code is None:
        return found
    copied = _copied(found.needed, code)
    return msgspec.structs.replace(
        found,
        needed=tuple(path for path in found.needed if path not in copied),
        compared=tuple(path for path in found.compared if path not in copied),
        model=None if found.model in copied else found.model,
    )


def may_be_paths(job: Job | Benchmark | None) -> tuple[str, ...]:
    """What a job names that is a path where a node has it, and else the name of a model on a hub."""
    return named_paths(job) if isinstance(job, LlamaFactoryJob) else ()


def outside_code(job: LlamaFactoryJob, code: CodeTree, cwd: str, there: Collection[str]) -> dict[str, str]:
    """The keys whose relative paths mean the node's own directory and not the copy of the code, with absolute ones.

    What is written does, so that no checkpoint is in the copy; what is read does if the copy lacks it.

    Args:
        job: the job.
        code: what is copied; the job runs in there.
        cwd: the node's own directory.
        there: paths that the node has in it.
    """
    paths = {*job_paths(job), *there}
    lacking = paths - _copied(paths, code)

    def place(key: str, path: str) -> str:
        is_path = key in _WRITTEN or path in lacking
        return f"{cwd.rstrip('/')}/{path}" if is_path and not path.startswith(("/", "~")) else path

    placed = {}
    config = {_DATASET_DIR: "data", **job.config} if "dataset" in job.config else job.config
    for key in (*_WRITTEN, *_READ, _DATASET_DIR):
        value = config.get(key)
        if isinstance(value, str) and value:
            joined = ",".join(place(key, part.strip()) for part in value.split(","))
            if joined != value:
                placed[key] = joined
    return placed


def require_copied(job: Job | Benchmark, code: CodeTree) -> None:
    """Refuse a script that the job could not find in the copy.

    Raises:
        UsageError: it would not be there.
    """
    for path in job_files(job, code).needed if isinstance(job, ScriptJob) else ():
        if not path.startswith(("/", "~")):
            raise UsageError(
                f"--copy-code: {path} is not among the copied files of {code.source}, where the job runs",
                hint="check whether git ignores it: git status --ignored",
            )


def _copied(paths: Collection[str], code: CodeTree) -> set[str]:
    """Those that the copy has; it has a directory of datasets if it has its list of them."""
    lists = {path: f"{path.rstrip('/')}/{_DATASET_LIST}" for path in paths}
    return {path for path in paths if code.holds(lists[path] if lists[path] in paths else path)}


def _llamafactory_files(job: LlamaFactoryJob) -> JobFiles:
    needed = job_paths(job)
    models = [path for key in _MODELS for path in _names(job.config.get(key)) if path in needed]
    folder = job.config.get("dataset_dir", "data")
    # Synthetic data travel with the plan and are prepared in the run's directory.
    keys = _DATASETS if job.synthetic is None else ()
    datasets = [name for key in keys for name in _names(job.config.get(key))]
    return JobFiles(
        needed=needed,
        output=_text(job.config.get("output_dir")),
        cache=_text(job.config.get("cache_dir")) or (_CACHE if datasets else None),
        compared=tuple(dict.fromkeys([*models, *([folder] if folder in needed else [])])),
        datasets=tuple(dict.fromkeys(datasets)),
        model=models[0] if models and models[0] == job.config.get(_MODELS[0]) else None,
    )


def _names(value: object) -> list[str]:
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else []
    return [part.strip() for part in parts if isinstance(part, str) and part.strip()]


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
