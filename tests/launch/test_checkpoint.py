from __future__ import annotations

from typing import Any

import pytest

from multinode.launch.restart import Checkpoint, choose_checkpoint, find_gap

FILES: dict[str, str | None] = dict.fromkeys(
    ("trainer_state.json", "optimizer.pt", "scheduler.pt", "adapter_model.safetensors", "rng_state_1.pth")
)


def checkpoint(*, without: str = "", files: dict[str, str | None] | None = None, **changed: Any) -> Checkpoint:
    kept = {name: problem for name, problem in FILES.items() if name != without} | (files or {})
    return Checkpoint(**{"name": "checkpoint-20", "step": 20, "files": kept, **changed})


@pytest.mark.parametrize(
    ("seen", "ranks", "world_size", "gap"),
    [
        (checkpoint(), (1,), 2, None),
        (None, (1,), 2, "it is missing"),
        (checkpoint(), (0, 1), 2, "rng_state_0.pth is missing"),
        # A world size that was another one then: there is no state for the new rank.
        (checkpoint(), (1, 2), 4, "rng_state_2.pth is missing"),
        (checkpoint(), (0,), 1, "rng_state.pth is missing"),
        (checkpoint(files={"rng_state.pth": None}), (0,), 1, None),
        (checkpoint(step=19), (1,), 2, "trainer_state.json is of step 19"),
        (checkpoint(step=None), (1,), 2, "trainer_state.json is of step None"),
        (checkpoint(without="adapter_model.safetensors"), (1,), 2, "its weights are missing"),
        (checkpoint(without="adapter_model.safetensors", files={"pytorch_model.bin": None}), (1,), 2, None),
        # What a mixed precision keeps is not always there; where it is, it is read.
        (checkpoint(files={"scaler.pt": "it is empty"}), (1,), 2, "scaler.pt: it is empty"),
        (checkpoint(shards=("a.safetensors",)), (1,), 2, "a.safetensors is missing"),
    ],
)
def test_what_a_checkpoint_lacks(
    seen: Checkpoint | None, ranks: tuple[int, ...], world_size: int, gap: str | None
) -> None:
    assert find_gap(seen, ranks, world_size) == gap


def test_a_checkpoint_that_one_node_lacks_is_skipped_by_name() -> None:
    whole = checkpoint(files={"rng_state_0.pth": None})
    newer = checkpoint(name="checkpoint-40", step=40, files={"rng_state_0.pth": None})
    chosen = choose_checkpoint({"a": (newer, whole), "b": (whole,)}, {"a": (0,), "b": (1,)})
    assert (chosen.name, chosen.step) == ("checkpoint-20", 20)
    assert chosen.skipped == {"checkpoint-40": "b: it is missing"}


def test_other_ranks_need_no_random_numbers_of_those_that_saved() -> None:
    assert find_gap(checkpoint(), (0,), 1, same_ranks=False) is None
    chosen = choose_checkpoint({"b": (checkpoint(max_steps=200),)}, {"b": (0,)}, same_ranks=False)
    assert (chosen.name, chosen.max_steps) == ("checkpoint-20", 200)


def test_a_node_that_was_not_asked_has_nothing() -> None:
    chosen = choose_checkpoint({"a": (checkpoint(),)}, {"a": (1,), "b": (0,)})
    assert (chosen.name, chosen.skipped) == (None, {"checkpoint-20": "b: it is missing"})
