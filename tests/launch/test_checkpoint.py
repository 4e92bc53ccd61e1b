from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from multinode.launch.checkpoints import (
    Checkpoint,
    CheckpointCopy,
    CheckpointFile,
    Layout,
    choose_checkpoint,
    complete,
    shards_elsewhere,
    spread,
)

WHOLE = ("trainer_state.json", "optimizer.pt", "scheduler.pt", "adapter_model.safetensors", "rng_state_1.pth")
ZERO2, ZERO3 = (Layout(library="DeepSpeed", stage=stage) for stage in (2, 3))
FSDP = Layout(library="FSDP")


def files(*names: str, **problems: str | None) -> dict[str, CheckpointFile]:
    return {name: CheckpointFile(size_bytes=10, problem=problems.get(name)) for name in names}


def checkpoint(*names: str, without: str = "", damaged: dict[str, str] | None = None, **changed: Any) -> Checkpoint:
    kept = files(*(name for name in (*WHOLE, *names) if name != without), **(damaged or {}))
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
        (checkpoint("rng_state.pth"), (0,), 1, None),
        (checkpoint(step=19), (1,), 2, "trainer_state.json is from step 19"),
        (checkpoint(step=None), (1,), 2, "trainer_state.json is from step None"),
        (checkpoint(without="adapter_model.safetensors"), (1,), 2, "its weights are missing"),
        (checkpoint("pytorch_model.bin", without="adapter_model.safetensors"), (1,), 2, None),
        # What a mixed precision keeps is not always there; where it is, it is read.
        (checkpoint("scaler.pt"), (1,), 2, None),
        (checkpoint("scaler.pt", damaged={"scaler.pt": "it is empty"}), (1,), 2, "scaler.pt: it is empty"),
        (
            checkpoint("model.safetensors.index.json", without="adapter_model.safetensors", shards=("a.safetensors",)),
            (1,),
            2,
            "a.safetensors is missing",
        ),
    ],
)
def test_what_a_checkpoint_lacks(
    seen: Checkpoint | None, ranks: tuple[int, ...], world_size: int, gap: str | None
) -> None:
    view = seen or Checkpoint(name="checkpoint-20")
    elsewhere = tuple(rank for rank in range(world_size) if rank not in ranks)
    # The nodes share a file system.
    states = files(*(f"rng_state_{rank}.pth" for rank in elsewhere if seen is not None))
    view = replace(view, files={**states, **view.files})
    found = complete({"a": view, "b": view}, {"a": ranks, "b": elsewhere})
    assert found == (() if gap is None else f"a: {gap}")


def test_a_checkpoint_that_one_node_lacks_is_skipped_by_name() -> None:
    whole = checkpoint("rng_state_0.pth")
    newer = checkpoint("rng_state_0.pth", name="checkpoint-40", step=40, without="rng_state_1.pth")
    chosen = choose_checkpoint({"a": (newer, whole), "b": (whole,)}, {"a": (0,), "b": (1,)})
    assert (chosen.name, chosen.step, chosen.copies) == ("checkpoint-20", 20, ())
    assert chosen.skipped == {"checkpoint-40": "b: it is missing"}


def test_other_ranks_need_no_random_numbers_of_those_that_saved() -> None:
    seen = {"b": (checkpoint(max_steps=200),)}
    assert choose_checkpoint(seen, {"b": (0,)}).name is None
    chosen = choose_checkpoint(seen, {"b": (0,)}, same_ranks=False)
    assert (chosen.name, chosen.max_steps) == ("checkpoint-20", 200)


def test_a_node_that_was_not_asked_has_nothing() -> None:
    chosen = choose_checkpoint({"a": (checkpoint(),)}, {"a": (1,), "b": (0,)})
    assert (chosen.name, chosen.skipped) == (None, {"checkpoint-20": "b: it is missing"})


# What each of two nodes with two workers has after a save, by the library that shards the training.
COMMON = ("trainer_state.json", "scheduler.pt", "config.json")
DISTCP = tuple(
    f"{folder}/{name}"
    for folder in ("pytorch_model_fsdp_0", "optimizer_0")
    for name in (".metadata", *(f"__{rank}_0.distcp" for rank in range(4)))
)


def saved(layout: Layout, ranks: tuple[int, ...], bf16: str = "") -> tuple[str, ...]:
    """As DeepSpeed with local storage and torch.distributed.checkpoint leave them, with `save_on_each_node`."""
    own = [*COMMON, *(f"rng_state_{rank}.pth" for rank in ranks)]
    first = 0 in ranks
    if layout is FSDP:
        mine = [name for name in DISTCP if any(f"__{rank}_" in name for rank in ranks) or (first and ".meta" in name)]
        return (*own, *mine)
    optimizer = [f"global_step20/{bf16}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in ranks]
    parameters = [f"global_step20/zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in ranks]
    model = parameters if layout.stage == 3 else ["global_step20/mp_rank_00_model_states.pt"]
    return (*own, *optimizer, *model, *(("latest", "zero_to_fp32.py") if first else ()))


NODES = {"a": (0, 1), "b": (2, 3)}


def views(layout: Layout, bf16: str = "") -> dict[str, Checkpoint]:
    """The checkpoint as the two nodes see it."""
    return {
        node: Checkpoint(
            name="checkpoint-20",
            step=20,
            files=files(*saved(layout, ranks, bf16)),
            tag="global_step20" if layout.library == "DeepSpeed" and 0 in ranks else None,
            shards=tuple(name for name in DISTCP if ".distcp" in name) if layout is FSDP and 0 in ranks else (),
        )
        for node, ranks in NODES.items()
    }


def without(seen: dict[str, Checkpoint], node: str, *names: str) -> dict[str, Checkpoint]:
    kept = {name: file for name, file in seen[node].files.items() if name not in names}
    return {**seen, node: replace(seen[node], files=kept)}


def with_copies(seen: dict[str, Checkpoint], copies: tuple[CheckpointCopy, ...]) -> dict[str, Checkpoint]:
    """The nodes after the copies."""
    for copy in copies:
        source, target = seen[copy.source], seen[copy.target]
        assert all(source.has(path) for path in copy.paths)
        assert copy.size_bytes == 10 * len(copy.paths)
        came = {path: source.files[path] for path in copy.paths}
        changed = replace(target, files={**target.files, **came}, step=20, tag=source.tag)
        seen = {**seen, copy.target: changed}
    return seen


@pytest.mark.parametrize(
    ("layout", "bf16", "paths"),
    [
        # DeepSpeed writes it on node 0 only, and reads it everywhere.
        (ZERO2, "", ("latest",)),
        (ZERO2, "bf16_", ("latest",)),
        (ZERO3, "", ("latest",)),
        (FSDP, "", tuple(sorted(name for name in DISTCP if not any(f"__{rank}_" in name for rank in (2, 3))))),
    ],
)
def test_what_a_node_gets_before_a_sharded_training_goes_on(layout: Layout, bf16: str, paths: tuple[str, ...]) -> None:
    seen = views(layout, bf16)
    copies = complete(seen, NODES, layout)
    assert not isinstance(copies, str)
    to_b = next(copy for copy in copies if copy.target == "b")
    assert tuple(sorted(to_b.paths)) == paths
    assert complete(with_copies(seen, copies), NODES, layout) == ()


@pytest.mark.parametrize(
    ("layout", "node", "name", "gap"),
    [
        (
            ZERO2,
            "b",
            "global_step20/zero_pp_rank_3_mp_rank_00_optim_states.pt",
            "b: global_step20/zero_pp_rank_3_mp_rank_00_optim_states.pt (the optimizer state of rank 3) is missing",
        ),
        (
            ZERO3,
            "a",
            "global_step20/zero_pp_rank_1_mp_rank_00_model_states.pt",
            "a: global_step20/zero_pp_rank_1_mp_rank_00_model_states.pt (the parameters of rank 1) is missing",
        ),
        (ZERO3, "a", "latest", "a: latest is missing"),
        (
            FSDP,
            "b",
            "optimizer_0/__2_0.distcp",
            "a: optimizer_0/__2_0.distcp (the optimizer state of rank 2) is missing",
        ),
        (FSDP, "a", "pytorch_model_fsdp_0/.metadata", "a: pytorch_model_fsdp_0/.metadata is missing"),
        (ZERO2, "b", "rng_state_2.pth", "b: rng_state_2.pth is missing"),
    ],
)
def test_a_shard_that_no_node_has_is_named(layout: Layout, node: str, name: str, gap: str) -> None:
    seen = without(views(layout), node, name)
    if name == "latest":
        seen = {node: replace(view, tag=None) for node, view in seen.items()}
    assert complete(seen, NODES, layout) == gap


@given(st.sampled_from([ZERO2, ZERO3, FSDP]), st.data())
def test_whatever_is_lost_is_copied_or_named(layout: Layout, data: st.DataObject) -> None:
    """Either the copies make the checkpoint complete, or no node has the file that is named."""
    seen = views(layout)
    for node, ranks in NODES.items():
        lost = data.draw(st.sets(st.sampled_from(saved(layout, ranks)), max_size=3))
        seen = without(seen, node, *lost)
        if "latest" in lost:
            seen[node] = replace(seen[node], tag=None)
    found = complete(seen, NODES, layout)
    if isinstance(found, str):
        named = found.split()[1]
        assert not any(view.has(named) for view in seen.values()), found
    else:
        assert complete(with_copies(seen, found), NODES, layout) == ()


@pytest.mark.parametrize("layout", [ZERO2, ZERO3, FSDP], ids=["zero2", "zero3", "fsdp"])
def test_a_node_with_an_empty_disk_gets_its_shards_from_a_node_that_keeps_copies(layout: Layout) -> None:
    seen = views(layout)
    kept = {**seen["b"].files, **seen["a"].files}
    seen = {"a": replace(seen["a"], files=kept), "b": Checkpoint(name="checkpoint-20")}
    copies = complete(seen, NODES, layout)
    assert not isinstance(copies, str)
    (to_b,) = (copy for copy in copies if copy.target == "b")
    assert {"config.json", "trainer_state.json", "rng_state_3.pth"} < set(to_b.paths)
    assert "rng_state_0.pth" not in to_b.paths
    assert complete(with_copies(seen, copies), NODES, layout) == ()


@pytest.mark.parametrize("layout", [ZERO2, ZERO3, FSDP], ids=["zero2", "zero3", "fsdp"])
def test_after_a_save_each_node_has_what_the_other_loads(layout: Layout) -> None:
    seen = views(layout)
    copies = spread(seen, NODES, layout)
    assert {(copy.source, copy.target) for copy in copies} == {("a", "b"), ("b", "a")}
    seen = with_copies(seen, copies)
    assert spread(seen, NODES, layout) == ()
    # Either may lose its disk.
    for node in NODES:
        left = {**seen, node: Checkpoint(name="checkpoint-20")}
        found = complete(left, NODES, layout)
        assert isinstance(found, tuple)
        assert complete(with_copies(left, found), NODES, layout) == ()


@pytest.mark.parametrize(
    ("copies", "pairs"),
    [
        (1, {("a", "b"), ("b", "c"), ("c", "a")}),
        (2, {("a", "b"), ("a", "c"), ("b", "c"), ("b", "a"), ("c", "a"), ("c", "b")}),
        (9, {("a", "b"), ("a", "c"), ("b", "c"), ("b", "a"), ("c", "a"), ("c", "b")}),
    ],
)
def test_how_many_nodes_get_a_copy(copies: int, pairs: set[tuple[str, str]]) -> None:
    ranks = {"a": (0,), "b": (1,), "c": (2,)}
    seen = {
        node: Checkpoint(name="checkpoint-20", step=20, files=files(*saved(ZERO3, own)), tag="global_step20")
        for node, own in ranks.items()
    }
    assert {(copy.source, copy.target) for copy in spread(seen, ranks, ZERO3, copies)} == pairs


@pytest.mark.parametrize(
    ("node", "name"),
    [
        ("b", "trainer_state.json"),
        ("b", "global_step20/zero_pp_rank_3_mp_rank_00_optim_states.pt"),
        ("a", "rng_state_1.pth"),
    ],
)
def test_nothing_is_copied_before_all_is_saved(node: str, name: str) -> None:
    assert spread(without(views(ZERO2), node, name), NODES, ZERO2) == ()


def test_which_shards_other_nodes_have_saved() -> None:
    folder = "checkpoint-20/global_step20/"
    optimizer = f"{folder}bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    here = (f"{folder}mp_rank_00_model_states.pt", optimizer, "checkpoint-20/latest")
    assert shards_elsewhere(here, {"a": (0,), "b": (1, 2)}) == {
        "b": tuple(optimizer.replace("rank_0_", f"rank_{rank}_", 1) for rank in (1, 2))
    }
    both = ("model", "optim")
    names = tuple(f"{folder}zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt" for rank in (0, 1) for kind in both)
    assert shards_elsewhere(names, {"a": (0,), "b": (1,)}) == {}
    assert shards_elsewhere(names[:2], {"a": (0,), "b": (1,)}) == {"b": names[2:]}
    assert shards_elsewhere(("model.safetensors",), {"a": (0,), "b": (1,)}) == {}


def test_a_truncated_shard_is_copied_from_a_node_that_has_it_whole() -> None:
    seen, name = views(ZERO2), "global_step20/mp_rank_00_model_states.pt"
    cut = files(*saved(ZERO2, NODES["b"]), **{name: "it is truncated"})
    seen = {**seen, "b": replace(seen["b"], files=cut)}
    copies = complete(seen, NODES, ZERO2)
    assert isinstance(copies, tuple)
    assert [(copy.source, copy.target, set(copy.paths)) for copy in copies] == [("a", "b", {"latest", name})]


def test_a_schedule_of_deepspeed_is_in_its_own_files() -> None:
    seen = views(ZERO2)
    for node in NODES:
        seen = without(seen, node, "scheduler.pt")
    assert complete(seen, NODES, ZERO2) == "a: scheduler.pt is missing"
    assert isinstance(complete(seen, NODES, replace(ZERO2, saves_scheduler=False)), tuple)


def test_an_older_checkpoint_is_chosen_where_a_shard_of_the_newest_is_lost() -> None:
    newest = without(views(ZERO3), "b", "global_step20/zero_pp_rank_2_mp_rank_00_optim_states.pt")
    older = {node: replace(view, name="checkpoint-10", step=10) for node, view in views(ZERO3).items()}
    chosen = choose_checkpoint({node: (newest[node], older[node]) for node in NODES}, NODES, ZERO3)
    assert (chosen.name, [copy.paths for copy in chosen.copies]) == ("checkpoint-10", [("latest",)])
    assert list(chosen.skipped) == ["checkpoint-20"]
