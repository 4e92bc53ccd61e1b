"""The first cause is found among messages that a run survived before it and what other ranks say after it."""

# ruff: noqa: E501 - lines stand here as they are printed
from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import msgspec
import pytest

from multinode.diagnose.explanation import LogFailure, explain
from multinode.diagnose.log_words import read_log

KNOWN = {
    "cuda-out-of-memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has 79 GiB in use",
    "device-assert": "torch.AcceleratorError: CUDA error: device-side assert triggered",
    "illegal-memory-access": "RuntimeError: CUDA error: an illegal memory access was encountered",
    "uncorrectable-ecc": "RuntimeError: CUDA error: uncorrectable ECC error encountered",
    "disk-full": "OSError: [Errno 28] No space left on device: '/out/checkpoint-5/optimizer.pt'",
    "out-of-memory": "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 74.5 GiB",
    "missing-module": "ModuleNotFoundError: No module named 'flash_attn'",
    "missing-file": "FileNotFoundError: [Errno 2] No such file or directory: '/data/shard-7.parquet'",
    "permission-denied": "PermissionError: [Errno 13] Permission denied: '/data/shard-7.parquet'",
    "open-files": "OSError: [Errno 24] Too many open files: '/data/shard-00017.parquet'",
    "shared-memory-full": "RuntimeError: unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left on device (28)",
    "dataloader-exited": "RuntimeError: DataLoader worker (pid(s) 3021) exited unexpectedly",
    "tensors-on-several-devices": "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:1 and cuda:0!",
    "weights-only": "_pickle.UnpicklingError: Weights only load failed. This file can still be loaded",
    "nan-gradient": "RuntimeError: Function 'MmBackward0' returned nan values in its 0th output.",
    "ddp-unused-parameters": "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.",
    "deepspeed-loss-scale": "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
    "image-tokens": "ValueError: Image features and image tokens do not match: tokens: 2456, features 3360",
    "lora-targets": "ValueError: Target modules ['q_proj'] not found in the base model. Please check the target modules and try again.",
    "no-backend-for-device": "RuntimeError: No backend type associated with device type cpu",
    "nccl-duplicate-gpu": "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, Duplicate GPU detected : rank 1 and rank 0",
    "dataset-format": "datasets.exceptions.DatasetGenerationError: An error occurred while generating the dataset",
    "file-system-gone": "OSError: [Errno 116] Stale file handle: '/nfs/data/x.bin'",
    "zero-ranks-disagree": "RuntimeError: disagreement between rank0 and rank1: rank0: [290], rank1: [293]",
    "amd-gpu": "RuntimeError: HIP error: the operation cannot be performed in the present state",
}
PLAIN = [
    "KeyError: 'labels'",
    "TypeError: forward() got an unexpected keyword argument 'labels'",
    "ValueError: labels must be integers",
    "IndexError: list index out of range",
    "AttributeError: 'NoneType' object has no attribute 'shape'",
    "ZeroDivisionError: division by zero",
    "AssertionError: loss is not finite",
    "RuntimeError: shape '[4, 5]' is invalid for input of size 19",
    "LookupError: no such schedule: cosine2",
    "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte",
    "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
    "OSError: bad shape in /data/train.bin",
    "pyarrow.lib.ArrowInvalid: Parquet magic bytes not found in footer",
    "torch._dynamo.exc.Unsupported: call_function print in skip_files",
    "omegaconf.errors.ConfigAttributeError: Key 'lr' is not in struct",
]
ENDS = {
    -11: "SIGSEGV",
    -9: "SIGKILL",
    -7: "SIGBUS",
    -6: "SIGABRT",
    -8: "SIGFPE",
    -4: "SIGILL",
    3: "3",
    17: "17",
    137: "SIGKILL",
    139: "SIGSEGV",
}
SURVIVED = [
    "'(MaxRetryError(\"HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /x\"))' thrown while requesting HEAD https://huggingface.co/x",
    "[W socket.cpp:436] [c10d] The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).",
    "[E socket.cpp:472] [c10d] The server socket has failed to listen on any local network address.",
    "OSError: [Errno 28] No space left on device",
    "PermissionError: [Errno 13] Permission denied: '/root/.triton'",
    "wandb: ERROR api_key not configured (no-tty). call wandb.login(key=[your_api_key])",
    "wandb: Network error (ConnectionError), entering retry loop.",
    "n1:1:2 [0] NCCL WARN NET/IB : Got async event : port error",
    "n1:1:2 [0] NCCL WARN NET/IB : Got completion with error 12, opcode 0, len 0, vendor err 129",
    "n1:1:2 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]",
    "n1:1:2 [0] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 10.0.0.2<4> failed : Connection refused",
    "W1120 14:00:00.1 99 event_file_writer.py:241] OSError: [Errno 28] No space left on device",
    "WARNING CUDA out of memory with batch size 32, using 16",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.00 GiB",
    "[12345.6] Out of memory: Killed process 4711 (chrome) total-vm:98765432kB, anon-rss:65432100kB",
    "ModuleNotFoundError: No module named 'apex'",
    "ImportError: cannot import name 'flash_attn_func' from 'flash_attn'",
    "/env/lib/python3.10/multiprocessing/resource_tracker.py:237: UserWarning: resource_tracker: '/a': [Errno 2] No such file or directory: '/a'",
    "FileNotFoundError: [Errno 2] No such file or directory: '/cache/index.json'",
    "TimeoutError: [Errno 110] Connection timed out",
    "requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='hf.co', port=443): Read timed out. (read timeout=10)",
    "ConnectionResetError: [Errno 104] Connection reset by peer",
    "BrokenPipeError: [Errno 32] Broken pipe",
    "RuntimeError: Numpy is not available",
    "nvcc fatal   : Unsupported gpu architecture 'compute_120'",
    "RuntimeError: Error building extension 'fused_adam'",
    "ValueError: Template qwen does not exist.",
    "bash: line 1: nvidia-smi: command not found",
    "json.decoder.JSONDecodeError: Extra data: line 2 column 1 (char 9)",
    "[W112 14:00:00.1 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=87): Failed to recv, got 0 bytes. Did the remote server shutdown or crash?",
    "[W112 14:00:00.1 ProcessGroupNCCL.cpp:1553] Warning: WARNING: destroy_process_group() was not called before program exit, which can leak resources.",
    "slurmstepd: error: Detected 1 oom_kill event in StepId=4711.1. Some of the step tasks have been OOM Killed.",
    "OSError: [Errno 5] Input/output error: '/nfs/lock'",
    "AttributeError: module 'triton' has no attribute 'ops'",
    "AssertionError: no cached plan",
    "RuntimeError: CUDA error: peer access is not supported between these two devices",
    "Failed to initialize NVML: Unknown Error",
    "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
    "subprocess.CalledProcessError: Command '['git', 'rev-parse']' returned non-zero exit status 128.",
    "grpc._channel._InactiveRpcError: <_InactiveRpcError of RPC that terminated with: StatusCode.UNAVAILABLE>",
]
CONSEQUENCES = [
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error",
    "RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:1234",
    "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0",
    "RuntimeError: Connection reset by peer",
    "[E816 01:09:38.1 ProcessGroupNCCL.cpp:621] [Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600034 milliseconds before timing out.",
    "[E816 01:09:38.1 ProcessGroupNCCL.cpp:627] [Rank {rank}] To avoid data inconsistency, we are taking the entire process down.",
    "[E816 01:09:38.1 ProcessGroupNCCL.cpp:1746] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Received a dump signal due to a collective timeout from  rank 2 and we will try our best to dump the debug info.",
    "[F816 01:09:38.1 ProcessGroupNCCL.cpp:1557] [Rank {rank}] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives.",
    "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (10.0.0.1, 29500).",
]
RANKS, FAILED = 4, 1


class Ending(msgspec.Struct, frozen=True):
    """How the process of the failed rank ends, and what has to be found."""

    lines: tuple[str, ...]
    code: int = 1
    error_id: str | None = None
    words: str = ""


def traceback(*lines: str) -> tuple[str, ...]:
    return ("Traceback (most recent call last):", '  File "/w/train.py", line 88, in <module>', "    main(3)", *lines)


def endings() -> Iterator[Ending]:
    chained = "", "During handling of the above exception, another exception occurred:", ""
    for number, (error_id, text) in enumerate(KNOWN.items()):
        lines = traceback(text)
        if number % 3 == 0:
            # What is raised while it is handled explains nothing.
            lines = (*lines, *chained, *traceback("KeyError: 'state'"))
        yield Ending(lines, error_id=error_id, words=text[:60])
    yield from (Ending(traceback(text), words=text) for text in PLAIN)
    yield from (Ending((), code, words=words) for code, words in ENDS.items())


def steps(first: int, *, is_marked: bool) -> list[str]:
    return [
        f"{f'[rank{rank}]: ' if is_marked else ''}step {number} loss {number / 7:.2f}"
        for number in range(first, first + 4)
        for rank in range(RANKS)
    ]


def report(code: int) -> list[str]:
    return [
        f"E1122 10:00:02.0 99 torch/distributed/elastic/multiprocessing/api.py:869] failed (exitcode: {code}) local_rank: {FAILED} (pid: 100) of binary: /usr/bin/python",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
        "============================================================",
        "train.py FAILED",
        "------------------------------------------------------------",
        "Root Cause (first observed failure):",
        "[0]:",
        "  time      : 2026-11-22_10:00:02",
        "  host      : gpu-a",
        f"  rank      : {FAILED} (local_rank: {FAILED})",
        f"  exitcode  : {code} (pid: 100)",
        "  error_file: <N/A>",
        "============================================================",
    ]


def log(
    ending: Ending, survived: str, consequence: str, *, is_mixed: bool, is_marked: bool, had_rank: int | None
) -> str:
    """A log in which ranks go on after `survived`, then one ends, and the others say `consequence`."""
    mark = f"[rank{had_rank}]: " if had_rank is not None else ""
    before = [*steps(1, is_marked=is_marked), f"{mark}{survived}", *steps(5, is_marked=is_marked)]
    own = [f"{f'[rank{FAILED}]: ' if is_marked else ''}{line}" for line in ending.lines]
    others = [
        [f"[rank{rank}]:{'' if consequence.startswith('[') else ' '}{consequence.format(rank=rank)}"]
        for rank in range(RANKS)
        if rank != FAILED
    ]
    if is_mixed:
        mixed = itertools.zip_longest(own, *others)
        after = [line for lines in mixed for line in lines if line is not None]
    else:
        after = [*own, *itertools.chain.from_iterable(others)]
    return "\n".join([*before, *after, *report(ending.code)]) + "\n"


def is_found(ending: Ending, first: LogFailure | None) -> bool:
    return (
        first is not None
        and first.rank == FAILED
        and ending.words in first.message
        and (ending.error_id is None or first.error_id == ending.error_id)
    )


def test_there_are_as_many_as_it_says() -> None:
    assert (len(KNOWN), len(PLAIN), len(ENDS), len(SURVIVED), len(CONSEQUENCES)) == (25, 15, 10, 40, 10)


@pytest.mark.parametrize("is_mixed", [False, True])
def test_the_cause_is_found_whatever_was_survived_before_and_follows_after(*, is_mixed: bool) -> None:
    missed: list[tuple[str, str, str, str]] = []
    draw = random.Random(7)  # noqa: S311 - a choice of logs, no secret
    tried = list(itertools.product(endings(), SURVIVED))
    for ending, survived in tried:
        consequence = draw.choice(CONSEQUENCES)
        # Lines of a process without a mark do not come between those of others.
        is_marked = is_mixed or draw.random() < 0.7
        had_rank = draw.choice([None, 0, FAILED]) if is_marked else None
        text = log(ending, survived, consequence, is_mixed=is_mixed, is_marked=is_marked, had_rank=had_rank)
        first = explain([("log", read_log(text))]).first_failure
        if not is_found(ending, first):
            missed.append((ending.words, survived[:60], consequence[:40], first.message[:80] if first else "nothing"))
    assert len(missed) <= len(tried) * 0.02, _summary(missed)


def _summary(missed: Sequence[tuple[str, ...]]) -> str:
    return f"{len(missed)} missed: " + "\n".join(" / ".join(each) for each in missed[:30])
