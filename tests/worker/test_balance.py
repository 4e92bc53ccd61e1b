"""Samples dealt out by speed: two real workers on gloo, whose gradient is that of one worker with the whole batch."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from multinode.levers.balance import deal_step, parse_balance
from multinode.levers.lever import Workers
from tests.golden import Golden
from tests.worker.gloo_pair import Told, run_pair

pytestmark = pytest.mark.torch

BALANCE = parse_balance("node0=5,node1=3")
TOLD = BALANCE.environment(Workers(nodes=("node0", "node1"), counts=(1, 1)))["MULTINODE_BALANCE"]

BEGIN = """
import itertools
sys.meta_path.insert(0, AfterImport(worker.levers.balance.hooks(steps)))
torch = begin()
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

WORDS, CLASSES, BATCH = 7, 5, 4

class Texts(Dataset):
    "Of unequal length: what is beyond has no target."
    def __init__(self, count=44): self.count = count
    def __len__(self): return self.count
    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(WORDS, 3, generator=generator)
        targets = torch.randint(CLASSES, (WORDS,), generator=generator)
        targets[1 + index % WORDS:] = -100
        return {"index": torch.tensor(index), "inputs": inputs, "targets": targets}

def mlp():
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, CLASSES))

WEIGHT = torch.arange(1.0, CLASSES + 1)
LOSSES = {
    "cross_entropy": lambda out, batch: F.cross_entropy(out.flatten(0, 1), batch["targets"].flatten()),
    "module": lambda out, batch: torch.nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.1)(
        out.transpose(1, 2), batch["targets"]),
    "probabilities": lambda out, batch: F.cross_entropy(out[:, 0], torch.softmax(batch["inputs"].sum(2)[:, :5], 1)),
    "nll": lambda out, batch: F.nll_loss(F.log_softmax(out.flatten(0, 1), 1), batch["targets"].flatten()),
    "mse": lambda out, batch: F.mse_loss(out[..., :3], batch["inputs"]),
    "two": lambda out, batch: LOSSES["cross_entropy"](out, batch) + 0.3 * LOSSES["mse"](out, batch),
    "kl": lambda out, batch: F.kl_div(
        F.log_softmax(out[..., :3], -1), torch.softmax(batch["inputs"], -1), reduction="batchmean"),
}

def loader(dataset, **given):
    sampler = DistributedSampler(dataset, shuffle=True, seed=1)
    return DataLoader(dataset, **{"batch_size": BATCH, "sampler": sampler, **given})

def gathered(value):
    values = [None, None]
    torch.distributed.all_gather_object(values, value)
    return values

def gradients(module):
    return torch.cat([each.grad.flatten() for each in module.parameters()])

def whole_batch(batches):
    "Of both workers: their samples beside one another, as one worker would have them."
    dataset = Texts()
    indices = [int(index) for part in gathered([batch["index"].tolist() for batch in batches]) for index in part[0]]
    return indices, torch.utils.data.default_collate([dataset[index] for index in indices])

def first_step(loss, micro=1):
    module = mlp()
    model = DistributedDataParallel(module)
    alone = mlp()
    batches = list(itertools.islice(loader(Texts()), micro))
    sizes = []
    for place, batch in enumerate(batches):
        with model.no_sync() if place < micro - 1 else torch.enable_grad():
            (LOSSES[loss](model(batch["inputs"]), batch) / micro).backward()
        indices, whole = whole_batch([batch])
        sizes.append(len(batch["index"]))
        (LOSSES[loss](alone(whole["inputs"]), whole) / micro).backward()
    return {"mine": gradients(module).tolist(), "alone": gradients(alone).tolist(), "sizes": sizes}
"""
FIRST_STEP = """
told = {loss: first_step(loss) for loss in LOSSES}
told["accumulated"] = first_step("cross_entropy", micro=3)

# An epoch: the samples of each step, and how many steps there are, also where they do not come out even.
def epoch(dataset, epoch, **given):
    ours = loader(dataset, **given)
    ours.sampler.set_epoch(epoch)
    plain = DistributedSampler(dataset, shuffle=True, seed=1)
    plain.set_epoch(epoch)
    expected = list(BatchSampler(plain, BATCH, given.get("drop_last", False)))
    return {"ours": gathered([batch["index"].tolist() for batch in ours]), "expected": gathered(expected),
            "length": len(ours)}

told["epochs"] = [epoch(Texts(count), number, **given) for count in (44, 40, 37, 8, 3) for number in (0, 1)
                  for given in ({}, {"drop_last": True})]
in_workers = loader(Texts(), num_workers=1)
told["in workers"] = [len(batch["index"]) for batch in in_workers]
# An evaluation, and what is computed without DDP, stays as it is.
in_order = loader(Texts(), sampler=DistributedSampler(Texts(), shuffle=False))
told["evaluation"] = [len(batch["index"]) for batch in in_order]
tell(told)
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    return run_pair(tmp_path_factory.mktemp("balance") / "first", BEGIN + FIRST_STEP, MULTINODE_BALANCE=TOLD)


@pytest.mark.parametrize("loss", ["cross_entropy", "module", "probabilities", "nll", "mse", "two", "kl", "accumulated"])
def test_the_first_gradient_is_that_of_one_worker_with_the_whole_batch(told: list[Told], loss: str) -> None:
    for worker, size in zip(told, (5, 3), strict=True):
        found = worker.said[loss]
        assert set(found["sizes"]) == {size}
        assert found["mine"] == pytest.approx(found["alone"], rel=1e-5, abs=1e-7)


def test_steps_have_the_samples_that_they_have_anyway(told: list[Told]) -> None:
    for epoch in told[0].said["epochs"]:
        ours, expected = epoch["ours"], epoch["expected"]
        assert len(ours[0]) == len(ours[1]) == len(expected[0]) == epoch["length"]
        for mine, theirs, *anyway in zip(*ours, *expected, strict=True):
            assert sorted(mine + theirs) == sorted(anyway[0] + anyway[1])
            assert [len(mine), len(theirs)] == list(deal_step(len(mine + theirs), (5.0, 3.0)))


def test_loader_processes_are_given_their_share_and_an_evaluation_is_left_alone(told: list[Told]) -> None:
    assert [worker.said["in workers"][0] for worker in told] == [5, 3]
    assert [worker.said["evaluation"][0] for worker in told] == [4, 4]


REFUSED = """
told = {}

class Stream(IterableDataset):
    def __iter__(self): return iter([Texts()[index] for index in range(RANK, 16, 2)])

class Own(BatchSampler):
    pass

def step(batch, loss=LOSSES["cross_entropy"], **given):
    module = mlp()
    model = DistributedDataParallel(module, **given)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loss(model(batch["inputs"]), batch).backward()
    optimizer.step()

def streamed():
    step(next(iter(DataLoader(Stream(), batch_size=4))))

def own_batches():
    sampler = DistributedSampler(Texts())
    step(next(iter(DataLoader(Texts(), batch_sampler=Own(sampler, 4, False)))))

def own_order():
    step(next(iter(DataLoader(Texts(), batch_size=4, sampler=RandomSampler(Texts())))))

def no_loader():
    step(torch.utils.data.default_collate([Texts()[index] for index in range(4)]))

def summed():
    step(next(iter(loader(Texts()))), lambda out, batch: F.mse_loss(out[..., :3], batch["inputs"], reduction="sum"))

def own_mean():
    step(next(iter(loader(Texts()))), lambda out, batch: (out[..., :3] - batch["inputs"]).square().mean())

def one_worker_alone():
    "The first has no loader of ours, the second one has: neither trains."
    step(next(iter(loader(Texts()) if RANK else DataLoader(Texts(), batch_size=4))))

def without_ddp():
    module = mlp()
    LOSSES["mse"](module(Texts()[0]["inputs"][None]), {"inputs": Texts()[0]["inputs"][None]}).backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()

def joined():
    with DistributedDataParallel(mlp()).join():
        pass

def fewer_calls():
    module = mlp()
    model = DistributedDataParallel(module)
    batch = next(iter(loader(Texts())))
    LOSSES["mse"](model(batch["inputs"]), batch).backward()
    model(batch["inputs"]).square().mean().backward()

name = os.environ["TEST"]
try:
    globals()[name]()
except worker.levers.balance.BalanceError as error:
    told = str(error)
tell(told)
"""
UNBALANCED = (
    "streamed",
    "own_batches",
    "own_order",
    "no_loader",
    "summed",
    "own_mean",
    "without_ddp",
    "fewer_calls",
    "joined",
)


@pytest.mark.parametrize("name", UNBALANCED)
def test_all_workers_refuse_what_cannot_be_balanced(tmp_path: Path, name: str, golden: Golden) -> None:
    for worker in run_pair(tmp_path / "refused", BEGIN + REFUSED, TEST=name, MULTINODE_BALANCE=TOLD):
        golden.check(f"balance_{name}.txt", f"{worker.said}\n")


def test_a_worker_whose_peer_cannot_be_balanced_refuses_with_it(tmp_path: Path, golden: Golden) -> None:
    one, other = run_pair(tmp_path / "refused", BEGIN + REFUSED, TEST="one_worker_alone", MULTINODE_BALANCE=TOLD)
    golden.check("balance_one_alone.txt", f"{one.said}\n{other.said}\n")


def test_micro_batches_of_one_sample_change_nothing_and_say_so(tmp_path: Path, golden: Golden) -> None:
    script = BEGIN + "tell([len(batch['index']) for batch in loader(Texts(), batch_size=1)])"
    one, other = run_pair(tmp_path / "one", script, MULTINODE_BALANCE=TOLD)
    assert set(one.said) == set(other.said) == {1}
    golden.check("balance_changes_nothing.txt", one.stderr)
    assert other.stderr == ""


LONG = """
def train(seed, loss, steps_to_do=100):
    torch.manual_seed(seed)
    module = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, CLASSES))
    model = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    batches, epoch = loader(Texts(200)), 0
    for number in range(steps_to_do):
        if number % len(batches) == 0:
            batches.sampler.set_epoch(seed * 1000 + epoch)
            left, epoch = iter(batches), epoch + 1
        batch = next(left)
        LOSSES[loss](model(batch["inputs"]), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    everything = torch.utils.data.default_collate([Texts()[index] for index in range(200)])
    with torch.no_grad():
        return LOSSES[loss](module(everything["inputs"]), everything).item()

tell({loss: [train(seed, loss) for seed in (1, 2, 3)] for loss in ("mse", "cross_entropy")})
"""


def test_the_loss_after_a_hundred_steps_is_that_without_balance_whatever_the_seed(tmp_path: Path) -> None:
    balanced = run_pair(tmp_path / "balanced", BEGIN + LONG, MULTINODE_BALANCE=TOLD)[0].said
    plain = run_pair(tmp_path / "plain", BEGIN + LONG)[0].said
    # A mean of samples is the same mean however they are dealt out.
    assert balanced["mse"] == pytest.approx(plain["mse"], rel=1e-3)
    # One of tokens is, without it, a mean of the workers' means: as far off as seeds are, at the most.
    between_seeds = max(plain["cross_entropy"]) - min(plain["cross_entropy"])
    assert balanced["cross_entropy"] == pytest.approx(plain["cross_entropy"], abs=max(0.01, between_seeds))


TRAINER = """
os.environ.update(LOCAL_RANK="0", MULTINODE_SAMPLES=FOLDER, MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
worker.hooks.install()
torch = begin()
import transformers
from torch.utils.data import Dataset

transformers.TrainingArguments.device = property(lambda args: args._setup_devices and torch.device("cpu"))

class Texts(Dataset):
    def __init__(self, count=37): self.count = count
    def __len__(self): return self.count
    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(2, 60, (3 + index % 11,), generator=generator)
        labels = ids.clone()
        labels[: index % 4] = -100
        return {"input_ids": ids, "labels": labels}

def collate(samples):
    length = max(len(sample["input_ids"]) for sample in samples)
    padded = lambda name, value: torch.stack(
        [F.pad(sample[name], (0, length - len(sample[name])), value=value) for sample in samples])
    ids = padded("input_ids", 0)
    mask = torch.stack([torch.arange(length) < len(sample["input_ids"]) for sample in samples]).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": padded("labels", -100)}

from torch.nn import functional as F

def model():
    torch.manual_seed(5)
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, attention_dropout=0.0))

class Watch(transformers.TrainerCallback):
    gradient = None
    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        if self.gradient is None:
            self.gradient = gradients(model)

def gradients(module):
    return torch.cat([each.grad.flatten() for each in module.parameters() if each.grad is not None])

def train(accepts=True, micro=2, **settings):
    args = transformers.TrainingArguments(**{
        "output_dir": FOLDER + "/out", "num_train_epochs": 1, "save_strategy": "no", "report_to": [], "use_cpu": True,
        "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "gradient_accumulation_steps": micro,
        "max_grad_norm": 0.0, "learning_rate": 1e-3, "seed": 3, "disable_tqdm": True, "logging_steps": 1,
        "eval_strategy": "epoch", **settings})
    watch, seen = Watch(), []
    trainer = transformers.Trainer(model=model(), args=args, train_dataset=Texts(), eval_dataset=Texts(13),
                                   data_collator=collate, callbacks=[watch])
    trainer.model_accepts_loss_kwargs = accepts
    training_step = trainer.training_step
    def noted(model, inputs, *rest):
        seen.append([ids[mask.bool()].tolist() for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"])])
        return training_step(model, inputs, *rest)
    trainer.training_step = noted
    trainer.train()
    parts = [None, None]
    torch.distributed.all_gather_object(parts, seen)
    # One worker: a micro-batch of all workers' samples, each with its labels.
    by_ids = {tuple(sample["input_ids"].tolist()): sample for sample in (Texts()[index] for index in range(37))}
    batches = [collate([by_ids[tuple(ids)] for part in parts for ids in part[place]]) for place in range(micro)]
    alone = model()
    for batch in batches:
        out = alone(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = F.cross_entropy(out[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten(), reduction="sum",
                               ignore_index=-100)
        mean = (loss / (batch["labels"][:, 1:] != -100).sum() / micro)
        whole = loss / sum((batch["labels"] != -100).sum() for batch in batches)
        (whole if accepts else mean).backward()
    return {"mine": watch.gradient.tolist(), "alone": gradients(alone).tolist(),
            "sizes": [len(each) for each in seen], "steps": trainer.state.global_step,
            "losses": [one["eval_loss"] for one in trainer.state.log_history if "eval_loss" in one]}

told = {
    "of all": train(), "of each": train(average_tokens_across_devices=False), "mean": train(accepts=False),
    "split": train(accelerator_config={"split_batches": True}, per_device_train_batch_size=8),
}
tell(told)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    folder = tmp_path_factory.mktemp("trainer")
    return run_pair(folder / "trained", TRAINER, warm=False, MULTINODE_BALANCE=TOLD)


@pytest.mark.parametrize("name", ["of all", "of each", "mean", "split"])
def test_the_trainers_first_gradient_is_that_of_one_worker(trained: list[Told], name: str) -> None:
    """Divided by the tokens of all workers, by each worker's own, and as the mean of each micro-batch."""
    for worker in trained:
        found = worker.said[name]
        assert found["mine"] == pytest.approx(found["alone"], rel=1e-5, abs=1e-7)


def test_the_trainers_epoch_has_as_many_steps_and_its_evaluation_is_left_alone(trained: list[Told]) -> None:
    one, other = (worker.said["of all"] for worker in trained)
    # 37 samples, 8 of both workers in a micro-batch, filled up at the end; two micro-batches are a step.
    assert len(one["sizes"]) == len(other["sizes"]) == math.ceil(37 / 8)
    assert one["steps"] == other["steps"] == 3
    assert [sum(sizes) for sizes in zip(one["sizes"], other["sizes"], strict=True)] == [8] * 5
    assert sum(one["sizes"][:2]) == deal_step(8, (5.0, 3.0), 2)[0]
    assert one["losses"] == other["losses"] != []


def test_a_balanced_workers_samples_are_counted(trained: list[Told]) -> None:
    for worker, samples in zip(trained, (10, 6), strict=True):
        steps: list[dict[str, Any]] = [one for one in worker.records if one["kind"] == "step"]
        assert steps[1]["samples"] == samples


@pytest.mark.parametrize("samples", [4, 8, 13, 64])
@pytest.mark.parametrize("accumulation", [1, 3, 4])
def test_both_ends_deal_alike(tmp_path: Path, samples: int, accumulation: int) -> None:
    speeds = (1.7, 1.0, 0.4)
    script = f"""
settings = worker.levers.balance.BalanceSettings(speeds={speeds}, accumulation={accumulation})
parts = []
for rank in range(3):
    os.environ["RANK"] = str(rank)
    balance = worker.levers.balance.BatchBalance(settings, steps)
    parts.append([len(part) for part in balance.deal_out(iter([list(range({samples}))] * {accumulation}))])
tell(parts)
"""
    (found,) = run_pair(tmp_path / "dealt", script, workers=1)
    assert tuple(map(sum, found.said)) == deal_step(samples, speeds, accumulation)
    assert all(sum(sizes) == samples and min(sizes) > 0 for sizes in zip(*found.said, strict=True))


def test_the_environment_is_what_the_workers_read() -> None:
    assert json.loads(TOLD) == {
        "speeds": [5.0, 3.0],
        "accumulation": 1,
        "option": "--balance node0=5,node1=3",
    }
