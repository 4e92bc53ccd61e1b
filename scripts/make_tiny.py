"""Makes what configs/tiny_sft.yaml trains on: a random Qwen2 of 3.7 M parameters, a tokenizer, and 400 samples.

Nothing is downloaded, and the same bytes come out each time. Where the assets are whole already nothing is done: then
every file has the hash that `complete.json`, written last, has on record.

    python scripts/make_tiny.py [FOLDER [SHAPE]]     (default: assets/tiny tiny)
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from pathlib import Path

SAMPLES = 400
SEED = 20240501
VOCABULARY = 2000
COMPLETE = "complete.json"
RECIPE = {"version": 2, "samples": SAMPLES, "seed": SEED, "vocabulary": VOCABULARY}
DEFAULTS = ("assets/tiny", "tiny")
# What is other than in the model that write_model describes; `wide` has nearly all its parameters in the embedding.
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {},
    "wide": {"vocab_size": 16384, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 1},
    # The 207.6 M parameters of benchmarks/h100.md: half the layers of Qwen2-0.5B, and a smaller vocabulary.
    "h100": {
        "vocab_size": 32000,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 12,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
}

# Qwen2's own chat markers, so that LLaMA-Factory's qwen template fits.
MARKERS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def main() -> None:
    """Make the assets, unless they are there."""
    asked = sys.argv[1:]
    name, shape_name = (*asked, *DEFAULTS[len(asked) :])
    folder, shape = Path(name), SHAPES[shape_name]
    recipe = RECIPE | shape
    if is_complete(folder, recipe):
        print(f"{folder}: complete")
        return
    folder.mkdir(parents=True, exist_ok=True)
    samples = make_samples()
    write_dataset(folder / "data", samples)
    write_tokenizer(folder / "model", samples)
    count = write_model(folder / "model", shape)
    (folder / COMPLETE).write_text(json.dumps({"recipe": recipe, "files": hash_files(folder)}, indent=1) + "\n")
    print(f"{folder}: {count / 1e6:.1f} M parameters, {len(samples)} samples")


def is_complete(folder: Path, recipe: dict[str, int]) -> bool:
    """Whether an earlier run of this recipe ended, and its files are as it left them."""
    try:
        record = json.loads((folder / COMPLETE).read_text())
        return bool(record["recipe"] == recipe and record["files"].items() <= hash_files(folder).items())
    except (FileNotFoundError, ValueError, KeyError):
        return False


def hash_files(folder: Path) -> dict[str, str]:
    """SHA-256 of every file but the record itself, by its path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != COMPLETE)
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def make_samples() -> list[dict[str, str]]:
    """Sums and little sentences: regular enough for a tiny model to learn something in thirty steps."""
    chance = random.Random(SEED)  # noqa: S311 - synthetic data, not a secret
    colours = ["red", "green", "blue", "white", "black", "yellow"]
    things = ["apple", "house", "river", "stone", "cloud", "train", "garden", "letter"]
    samples = []
    for _ in range(SAMPLES):
        a, b = chance.randrange(100), chance.randrange(100)
        colour, thing = chance.choice(colours), chance.choice(things)
        samples.append(
            {
                "instruction": f"The {colour} {thing} costs {a} coins and a ticket costs {b}. What is the sum?",
                "input": "",
                "output": f"The {colour} {thing} and the ticket cost {a + b} coins, because {a} and {b} make {a + b}.",
            }
        )
    return samples


def write_dataset(folder: Path, samples: list[dict[str, str]]) -> None:
    """The samples as LLaMA-Factory reads them: alpaca JSON and its dataset_info.json."""
    folder.mkdir(exist_ok=True)
    (folder / "tiny.json").write_text(json.dumps(samples, indent=1) + "\n")
    (folder / "dataset_info.json").write_text(json.dumps({"tiny": {"file_name": "tiny.json"}}, indent=1) + "\n")


def write_tokenizer(folder: Path, samples: list[dict[str, str]]) -> None:
    """A byte-level BPE tokenizer trained on the samples."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=MARKERS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f"{s['instruction']} {s['output']}" for s in samples), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=MARKERS[2], pad_token=MARKERS[0])
    fast.save_pretrained(folder)


def write_model(folder: Path, shape: dict[str, int]) -> int:
    """A Qwen2 with random weights; returns its parameters."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(SEED)
    usual = {
        "vocab_size": 2048,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config = Qwen2Config(tie_word_embeddings=True, **(usual | shape))
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    return int(sum(parameter.numel() for parameter in model.parameters()))


if __name__ == "__main__":
    main()
