"""What workers call on torch.distributed, counted in two real processes on gloo; waits on a GPU with a stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytestmark = pytest.mark.torch

DEADLINE_S = 100.0
# Each worker installs the hooks by hand, as multinode_hooks does, and ends a step where the script says so.
PRELUDE = """
import os, sys
hooks, samples, meeting, rank, watched = sys.argv[1:]
rank, watched = int(rank), watched == "watched"
sys.path.insert(0, hooks)
os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
import multinode_guard, multinode_imports, multinode_recorder, multinode_steps, multinode_traffic
recorder = multinode_recorder.Recorder(samples, rank)
guard = multinode_guard.Guard(recorder)
steps = multinode_steps.Steps(recorder, guard)
if watched:
    traffic = multinode_traffic.Traffic(steps, guard)
    actions = [(name, guard.quietly(action)) for name, action in traffic.hooks()]
    sys.meta_path.insert(0, multinode_imports.AfterImport(actions))
import torch
import torch.distributed as dist
torch.manual_seed(0)
"""
MEET = """
dist.init_process_group("gloo", init_method="file://" + meeting, rank=rank, world_size=2)
"""
LEAVE = """
dist.destroy_process_group()
"""
# Every statement is one step. `x` is 10 float32: 40 bytes; `both` twice as much; `self_` and `peer` are the ranks.
STATEMENTS = {
    "nothing": "",
    "all_reduce": "dist.all_reduce(x)",
    "all_reduce, by name": "dist.all_reduce(op=dist.ReduceOp.MAX, tensor=x)",
    "all_reduce, asynchronous": "dist.all_reduce(x, async_op=True).wait()",
    "all_reduce, twice and another": "dist.all_reduce(x); dist.all_reduce(x); dist.all_reduce(both)",
    "all_reduce_coalesced": "dist.all_reduce_coalesced([x, both])",
    "all_gather": "dist.all_gather([torch.empty(10), torch.empty(10)], x)",
    "all_gather_into_tensor": "dist.all_gather_into_tensor(both, x)",
    "all_gather_single": "dist.all_gather_single(both, x)",
    "_all_gather_base": "dist._all_gather_base(both, x)",
    "all_gather_coalesced": "dist.all_gather_coalesced([[torch.empty(10)], [torch.empty(10)]], [x])",
    "reduce_scatter": "dist.reduce_scatter(x, [torch.ones(10), torch.ones(10)])",
    "reduce_scatter_tensor": "dist.reduce_scatter_tensor(x, both)",
    "reduce_scatter_single": "dist.reduce_scatter_single(x, both)",
    "broadcast": "dist.broadcast(x, 0)",
    "_broadcast_coalesced": "dist._broadcast_coalesced(dist.group.WORLD, [x, both], 1 << 20, 0)",
    "all_to_all_single": "dist.all_to_all_single(torch.empty(10), x)",
    "reduce": "dist.reduce(x, 1)",
    "gather": "dist.gather(x, [torch.empty(10), torch.empty(10)] if rank == 0 else None, 0)",
    "scatter": "dist.scatter(x, [torch.ones(10), torch.ones(10)] if rank == 0 else None, 0)",
    "send and recv": "dist.send(x, peer) if rank == 0 else dist.recv(x, peer)",
    "isend and irecv": "[work.wait() for work in (dist.isend(both, peer), dist.irecv(x.new_empty(20), peer))]",
    "batch_isend_irecv": "[work.wait() for work in dist.batch_isend_irecv("
    "[dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, torch.empty(10), peer)])]",
    "barrier": "dist.barrier()",
    "all_gather_object": "dist.all_gather_object([None, None], 'one')",
    "a group of one": "dist.all_reduce(x, group=alone)",
    "a group of others": "dist.all_reduce(x, group=others)",
    "a call that fails": "fails(lambda: dist.all_reduce('no tensor'))",
    "a call after it": "dist.all_reduce(x)",
    "coalescing manager": "coalesced()",
    "functional all_reduce": "functional.all_reduce(x, 'sum', dist.group.WORLD).wait()",
    "functional all_gather of a mesh": "functional.all_gather_single(x, 0, mesh).wait()",
    "functional reduce_scatter by name": "functional.reduce_scatter_single("
    "both, 'sum', 0, dist.group.WORLD.group_name).wait()",
    "functional all_to_all": "functional.all_to_all_single(x, None, None, (mesh, 0)).wait()",
    "a late peer": "time.sleep(0.3 * rank); dist.all_reduce(x)",
    "a late peer, asynchronous": "time.sleep(0.3 * rank); dist.all_reduce(x, async_op=True).wait()",
    "from another thread": "in_a_thread(lambda: dist.all_reduce(x))",
    "the sizes of a long list": "[dist.all_reduce(torch.ones(size)) for size in range(1, 101)]",
    "what was called before": "dist.all_reduce(x)",
}
SCRIPT = """
import hashlib, json, threading, time, warnings
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
warnings.simplefilter("ignore")
alone = [dist.new_group([0]), dist.new_group([1])][rank]
others = [dist.new_group([1]), dist.new_group([0])]
others = [group for group in others if group == dist.GroupMember.NON_GROUP_MEMBER][0]
mesh = init_device_mesh("cpu", (2,))
self_, peer = rank, 1 - rank

def fails(call):
    try:
        call()
    except TypeError as error:
        assert "Invalid function argument" in str(error), error
    else:
        raise AssertionError

def in_a_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()

def coalesced():
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(x, async_op=True)
        dist.all_reduce(both, async_op=True)
    manager.wait()

results = []
for number, statement in enumerate(json.loads(os.environ["STATEMENTS"]), 1):
    x, both = torch.arange(10.0) + rank, torch.arange(20.0) * (rank + 1)
    exec(statement)
    results.append([x.tolist(), both.tolist()])
    steps.step("optimizer")
print(hashlib.sha256(json.dumps(results).encode()).hexdigest())
"""
S, BOTH = 40, 80
WORLD = "0"
EXPECTED: dict[str, list[tuple[str, float, int]]] = {
    "nothing": [],
    "all_reduce": [("all_reduce", S, 1)],
    "all_reduce, by name": [("all_reduce", S, 1)],
    "all_reduce, asynchronous": [("all_reduce", S, 1)],
    "all_reduce, twice and another": [("all_reduce", S, 2), ("all_reduce", BOTH, 1)],
    "all_reduce_coalesced": [("all_reduce", S + BOTH, 1)],
    "all_gather": [("all_gather", BOTH, 1)],
    "all_gather_into_tensor": [("all_gather", BOTH, 1)],
    "all_gather_single": [("all_gather", BOTH, 1)],
    "_all_gather_base": [("all_gather", BOTH, 1)],
    "all_gather_coalesced": [("all_gather", BOTH, 1)],
    "reduce_scatter": [("reduce_scatter", BOTH, 1)],
    "reduce_scatter_tensor": [("reduce_scatter", BOTH, 1)],
    "reduce_scatter_single": [("reduce_scatter", BOTH, 1)],
    "broadcast": [("broadcast", S, 1)],
    "_broadcast_coalesced": [("broadcast", S + BOTH, 1)],
    "all_to_all_single": [("all_to_all", S, 1)],
    "reduce": [("reduce", S, 1)],
    "gather": [("gather", BOTH, 1)],
    "scatter": [("scatter", BOTH, 1)],
    "isend and irecv": [("recv", BOTH, 1), ("send", BOTH, 1)],
    "batch_isend_irecv": [("recv", S, 1), ("send", S, 1)],
    "barrier": [("barrier", 0, 1)],
    "a group of one": [("all_reduce", S, 1)],
    "a group of others": [],
    "a call that fails": [],
    "a call after it": [("all_reduce", S, 1)],
    "coalescing manager": [("all_reduce", S, 1), ("all_reduce", BOTH, 1)],
    "functional all_reduce": [("all_reduce", S, 1)],
    "functional all_gather of a mesh": [("all_gather", BOTH, 1)],
    "functional reduce_scatter by name": [("reduce_scatter", BOTH, 1)],
    "functional all_to_all": [("all_to_all", S, 1)],
    "a late peer": [("all_reduce", S, 1)],
    "a late peer, asynchronous": [("all_reduce", S, 1)],
    "from another thread": [("all_reduce", S, 1)],
    "the sizes of a long list": [("all_reduce", 202.0, 100)],
    "what was called before": [("all_reduce", S, 1)],
}

FSDP2 = """
import hashlib
from torch.distributed.fsdp import fully_shard
model = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 4, bias=False))
mesh = dist.init_device_mesh("cpu", (2,))
for layer in (*model, model):
    fully_shard(layer, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 8) * (rank + 1)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    steps.step("optimizer")
print(hashlib.sha256(repr([p.to_local().tolist() for p in model.parameters()]).encode()).hexdigest())
"""
ZERO2 = """
import hashlib, logging
logging.disable(logging.CRITICAL)
import deepspeed
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first, for a minute
model = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 4, bias=False))
config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 2, "overlap_comm": False},
    "zero_allow_untested_optimizer": True,
}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
for _ in range(3):
    engine.backward(engine(torch.ones(2, 8) * (rank + 1)).sum())
    engine.step()
    steps.step("deepspeed")
print(hashlib.sha256(repr([p.tolist() for p in model.parameters()]).encode()).hexdigest())
"""
