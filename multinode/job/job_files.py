"""JobFiles: what of a job lies on the disks of the nodes, by what it is for. Names only; reads nothing."""

from __future__ import annotations

import msgspec

from multinode.job.job import Job, LlamaFactoryJob, ScriptJob, job_paths
from multinode.records.benchmark import Benchmark

_MODELS = ("model_name_or_path", "adapter_name_or_path")
_DATASETS = ("dataset", "eval_dataset")
# Where Hugging Face's datasets keep what they have prepared, unless a variable moves it (its HF_HOME).
_CACHE = "~/.cache/huggingface/datasets"


class JobFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The paths of a job, as it names them.

    Attributes:
        needed: must be there on every node.
        compared: those of `needed` whose content must be equal on all nodes.
        datasets: names of the datasets, as dataset_info.json has them.
        model: directory of the model; None where it comes from a hub.
    """

    needed: tuple[str, ...] = ()
    output: str | None = None
    cache: str | None = None
    compared: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    model: str | None = None

    @property
    def looked_at(self) -> tuple[str, ...]:
        """All paths that a probe looks at."""
        others = (path for path in (self.output, self.cache) if path is not None)
        return tuple(dict.fromkeys([*self.needed, *others]))


def job_files(job: Job | Benchmark | None) -> JobFiles:
    """The files of a job; none where there is no job, or none is known of."""
    if isinstance(job, LlamaFactoryJob):
        return _llamafactory_files(job)
    if isinstance(job, ScriptJob) and job.argv and job.argv[0].endswith(".py"):
        return JobFiles(needed=job.argv[:1], compared=job.argv[:1])
    return JobFiles()


def _llamafactory_files(job: LlamaFactoryJob) -> JobFiles:
    needed = job_paths(job)
    models = [path for key in _MODELS for path in _names(job.config.get(key)) if path in needed]
    folder = job.config.get("dataset_dir", "data")
    # Synthetic data travel with the plan, and are prepared in the run's directory.
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
    """A list, or a text with commas between."""
    parts = value.split(",") if isinstance(value, str) else value if isinstance(value, list) else []
    return [part.strip() for part in parts if isinstance(part, str) and part.strip()]


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None
