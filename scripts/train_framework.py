"""Trains, contrasts, predicts and sweeps a tiny model with a framework on two virtual nodes.

python scripts/train_framework.py NAME PYTHON     (PYTHON has the framework; scripts/train-framework makes it)
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_STEPS = 8
_MODEL, _DATA = "assets/tiny/model", "assets/tiny/data/tiny.json"
_ABSENT = "/no/such/data.json"
# Unless it is told to use CPUs, accelerate has every worker on a machine without a GPU train alone.
_ENV = ("--env", "DO_NOT_TRACK=1", "--env", "ACCELERATE_USE_CPU=true")
# What all three call alike.
_ALIKE: dict[str, Any] = {
    "learning_rate": 1e-3,
    "max_steps": 60,
    "logging_steps": 1,
    "save_strategy": "no",
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": False,
}
_TRAINER = _ALIKE | {"per_device_train_batch_size": 2, "max_length": 128, "report_to": "none"}


def main() -> None:
    """Check and train on a lab; end with what went wrong."""
    name, python = sys.argv[1:]
    subprocess.run([sys.executable, "scripts/make_tiny.py"], check=True)
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="train-framework-") as folder:
        _multinode("lab", "up", "--nodes", "2", "--slots", "1", "--python", python)
        try:
            _train(name, python, Path(folder))
        finally:
            _multinode("lab", "down", "--force")


def _train(name: str, python: str, folder: Path) -> None:
    command = _COMMANDS[name]
    checked = _document("check", "--hosts", "lab", "--json", "--", *command(folder, _ABSENT))
    errors = {one["check"] for one in checked["findings"] if one["severity"] == "error"}
    if "paths" not in errors:
        sys.exit(f"{name}: check found {sorted(errors)}, not that {_ABSENT} is missing")
    options = ("--hosts", "lab", "--set", f"max_steps={_STEPS}", *_ENV, "--json")
    run = _document("launch", *options, "--", *command(folder, _DATA))
    if run["status"] != "succeeded":
        sys.exit(f"{name}: {run['run_id']} {run['status']}: {json.dumps(run['first_failure'], indent=1)}")
    summary = run["summary"]
    first, last = summary["first_loss"], summary["last_loss"]
    trained = (run["world_size"], summary["strategy"], summary["steps"], last < first)
    if trained != (2, "DDP", _STEPS, True):
        sys.exit(f"{name}: workers, strategy, steps and whether the loss fell: {trained}")
    versions = ", ".join(f"{package} {version}" for package, version in _versions(name, python).items())
    print(f"{versions}: {_STEPS} steps of 2 workers on 2 nodes under {run['engine']}, loss {first:.3f} to {last:.3f}")
    _compare(name, command(folder, _DATA))


def _compare(name: str, command: tuple[str, ...]) -> None:
    """One node against two, the same at another rate, and two batch sizes on one node."""
    options = ("--hosts", "lab", "--no-check", *_ENV, "--json")
    contrast = _document("contrast", *options, "--steps", str(_STEPS), "--", *command)
    print(f"{name}: contrast: {contrast['verdict']['message']}")
    predicted = _document("predict", "last", "--link", "100mbit", "--nodes", "2", "--json")
    rates = predicted["scenarios"][0]["samples_per_s"]
    print(f"{name}: predict: {rates['value']:.3g} samples/s at 100 Mbit/s ({rates['low']:.3g} to {rates['high']:.3g})")
    batch = "micro_batch_size" if name == "axolotl" else "per_device_train_batch_size"
    swept = _document(
        "sweep", *options, "--nodes", "1", "--grid", f"{batch}=1,2", "--steps", str(_STEPS), "--", *command
    )
    cells = {cell["varied"][batch]: (cell["state"], cell["samples_per_s"].get("value")) for cell in swept["cells"]}
    print(f"{name}: sweep: {cells}")
    if {state for state, _ in cells.values()} != {"measured"}:
        sys.exit(f"{name}: not every cell was measured")


def _trl(folder: Path, data: str) -> tuple[str, ...]:
    # Of its own: the training writes into the other.
    path = folder / "data/trl.jsonl"
    path.parent.mkdir(exist_ok=True)
    rows = json.loads(Path(_DATA).read_text())
    path.write_text("\n".join(json.dumps({"prompt": row["instruction"], "completion": row["output"]}) for row in rows))
    own: dict[str, Any] = {
        "model_name_or_path": _MODEL,
        "dataset_name": str(path.parent) if data == _DATA else data,
        "dtype": "float32",
    }
    config = _written(folder / "trl.yaml", _TRAINER | own | {"use_cpu": True, "bf16": False})
    return ("trl", "sft", "--config", config, "--output_dir", str(folder / "out"), "--run_name", "007")


def _swift(folder: Path, data: str) -> tuple[str, ...]:
    own: dict[str, Any] = {
        "model": _MODEL,
        "model_type": "qwen2",
        "template": "qwen",
        "dataset": data,
        "tuner_type": "full",
    }
    own |= {"torch_dtype": "float32", "split_dataset_ratio": 0, "use_hf": True, "output_dir": str(folder / "out")}
    config = _TRAINER | own | {"dataset_num_proc": 1, "dataloader_num_workers": 0}
    return ("swift", "sft", *(word for key, value in config.items() for word in (f"--{key}", str(value))))


def _axolotl(folder: Path, data: str) -> tuple[str, ...]:
    own: dict[str, Any] = {
        "base_model": _MODEL,
        "sequence_len": 256,
        "micro_batch_size": 2,
        "num_epochs": 1,
        "optimizer": "adamw_torch",
    }
    own |= {"datasets": [{"path": data, "ds_type": "json", "type": "alpaca"}], "output_dir": str(folder / "out")}
    own |= {"dataset_prepared_path": str(folder / "prepared"), "special_tokens": {"pad_token": "<|endoftext|>"}}
    # Where there is no GPU, it loads the model to GPU 0 all the same, unless the memory of the devices is given.
    own |= {"bf16": False, "max_memory": {"cpu": "8GiB"}}
    return ("axolotl", "train", _written(folder / "axolotl.yaml", _ALIKE | own), "--seed", "7", "--no-load-in-8bit")


_COMMANDS: Mapping[str, Callable[[Path, str], tuple[str, ...]]] = {"axolotl": _axolotl, "swift": _swift, "trl": _trl}


def _written(path: Path, config: Mapping[str, Any]) -> str:
    # JSON is YAML.
    path.write_text(json.dumps(config))
    return str(path)


def _versions(name: str, python: str) -> dict[str, str]:
    program = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    )
    package = "ms-swift" if name == "swift" else name
    argv = [python, "-c", program, package, "torch", "transformers", "accelerate"]
    found: dict[str, str] = json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)
    return found


def _document(*words: str) -> dict[str, Any]:
    done = _multinode(*words, check=False)
    if not done.stdout:
        sys.exit(f"multinode {' '.join(words)} printed no document")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def _multinode(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "multinode", *words], check=check, stdout=subprocess.PIPE, text=True)


if __name__ == "__main__":
    main()
