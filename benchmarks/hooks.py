"""Host time of a worker's hooks in a step, of this tree and of another, in turns in one process, without a GPU.

Trainings are replays of the order of calls (tests/worker/cuda_replays.py) on torch.cuda's stand-in, whose own time is
measured without hooks and taken off. Time of the one thread, the best of the rounds. What the driver takes is not in
it: of that the stand-in counts the calls.

    git worktree add /tmp/before REVISION && python benchmarks/hooks.py --against /tmp/before
"""

# mypy: disable-error-code="no-any-return"

from __future__ import annotations

import argparse
import functools
import importlib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402 - the root has to be on the path first
import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives  # noqa: E402
import torch.nn.parallel.distributed  # noqa: E402
from torch.optim import optimizer  # noqa: E402

from tests import cuda_stand_in  # noqa: E402
from tests.worker import cuda_replays  # noqa: E402

_STEPS = 20
_UNIT = (2.0, 4.0, 1.0, 3.0)


class Model(cuda_replays.Ddp):
    """A DDP module that is given batches with attention masks."""

    training = True

    def __call__(self, **_: Any) -> None:
        """A forward pass of a batch."""
        super().__call__()


class Reducers:
    """In the place of torch.nn.parallel.distributed."""

    DistributedDataParallel = Model


OWNERS: tuple[Any, ...] = (
    dist.distributed_c10d,
    dist.distributed_c10d.Work,
    dist,
    torch.distributed._functional_collectives,  # noqa: SLF001 - what DTensor calls
    torch.cuda,
    torch.accelerator,
    Model,
)


class Tree(NamedTuple):
    """A tree's hooks."""

    hooked: list[tuple[Any, str, Any]]  # what they put in the place of attributes, by owner and name
    optimizer_hooks: tuple[dict[int, Any], dict[int, Any]]  # before and after an optimizer's step
    end_step: Callable[[], None]  # as a training's step ends


def main() -> None:
    """Print a row for each training."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, required=True, metavar="DIR", help="a checkout of another revision")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    os.environ |= {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    cuda_stand_in.install()
    owners = (*OWNERS, torch.cuda.streams.Event, torch.cuda.streams.Stream)
    pristine = {owner: dict(vars(owner)) for owner in owners}
    with tempfile.TemporaryDirectory() as folder:
        trees = {"": Tree([], ({}, {}), lambda: None)}
        trees |= {
            name: _load(path, folder, owners, pristine) for name, path in (("before", options.against), ("now", ROOT))
        }
        print(f"| training | before, us | now, us | now / before | driver's calls before | now |\n{'|---' * 6}|")
        for title, make in TRAININGS.items():
            best = dict.fromkeys(trees, float("inf"))
            calls: dict[str, float] = {}
            steps = {name: make() for name in trees}
            for _ in range(options.rounds):
                for name, tree in trees.items():
                    _switch(tree, pristine)
                    took_us, calls[name] = _measure(steps[name], tree)
                    best[name] = min(best[name], took_us)
            _switch(trees[""], pristine)
            before, now = (best[name] - best[""] for name in ("before", "now"))
            extra = [round(calls[name] - calls[""]) for name in ("before", "now")]
            print(f"| {title} | {before:.0f} | {now:.0f} | {now / before:.2f} | {extra[0]} | {extra[1]} |", flush=True)


def _measure(step: Callable[[], None], tree: Tree) -> tuple[float, float]:
    """Microseconds of the thread, and calls of the driver, each of one step."""
    for _ in range(3):
        step()
        tree.end_step()
    calls, began = cuda_stand_in.gpu.calls, time.thread_time()
    for _ in range(_STEPS):
        step()
        tree.end_step()
    return (time.thread_time() - began) / _STEPS * 1e6, (cuda_stand_in.gpu.calls - calls) / _STEPS


def _load(root: Path, folder: str, owners: tuple[Any, ...], pristine: dict[Any, dict[str, Any]]) -> Tree:
    """The hooks of a tree, taken off again."""
    package = Path(folder) / root.name / "multinode_agent"
    package.parent.mkdir()
    package.symlink_to(root / "multinode")
    sys.path.insert(0, str(package.parent))
    names = ("batches", "collectives", "compiler", "ddp", "guard", "phases", "recorder", "steps", "traffic")
    own = {name: importlib.import_module(f"multinode_agent.worker.{name}") for name in names}
    recorder = own["recorder"].Recorder(str(package.parent), 0)
    guard = own["guard"].Guard(recorder)
    steps = own["steps"].Steps(recorder, guard)
    traffic = own["traffic"].Traffic(steps, guard)
    modules = {"torch.nn.parallel.distributed": Reducers, "torch.distributed._functional_collectives": OWNERS[3]}
    before = (dict(optimizer._global_optimizer_pre_hooks), dict(optimizer._global_optimizer_post_hooks))  # noqa: SLF001
    hooks = [
        *own["compiler"].HOOKS,
        *own["phases"].hooks(steps.phases, guard),
        *own["batches"].hooks(steps, guard),
        *traffic.hooks(),
        *own["ddp"].hooks(steps, guard, traffic),
    ]
    for name, hook in hooks:
        module = modules.get(name) or sys.modules.get(name)
        if module is not None and not name.startswith("torch._dynamo"):
            hook(module)
    cuda_stand_in.hand_on()
    hooked = [
        (owner, name, value)
        for owner in owners
        for name, value in vars(owner).items()
        if pristine[owner].get(name) is not value and not name.startswith("__dict")
    ]
    after = (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks)  # noqa: SLF001
    added = tuple({k: v for k, v in new.items() if k not in old} for old, new in zip(before, after, strict=True))
    tree = Tree(hooked, (added[0], added[1]), functools.partial(steps.step, "optimizer"))
    _switch(Tree([], ({}, {}), lambda: None), pristine)
    for name in [name for name in sys.modules if name.startswith("multinode_agent")]:
        del sys.modules[name]
    sys.path.pop(0)
    return tree


def _switch(tree: Tree, pristine: dict[Any, dict[str, Any]]) -> None:
    for owner, names in pristine.items():
        for name in [name for name, value in vars(owner).items() if names.get(name) is not value]:
            if name in names:
                setattr(owner, name, names[name])
            elif not name.startswith("__"):
                delattr(owner, name)
    for owner, name, value in tree.hooked:
        setattr(owner, name, value)
    for hooks, own in zip(
        (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks),  # noqa: SLF001
        tree.optimizer_hooks,
        strict=True,
    ):
        hooks.clear()
        hooks.update(own)


def _ddp() -> Callable[[], None]:
    model = Model([5.0] * 4, [4.0] * 4, 10.0)
    batch = {
        "input_ids": torch.ones(8, 512, dtype=torch.int64),
        "attention_mask": torch.ones(8, 512, dtype=torch.int64),
    }
    owner = object()

    def step() -> None:
        model(**batch)
        model.backward()
        for hooks in (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks):  # noqa: SLF001
            for hook in list(hooks.values()):
                hook(owner, (), {})
        cuda_stand_in.gpu.await_on_host(cuda_stand_in.gpu.ends_ms[0])

    return step


def _looking_at_its_loss(step: Callable[[], None]) -> Callable[[], None]:
    def looking() -> None:
        step()
        cuda_stand_in.gpu.await_on_host(cuda_stand_in.gpu.ends_ms[0])

    return looking


TRAININGS: dict[str, Callable[[], Callable[[], None]]] = {
    "DDP, a mask of 8 x 512": _ddp,
    "FSDP 2, 32 units": lambda: _looking_at_its_loss(cuda_replays.fsdp2([_UNIT] * 32)),
    "ZeRO-3, 300 gathers": lambda: cuda_replays.zero3([_UNIT[:3]] * 150, [3.0] * 8, overlap=True),
    "ZeRO-2, 8 buckets, overlap_comm": lambda: cuda_replays.zero12([5.0] * 8, [4.0] * 8, stage=2, overlap=True),
}

if __name__ == "__main__":
    main()
