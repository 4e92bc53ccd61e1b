"""What is recorded of a model and of how it is spread, by the wrappers themselves on two gloo workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from multinode.records.samples import ModelSample, TokenWork, WorkerSample
from tests.warm import free_port

from .gloo_pair import run_pair
from .instrumented import Worker

BEGIN = """
if os.environ.get("WATCHED", "yes") == "yes":
    watch(worker.model.hooks(steps, guard))
torch = begin()

class Net(torch.nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(3))
        self.frozen = torch.nn.Linear(width, 5).bfloat16().requires_grad_(False)
    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x

def train(run, optimizer, steps_to_do=3):
    for _ in range(steps_to_do):
        run(torch.randn(2, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.step("optimizer")
"""
TRAINABLE = 3 * (64 * 64 + 64)
FROZEN = 64 * 5 + 5
# Of its matrices; gradients would pass through the frozen one.
WORK = TokenWork(trained=3 * 64 * 64, passed=64 * 5)
WHOLE: dict[str, Any] = {
    "parameters": TRAINABLE + FROZEN,
    "trainable": TRAINABLE,
    "dtypes": {"float32": TRAINABLE, "bfloat16": FROZEN},
    "trainable_dtypes": {"float32": TRAINABLE},
    "device": "cpu",
}


def models_of(folder: Path, script: str, workers: int = 2, **environ: str) -> list[ModelSample]:
    """The records of the first worker, which must be those of the second, too."""
    told = run_pair(folder / "run", BEGIN + script, workers, warm=True, **environ)
    records = [[each for each in worker.samples if isinstance(each, ModelSample)] for worker in told]
    assert [worker.stderr for worker in told if "multinode:" in worker.stderr] == []
    for rank, samples in enumerate(records):
        assert [each.rank for each in samples] == [rank] * len(samples)
        assert [(each.wrapper, each.parameters) for each in samples] == [
            (each.wrapper, each.parameters) for each in records[0]
        ]
    return records[0]


def described(sample: ModelSample) -> dict[str, Any]:
    return {name: getattr(sample, name) for name in WHOLE}


@pytest.mark.torch
def test_ddp_with_its_settings_and_what_is_frozen_later(tmp_path: Path) -> None:
    script = """
model = torch.nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=3, find_unused_parameters=True)
model._register_builtin_comm_hook(torch.distributed.BuiltinCommHookType.FP16_COMPRESS)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train(model, optimizer)
model.module.layers[0].requires_grad_(False)
train(model, optimizer, 5)
tell(steps.count)
"""
    first, later = models_of(tmp_path, script)
    assert described(first) == WHOLE
    assert first.token_work == WORK
    assert (first.wrapper, first.zero_stage, first.accumulation, first.device_name) == ("ddp", None, None, None)
    assert first.settings == {
        "bucket_cap_mb": 3.0,
        "find_unused_parameters": True,
        "static_graph": False,
        "gradient_as_bucket_view": False,
        "comm_hooks": "BuiltinCommHookType.FP16_COMPRESS",
    }
    assert (later.parameters, later.trainable) == (TRAINABLE + FROZEN, TRAINABLE * 2 // 3)


@pytest.mark.torch
def test_two_ddp_models_are_trained_together_and_one_that_was_thrown_away_is_not_told(tmp_path: Path) -> None:
    script = """
import gc
torch.nn.parallel.DistributedDataParallel(Net(128))
gc.collect()
models = [torch.nn.parallel.DistributedDataParallel(Net(), gradient_as_bucket_view=first) for first in (False, True)]
train(lambda x: models[0](x) + models[1](x), torch.optim.SGD([*models[0].parameters(), *models[1].parameters()]))
tell(None)
"""
    (sample,) = models_of(tmp_path, script)
    assert (sample.parameters, sample.trainable) == (2 * (TRAINABLE + FROZEN), 2 * TRAINABLE)


@pytest.mark.torch
def test_fully_shard_with_its_settings_and_whole_sizes(tmp_path: Path) -> None:
    script = """
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.device_mesh import init_device_mesh
model = Net().float()
model.frozen.requires_grad_(False)
mesh = init_device_mesh("cpu", (2,))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.layers:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
train(model, torch.optim.SGD(model.parameters(), lr=0.1))
tell(None)
"""
    (sample,) = models_of(tmp_path, script)
    assert (sample.wrapper, sample.token_work) == ("fsdp2", WORK)
    assert (sample.parameters, sample.trainable) == (TRAINABLE + FROZEN, TRAINABLE)
    assert sample.dtypes == {"float32": TRAINABLE + FROZEN}
    assert sample.settings == {
        "reshard_after_forward": True,
        "param_dtype": "bfloat16",
        "reduce_dtype": "float32",
        "mesh": "2",
        "offload_param": "none",
    }


@pytest.mark.torch
@pytest.mark.parametrize("use_orig_params", ["True", "False"])
def test_fsdp_with_its_settings_and_whole_sizes(tmp_path: Path, use_orig_params: str) -> None:
    script = f"""
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
model = Net().float()
model.frozen.requires_grad_(False)
policy = ModuleWrapPolicy([torch.nn.Linear])
model = FSDP(model, auto_wrap_policy=policy, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
             device_id=torch.device("cpu"), use_orig_params={use_orig_params})
train(model, torch.optim.SGD(model.parameters(), lr=0.1))
tell(None)
"""
    (sample,) = models_of(tmp_path, script)
    assert (sample.wrapper, sample.token_work) == ("fsdp", WORK)
    assert (sample.parameters, sample.trainable) == (TRAINABLE + FROZEN, TRAINABLE)
    assert (sample.settings["sharding_strategy"], sample.settings["reshard_after_forward"]) == ("SHARD_GRAD_OP", False)


DEEPSPEED = """
import gc
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first, for a minute

def make(stage):
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "bf16": {"enabled": True},
              "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": stage, "overlap_comm": False,
              "reduce_bucket_size": 5000, "allgather_bucket_size": 7000}}
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model = Net()
    trained = [each for each in model.parameters() if each.requires_grad]
    return deepspeed.initialize(model=model, config=config, optimizer=torch.optim.SGD(trained, lr=0.1))[0]

def train_engine(engine, steps_to_do):
    for micro_step in range(2 * steps_to_do):
        engine.backward(engine(torch.randn(2, 64).bfloat16()).float().square().mean())
        engine.step()
        if micro_step % 2:
            steps.step("deepspeed")

# The model is looked at after steps 1, 2, 4 and 8.
for stage, steps_to_do in enumerate([1, 1, 2, 4]):
    engine = make(stage)
    train_engine(engine, steps_to_do)
    engine.destroy()
    del engine
    gc.collect()
tell(None)
"""


@pytest.mark.torch
def test_deepspeed_with_its_stage_settings_and_whole_sizes(tmp_path: Path) -> None:
    samples = models_of(
        tmp_path, DEEPSPEED, DS_ACCELERATOR="cpu", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port())
    )
    assert [each.zero_stage for each in samples] == [0, 1, 2, 3]
    for sample in samples:
        assert (sample.wrapper, sample.accumulation, sample.token_work) == ("deepspeed", 2, WORK)
        assert (sample.parameters, sample.trainable, sample.device) == (TRAINABLE + FROZEN, TRAINABLE, "cpu")
        assert sample.dtypes == {"bfloat16": TRAINABLE + FROZEN}
        expected = {
            "reduce_bucket_size": 5000,
            "allgather_bucket_size": 7000,
            "overlap_comm": False,
            "communication_dtype": "bfloat16",
            "offload_optimizer": "none",
        }
        assert {name: sample.settings[name] for name in expected} == expected


@pytest.mark.torch
def test_a_model_that_nothing_wraps_is_what_its_optimizer_trains(tmp_path: Path) -> None:
    script = """
model = Net()
train(model, torch.optim.SGD(model.layers.parameters(), lr=0.1))
tell(None)
"""
    (sample,) = models_of(tmp_path, script)
    assert (sample.wrapper, sample.parameters, sample.trainable) == ("none", TRAINABLE, TRAINABLE)
    assert sample.token_work is None
    assert sample.settings == {}


TRAINER = """
class Trainer:
    def __init__(self, model, args):
        self.model, self.args = model, args
"""


@pytest.mark.torch
def test_a_trainer_knows_the_whole_model_and_the_accumulation(tmp_path: Path) -> None:
    module = tmp_path / "modules" / "transformers" / "trainer.py"
    module.parent.mkdir(parents=True)
    module.write_text(TRAINER)
    (module.parent / "__init__.py").touch()
    script = """
import types
from transformers.trainer import Trainer
trainer = Trainer(Net(), types.SimpleNamespace(gradient_accumulation_steps=8))
train(trainer.model, torch.optim.SGD(trainer.model.layers.parameters(), lr=0.1))
tell(None)
"""
    (sample,) = models_of(tmp_path, script)
    assert described(sample) == WHOLE
    assert (sample.wrapper, sample.accumulation, sample.dataset_samples) == ("none", 8, None)
    assert sample.token_work == WORK


@pytest.mark.torch
@pytest.mark.parametrize(
    ("data", "samples"),
    [
        ("list(range(30))", 30),
        ("iter(range(30))", None),
        ("type('Endless', (), {'__len__': lambda self: sys.maxsize})()", None),
        ("type('Broken', (), {'__len__': lambda self: 1 / 0})()", None),
    ],
)
def test_a_trainers_data_set_is_counted_whole_where_it_has_a_length(
    tmp_path: Path, data: str, samples: int | None
) -> None:
    module = tmp_path / "modules" / "transformers" / "trainer.py"
    module.parent.mkdir(parents=True)
    module.write_text(TRAINER)
    (module.parent / "__init__.py").touch()
    script = f"""
import types
from transformers.trainer import Trainer
trainer = Trainer(Net(), types.SimpleNamespace(gradient_accumulation_steps=8))
loader = types.SimpleNamespace(dataset={data})
trainer.callback_handler = types.SimpleNamespace(train_dataloader=loader)
train(trainer.model, torch.optim.SGD(trainer.model.layers.parameters(), lr=0.1))
tell(None)
"""
    (sample,) = models_of(tmp_path, script)
    assert sample.dataset_samples == samples
    assert sample.accumulation == 8


@pytest.mark.torch
def test_accelerate_knows_the_accumulation_and_the_precision_that_it_was_given(tmp_path: Path) -> None:
    script = """
import accelerate
model = Net()
train(model, torch.optim.SGD(model.parameters()), 1)
accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4, mixed_precision="bf16")
train(model, torch.optim.SGD(model.parameters()), 1)
tell(None)
"""
    before, after = models_of(tmp_path, script, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    assert (before.accumulation, after.accumulation) == (None, 4)
    assert (before.mixed_precision, after.mixed_precision) == (None, "bf16")


@pytest.mark.torch
def test_the_precision_of_autocast_is_told_unless_it_is_off_or_of_another_device(tmp_path: Path) -> None:
    script = """
model = Net()
optimizer = torch.optim.SGD(model.parameters())
for device, dtype, enabled in [
    ("cpu", torch.bfloat16, False),
    ("cpu", torch.bfloat16, True),
    ("cuda", torch.float16, True),
    ("cpu", torch.float16, True),
]:
    with torch.autocast(device, dtype=dtype, enabled=enabled):
        train(model, optimizer, 1)
    # As in an evaluation.
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16 if dtype is torch.bfloat16 else torch.bfloat16):
        pass
tell(None)
"""
    told = models_of(tmp_path, script, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    assert [each.mixed_precision for each in told] == [None, "bf16", "fp16"]


@pytest.mark.torch
def test_tf32_is_told_whichever_way_it_was_set(tmp_path: Path, archive: Path) -> None:
    told = Worker(tmp_path, archive, warm=True).run_wired("""
matmul = torch.backends.cuda.matmul
def tell(): say({"tf32": worker.model._tf32()})
tell()
torch.set_float32_matmul_precision("high"); tell()
torch.set_float32_matmul_precision("highest"); tell()
if hasattr(matmul, "fp32_precision"):
    matmul.fp32_precision = "tf32"
else:
    matmul.allow_tf32 = True
tell()
os.environ["NVIDIA_TF32_OVERRIDE"] = "0"; tell()
""")
    assert [record["tf32"] for record in told] == [False, True, False, True, False]


@pytest.mark.torch
def test_the_gpu_of_a_model_is_told_by_its_own_id_unless_torch_knows_none(tmp_path: Path, archive: Path) -> None:
    told = Worker(tmp_path, archive, warm=True).run_wired("""
from types import SimpleNamespace
def tell(**properties):
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(**properties)
    torch.cuda.get_device_name = lambda device: "NVIDIA H100"
    weight = worker.model._Parameter(elements=8, dtype="float32", device=torch.device("cuda:0"), is_trainable=True)
    spread = worker.model._Spread(wrapper="none", parameters=(weight,), settings={})
    say(worker.model._fields(spread, {}))
tell(uuid="5fd9b6b2-0000-0000-0000-000000000000"); tell(name="of torch 2.3")
""")
    assert [record["device_uuid"] for record in told] == ["5fd9b6b2-0000-0000-0000-000000000000", None]
    assert [record["device_name"] for record in told] == ["NVIDIA H100"] * 2


@pytest.mark.torch
def test_a_worker_tells_its_network_and_the_protocol_that_nccl_is_held_to(tmp_path: Path) -> None:
    script = """
model = torch.nn.parallel.DistributedDataParallel(Net().float())
train(model, torch.optim.SGD(model.parameters(), lr=0.1))
"""
    for proto in ({"NCCL_PROTO": "LL"}, {}):
        folder = tmp_path / f"of-{len(proto)}"
        told = run_pair(folder, BEGIN + script, 2, warm=True, **proto)
        (first,), (second,) = ([each for each in one.samples if isinstance(each, WorkerSample)] for one in told)
        # Workers of one machine and one network namespace count the same interface.
        assert first.network == second.network
        assert first.network is not None
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        assert first.network == f"{boot_id}/{Path('/proc/self/ns/net').stat().st_ino}"
        assert (first.nccl_proto, second.nccl_proto) == (proto.get("NCCL_PROTO"),) * 2


@pytest.mark.torch
@pytest.mark.parametrize("wrap", ["torch.nn.parallel.DistributedDataParallel", "fsdp.fully_shard"])
def test_the_training_is_the_same_bit_for_bit(tmp_path: Path, wrap: str) -> None:
    script = f"""
import torch.distributed.fsdp as fsdp
model = {wrap}(Net().float())
train(model, torch.optim.SGD(model.parameters(), lr=0.1))
weights = [getattr(each, "to_local", lambda: each)() for each in model.parameters()]
tell([each.double().square().sum().item() for each in weights])
"""
    watched, unwatched = (run_pair(tmp_path / each, BEGIN + script, WATCHED=each) for each in ("yes", "no"))
    assert [told.said for told in watched] == [told.said for told in unwatched]
    assert [len(told.samples) for told in watched] == [len(told.samples) + 1 for told in unwatched]
