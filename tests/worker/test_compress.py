"""Gradients that DDP sends as fp16 or bf16, between two real workers on gloo, and what is recorded of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from multinode.records.samples import DdpSample, ModelSample, NoteSample, StepSample, TrafficSample

from .gloo_pair import Told, run_pair
from .instrumented import Worker

pytestmark = pytest.mark.torch

STEPS = 6  # as `train` below does; likewise its layers
# After these all buckets are as they stay.
SETTLING = 3
WIDTH, LAYERS = 32, 4
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)
# All that the instrumentation has to do with DDP, in its order.
BEGIN = """
import contextlib
kind = os.environ["KIND"]
traffic = worker.traffic.Traffic(steps, guard)
watch([
    *worker.compiler.HOOKS,
    *worker.phases.hooks(steps.phases, guard),
    *traffic.hooks(),
    *(worker.levers.compress.hooks(steps, guard, traffic, kind) if kind else []),
    *worker.ddp.hooks(steps, guard, traffic),
    *worker.model.hooks(steps, guard),
])
torch = begin()
from torch.nn.parallel import DistributedDataParallel as DDP
BUILTIN = torch.distributed.BuiltinCommHookType

def make(dtype=torch.float32, **settings):
    torch.manual_seed(7)
    layers = [torch.nn.Linear(32, 32, dtype=dtype) for _ in range(4)]
    return DDP(torch.nn.Sequential(*layers), **{"bucket_cap_mb": 0.008, **settings})

def own_hook(state, bucket):
    state.append(bucket.buffer().dtype)
    future = torch.distributed.all_reduce(bucket.buffer().div_(2), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])

def train(model, micro_steps=1, steps_to_do=6, run=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dtype = next(model.parameters()).dtype
    first, losses = steps.count + 1, []
    for number in range(steps_to_do):
        for micro in range(micro_steps):
            torch.manual_seed(100 * number + 10 * micro + RANK)
            with contextlib.nullcontext() if micro == micro_steps - 1 else model.no_sync():
                loss = (model if run is None else run)(torch.randn(4, 32, dtype=dtype)).square().mean()
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        steps.step("optimizer")
    return {"steps": [first, steps.count], "losses": losses,
            "weights": [each.double().square().sum().item() for each in model.parameters()],
            "hook": model._get_ddp_logging_data().get("comm_hook", "")}
"""
TRAIN = """
model = make()
told = {
    "plain": train(model),
    "accumulated": train(make(), micro_steps=4),
    "static graph": train(make(static_graph=True)),
    "views": train(make(gradient_as_bucket_view=True)),
    "unused": train(make(find_unused_parameters=True)),
    "two models": [train(make()), train(make())],
}
torch.save(model, FOLDER + "/model-%d.pt" % RANK)
told["saved"] = b"multinode" in open(FOLDER + "/model-%d.pt" % RANK, "rb").read()
told["loaded"] = train(torch.load(FOLDER + "/model-%d.pt" % RANK, weights_only=False))
model = make(bucket_cap_mb=2)
told["compiled"] = train(model, run=torch.compile(model, backend="eager"))
tell(told)
"""
SCENARIOS = ["plain", "accumulated", "static graph", "views", "unused", "loaded", "compiled"]


@pytest.fixture(scope="module")
def as_it_is(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    return run_pair(tmp_path_factory.mktemp("compress") / "none", BEGIN + TRAIN, KIND="")


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Told]]:
    folder = tmp_path_factory.mktemp("compress")
    return {kind: run_pair(folder / kind, BEGIN + TRAIN, KIND=kind) for kind in ("fp16", "bf16")}


def notes(told: Told) -> list[str]:
    return [sample.message for sample in told.samples if isinstance(sample, NoteSample)]


def reduced_bytes(told: Told, scenario: Any) -> list[float]:
    """What each settled step of a scenario asked its all-reduces to carry."""
    first, last = scenario["steps"]
    calls = {sample.traffic: sample.calls for sample in told.samples if isinstance(sample, TrafficSample)}
    numbers = {sample.step: sample.traffic for sample in told.samples if isinstance(sample, StepSample)}
    steps = [calls[numbers[step] or 0] for step in range(first + SETTLING, last + 1)]
    return [sum(call.size_bytes * call.count for call in step if call.op == "all_reduce") for step in steps]


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_half_the_bytes_train_nearly_the_same(
    halved: dict[str, list[Told]], as_it_is: list[Told], kind: str, scenario: str
) -> None:
    # Which parameters had gradients is agreed on beside them, an int32 for each.
    flags = 4 * 2 * LAYERS if scenario == "unused" else 0
    for ours, theirs in zip(halved[kind], as_it_is, strict=True):
        assert reduced_bytes(ours, ours.said[scenario]) == [2 * PARAMETERS + flags] * (STEPS - SETTLING)
        assert reduced_bytes(theirs, theirs.said[scenario]) == [4 * PARAMETERS + flags] * (STEPS - SETTLING)
        losses, exact = ours.said[scenario]["losses"], theirs.said[scenario]["losses"]
        assert losses == pytest.approx(exact, rel=0.01)
        assert losses != exact
        assert losses[-1] < losses[0]
    first, second = (told.said[scenario]["weights"] for told in halved[kind])
    assert first == second


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_each_module_is_told_by_the_name_of_the_hook_and_nothing_is_said(
    halved: dict[str, list[Told]], kind: str
) -> None:
    for told in halved[kind]:
        assert {told.said[scenario]["hook"] for scenario in SCENARIOS} == {f"multinode_{kind}"}
        assert [one["hook"] for one in told.said["two models"]] == [f"multinode_{kind}"] * 2
        models = [sample for sample in told.samples if isinstance(sample, ModelSample)]
        assert {(model.wrapper, model.settings["comm_hooks"]) for model in models} == {("ddp", f"multinode_{kind}")}
        assert notes(told) == []
        assert "multinode:" not in told.stderr


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_ddp_still_times_its_reductions(halved: dict[str, list[Told]], kind: str) -> None:
    told = halved[kind][0]
    first, last = told.said["accumulated"]["steps"]
    samples = [sample for sample in told.samples if isinstance(sample, DdpSample) and first <= sample.step <= last]
    # Torch shows the counters of a step in the next one.
    assert [sample.step for sample in samples] == list(range(first, last))
    for sample in samples:
        assert sample.comm_us > 0
        assert 0 <= sample.overlap_us <= min(sample.comm_us, sample.backward_us)


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_what_the_hook_sends_counts_as_ddps_and_its_time_is_not_counted_again(
    halved: dict[str, list[Told]], kind: str
) -> None:
    for told in halved[kind]:
        calls = [call for sample in told.samples if isinstance(sample, TrafficSample) for call in sample.calls]
        assert {call.source for call in calls if call.op == "all_reduce"} == {"ddp"}
        first, last = told.said["plain"]["steps"]
        settled = [s for s in told.samples if isinstance(s, StepSample) and first + SETTLING <= s.step <= last]
        phases = [step.phases_us or {} for step in settled]
        assert all("backward" in each and "comm" not in each for each in phases)


def test_a_model_that_is_saved_holds_nothing_of_ours(halved: dict[str, list[Told]]) -> None:
    assert [told.said["saved"] for told in halved["fp16"]] == [False, False]


def test_all_that_gloo_is_given_is_half_as_long(tmp_path: Path) -> None:
    script = """
from torch.autograd.profiler import profile
add_up, given = torch.distributed.ProcessGroup.allreduce, []
def recorded(group, tensors, *args):
    given.extend([str(each.dtype), each.nbytes] for each in tensors)
    return add_up(group, tensors, *args)
torch.distributed.ProcessGroup.allreduce = recorded
model = make()
train(model, steps_to_do=3)
del given[:]
with profile(record_shapes=True) as events:
    train(model, steps_to_do=1)
# Elements; gloo says so of what C++ gives it, too.
carried = [each.input_shapes[0][0] for each in events.function_events if each.name.startswith("gloo:")]
tell({"given": given, "carried": carried})
"""
    for told in run_pair(tmp_path / "run", BEGIN + script, KIND="fp16"):
        assert {dtype for dtype, _ in told.said["given"]} == {"torch.float16"}
        assert sum(size for _, size in told.said["given"]) == 2 * PARAMETERS
        assert sum(told.said["carried"]) == PARAMETERS


def test_what_overflows_in_the_sum_alone_does_not_overflow(tmp_path: Path) -> None:
    """Gradients of 40000 on both workers: their sum is beyond fp16, their mean is not; and small ones are kept."""
    script = """
model = DDP(torch.nn.Linear(2, 1, bias=False))
model(torch.tensor([[40000.0, 0.001]])).sum().backward()
tell(model.module.weight.grad.tolist())
"""
    for told in run_pair(tmp_path / "run", BEGIN + script, KIND="fp16"):
        assert told.said == [pytest.approx([40000.0, 0.001], rel=1e-3)]


OTHERS = """
told, seen = {}, []
model = make()
model.register_comm_hook(seen, own_hook)
told["own hook"] = train(model)
told["calls of own"] = len(seen)
try:
    model.register_comm_hook(seen, own_hook)
except RuntimeError as error:
    told["twice"] = str(error)

model, seen = make(), []
train(model, steps_to_do=2)
model.register_comm_hook(state=seen, hook=own_hook)
told["later"] = train(model)
told["calls of later"] = len(seen)
try:
    model.register_comm_hook(seen, own_hook)
except RuntimeError as error:
    told["later, twice"] = str(error)

for name in ("ALLREDUCE", "FP16_COMPRESS"):
    model = make()
    train(model, steps_to_do=2)
    model._register_builtin_comm_hook(comm_hook_type=getattr(BUILTIN, name))
    told[name] = train(model)
told["short"] = train(make(torch.bfloat16))
mixed = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32).bfloat16())
mixed[0].register_forward_hook(lambda module, args, result: result.bfloat16())
told["mixed"] = train(DDP(mixed))
tell(told)
"""


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    return run_pair(tmp_path_factory.mktemp("compress") / "others", BEGIN + OTHERS, KIND="bf16")


def test_a_hook_of_the_users_own_wins_and_is_named(others: list[Told]) -> None:
    for told in others:
        assert told.said["own hook"]["hook"] == "own_hook"
        assert told.said["calls of own"] > 0
        assert "can only be called once" in told.said["twice"]
        assert reduced_bytes(told, told.said["own hook"]) == [4 * PARAMETERS] * (STEPS - SETTLING)
        reason = "DistributedDataParallel already has a communication hook, own_hook"
        (note,) = {note for note in notes(told) if note.endswith(reason)}
        assert note == f"gradients were NOT compressed to bf16: {reason}"
        assert f"multinode: {note}" in told.stderr.splitlines()


def test_a_hook_that_the_user_registers_late_takes_the_place(others: list[Told]) -> None:
    for told in others:
        assert told.said["later"]["hook"] == "own_hook"
        assert told.said["calls of later"] >= STEPS
        assert "can only be called once" in told.said["later, twice"]
        assert reduced_bytes(told, told.said["later"]) == [4 * PARAMETERS] * (STEPS - SETTLING)
        assert any("registered its own communication hook later, own_hook" in note for note in notes(told))


@pytest.mark.parametrize(("name", "item_bytes"), [("ALLREDUCE", 4), ("FP16_COMPRESS", 2)])
def test_so_do_torchs_built_in_ones(others: list[Told], name: str, item_bytes: int) -> None:
    for told in others:
        assert reduced_bytes(told, told.said[name]) == [item_bytes * PARAMETERS] * (STEPS - SETTLING)
    assert others[0].said[name]["weights"] == others[1].said[name]["weights"]


def test_gradients_of_two_bytes_stay_as_they_are(others: list[Told]) -> None:
    one_layer = WIDTH * WIDTH + WIDTH
    for told in others:
        assert told.said["short"]["hook"] == ""
        assert reduced_bytes(told, told.said["short"]) == [2 * PARAMETERS] * (STEPS - SETTLING)
        assert any("NOT compressed to bf16: they are torch.bfloat16" in note for note in notes(told))
        assert reduced_bytes(told, told.said["mixed"]) == [2 * 2 * one_layer] * (STEPS - SETTLING)


def test_where_the_backend_cannot_add_up_the_dtype_the_training_goes_on_without(tmp_path: Path) -> None:
    script = """
add_up = torch.distributed.ProcessGroup.allreduce
def refuse(group, tensors, *args):
    if tensors[0].dtype is torch.float16:
        raise RuntimeError("Invalid scalar type")
    return add_up(group, tensors, *args)
torch.distributed.ProcessGroup.allreduce = refuse
tell(train(make()))
"""
    for told in run_pair(tmp_path / "run", BEGIN + script, KIND="fp16"):
        assert told.said["hook"] == ""
        assert reduced_bytes(told, told.said) == [4 * PARAMETERS] * (STEPS - SETTLING)
        assert notes(told) == ["gradients were NOT compressed to fp16: RuntimeError Invalid scalar type"]


LOOP = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "the first step had no DistributedDataParallel; DeepSpeed and FSDP set their dtypes"),
        ({"WORLD_SIZE": "1"}, "a single worker sends none"),
        ({"MULTINODE_GRAD_COMPRESS": "fp8"}, "'fp8' is neither of fp16, bf16"),
    ],
)
def test_a_training_without_ddp_is_told_so_once(
    tmp_path: Path, archive: Path, changes: dict[str, str | None], reason: str
) -> None:
    worker = Worker(tmp_path, archive, warm=True)
    done = worker.run(LOOP, **{"MULTINODE_GRAD_COMPRESS": "fp16", **changes})
    assert done.returncode == 0
    (note,) = worker.records("note")
    assert note["message"].startswith("gradients were NOT compressed to ")
    assert reason in note["message"]
    assert f"multinode: {note['message']}\n" == done.stderr
