"""Four ranks of which one breaks step in the way that is asked for: KIND RANK STEP; over NCCL where there is a GPU."""

import sys
import time

import torch
import torch.distributed as dist

kind, guilty, at = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank = dist.get_rank()
pairs = [dist.new_group([0, 1], group_desc="pair"), dist.new_group([2, 3], group_desc="pair")]
pair = pairs[rank // 2]
print("rank", rank, "begins", flush=True)  # noqa: T201 - a training prints


def load_batch() -> None:
    """Be late, which is all the same to whoever looks at the stack."""
    time.sleep(600)


for step in range(1, at + 3):
    breaks = rank == guilty and step == at
    if breaks and kind == "end":
        sys.exit(0)
    if breaks and kind == "group":
        load_batch()
    dist.all_gather([torch.zeros(4, device=device) for _ in range(2)], torch.ones(4, device=device), group=pair)
    if breaks and kind == "sleep":
        load_batch()
    if breaks and kind == "operation":
        dist.broadcast(torch.ones(8, device=device), guilty)
    elif breaks and kind == "size":
        dist.all_reduce(torch.ones(8192, device=device))
    elif not (breaks and kind == "skip"):
        dist.all_reduce(torch.ones(8, device=device))
    dist.barrier()
    print("rank", rank, "step", step, flush=True)  # noqa: T201 - likewise
