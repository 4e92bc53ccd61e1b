"""What failures provoked on an H100 printed under torchrun (tests/gpu/h100/failures.jsonl) is told by its cause."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from multinode.diagnose.explanation import explain
from multinode.diagnose.log_words import last_words, read_log

_LOGS = Path(__file__).parents[1] / "gpu" / "h100" / "failures.jsonl"
LOGS = {log["case"]: log["log"] for log in map(json.loads, _LOGS.read_text().splitlines())}

# The entry of the catalogue, the rank, and how the message begins; CUDA and torch 2.11, NCCL 2.28.
TOLD = {
    "alloc-conf": ("allocator-settings", 0, ": ValueError: Unrecognized key 'max_split_size' in CUDA allocator conf"),
    "anomaly": ("nan-gradient", 0, ": RuntimeError: Function 'SqrtBackward0' returned nan values in its 0t"),
    "bad-visible": ("no-gpu", 0, ": RuntimeError: No CUDA GPUs are available"),
    "barrier-device": ("invalid-device", 0, ": torch.AcceleratorError: CUDA error: invalid device ordinal"),
    "checkpoint-device": (
        "checkpoint-device",
        0,
        ": RuntimeError: Attempting to deserialize object on CUDA device 1 but ",
    ),
    "compile-error": (None, 0, ": torch._dynamo.exc.Unsupported: Failed to trace builtin operator"),
    "compile-no-gcc": ("no-compiler", 0, ": torch._inductor.exc.InductorError: RuntimeError: Failed to find C co"),
    "cpu-tensor-nccl": ("no-backend-for-device", 0, ": RuntimeError: No backend type associated with device type cpu"),
    "cudnn-memory": ("cuda-out-of-memory", 0, ": torch.AcceleratorError: CUDA error: out of memory"),
    "ddp-shapes": ("ddp-unequal-models", 1, ": RuntimeError: [1]: params[0] in this process with sizes [4, 5] appea"),
    "ddp-unused": (
        "ddp-unused-parameters",
        0,
        ": RuntimeError: Expected to have finished reduction in the prior itera",
    ),
    "device-ordinal": ("invalid-device", 0, ": torch.AcceleratorError: CUDA error: invalid device ordinal"),
    "dtype": ("mixed-types", 0, ": RuntimeError: mat1 and mat2 must have the same dtype, but got Float "),
    "duplicate-gpu": ("nccl-duplicate-gpu", 1, ": Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 60"),
    "embedding-index": ("device-assert", 0, ": torch.AcceleratorError: CUDA error: device-side assert triggered"),
    "expandable-oom": (
        "cuda-out-of-memory",
        0,
        ": torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 16.00 ",
    ),
    "fork": ("cuda-in-fork", 0, ": RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use"),
    "fraction-oom": ("cuda-out-of-memory", 0, ": torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 256.00"),
    "fsdp-oom": ("cuda-out-of-memory", 0, ": torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.35 G"),
    "gather-index": ("device-assert", 0, ": torch.AcceleratorError: CUDA error: device-side assert triggered"),
    "grad-scaler": (None, 0, ": AssertionError: No inf checks were recorded for this optimizer."),
    "graph-capture": ("graph-capture", 0, ": torch.AcceleratorError: CUDA error: operation not permitted when str"),
    "illegal-address": (
        "illegal-memory-access",
        0,
        ": torch.AcceleratorError: CUDA error: an illegal memory access was enc",
    ),
    "inference-grad": (None, 0, ": RuntimeError: Inference tensors cannot be saved for backward. Please"),
    "label-range": ("device-assert", 0, ": torch.AcceleratorError: CUDA error: device-side assert triggered"),
    "misaligned": ("cuda-kernel-crash", 0, ": torch.AcceleratorError: CUDA error: misaligned address"),
    "monitored-mismatch": (
        "collective-mismatch",
        0,
        ": RuntimeError: Detected mismatch between collectives on ranks. Rank 0",
    ),
    "nccl-algo": ("nccl-algorithm", 0, ": Error : no algorithm/protocol available for function AllReduce with "),
    "nccl-dtype": (None, 0, ": TypeError: Input tensor data type is not supported for NCCL process "),
    "nccl-memory": ("cuda-out-of-memory", 0, ": Cuda failure 2 'out of memory'"),
    "net-name": ("nccl-network-not-found", 0, ": Failed to initialize any NET plugin"),
    "net-plugin": ("nccl-network-not-found", 0, ": Failed to initialize any NET plugin"),
    "no-gpu": ("no-gpu", 0, ": RuntimeError: No CUDA GPUs are available"),
    "no-interface": ("nccl-no-interface", 0, ": Bootstrap : no socket interface found"),
    "nvrtc": (None, 0, ": RuntimeError: Kernel compilation failed:"),
    "peer-exits": (None, 1, " exited with code 3"),
    "peer-raises": (None, 1, ": ValueError: bad sample 17 in shard 3"),
    "pin-in-worker": ("cuda-in-fork", 0, ": RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use"),
    "scaler-fp16-grads": ("fp16-gradients", 0, ": ValueError: Attempting to unscale FP16 gradients."),
    "sdpa-flash-fp32": (None, 0, ": RuntimeError: No available kernel. Aborting execution."),
    "stack-overflow": (
        "illegal-memory-access",
        0,
        ": torch.AcceleratorError: CUDA error: an illegal memory access was enc",
    ),
    "tensor-device-ordinal": ("invalid-device", 0, ": torch.AcceleratorError: CUDA error: invalid device ordinal"),
    "too-many-threads": ("cuda-kernel-crash", 0, ": RuntimeError: CUDA error: invalid argument"),
    "trap": ("illegal-memory-access", 0, ": torch.AcceleratorError: CUDA error: unspecified launch failure"),
    "two-devices": (
        "tensors-on-several-devices",
        0,
        ": RuntimeError: Expected all tensors to be on the same device, but got",
    ),
    "watchdog": ("collective-timeout", 0, ": the collective timed out: allreduce took longer than"),
    "weights-on-cpu": (
        "tensors-on-several-devices",
        0,
        ": RuntimeError: Expected all tensors to be on the same device, but got",
    ),
}


def test_every_log_has_its_line() -> None:
    assert sorted(TOLD) == sorted(LOGS)


@pytest.mark.parametrize("case", TOLD)
def test_the_first_cause_is_told(case: str) -> None:
    first = explain([("log", read_log(LOGS[case]))]).first_failure
    assert first is not None
    error, rank, begins = TOLD[case]
    assert (first.error_id, first.rank) == (error, rank)
    assert first.message.startswith(f"rank {rank}{begins}"), first.message


def test_a_worker_that_leaves_without_a_word_is_told_before_the_lost_connections_of_the_others() -> None:
    first = explain([("log", read_log(LOGS["peer-exits"]))]).first_failure
    assert first is not None
    assert not first.of_peers
    assert first.cause is not None
    assert first.cause.startswith("The worker exited on its own without raising an exception")
    assert first.hint is not None
    assert "os._exit" in first.hint
    # Where the others said nothing of it, nothing of peers is known.
    silent = LOGS["peer-exits"][LOGS["peer-exits"].index("W1127") :]
    told = explain([("log", read_log(silent))]).first_failure
    assert told is not None
    assert (told.message, told.cause) == ("rank 1 exited with code 3", None)


def test_what_torch_says_of_a_worker_that_left_without_a_word_is_no_last_word() -> None:
    log = (
        "step 12\n[rank1]:[W1127 05:11:02.518 ProcessGroupNCCL.cpp:1553] Warning: WARNING: destroy_process_group() was "
        "not called before program exit, which can leak resources. (function operator())\n"
    )
    assert last_words(log, 2) == "step 12"


def test_a_programs_own_line_about_a_signal_is_its_last_word() -> None:
    assert last_words("[rank2]: Signal: lost while reading [ 3] /data/shard.bin\n", 2) is not None
    assert (
        last_words("step 12\n[node-1:77] Signal: Segmentation fault (11)\n[node-1:77] [ 0] /lib/x.so\n", 2) == "step 12"
    )
