r"""A job that continues a training, in which averaging can pay: text, a base, and a YAML for `multinode tune`.

The model is that of configs/tiny_sft.yaml, 3.7 M parameters, and its text the source of Python's standard library (PSF
License), cut into blocks of 128 tokens. The base is trained on every other file, on one node, at a constant rate; the
job goes on with the other files, and its rate decays to 0. Training a base of 1500 steps takes about ten minutes.

    .venv/bin/python benchmarks/continued_job.py STORE
    multinode lab up --nodes 2 --cores-per-node 1 --rate 300mbit
    multinode tune --hosts lab --workers-per-node 1 --steps 256 --pick 'in fp16' --candidates 2 --budget 45m \
        STORE/job.yaml

benchmarks/averaging-tuned.json has what four tunings measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml
from averaging import python_files, standard_library_root
from command import REPOSITORY, run

_TASK = {
    "stage": "pt",
    "do_train": True,
    "finetuning_type": "full",
    "template": "qwen",
    "cutoff_len": 128,
    "packing": True,
    "preprocessing_num_workers": 1,
    "dataloader_num_workers": 0,
    "overwrite_output_dir": True,
    "logging_steps": 1,
    "report_to": "none",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-3,
    "ddp_timeout": 180,
}
# Enough for three times as many samples as the job below trains on.
_JOB_FILES = 100
# A sample is about a block: `tune` holds out samples.
_SAMPLE_CHARACTERS = 146


def main() -> None:
    """Write the texts, train the base and write the job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, metavar="STORE")
    parser.add_argument("--base-steps", type=int, default=1500)
    options = parser.parse_args()
    store = options.store.resolve()
    (store / "data").mkdir(parents=True, exist_ok=True)
    files = python_files(standard_library_root())
    job_text = "\n".join(map(_read, files[1::2][:_JOB_FILES]))
    begins = range(0, len(job_text), _SAMPLE_CHARACTERS)
    texts = {
        "base": list(map(_read, files[::2])),
        "job": [job_text[begin : begin + _SAMPLE_CHARACTERS] for begin in begins],
    }
    for name, samples in texts.items():
        (store / "data" / f"{name}.json").write_text(json.dumps([{"text": text} for text in samples]))
    described = {name: {"file_name": f"{name}.json", "columns": {"prompt": "text"}} for name in texts}
    (store / "data" / "dataset_info.json").write_text(json.dumps(described))
    base = _task(store, REPOSITORY / "assets/tiny/model", "base") | {
        "max_steps": options.base_steps,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 50,
        "save_strategy": "steps",
        "save_steps": options.base_steps,
        "save_only_model": True,
    }
    _write(store / "base.yaml", base)
    program = (sys.executable, "-m", "llamafactory.cli", "train", str(store / "base.yaml"))
    log = run(program, {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    (store / "base.log").write_text(log)
    job = _task(store, store / "saves/base", "job")
    job |= {"max_steps": 256, "lr_scheduler_type": "linear", "warmup_steps": 10, "save_strategy": "no"}
    _write(store / "job.yaml", job)
    sys.stderr.write(f"{store / 'job.yaml'}\n")


def _read(path: Path) -> str:
    return path.read_text(errors="replace")


def _task(store: Path, model: Path, dataset: str) -> dict[str, Any]:
    given = {"model_name_or_path": str(model), "dataset_dir": str(store / "data"), "dataset": dataset}
    return _TASK | given | {"output_dir": str(store / "saves" / dataset)}


def _write(path: Path, arguments: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(arguments, sort_keys=False))


if __name__ == "__main__":
    main()
