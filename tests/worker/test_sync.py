"""Averaging between nodes, two real workers on gloo that take themselves for two nodes, or four for two times two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from multinode.levers.averaging import parse_average
from multinode.levers.lever import Workers
from multinode.records.samples import AveragingSample, SyncSample, TrafficSample

from .gloo_pair import Told, run_pair

pytestmark = pytest.mark.torch

# All levers in one pair of processes: each is a set of hooks of its own, and torch is imported once.
BEGIN = """
import copy
traffic = worker.traffic.Traffic(steps, guard)
watch([*worker.compiler.HOOKS, *traffic.hooks()])
torch = begin()
import torch.nn.parallel.distributed as parallel
import torch.optim.optimizer as optimizers
PLAIN = {name: getattr(parallel.DistributedDataParallel, name) for name in ("__init__", "register_comm_hook", "join")}
averaging = None

class Optimizers:
    handles = []
    def register_optimizer_step_pre_hook(self, hook):
        self.handles.append(optimizers.register_optimizer_step_pre_hook(hook))
    def register_optimizer_step_post_hook(self, hook):
        self.handles.append(optimizers.register_optimizer_step_post_hook(hook))

def lever(**settings):
    "Train under these settings from now on; under none, as ever."
    global averaging
    for name, function in PLAIN.items():
        setattr(parallel.DistributedDataParallel, name, function)
    while Optimizers.handles:
        Optimizers.handles.pop().remove()
    if averaging is not None:
        steps.meters.remove(averaging.end_step)
    averaging = None
    if settings:
        settings = worker.levers.averaging.AveragingSettings(**{"workers": (1, 1), **settings})
        averaging = worker.levers.sync.ParameterAveraging(settings, steps)
        steps.meters.append(averaging.end_step)
        averaging.hook_ddp(parallel)
        averaging.hook_optimizers(Optimizers())

def mlp():
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))

def checksum(module):
    return [each.double().sum().item() for each in module.parameters()]

def train(module, make_optimizer, count=12, micro=1, after=None):
    model = parallel.DistributedDataParallel(module)
    optimizer = make_optimizer(module)
    sums, losses = [], []
    for number in range(count):
        for part in range(micro):
            torch.manual_seed(1000 * number + 10 * part + RANK)
            with model.no_sync() if part < micro - 1 else torch.enable_grad():
                loss = (model(torch.randn(6, 8)) - 1).square().mean() / micro
                loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        steps.step("optimizer")
        sums.append(checksum(module))
        if after is not None:
            after(number + 1)
    return {"sums": sums, "losses": losses, "weights": [each.tolist() for each in module.parameters()]}

def sgd(**settings):
    return lambda module: torch.optim.SGD(module.parameters(), **{"lr": 0.1, **settings})
"""
MATRIX = """
told = {}
adam = lambda module: torch.optim.AdamW(module.parameters(), lr=0.01)
KINDS = {
    "sgd": sgd(), "momentum": sgd(momentum=0.9), "decay": sgd(momentum=0.9, weight_decay=0.1, nesterov=True),
}
for name, kind in KINDS.items():
    told[name] = {"ddp": None, "one": None}
    lever()
    told[name]["ddp"] = train(mlp(), kind)["weights"]
    lever(every=1)
    told[name]["one"] = train(mlp(), kind)["weights"]

def frozen():
    module = mlp()
    module[0].weight.requires_grad_(False)
    return module

def groups(module):
    return torch.optim.AdamW([
        {"params": module[0].parameters(), "lr": 0.01}, {"params": module[2].parameters(), "lr": 0.001}])

class Normed(torch.nn.Sequential):
    pass

def normed():
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))

LEVERS = {
    "local": {}, "fp16": {"dtype": "fp16"}, "bf16": {"dtype": "bf16"},
    "diloco": {"outer_lr": 0.7, "momentum": 0.9}, "diloco16": {"outer_lr": 0.7, "momentum": 0.9, "dtype": "fp16"},
}
JOBS = {
    "plain": lambda: train(mlp(), adam), "accumulation": lambda: train(mlp(), adam, micro=3),
    "frozen": lambda: train(frozen(), adam), "groups": lambda: train(mlp(), groups),
}
told["matrix"] = {}
for name, settings in LEVERS.items():
    lever(every=4, **settings)
    for job, run in JOBS.items():
        told["matrix"][name + " " + job] = run()
lever(every=4)
module = normed()
train(module, adam, count=4)
told["buffers"] = [each.tolist() for each in module.buffers()]
# Two optimizers, each with a round of its own.
module = mlp()
model = parallel.DistributedDataParallel(module)
first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (module[0], module[2]))
for number in range(8):
    torch.manual_seed(RANK + number)
    model(torch.randn(6, 8)).square().mean().backward()
    first.step()
    if number % 2:
        second.step()
    steps.step("optimizer")
told["two"] = checksum(module)
# Unfrozen after two steps, and given to the optimizer then.
module = frozen()
module[0].weight.requires_grad_(True)
model = parallel.DistributedDataParallel(module, find_unused_parameters=True)
optimizer = torch.optim.SGD([each for name, each in module.named_parameters() if name != "0.weight"], lr=0.1)
for number in range(8):
    torch.manual_seed(RANK + number)
    model(torch.randn(6, 8)).square().mean().backward()
    optimizer.step()
    steps.step("optimizer")
    if number == 1:
        optimizer.add_param_group({"params": [module[0].weight]})
told["unfrozen"] = checksum(module)
# DiLoCo by its paper: both workers' inner optimizers here, and torch's SGD outside.
lever(every=4, outer_lr=0.7, momentum=0.9)
told["diloco"] = train(mlp(), adam)["weights"]
lever()
outside = mlp()
workers = [mlp(), mlp()]
inner = [adam(worker) for worker in workers]
outer = torch.optim.SGD(outside.parameters(), lr=0.7, momentum=0.9, nesterov=True)
for number in range(12):
    for rank, (worker, optimizer) in enumerate(zip(workers, inner)):
        torch.manual_seed(1000 * number + rank)
        optimizer.zero_grad()
        (worker(torch.randn(6, 8)) - 1).square().mean().backward()
        optimizer.step()
    if number % 4 == 3:
        for whole, parts in zip(outside.parameters(), zip(*(worker.parameters() for worker in workers))):
            whole.grad = whole.detach() - sum(part.detach() for part in parts) / 2
        outer.step()
        for worker in workers:
            worker.load_state_dict(outside.state_dict())
told["reference"] = [each.tolist() for each in outside.parameters()]
tell(told)
"""
REFUSED = """
import types
told = {}

def refused(name, run):
    try:
        run()
    except worker.levers.sync.AveragingError as error:
        told[name] = str(error)

def own_group():
    parallel.DistributedDataParallel(mlp(), process_group=torch.distributed.new_group([0, 1]))

def own_hook():
    parallel.DistributedDataParallel(mlp()).register_comm_hook(None, lambda state, bucket: None)

def joined():
    with parallel.DistributedDataParallel(mlp()).join():
        pass

def unwrapped():
    train_alone(torch.optim.SGD(mlp().parameters(), lr=0.1))

def train_alone(optimizer):
    for group in optimizer.param_groups:
        for each in group["params"]:
            each.grad = torch.ones_like(each)
    optimizer.step()

def copied():
    module = mlp()
    kept = parallel.DistributedDataParallel(module)
    train_alone(torch.optim.SGD([each.detach().clone().requires_grad_() for each in module.parameters()], lr=0.1))

def layered():
    module = mlp()
    model = parallel.DistributedDataParallel(module)
    optimizers = {each: torch.optim.SGD([each], lr=0.1) for each in module.parameters()}
    for each in module.parameters():
        each.register_post_accumulate_grad_hook(lambda each: optimizers[each].step())
    model(torch.randn(2, 8)).sum().backward()

def scaled():
    module = mlp()
    model, optimizer = parallel.DistributedDataParallel(module), sgd()(module)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.randn(2, 8)).sum()).backward()
    scaler.step(optimizer)

def sharded():
    from torch.distributed.optim import ZeroRedundancyOptimizer
    averaging.hook_zero_redundancy(sys.modules["torch.distributed.optim.zero_redundancy_optimizer"])
    module = mlp()
    model = parallel.DistributedDataParallel(module)
    ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1)

def uneven():
    parallel.DistributedDataParallel(mlp())

for run in (own_group, own_hook, joined, unwrapped, copied, layered, scaled, sharded):
    lever(every=4, option="--average local:4")
    averaging.hook_grad_scaler(sys.modules["torch.amp.grad_scaler"])
    refused(run.__name__, run)
lever(every=4, workers=(2, 1), option="--average local:4")
refused("uneven", uneven)
# What is saved: nothing is said at the end of a round, and once inside one.
lever(every=2)
plain = types.SimpleNamespace(save=lambda *_: None)
averaging.hook_saving(plain, "save")
train(mlp(), sgd(), count=6, after=lambda number: number == 2 and plain.save())
told["saved at the end of a round"] = averaging._has_warned
train(mlp(), sgd(), count=3, after=lambda number: plain.save())
told["saved"] = averaging._has_warned
tell(told)
"""
FOUR = """
told = {}
for name, settings in {
    "ddp": None, "one": {"every": 1}, "diloco": {"every": 4, "outer_lr": 0.7},
    "unequal": {"every": 1, "workers": (3, 1)},
}.items():
    lever(**({"workers": (2, 2), **settings} if settings else {}))
    told[name] = train(mlp(), sgd(momentum=0.9), count=8)
tell(told)
"""


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    return run_pair(tmp_path_factory.mktemp("sync") / "matrix", BEGIN + MATRIX)


def flat(weights: Any) -> list[float]:
    """All numbers of nested lists."""
    return [weights] if isinstance(weights, float) else [one for part in weights for one in flat(part)]


def farthest(ours: Any, theirs: Any) -> float:
    """The largest difference of two models' weights."""
    return max(abs(one - other) for one, other in zip(flat(ours), flat(theirs), strict=True))


@pytest.mark.parametrize("kind", ["sgd", "momentum", "decay"])
def test_a_round_of_one_step_is_ddp_to_rounding(matrix: list[Told], kind: str) -> None:
    for told in matrix:
        assert farthest(told.said[kind]["one"], told.said[kind]["ddp"]) < 1e-6
    assert matrix[0].said[kind]["one"] == matrix[1].said[kind]["one"]


@pytest.mark.parametrize("lever", ["local", "fp16", "bf16", "diloco", "diloco16"])
@pytest.mark.parametrize("job", ["plain", "accumulation", "frozen", "groups"])
def test_workers_are_equal_at_the_end_of_each_round_and_at_no_other_step(
    matrix: list[Told], lever: str, job: str
) -> None:
    first, second = (told.said["matrix"][f"{lever} {job}"] for told in matrix)
    equal = [
        step for step, (one, other) in enumerate(zip(first["sums"], second["sums"], strict=True), 1) if one == other
    ]
    assert equal == [4, 8, 12]
    assert first["losses"][-1] < first["losses"][0]


def test_what_is_sent_as_two_bytes_trains_nearly_the_same(matrix: list[Told]) -> None:
    runs = matrix[0].said["matrix"]
    for job in ("plain", "accumulation", "frozen", "groups"):
        for dtype, off in (("fp16", 1e-3), ("bf16", 1e-2)):
            assert 0 < farthest(runs[f"{dtype} {job}"]["weights"], runs[f"local {job}"]["weights"]) < off


def test_diloco_is_nesterov_sgd_on_the_mean_change_of_a_round(matrix: list[Told]) -> None:
    for told in matrix:
        assert farthest(told.said["diloco"], told.said["reference"]) < 1e-5


def test_buffers_are_rank_0s_and_optimizers_have_rounds_of_their_own(matrix: list[Told]) -> None:
    first, second = (told.said for told in matrix)
    for name in ("buffers", "two", "unfrozen"):
        assert first[name] == second[name], name


def test_each_round_is_recorded_with_its_bytes_and_its_drift(matrix: list[Told]) -> None:
    parameters = 8 * 16 + 16 + 16 * 4 + 4
    for told in matrix:
        (diloco,) = [
            one for one in told.samples if isinstance(one, AveragingSample) and one.outer_lr and not one.dtype
        ][:1]
        assert (diloco.nodes, diloco.every, diloco.momentum) == (2, 4, 0.9)
        rounds = [one for one in told.samples if isinstance(one, SyncSample) and one.steps == 4 and one.step <= 13 * 12]
        assert {(one.reason, one.size_bytes) for one in rounds} >= {
            ("round", 4 * parameters),
            ("round", 2 * parameters),
        }
        assert all(one.drift is not None and one.drift > 0 for one in rounds)
        calls = [call for sample in told.samples if isinstance(sample, TrafficSample) for call in sample.calls]
        assert {call.size_bytes for call in calls if call.op == "all_reduce"} >= {4 * parameters, 2 * parameters}


# A device that computes and sends when it comes to it, and a host that sees what that takes where it waits for it.
QUEUED = """
import types

class Device:
    now, queued = 0.0, 0.0
    def synchronize(self, device=None):
        self.now += self.queued
        self.queued = 0.0

device = Device()
torch.cpu.synchronize = device.synchronize
plain_float = torch.Tensor.__float__
def waiting_float(tensor):
    device.synchronize()
    return plain_float(tensor)
torch.Tensor.__float__ = waiting_float
worker.levers.sync.time = types.SimpleNamespace(monotonic=lambda: device.now)

def sending(function):
    def sent(*args, **kwargs):
        device.queued += 0.1
        return function(*args, **kwargs)
    return sent

lever(every=3)
torch.distributed.all_reduce = sending(torch.distributed.all_reduce)
class Computing(torch.optim.SGD):
    def step(self):
        device.queued += 1.0
        super().step()
train(mlp(), lambda module: Computing(module.parameters(), lr=0.1))
"""


def test_a_round_takes_what_it_sends_and_not_what_the_device_has_yet_to_compute(tmp_path: Path) -> None:
    for worker in run_pair(tmp_path / "run", BEGIN + QUEUED):
        rounds = [sample for sample in worker.samples if isinstance(sample, SyncSample)]
        assert [one.sync_us for one in rounds] == pytest.approx([100_000.0] * 4)


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    return run_pair(tmp_path_factory.mktemp("sync") / "refused", BEGIN + REFUSED)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("own_group", "uses its own process group"),
        ("own_hook", "registers its own communication hook"),
        ("joined", "DistributedDataParallel.join"),
        ("unwrapped", "not wrapped in DistributedDataParallel"),
        ("copied", "parameters outside DistributedDataParallel"),
        ("layered", "inside the backward pass"),
        ("scaled", "GradScaler"),
        ("sharded", "ZeroRedundancyOptimizer"),
        ("uneven", "the world size is 2, but the nodes have"),
    ],
)
def test_what_cannot_be_averaged_ends_every_worker_before_its_first_step(
    refused: list[Told], what: str, why: str
) -> None:
    for told in refused:
        message = told.said[what]
        assert message.startswith("multinode: --average local:4: ")
        assert why in message


def test_saving_inside_a_round_is_warned_about_on_rank_0(refused: list[Told]) -> None:
    first, second = (told.said for told in refused)
    assert not first["saved at the end of a round"]
    assert (first["saved"], second["saved"]) == (True, False)
    assert refused[0].stderr.count("multinode: WARNING: a checkpoint was saved inside a round") == 1


def test_two_nodes_of_two_workers_average_inside_and_between(tmp_path: Path) -> None:
    four = run_pair(tmp_path / "four", BEGIN + FOUR, workers=4, WORLD_SIZE="4")
    for told in four:
        # Each node counts as much as it has workers.
        for name in ("one", "unequal"):
            assert farthest(told.said[name]["weights"], told.said["ddp"]["weights"]) < 1e-6
    sums = [told.said["diloco"]["sums"] for told in four]
    for step in range(8):
        assert sums[0][step] == sums[1][step]
        assert sums[2][step] == sums[3][step]
        assert (sums[0][step] == sums[2][step]) == ((step + 1) % 4 == 0)
    # One worker of a node sends.
    sent = [[one.size_bytes for one in told.samples if isinstance(one, SyncSample) and one.steps == 4] for told in four]
    assert sent[0]
    assert sent[0] == sent[2]
    assert set(sent[1]) == set(sent[3]) == {0}


@pytest.mark.parametrize(
    ("average", "fields"),
    [
        ("local:16", {"every": 16}),
        ("diloco:64:0.7:0.9:fp16", {"every": 64, "outer_lr": 0.7, "momentum": 0.9, "dtype": "fp16"}),
        ("diloco:64:0.5:0:bf16", {"every": 64, "outer_lr": 0.5, "momentum": 0.0, "dtype": "bf16"}),
    ],
)
def test_the_instrumentation_reads_what_the_plan_writes(tmp_path: Path, average: str, fields: dict[str, Any]) -> None:
    environ = parse_average(average).environment(Workers(counts=(2, 1)))
    script = "tell(worker.levers.averaging.read_settings(os.environ['MULTINODE_SYNC'])._asdict())"
    (told,) = run_pair(tmp_path / "read", script, workers=1, MULTINODE_SYNC=environ["MULTINODE_SYNC"])
    assert fields.items() <= told.said.items()
    assert told.said["workers"] == [2, 1]
    assert told.said["option"] == f"--average {average}"


KEPT = """
import torch
told = {}
for text, fields in AVERAGES.items():
    settings = worker.levers.averaging.AveragingSettings(workers=(1, 1), **fields)
    outer = worker.levers.averaging.OuterOptimizer(settings, torch.ones(4))
    outer.step(outer.change(torch.zeros(4)))
    told[text] = [name for name, kept in outer.state().items() if kept is not None]
tell(told)
"""


def test_only_what_sends_changes_keeps_a_copy_of_the_parameters(tmp_path: Path) -> None:
    texts = ("local:4", "local:4:fp16", "diloco:4:0.7:0", "diloco:4")
    averages = {text: msgspec.structs.asdict(parse_average(text)) for text in texts}
    (told,) = run_pair(tmp_path / "kept", f"AVERAGES = {averages}\n{KEPT}", workers=1)
    assert list(told.said.values()) == [[], ["anchor"], ["anchor"], ["anchor", "momentum"]]
