"""The catalogue of error messages: what each means and what fixes it. The page is generated from it. Pure data.

Every text stands in the source of its project, or in the issue that `source` names, as it is printed there.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import msgspec

# The sections of the page.
PROJECTS = (
    "NCCL",
    "gloo",
    "PyTorch",
    "CUDA",
    "DeepSpeed",
    "Accelerate, Transformers",
    "LLaMA-Factory",
    "Slurm",
    "SSH",
    "System",
)
_MOST_BETWEEN = 200


class KnownError(msgspec.Struct, frozen=True):
    """One kind of error.

    Attributes:
        id: its name, which is also its heading on the page.
        project: who prints it, one of `PROJECTS`.
        texts: as printed, in any case and in whole words; `...` stands for up to 200 characters of the same line. The
            bare name of an exception is one only where its message or the end of the line follows.
        kind: as in `Failure`.
        cause: why it happens.
        fix: what to do; `{node}` is the node that failed.
        source: file of the project, or issue.
        checks: names of the checks that find the cause before a launch.
        of_peers: whether it is what workers say when another worker or node is gone: a consequence, while there is
            any other cause.
        is_general: whether it gives way to an error that says more, in the rest of what was said.
        is_harmless: whether it also stands in logs of runs that end well: it explains no failure.
        is_last: whether it explains a failure only as the exception or the last words of a worker: programs also print
            it of what they survive.
    """

    id: str
    project: str
    texts: tuple[str, ...]
    cause: str
    fix: str
    source: str
    kind: str | None = None
    checks: tuple[str, ...] = ()
    of_peers: bool = False
    is_general: bool = False
    is_harmless: bool = False
    is_last: bool = False

    def matches(self, text: str) -> bool:
        """Whether one of the texts stands in it."""
        return _pattern(self.texts).search(text) is not None


@functools.cache
def _pattern(texts: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(text_pattern(texts), re.IGNORECASE | re.MULTILINE)


def text_pattern(texts: Iterable[str]) -> str:
    """The regular expression of texts, for MULTILINE."""
    return "|".join(map(_words, texts))


_EXCEPTION_NAME = re.compile(r"[A-Za-z]\w*(?:Error|Exception)")


def _words(text: str) -> str:
    if _EXCEPTION_NAME.fullmatch(text):
        return rf"(?<![A-Za-z0-9])(?<!except ){text}(?=:|[ \r]*$)"
    words = f".{{0,{_MOST_BETWEEN}}}?".join(map(re.escape, text.split("...")))
    # The name of a variable is one in its own letters alone.
    words = re.sub(r"'[A-Z_]+'", r"(?-i:\g<0>)", words)
    before = r"(?<![A-Za-z0-9])" if text[0].isalnum() else ""
    return before + words + (r"(?![A-Za-z0-9])" if text[-1].isalnum() else "")


# The first that matches counts: what names its own cause comes before what only says that a connection ended.
ERRORS = (
    KnownError(
        "nccl-locked-memory",
        "NCCL",
        (
            "Call to ibv_... failed with error Cannot allocate memory",
            "Call to ibv_... failed with 12 Cannot allocate memory",
        ),
        kind="configuration",
        cause="RDMA has to lock its buffers in memory, and the limit on locked memory is too low.",
        fix="raise the limit to unlimited: ulimit -l, memlock in /etc/security/limits.conf, docker run --ulimit "
        "memlock=-1",
        source="NCCL src/misc/ibvwrap.cc",
        checks=("rdma",),
    ),
    KnownError(
        "nccl-ib-connect",
        "NCCL",
        ("Call to ibv_modify_qp failed with",),
        kind="configuration",
        cause="Two RDMA NICs do not reach each other: a wrong GID index (RoCE has several), NICs of rails that are not "
        "connected with each other, or a NIC of another network.",
        fix="which NICs reach which: multinode check; leave the GID to NCCL (NCCL_IB_GID_INDEX=-1); "
        "env.NCCL_CROSS_NIC=0 "
        "where each rail has a switch of its own; name the NICs that are connected: env.NCCL_IB_HCA=...; over TCP: "
        "env.NCCL_NET=Socket",
        source="NCCL src/misc/ibvwrap.cc (2.18 to 2.30); nccl-tests#227, nccl-tests#185, nccl#925, nccl#2013",
        checks=("rdma",),
    ),
    KnownError(
        "nccl-ib-port",
        "NCCL",
        (
            "Got async event : port error",
            "Got async event : local catastrophic error",
            "Got async error event: port error",
            "Got async error event: local catastrophic error",
            "async fatal event: local catastrophic error",
            "Got non-fatal async event: port error",
        ),
        kind="hardware",
        cause="An RDMA NIC lost its link, or failed, while the training ran.",
        fix="check the cable, transceiver and switch port of {node}; what the kernel says: ssh {node} dmesg -T | grep "
        "mlx; how often: ssh {node} ibstat",
        source="NCCL src/transport/net_ib.cc (2.18 to 2.27), src/transport/net_ib/init.cc (2.28); nccl#905",
        checks=("rdma",),
    ),
    KnownError(
        "cuda-out-of-memory",
        "CUDA",
        (
            "CUDA out of memory",
            "HIP out of memory",
            "XPU out of memory",
            "NPU out of memory",
            "MPS backend out of memory",
            "OutOfMemoryError",
            "CUDA error: out of memory",
            "CUDA driver error: out of memory",
            "cudaErrorMemoryAllocation",
            "CUDA_ERROR_OUT_OF_MEMORY",
            "CUBLAS_STATUS_ALLOC_FAILED",
            "CUDNN_STATUS_ALLOC_FAILED",
            "Cuda failure 'out of memory'",
            "Cuda failure 2 'out of memory'",
        ),
        kind="out_of_gpu_memory",
        cause="The GPU has too little free memory for model, optimizer, activations and communication buffers.",
        fix="a smaller per_device_train_batch_size with more gradient_accumulation_steps, a shorter cutoff_len, or "
        "ZeRO; see who else is on the GPU: nvidia-smi on {node}",
        source="PyTorch c10/cuda/CUDACachingAllocator.cpp; NCCL src/include/checks.h",
        checks=("gpus", "leftovers"),
    ),
    KnownError(
        "nccl-shared-memory",
        "NCCL",
        (
            "Error while creating shared memory segment",
            "Error: failed to extend /dev/shm/",
            "Call to posix_fallocate failed",
            "Call to shm_open failed",
        ),
        kind="disk_full",
        cause="NCCL exchanges data between the GPUs of a node in /dev/shm, which is full or too small: docker gives a "
        "container 64 MiB.",
        fix="docker run --ipc=host, or --shm-size=16g; delete what dead processes left there: ssh {node} ls -l "
        "/dev/shm",
        source="NCCL src/misc/shmutils.cc",
        checks=("machine",),
    ),
    KnownError(
        "bus-error",
        "PyTorch",
        (
            "is killed by signal: Bus error",
            "Unexpected bus error encountered in worker",
            "dataloader's workers are out of shared memory",
        ),
        kind="crashed",
        cause="A page of /dev/shm could not be had: it is full or too small. Data loader workers hand their batches "
        "over there; docker gives a container 64 MiB.",
        fix="see its size: ssh {node} df -h /dev/shm; then docker run --ipc=host or --shm-size=16g, or on the machine: "
        "mount -o remount,size=16G /dev/shm; fewer data loader workers need less: dataloader_num_workers",
        source="PyTorch torch/csrc/DataLoader.cpp; pytorch#5040, LlamaFactory#3150",
        checks=("machine",),
    ),
    KnownError(
        "abort-at-exit",
        "PyTorch",
        ("terminate called without an active exception",),
        kind="crashed",
        cause="The worker aborted while it was ending: as a rule, a thread of gloo asked for the Python interpreter, "
        "which was gone. What the training wrote before is whole.",
        fix="see in the log whether the training was over: multinode logs; nothing has to be repeated then. It is "
        "a race in PyTorch that comes and goes",
        source="pytorch#179291",
        is_general=True,
    ),
    KnownError(
        "shared-memory-full",
        "PyTorch",
        ("unable to allocate shared memory(shm) for file",),
        kind="disk_full",
        cause="Data loader workers hand their batches over in /dev/shm, which is full or too small: docker gives a "
        "container 64 MiB.",
        fix="see its size: ssh {node} df -h /dev/shm; then docker run --ipc=host or --shm-size=16g, or on the machine: "
        "mount -o remount,size=16G /dev/shm; fewer data loader workers need less: dataloader_num_workers",
        source="PyTorch aten/src/ATen/MapAllocator.cpp",
        checks=("machine",),
    ),
    KnownError(
        "open-files",
        "System",
        ("Too many open files", "received 0 items of ancdata", "unable to open shared memory object"),
        kind="configuration",
        cause="The worker reached its limit on open files: data loader workers and sockets each need some.",
        fix="raise it in the shell that starts the job: ulimit -n 65536 (launch --setup); or fewer data loader workers",
        source="PyTorch aten/src/ATen/MapAllocator.cpp, torch/utils/data/dataloader.py",
        checks=("machine",),
    ),
    KnownError(
        "thread-limit",
        "System",
        (
            "can't start new thread",
            "blas_thread_init: pthread_create failed",
            "Thread creation failed: Resource temporarily unavailable",
        ),
        kind="configuration",
        cause="The user, or the container, has reached its limit on processes and threads.",
        fix="raise it: ulimit -u, pids limit of the container; or fewer threads: OMP_NUM_THREADS, "
        "preprocessing_num_workers",
        source="CPython Modules/_threadmodule.c; OpenBLAS driver/others/blas_server.c; libgomp team.c",
        checks=("machine",),
    ),
    KnownError(
        "out-of-memory",
        "System",
        (
            "MemoryError",
            "_ArrayMemoryError",
            "Cannot allocate memory",
            "DefaultCPUAllocator: can't allocate memory",
            "DefaultCPUAllocator: not enough memory",
            "std::bad_alloc",
        ),
        kind="out_of_memory",
        cause="The node, or a limit on the process, had no memory left.",
        fix="fewer data loader workers, a smaller batch, no offload; what is left: ssh {node} free -g; what is "
        "allowed: ssh {node} ulimit -a",
        source="PyTorch c10/core/impl/alloc_cpu.cpp",
        checks=("machine",),
    ),
    KnownError(
        "oom-killer",
        "System",
        ("Out of memory: Killed process", "Memory cgroup out of memory", "OOMKilled"),
        kind="out_of_memory",
        cause="The kernel killed the process, because the node, or the control group it ran in, had no memory left.",
        fix="fewer data loader workers, a smaller batch, no offload, or a higher limit of the container; what the "
        "kernel says: ssh {node} dmesg -T | grep -i oom",
        source="Linux mm/oom_kill.c",
        checks=("machine",),
    ),
    KnownError(
        "disk-full",
        "System",
        (
            "No space left on device",
            "Disk quota exceeded",
            "ENOSPC",
            "PytorchStreamWriter failed writing file",
            "kind: StorageFull",
        ),
        kind="disk_full",
        cause="A file system of the node is full, or the user's quota is used up.",
        fix="make room on {node}: ssh {node} df -h ~ /tmp /dev/shm",
        source="errno(3)",
        checks=("machine",),
    ),
    KnownError(
        "nccl-no-interface",
        "NCCL",
        (
            "Bootstrap : no socket interface found",
            "NET/Socket : no interface found",
            "verify NCCL_OOB_NET_IFNAME",
            "Net : No interface found in the same subnet as remote address",
            "Call to bind failed : Cannot assign requested address",
            "no device found matching NCCL_OOB_NET_IFNAME",
            "connecting to address ... is neither AF_INET(2) nor AF_INET6(10)",
        ),
        kind="configuration",
        cause="NCCL_SOCKET_IFNAME names no interface of this node. One value for all nodes breaks where the interfaces "
        "have different names (eno1 here, eth0 there).",
        fix="take NCCL_SOCKET_IFNAME out of profiles and /etc/nccl.conf: multinode sets it for each node from its "
        "routes; or name the interface on the node's line of the hostfile: ifname=",
        source="NCCL src/bootstrap.cc, src/transport/net_socket.cc, src/misc/socket.cc; nccl#286, nccl#1837",
        checks=("variables", "interface"),
    ),
    KnownError(
        "gloo-interface",
        "gloo",
        ("Unable to find address for: ",),
        kind="configuration",
        cause="GLOO_SOCKET_IFNAME names an interface that this node does not have, or one without an address.",
        fix="take GLOO_SOCKET_IFNAME out of profiles: multinode sets it for each node; or name the interface on the "
        "node's line of the hostfile: ifname=",
        source="gloo gloo/transport/tcp/device.cc",
        checks=("variables", "interface"),
    ),
    KnownError(
        "gloo-loopback",
        "gloo",
        (
            "connectFullMesh failed ... remote=[127.",
            "SO_ERROR: ... remote=[127.",
            "Connection closed by peer [127.",
        ),
        kind="configuration",
        cause="The other worker announced a loopback address: gloo listens where the host's own name leads, on Debian "
        "and Ubuntu to 127.0.1.1.",
        fix="name the interface: multinode's launches do; by hand, on each node: export "
        "GLOO_SOCKET_IFNAME=<interface>; or correct the host's line in /etc/hosts",
        source="gloo gloo/transport/tcp/device.cc, error.cc; gloo#223",
        checks=("hostname", "interface"),
        of_peers=True,
    ),
    KnownError(
        "nccl-version-mismatch",
        "NCCL",
        ("Mismatched NCCL version detected",),
        kind="version_mismatch",
        cause="The nodes have different versions of NCCL; those do not speak with each other.",
        fix="install the same torch on every node; who has which: multinode check",
        source="NCCL src/init.cc",
        checks=("versions",),
    ),
    KnownError(
        "nccl-rank-taken",
        "NCCL",
        ("ranks has already checked in",),
        kind="configuration",
        cause="Two workers have the same rank: two nodes were started with the same node rank, or one machine stands "
        "in the hostfile twice.",
        fix="give every node its own rank (multinode does); look for NODE_RANK or RANK in profiles and in the "
        "hostfile: multinode check",
        source="NCCL src/bootstrap.cc",
        checks=("variables", "machine"),
    ),
    KnownError(
        "nccl-rank-count",
        "NCCL",
        ("mismatch in rank count from procs", "mismatch in info from procs"),
        kind="configuration",
        cause="The workers do not agree on how many they are: nodes that were started with different figures, or "
        "workers of two jobs at one rendezvous.",
        fix="start all nodes with one command, as multinode launch does, and give each job a MASTER_PORT of its own",
        source="NCCL src/bootstrap.cc",
        checks=("gpus", "leftovers", "variables"),
    ),
    KnownError(
        "nccl-duplicate-gpu",
        "NCCL",
        ("Duplicate GPU detected", "Multiple Ranks are using the same GPU/Partition"),
        kind="configuration",
        cause="Two workers of a node use the same GPU: more workers than GPUs, or CUDA_VISIBLE_DEVICES hides some.",
        fix="as many workers as GPUs on {node} (slots= or gpus= in the hostfile); a script has to call "
        "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))",
        source="NCCL src/init.cc (2.30 names it anew)",
        checks=("gpus", "variables"),
    ),
    KnownError(
        "nccl-network-not-found",
        "NCCL",
        ("Error: network ... not found.", "Failed to initialize any NET plugin"),
        kind="configuration",
        cause="NCCL_NET names a network that this NCCL does not have: a plugin that is not installed, or a "
        "misspelling.",
        fix="take NCCL_NET out, or set it to Socket on every node: env.NCCL_NET=Socket in the hostfile",
        source="NCCL src/net.cc (2.21), src/plugin/net.cc (2.27)",
        checks=("variables", "rdma"),
    ),
    KnownError(
        "nccl-ib-completion",
        "NCCL",
        (
            "Got completion from peer ... with status=",
            "Got completion from peer ... with error ",
            "Got completion with error ",
            "NET/OFI Request ... completed with error",
            "Got CQE with error",
        ),
        kind="connection",
        cause="An RDMA transfer failed: a lossy or misconfigured RoCE network, a wrong GID, a dead peer.",
        fix="see whether it works over TCP: env.NCCL_NET=Socket on every line of the hostfile; then look at "
        "NCCL_IB_GID_INDEX and the switch's flow control",
        source="NCCL src/transport/net_ib.cc (2.10 to 2.27), src/transport/net_ib/p2p.cc (2.28); nccl#426, DeepEP#106, "
        "nccl#905, nccl#1664",
        checks=("rdma",),
        of_peers=True,
    ),
    KnownError(
        "nccl-truncated",
        "NCCL",
        ("Message truncated : received", "message truncated : receiving"),
        kind="desync",
        cause="Two ranks exchanged messages of different sizes: they did not call the same collective, have different "
        "NCCL_ALGO or NCCL_PROTO, or belong to two jobs.",
        fix="the same code, data and NCCL_* settings on every node: multinode check; TORCH_DISTRIBUTED_DEBUG=DETAIL "
        "names the collective",
        source="NCCL src/bootstrap.cc, src/transport/net_socket.cc",
        checks=("variables", "content", "leftovers"),
    ),
    KnownError(
        "gloo-length",
        "gloo",
        ("op.preamble.length <= op.nbytes",),
        kind="desync",
        cause="Two ranks called a collective with tensors of different sizes, or different collectives.",
        fix="the same code, model and data on every node: multinode check; TORCH_DISTRIBUTED_DEBUG=DETAIL names the "
        "collective",
        source="gloo gloo/transport/tcp/pair.cc",
        checks=("content", "versions"),
    ),
    KnownError(
        "ddp-unequal-models",
        "PyTorch",
        ("DDP expects same model across all ranks", "sizes of the same param in process 0"),
        kind="desync",
        cause="The ranks built different models: another model directory, configuration or version on a node.",
        fix="compare the nodes' files and packages: multinode check JOB",
        source="PyTorch torch/csrc/distributed/c10d/reducer.cpp",
        checks=("content", "versions"),
    ),
    KnownError(
        "collective-mismatch",
        "PyTorch",
        ("Detected mismatch between collectives on ranks",),
        kind="desync",
        cause="The ranks called different collectives, or the same with tensors of different shapes (found by "
        "TORCH_DISTRIBUTED_DEBUG=DETAIL).",
        fix="the message names both; look for code that only one rank runs, and for data of different length on the "
        "nodes",
        source="PyTorch torch/csrc/distributed/c10d/ProcessGroupWrapper.cpp",
        checks=("content",),
    ),
    KnownError(
        "ddp-unused-parameters",
        "PyTorch",
        ("Expected to have finished reduction in the prior iteration",),
        kind="configuration",
        cause="Parameters that need a gradient took no part in the loss, so DDP waits for them.",
        fix="in a LLaMA-Factory YAML: ddp_find_unused_parameters: true; in a script: "
        "DistributedDataParallel(..., find_unused_parameters=True)",
        source="PyTorch torch/csrc/distributed/c10d/reducer.cpp",
    ),
    KnownError(
        "missing-rank",
        "PyTorch",
        ("environment variable ... expected, but not set", "KeyError: 'RANK'", "KeyError: 'LOCAL_RANK'"),
        kind="configuration",
        cause="The script was not started by a launcher that sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and "
        "MASTER_PORT.",
        fix="start it with multinode launch -- SCRIPT, or torchrun. By hand, the rank of a node is NODE_RANK for "
        "LLaMA-Factory from 0.9.1 and RANK before",
        source="PyTorch torch/distributed/rendezvous.py; LlamaFactory#7326",
        checks=("variables",),
    ),
    KnownError(
        "no-process-group",
        "PyTorch",
        ("Default process group has not been initialized",),
        kind="configuration",
        cause="A collective was called in a process that no launcher started, or before init_process_group.",
        fix="start the script with multinode launch -- SCRIPT, or torchrun; call torch.distributed.init_process_group "
        "first",
        source="PyTorch torch/distributed/distributed_c10d.py",
    ),
    KnownError(
        "nccl-without-gpu",
        "PyTorch",
        ("ProcessGroupNCCL is only supported with GPUs, no GPUs found",),
        kind="configuration",
        cause="The nccl backend was asked for on a node where torch sees no GPU.",
        fix="see why: ssh {node} nvidia-smi; a container needs --gpus all; without GPUs use the gloo backend",
        source="PyTorch torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp",
        checks=("gpus",),
    ),
    KnownError(
        "no-backend-for-device",
        "PyTorch",
        ("No backend type associated with device type",),
        kind="configuration",
        cause="A tensor on the CPU went to a process group with nccl alone, or one on a GPU to gloo alone.",
        fix='init_process_group("cpu:gloo,cuda:nccl"), or move the tensor to the device of the backend',
        source="PyTorch torch/csrc/distributed/c10d/ProcessGroup.hpp",
        checks=("gpus",),
    ),
    KnownError(
        "devices-not-numbers",
        "DeepSpeed",
        (
            "invalid literal for int() with base 10: 'GPU-",
            "invalid literal for int() with base 10: 'MIG-",
            "invalid literal for int() with base 10: ' GPU-",
            "invalid literal for int() with base 10: ' MIG-",
        ),
        kind="configuration",
        cause="CUDA_VISIBLE_DEVICES names devices by UUID, and DeepSpeed 0.18.9 and later reads it as whole numbers "
        "when ZeRO-1 or ZeRO-2 starts.",
        fix="numbers in its place, as nvidia-smi counts the GPUs, or leave CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER "
        "to multinode, which gives numbers. A MIG device has none: uninstall nvidia-ml-py from the job's environment",
        source="DeepSpeed accelerator/cuda_accelerator.py, _get_nvml_gpu_id",
        checks=("training",),
    ),
    KnownError(
        "invalid-device",
        "CUDA",
        ("invalid device ordinal",),
        kind="configuration",
        cause="A worker asked for a GPU that it cannot see: more workers than GPUs, or CUDA_VISIBLE_DEVICES hides "
        "some.",
        fix="as many workers as GPUs on {node}: slots= or gpus= in the hostfile; take CUDA_VISIBLE_DEVICES out of "
        "profiles",
        source="CUDA runtime API, cudaErrorInvalidDevice",
        checks=("gpus", "variables"),
    ),
    KnownError(
        "no-gpu",
        "CUDA",
        (
            "RuntimeError: Found no NVIDIA driver on your system",
            "No CUDA GPUs are available",
            "CUDA unknown error - this may be due to an incorrectly set up environment",
            "Torch not compiled with CUDA enabled",
        ),
        kind="configuration",
        cause="torch sees no GPU: no driver, a container without --gpus, an empty CUDA_VISIBLE_DEVICES, or a CPU "
        "build of torch.",
        fix="ssh {node} nvidia-smi; and with the job's interpreter: python -c 'import torch; "
        "print(torch.version.cuda)'",
        source="PyTorch c10/cuda/CUDAFunctions.cpp, torch/cuda/__init__.py",
        checks=("gpus", "versions", "variables"),
    ),
    KnownError(
        "no-kernel-image",
        "CUDA",
        (
            "no kernel image is available for execution on the device",
            "device kernel image is invalid",
            "is not compatible with the current PyTorch installation",
        ),
        kind="version_mismatch",
        cause="torch, or an extension, was not built for this model of GPU.",
        fix="a torch build for this GPU on every node; who has which: multinode check",
        source="CUDA runtime API, cudaErrorNoKernelImageForDevice",
        checks=("versions", "gpus"),
    ),
    KnownError(
        "driver-too-old",
        "CUDA",
        (
            "CUDA driver version is insufficient",
            "PTX was compiled with an unsupported toolchain",
            "RuntimeError: The NVIDIA driver on your system is too old",
        ),
        kind="version_mismatch",
        cause="torch was built with a newer CUDA than the driver of the node supports.",
        fix="update the driver of {node}, or install a torch built with an older CUDA; who has which: multinode check",
        source="PyTorch c10/cuda/CUDAFunctions.cpp",
        checks=("gpus", "versions"),
    ),
    KnownError(
        "uncorrectable-ecc",
        "CUDA",
        ("uncorrectable ECC error encountered",),
        kind="hardware",
        cause="The memory of a GPU is damaged, or was hit by an error that ECC could not correct.",
        fix="reset the GPU or leave it out (gpus= in the hostfile); how often: ssh {node} nvidia-smi -q -d ECC",
        source="CUDA runtime API, cudaErrorECCUncorrectable",
        checks=("gpus",),
    ),
    KnownError(
        "illegal-memory-access",
        "CUDA",
        ("an illegal memory access was encountered", "unspecified launch failure"),
        kind="crashed",
        cause="A kernel read or wrote outside its memory: a bug in a CUDA extension, mismatched builds, or a failing "
        "GPU. The traceback may name a later call.",
        fix="run once with --env CUDA_LAUNCH_BLOCKING=1, which names the right call; if it is always the same GPU, "
        "leave that out; ssh {node} dmesg -T | grep -i xid",
        source="CUDA runtime API, cudaErrorIllegalAddress",
        checks=("gpus", "versions"),
    ),
    KnownError(
        "device-assert",
        "CUDA",
        ("device-side assert triggered",),
        kind="crashed",
        cause="An index was out of range on the GPU: mostly a token id beyond the embedding, or a label beyond the "
        "classes.",
        fix="run once with --env CUDA_LAUNCH_BLOCKING=1; does the tokenizer belong to the model, on every node?",
        source="CUDA runtime API, cudaErrorAssert",
        checks=("content",),
    ),
    KnownError(
        "deepspeed-batch-size",
        "DeepSpeed",
        ("Check batch related parameters",),
        kind="configuration",
        cause="train_batch_size in the DeepSpeed JSON is not micro batch x accumulation x workers: it was written for "
        "another number of workers.",
        fix='write "auto" for it in the DeepSpeed JSON, or for one run: --deepspeed-set train_batch_size=auto',
        source="DeepSpeed deepspeed/runtime/config.py",
        checks=("training",),
    ),
    KnownError(
        "deepspeed-config-mismatch",
        "DeepSpeed",
        ("Please correct the following DeepSpeed config values",),
        kind="configuration",
        cause="The DeepSpeed JSON and the training arguments say different things.",
        fix='write "auto" in the DeepSpeed JSON where the message says, and the YAML decides: --deepspeed-set KEY=auto',
        source="Transformers transformers/integrations/deepspeed.py",
        checks=("training",),
    ),
    KnownError(
        "deepspeed-cuda-mismatch",
        "DeepSpeed",
        ("DeepSpeed Op Builder: Installed CUDA version", "CUDAMismatchException"),
        kind="version_mismatch",
        cause="DeepSpeed wants to compile an operation with nvcc of another CUDA than torch was built with.",
        fix="a CUDA toolkit of torch's version first on PATH and in CUDA_HOME; if only the minor version differs: "
        "--env DS_SKIP_CUDA_CHECK=1",
        source="DeepSpeed deepspeed/ops/op_builder/builder.py",
        checks=("versions",),
    ),
    KnownError(
        "deepspeed-no-nvcc",
        "DeepSpeed",
        (
            "CUDA_HOME does not exist, unable to compile CUDA op(s)",
            "MissingCUDAException",
            "No such file or directory: ...nvcc'",
        ),
        kind="configuration",
        cause="DeepSpeed wants to compile an operation and finds no CUDA toolkit (nvcc).",
        fix="install the CUDA toolkit on every node and set CUDA_HOME, or use what needs no compiling: optim: "
        "adamw_torch",
        source="DeepSpeed deepspeed/ops/op_builder/builder.py",
        checks=("packages",),
    ),
    KnownError(
        "no-ninja",
        "PyTorch",
        ("Ninja is required to load C++ extensions", "No such file or directory: 'ninja'"),
        kind="configuration",
        cause="PyTorch compiles an extension on the node, and the ninja program is not on the job's PATH.",
        fix="on every node, in the training environment: pip install ninja; where it is installed, its directory (that "
        "of python) has to be on PATH: python= in the hostfile puts it there",
        source="PyTorch torch/utils/cpp_extension.py; DeepSpeed#5627",
    ),
    KnownError(
        "half-built-extension",
        "PyTorch",
        (
            "torch_extensions...cannot open shared object file",
            "torch_extensions...file too short",
            "torch_extensions...invalid ELF header",
            "torch_extensions...does not define module export function",
            ".so: file too short",
        ),
        kind="configuration",
        cause="The cache of compiled extensions on the node holds one whose build failed or was interrupted.",
        fix="remove it on the node, and the next run builds it anew: ssh {node} rm -rf ~/.cache/torch_extensions; a "
        "cache that nodes share is built by all at once: give each its own by --env TORCH_EXTENSIONS_DIR=/var/tmp/ext",
        source="PyTorch torch/utils/cpp_extension.py; ld.so(8)",
    ),
    KnownError(
        "deepspeed-cannot-compile",
        "DeepSpeed",
        ("Unable to JIT load the ... op", "'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'"),
        kind="configuration",
        cause="An operation of DeepSpeed could not be compiled on the node: no ninja, no compiler, no fitting CUDA "
        "toolkit. The reason stands above it.",
        fix="on every node, in the training environment: pip install ninja; apt-get install g++; a half-built cache is "
        "removed by rm -rf ~/.cache/torch_extensions",
        source="DeepSpeed deepspeed/ops/op_builder/builder.py, deepspeed/ops/adam/cpu_adam.py",
        checks=("packages", "versions"),
    ),
    KnownError(
        "deepspeed-loss-scale",
        "DeepSpeed",
        ("Current loss scale already at minimum",),
        kind="configuration",
        cause="In fp16 the loss overflows at every step: the training diverges, or the model was trained in bf16.",
        fix="bf16: true instead of fp16 where the GPUs have it; else a smaller learning rate",
        source="DeepSpeed deepspeed/runtime/fp16/loss_scaler.py",
    ),
    KnownError(
        "deepspeed-no-gpu",
        "DeepSpeed",
        ("Unable to proceed, no GPU resources available",),
        kind="configuration",
        cause="DeepSpeed's launcher found neither a hostfile nor a GPU on this machine.",
        fix="ssh {node} nvidia-smi; on nodes without GPUs: --env DS_ACCELERATOR=cpu",
        source="DeepSpeed deepspeed/launcher/runner.py",
        checks=("gpus",),
    ),
    KnownError(
        "deepspeed-ssh",
        "DeepSpeed",
        ("was not reachable via ssh", "ssh exited with exit code 255", "Unable to detect suitable master address via"),
        kind="connection",
        cause="DeepSpeed's launcher uses ssh from node to node, which needs keys between them; it asks the first host "
        "only.",
        fix="multinode launch --engine deepspeed needs no ssh between the nodes; which node you cannot reach yourself: "
        "multinode check",
        source="DeepSpeed deepspeed/launcher/runner.py",
        checks=("ssh",),
        is_general=True,
    ),
    KnownError(
        "deepspeed-launcher",
        "DeepSpeed",
        ("launcher 'pdsh' not installed", "launcher 'openmpi' not installed", "launcher 'mpich' not installed"),
        kind="configuration",
        cause="DeepSpeed's launcher starts the nodes through a program that is not installed here.",
        fix="multinode launch --engine deepspeed needs none; by hand: apt-get install pdsh",
        source="DeepSpeed deepspeed/launcher/runner.py",
    ),
    KnownError(
        "deepspeed-hostfile",
        "DeepSpeed",
        ("Hostfile contains a bad entry", "Hostfile contains multiple entries for"),
        kind="configuration",
        cause="DeepSpeed knows only lines of the form `name slots=N`, each name once.",
        fix="multinode's hostfile may have more keys and launches DeepSpeed itself: multinode launch --engine "
        "deepspeed",
        source="DeepSpeed deepspeed/launcher/runner.py",
    ),
    KnownError(
        "deepspeed-no-hostfile",
        "DeepSpeed",
        ("Unable to find hostfile, will proceed with training with local resources only",),
        cause="DeepSpeed's launcher found no hostfile (/job/hostfile): it trains on this machine alone, without a "
        "further word.",
        fix="multinode launch --engine deepspeed --hosts FILE, which needs no hostfile of DeepSpeed's own",
        source="DeepSpeed deepspeed/launcher/runner.py",
        is_harmless=True,
    ),
    KnownError(
        "rtx-4000-p2p",
        "Accelerate, Transformers",
        ("Using RTX 4000 series doesn't support faster communication broadband via P2P or IB",),
        kind="configuration",
        cause="GeForce RTX 40 cards with a driver before 550.40.07 offer peer-to-peer that does not work.",
        fix="update the driver, or on every line of the hostfile: env.NCCL_P2P_DISABLE=1 env.NCCL_IB_DISABLE=1",
        source="Accelerate accelerate/state.py",
        checks=("gpus",),
    ),
    KnownError(
        "bf16-unsupported",
        "Accelerate, Transformers",
        (
            "Your setup doesn't support bf16/gpu",
            "mixed precision requires a GPU",
            "can only be used on CUDA devices",
        ),
        kind="configuration",
        cause="bf16 was asked for, and torch sees no GPU that has it.",
        fix="fp16: true on GPUs before Ampere; if the node has newer ones: ssh {node} nvidia-smi",
        source="Transformers transformers/training_args.py",
        checks=("gpus",),
    ),
    KnownError(
        "model-card-of-an-adapter",
        "Accelerate, Transformers",
        ("object has no attribute 'create_or_update_model_card'",),
        kind="configuration",
        cause="The output directory has the model card of an adapter, left by an earlier LoRA run, and this run "
        "trained the whole model: Transformers updates the card as PEFT's. The model was saved before.",
        fix="another output_dir, or remove the card: ssh {node} rm OUTPUT_DIR/README.md",
        source="Transformers transformers/trainer.py, create_model_card",
    ),
    KnownError(
        "llamafactory-not-distributed",
        "LLaMA-Factory",
        (
            "Please launch distributed training with `llamafactory-cli` or `torchrun`",
            "Please use `FORCE_TORCHRUN=1` to launch DeepSpeed training",
        ),
        kind="configuration",
        cause="LLaMA-Factory was started without torchrun. With one GPU a node it ignores NNODES unless "
        "FORCE_TORCHRUN=1 is set, and each node would train alone.",
        fix="multinode launch JOB.yaml starts torchrun itself; by hand, on every node: FORCE_TORCHRUN=1",
        source="LLaMA-Factory src/llamafactory/hparams/parser.py; LlamaFactory#8729",
    ),
    KnownError(
        "llamafactory-unknown-key",
        "LLaMA-Factory",
        ("are not used by the HfArgumentParser",),
        kind="configuration",
        cause="A key of the YAML is misspelt, or this version of LLaMA-Factory does not have it.",
        fix="multinode check JOB names the nearest key that it has",
        source="Transformers transformers/hf_argparser.py; LLaMA-Factory src/llamafactory/hparams/parser.py",
        checks=("training",),
    ),
    KnownError(
        "llamafactory-output-dir",
        "LLaMA-Factory",
        ("Output directory already exists and is not empty",),
        kind="configuration",
        cause="output_dir on the node holds files of an earlier training.",
        fix="another place: --set output_dir=...; or --set overwrite_output_dir=true",
        source="LLaMA-Factory src/llamafactory/hparams/parser.py",
        checks=("paths",),
    ),
    KnownError(
        "llamafactory-template",
        "LLaMA-Factory",
        ("Template ... does not exist.",),
        kind="configuration",
        cause="The YAML's `template` is none that this version of LLaMA-Factory knows.",
        fix="correct it, or bring LLaMA-Factory to the same version on every node: multinode check",
        source="LLaMA-Factory src/llamafactory/data/template.py",
        checks=("versions",),
    ),
    KnownError(
        "llamafactory-streaming",
        "LLaMA-Factory",
        ("Please specify `max_steps` in streaming mode",),
        kind="configuration",
        cause="A streamed dataset has no known length.",
        fix="--set max_steps=N",
        source="LLaMA-Factory src/llamafactory/hparams/parser.py",
    ),
    KnownError(
        "llamafactory-dataset",
        "LLaMA-Factory",
        ("Undefined dataset", "dataset_info.json due to"),
        kind="missing_file",
        cause="dataset_info.json is missing on the node, or does not have the dataset.",
        fix="dataset_dir with dataset_info.json and the data has to be on every node at the same path: multinode "
        "check JOB",
        source="LLaMA-Factory src/llamafactory/data/parser.py",
        checks=("paths", "content"),
    ),
    KnownError(
        "llamafactory-no-samples",
        "LLaMA-Factory",
        ("Cannot find valid samples",),
        kind="missing_file",
        cause="No sample of the dataset fits its format in dataset_info.json, or all were filtered out.",
        fix="compare the columns in dataset_info.json with the data; the nodes' copies: multinode check JOB",
        source="LLaMA-Factory src/llamafactory/data/loader.py",
        checks=("content",),
    ),
    KnownError(
        "cuda-driver-mismatch",
        "CUDA",
        (
            "system has unsupported display driver / cuda driver combination",
            "Driver/library version mismatch",
            "Error 803: ",
            "Error 804: ",
            "forward compatibility was attempted on non supported HW",
        ),
        kind="version_mismatch",
        cause="The driver in the kernel and its library in user space differ: the driver was updated without a reboot, "
        "or a container or LD_LIBRARY_PATH brings a libcuda of its own.",
        fix="reboot {node}, or load its driver anew; in a container, take libcuda (a compat directory) out of "
        "LD_LIBRARY_PATH; what is loaded: ssh {node} cat /proc/driver/nvidia/version",
        source="CUDA runtime API, errors 803 and 804; llm-d#706, nixl#441, inference#891",
    ),
    KnownError(
        "fabric-manager",
        "CUDA",
        (
            "system not yet initialized",
            "Failed to bind NVLink SHARP (NVLS) Multicast memory",
        ),
        kind="configuration",
        cause="The GPUs are joined by NVSwitches, and nvidia-fabricmanager does not run, or is of another version than "
        "the driver.",
        fix="install the nvidia-fabricmanager of the driver's version on {node} and start it: ssh {node} systemctl "
        "status nvidia-fabricmanager; until then, where only NVLS fails: --env NCCL_NVLS_ENABLE=0",
        source="CUDA runtime API, error 802; NCCL src/transport/nvls.cc; huggingface_hub#4134, gpu-burn#92, "
        "pytorch#177472, nccl#1672",
    ),
    KnownError(
        "gpu-busy",
        "CUDA",
        (
            "CUDA-capable device(s) is/are busy or unavailable",
            "all CUDA-capable devices are busy or unavailable",
        ),
        kind="configuration",
        cause="Another process holds the GPU in exclusive mode, or the GPU is in a state in which nobody can use it.",
        fix="who holds it: nvidia-smi on {node}; its mode: ssh {node} nvidia-smi -q -d COMPUTE; back to the default: "
        "nvidia-smi -c 0",
        source="CUDA runtime API, cudaErrorDevicesUnavailable; llama.cpp#11841",
    ),
    KnownError(
        "gpu-lost-in-container",
        "CUDA",
        (
            "Failed to initialize NVML: Unknown Error",
            "NVMLError_Unknown",
            "Failed to initialize NVML: Insufficient Permissions",
        ),
        kind="configuration",
        cause="The container has lost the GPU's devices: systemd changed its device cgroup (a daemon-reload does), or "
        "it was started without them.",
        fix="start the container anew with --gpus all and --device for /dev/nvidia*; lastingly: the cgroupfs driver of "
        "docker, or CDI of nvidia-container-toolkit",
        source="NVML; nvidia-container-toolkit#48, pytorch#184277, dmlcloud#58",
    ),
    KnownError(
        "gpu-fell-off",
        "CUDA",
        (
            "GPU is lost",
            "has fallen off the bus",
            "Unable to determine the device handle for GPU",
            "NVMLError_GpuIsLost",
        ),
        kind="hardware",
        cause="The driver no longer reaches the GPU: power, heat, the slot, or the GPU itself.",
        fix="what the kernel says: ssh {node} dmesg -T | grep -i xid; a cold restart of the node often brings it back; "
        "if it is always the same, leave it out (gpus= in the hostfile)",
        source="NVML, NVML_ERROR_GPU_IS_LOST; NVIDIA Xid 79",
    ),
    KnownError(
        "cuda-kernel-crash",
        "CUDA",
        (
            "CUDA error: misaligned address",
            "CUDA error: an illegal instruction was encountered",
            "CUDA error: the launch timed out and was terminated",
            "CUDA error: unknown error",
            "CUDA error: invalid program counter",
            "CUDA error: hardware stack error",
            "CUDA error: invalid argument",
            "CUDA error: operation not supported",
        ),
        kind="crashed",
        cause="A kernel failed on the GPU: a bug in a CUDA extension, a build for another GPU or CUDA, or a failing "
        "GPU. The traceback may name a later call.",
        fix="run once with --env CUDA_LAUNCH_BLOCKING=1, which names the right call; if it is always the same GPU, "
        "leave that out; ssh {node} dmesg -T | grep -i xid",
        source="CUDA runtime API; kohya_ss#3168, unbiased-teacher#80",
    ),
    KnownError(
        "cublas-cudnn",
        "CUDA",
        (
            "CUBLAS_STATUS_NOT_INITIALIZED",
            "CUBLAS_STATUS_EXECUTION_FAILED",
            "CUBLAS_STATUS_INTERNAL_ERROR",
            "CUBLAS_STATUS_NOT_SUPPORTED",
            "CUBLAS_STATUS_INVALID_VALUE",
            "CUDNN_STATUS_NOT_INITIALIZED",
            "CUDNN_STATUS_EXECUTION_FAILED",
            "CUDNN_STATUS_INTERNAL_ERROR",
            "CUDNN_STATUS_MAPPING_ERROR",
            "Unable to load any of {libcudnn",
        ),
        kind="crashed",
        cause="A library of CUDA failed: mostly for lack of GPU memory, after an index that was out of range (a token "
        "id beyond the embedding), or because another libcublas or libcudnn than torch's is found first.",
        fix="see the free memory: nvidia-smi on {node}; does the tokenizer belong to the model; take CUDA's own "
        "directories out of LD_LIBRARY_PATH, torch brings these libraries",
        source="PyTorch aten/src/ATen/cuda/Exceptions.h; Qwen#120, DeepSpeedExamples#499, VisCPM#3, Skywork#38",
    ),
    KnownError(
        "cuda-in-fork",
        "PyTorch",
        ("Cannot re-initialize CUDA in forked subprocess",),
        kind="configuration",
        cause="A process that had used CUDA was forked, and its child uses CUDA as well: a dataset that puts tensors "
        "on the GPU, or a script that calls torch.cuda before it starts workers.",
        fix="keep data on the CPU in the dataset, or start the workers by spawn: "
        "torch.multiprocessing.set_start_method('spawn')",
        source="PyTorch torch/cuda/__init__.py; GroundingDINO#276, graphnet#614, nano-vllm#22",
    ),
    KnownError(
        "flash-attention-gpu",
        "CUDA",
        (
            "FlashAttention only supports Ampere GPUs or newer",
            "FlashAttention only supports Ampere",
            "FlashAttention2 has been toggled on, but it cannot be used",
        ),
        kind="configuration",
        cause="FlashAttention 2 needs a GPU from Ampere on (not V100, T4 or RTX 20), in fp16 or bf16, and its package "
        "flash_attn.",
        fix="another attention: in a LLaMA-Factory YAML flash_attn: sdpa, in Transformers "
        'attn_implementation="sdpa"; which GPUs the nodes have: multinode check',
        source="flash-attention csrc/flash_attn/flash_api.cpp; flash-attention#762, ms-swift#1603, vllm#8189",
    ),
    KnownError(
        "ddp-ready-twice",
        "PyTorch",
        (
            "Expected to mark a variable ready only once",
            "has been marked as ready twice",
        ),
        kind="configuration",
        cause="A parameter was used twice in a backward pass: gradient checkpointing of the reentrant kind together "
        "with DDP's search for unused parameters, or a layer that is called twice.",
        fix='gradient_checkpointing_kwargs={"use_reentrant": False} (LLaMA-Factory: use_reentrant_gc: false), and '
        "ddp_find_unused_parameters: false",
        source="PyTorch torch/csrc/distributed/c10d/reducer.cpp; accelerate#2017, peft#313",
    ),
    KnownError(
        "no-gradient",
        "PyTorch",
        (
            "does not require grad and does not have a grad_fn",
            "DistributedDataParallel is not needed when a module doesn't have any parameters that require a gradient",
        ),
        kind="configuration",
        cause="Nothing that is trained takes part in the loss: gradient checkpointing over a frozen model (LoRA), or "
        "all parameters are frozen.",
        fix='with LoRA call model.enable_input_require_grads(), or gradient_checkpointing_kwargs={"use_reentrant": '
        "False}; see what is trainable: model.print_trainable_parameters()",
        source="PyTorch torch/autograd, torch/nn/parallel/distributed.py; self-llm#172, FastChat#581, "
        "Llama-Chinese#242",
    ),
    KnownError(
        "fsdp-mixed-parameters",
        "PyTorch",
        (
            "Must flatten tensors with uniform dtype",
            "Must flatten tensors with uniform `requires_grad`",
            "Must flatten tensors with uniform requires_grad",
            "`FlatParameter` requires uniform",
        ),
        kind="configuration",
        cause="FSDP puts the parameters of a layer into one tensor, and they are of different types, or some are "
        "frozen (LoRA, quantised weights).",
        fix="use_orig_params: true (fsdp_use_orig_params in accelerate), load the model in the type it is trained in, "
        "wrap LoRA's layers apart; or FSDP2, which keeps parameters apart",
        source="PyTorch torch/distributed/fsdp/_flat_param.py; peft#1702, peft#484, LlamaFactory#7993, pytorch#104690",
    ),
    KnownError(
        "tensors-on-several-devices",
        "PyTorch",
        (
            "Expected all tensors to be on the same device, but found at least two devices",
            "Expected all tensors to be on the same device, but got",
        ),
        kind="configuration",
        cause="Tensors of one calculation lie on different devices: a model that device_map spread over the GPUs, a "
        "batch that stayed on the CPU, or a script that writes cuda:0 on every rank.",
        fix="leave device_map out under DDP, FSDP and DeepSpeed; torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) "
        "at the start, and batch.to(model.device)",
        source="PyTorch aten/src/ATen/native; chatglm3-base-tuning#8, nunchaku#805, FAST-NN#1",
    ),
    KnownError(
        "mixed-types",
        "PyTorch",
        (
            "mat1 and mat2 to have the same dtype...Half",
            "mat1 and mat2 to have the same dtype...BFloat16",
            "mat1 and mat2 must have the same dtype...Half",
            "mat1 and mat2 must have the same dtype...BFloat16",
            "expected scalar type Half but found",
            "expected scalar type BFloat16 but found",
            "expected scalar type Float but found Half",
            "expected scalar type Float but found BFloat16",
        ),
        kind="configuration",
        cause="Weights and input of a layer are of different types: LoRA's weights in fp32 on a model in bf16 without "
        "autocast, or a quantised model in another compute type.",
        fix="one type for all: bf16: true (or fp16: true) in the training arguments and the same torch_dtype for the "
        "model; with quantisation the same bnb_4bit_compute_dtype",
        source="PyTorch aten/src/ATen/native/cuda/Blas.cpp; LlamaFactory#3991, LlamaFactory#2022, axolotl#844, "
        "DeepSpeed#4885",
    ),
    KnownError(
        "fp16-gradients",
        "PyTorch",
        ("Attempting to unscale FP16 gradients",),
        kind="configuration",
        cause="The trainable weights are in fp16, and mixed precision needs them in fp32.",
        fix="load the model in fp32 (torch_dtype), or LoRA's weights in fp32; bf16: true instead of fp16 where the "
        "GPUs have it",
        source="PyTorch torch/amp/grad_scaler.py; LLaVA#363, diffusers#10910, textgen#3240",
    ),
    KnownError(
        "weights-only",
        "PyTorch",
        ("Weights only load failed",),
        kind="version_mismatch",
        cause="From torch 2.6 on torch.load reads weights alone; the file holds other Python objects, such as a "
        "checkpoint's random state or an optimizer's configuration.",
        fix="bring transformers and accelerate to a version that fits the torch, on every node; for a file you trust: "
        "--env TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1",
        source="PyTorch torch/serialization.py; open-instruct#673, e3nn#519, torchtune#1142",
    ),
    KnownError(
        "checkpoint-of-another-model",
        "PyTorch",
        (
            "size mismatch for ...copying a param with shape",
            "loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
        ),
        kind="configuration",
        cause="The checkpoint belongs to another model, vocabulary, set of trainable parameters or kind of parallelism "
        "than the run that loads it.",
        fix="resume with the arguments it was written with, or start anew from the model: another output_dir; compare "
        "the nodes' files: multinode check JOB",
        source="PyTorch torch/nn/modules/module.py, torch/optim/optimizer.py; DeepSpeed#5570, sd-scripts#378, "
        "score_sde_pytorch#63",
    ),
    KnownError(
        "damaged-weights",
        "Accelerate, Transformers",
        (
            "Error while deserializing header",
            "PytorchStreamReader failed reading zip archive",
            "unpickling stack underflow",
            "invalid load key, 'v'",
        ),
        kind="missing_file",
        cause="A file of weights on this node is damaged or not whole: a download that broke off, a pointer of git-lfs "
        "instead of the file, or a copy on a full disk.",
        fix="compare size and hash with another node's, and copy the whole file anew (git lfs pull fetches what "
        "pointers stand for): multinode check JOB says whose files differ",
        source="safetensors safetensors/src/tensor.rs; safetensors#668, MiniCPM-V#159, Qwen-VL#314",
    ),
    KnownError(
        "numpy-2",
        "System",
        (
            "A module that was compiled using NumPy 1.x cannot be run in",
            "Numpy is not available",
            "numpy.dtype size changed, may indicate binary incompatibility",
            "_ARRAY_API not found",
        ),
        kind="version_mismatch",
        cause="numpy 2 is installed beside packages that were built for numpy 1, such as torch before 2.3.",
        fix="on every node, in the training environment: pip install 'numpy<2', or newer builds of the packages that "
        "the message names",
        source="NumPy numpy/_core/src; pytorch#132179, openfederatedlearning#999, nunif#135",
        is_last=True,
    ),
    KnownError(
        "no-compiler",
        "PyTorch",
        (
            "Failed to find C compiler. Please specify via CC environment variable",
            "nvcc fatal",
            "cannot find -lcurand",
            "cannot find -lcudart",
            "CUDA_HOME environment variable is not set",
            "Error building extension",
            "ninja: build stopped",
        ),
        kind="configuration",
        cause="Something is compiled on the node (Triton, torch.compile, an extension of DeepSpeed or flash-attn), and "
        "it lacks a C compiler, a CUDA toolkit, a library of it, or has one that does not know the GPU. The compiler's "
        "own words stand above.",
        fix="on every node: apt-get install g++, and a CUDA toolkit of torch's version with CUDA_HOME and its lib64 in "
        "LD_LIBRARY_PATH; a half-built cache: rm -rf ~/.cache/torch_extensions",
        source="Triton python/triton/runtime/build.py; PyTorch torch/utils/cpp_extension.py; DeepSpeed#4889, "
        "DeepSpeed#3929, DeepSpeed#5659, DeepSpeed#7174, flash-attention#1736, trainer#2884",
    ),
    KnownError(
        "bitsandbytes-cuda",
        "CUDA",
        (
            "CUDA Setup failed despite GPU being available",
            "Could not find the bitsandbytes CUDA binary",
        ),
        kind="version_mismatch",
        cause="bitsandbytes has no library for the CUDA that torch was built with, or does not find CUDA's.",
        fix="on every node, in the training environment: pip install -U bitsandbytes; what it looks for: python -m "
        "bitsandbytes",
        source="bitsandbytes bitsandbytes/cextension.py; bitsandbytes#1559, bitsandbytes#862, alpaca-lora#540",
    ),
    KnownError(
        "zero3-device-map",
        "DeepSpeed",
        ("DeepSpeed Zero-3 is not compatible with",),
        kind="configuration",
        cause="ZeRO-3 places the parameters itself; device_map and low_cpu_mem_usage do so, too.",
        fix="load the model without device_map and low_cpu_mem_usage (and without unsloth); ZeRO-2 allows them",
        source="Transformers transformers/modeling_utils.py; accelerate#2543, LlamaFactory#3949, peft#306, "
        "MedicalGPT#477",
    ),
    KnownError(
        "deepspeed-no-sync",
        "DeepSpeed",
        (
            "no_sync context manager is incompatible with",
            "no sync context manager is incompatible with",
        ),
        kind="version_mismatch",
        cause="DeepSpeed from 0.16 on refuses no_sync under ZeRO-2 and ZeRO-3, and transformers or accelerate of "
        "before call it for gradient accumulation.",
        fix="bring transformers (4.47 and later) and accelerate to newer versions on every node, or DeepSpeed to "
        "0.15.4",
        source="DeepSpeed deepspeed/runtime/engine.py; DeepSpeed#6793, LlamaFactory#6194, accelerate#3481",
    ),
    KnownError(
        "deepspeed-other-world-size",
        "DeepSpeed",
        (
            "The checkpoint being loaded used a DP world size of",
            "Automatic adjustment of ZeRO's optimizer state partitioning",
        ),
        kind="configuration",
        cause="A ZeRO checkpoint holds a part for each worker, and the run that resumes has another number of workers.",
        fix="resume on as many workers as before; or convert it once: ds_to_universal.py of DeepSpeed; or start from "
        "the weights alone: zero_to_fp32.py in the checkpoint",
        source="DeepSpeed deepspeed/runtime/engine.py; DeepSpeed#2898, DeepSpeed#3810, DeepSpeed#6441",
    ),
    KnownError(
        "device-map-distributed",
        "Accelerate, Transformers",
        (
            "You can't train a model that has been loaded with `device_map=",
            "You can't train a model that has been loaded in 8-bit",
        ),
        kind="configuration",
        cause="device_map spreads one copy of the model over the GPUs, and each worker of a distributed training needs "
        "its own.",
        fix='load the model without device_map; a quantised one on the worker\'s own GPU: device_map={"": '
        'int(os.environ["LOCAL_RANK"])}',
        source="Accelerate accelerate/accelerator.py; transformers#31557, accelerate#2713, Qwen#900",
    ),
    KnownError(
        "unknown-architecture",
        "Accelerate, Transformers",
        (
            "but Transformers does not recognize this architecture",
            "data did not match any variant of untagged enum",
        ),
        kind="version_mismatch",
        cause="The model or its tokenizer.json was written by a newer transformers or tokenizers than the node has.",
        fix="install the version that the model's page names, the same on every node; who has which: multinode check",
        source="Transformers transformers/models/auto/configuration_auto.py; ktransformers#433, open-instruct#738, "
        "DeepSeek-VL2#125, OLMo#813",
    ),
    KnownError(
        "trust-remote-code",
        "Accelerate, Transformers",
        (
            "Please pass the argument `trust_remote_code=True`",
            "requires you to execute the ... file in that repo",
        ),
        kind="configuration",
        cause="The model brings code of its own, which is only run when you allow it.",
        fix="read that code; then trust_remote_code: true in the training arguments",
        source="Transformers transformers/dynamic_module_utils.py",
    ),
    KnownError(
        "padding-token",
        "Accelerate, Transformers",
        (
            "Asking to pad but the tokenizer does not have a padding token",
            "Cannot handle batch sizes > 1 if no padding token is defined",
        ),
        kind="configuration",
        cause="The tokenizer has no padding token, and samples of different length stand in one batch.",
        fix="tokenizer.pad_token = tokenizer.eos_token, or a template of LLaMA-Factory that sets it; else a batch of 1",
        source="Transformers transformers/tokenization_utils_base.py",
    ),
    KnownError(
        "lora-targets",
        "Accelerate, Transformers",
        (
            "not found in the base model. Please check the target modules",
            "No target modules passed, or",
        ),
        kind="configuration",
        cause="The names of LoRA's target modules are not those of this model's layers.",
        fix='lora_target: all in a LLaMA-Factory YAML, target_modules="all-linear" in PEFT; the names: print(model)',
        source="PEFT peft/tuners/tuners_utils.py; peft#1206, LlamaFactory#181, petals#508",
    ),
    KnownError(
        "image-tokens",
        "LLaMA-Factory",
        (
            "Image features and image tokens do not match",
            "Videos features and video tokens do not match",
            "Processor was not found, please check and update your",
            "The number of images does not match the number of",
            "The number of videos does not match the number of",
        ),
        kind="configuration",
        cause="The samples' placeholders and the images or videos that belong to them do not fit: too many or too few "
        "<image> in a sample, a cutoff_len that cuts them off, or a model without its processor.",
        fix="as many <image> in the text as files in the sample; a longer cutoff_len, a smaller image_max_pixels; all "
        "files of the model on the node, and a transformers that knows its processor: multinode check",
        source="LLaMA-Factory src/llamafactory/data/mm_plugin.py; LlamaFactory#9119, LlamaFactory#8393, "
        "LlamaFactory#7897, LlamaFactory#8855, transformers#36002",
    ),
    KnownError(
        "dataset-worker-died",
        "Accelerate, Transformers",
        ("One of the subprocesses has abruptly died during map operation",),
        kind="out_of_memory",
        cause="A process that prepares the data was killed, mostly for lack of memory: each takes its share.",
        fix="a smaller preprocessing_num_workers; prepare the data once (tokenized_path); what the kernel says: ssh "
        "{node} dmesg -T | grep -i oom",
        source="datasets src/datasets/utils/py_utils.py; LlamaFactory#1914, LlamaFactory#6762, LlamaFactory#5308, "
        "data-juicer#430",
    ),
    KnownError(
        "dataset-format",
        "Accelerate, Transformers",
        (
            "An error occurred while generating the dataset",
            "JSON parse error: Column",
            "because column names don't match",
        ),
        kind="configuration",
        cause="The rows of a dataset's files do not have the same columns or types, or a file is not the JSON that its "
        "name says.",
        fix="a list of objects with the same keys, or one object a line in .jsonl; the file and row stand above; the "
        "nodes' copies: multinode check JOB",
        source="datasets src/datasets/builder.py, packaged_modules/json/json.py; LlamaFactory#8805, LlamaFactory#1082, "
        "LlamaFactory#1784, SciCode#40",
    ),
    KnownError(
        "wandb-key",
        "System",
        ("api_key not configured (no-tty)",),
        kind="configuration",
        cause="W&B has no key on this node, and there is no terminal to ask for it.",
        fix="launch --env WANDB_API_KEY hands yours on without showing it; or report_to: none, or --env "
        "WANDB_MODE=offline",
        source="W&B wandb/sdk/lib/apikey.py; EasyR1#69, unsloth#1914, VeOmni#284, LMFlow#436",
    ),
    KnownError(
        "parallel-sizes",
        "PyTorch",
        (
            "is not divisible by tensor_model_parallel_size",
            "must be divisible by tensor parallel size",
            "must be divisible by tensor_model_parallel_size",
            "num_attention_heads ... must be divisible by",
            "is not divisible by (tensor_model_parallel_size",
            "should be divisible by tensor parallel size",
            "num_heads ... must be divisible by mp_size",
        ),
        kind="configuration",
        cause="The number of workers, heads or layers cannot be divided by the size of tensor or pipeline parallelism.",
        fix="sizes whose product divides the number of workers, and a tensor parallel size that divides the heads; as "
        "many workers on every node as planned: multinode check",
        source="Megatron-LM megatron/core/parallel_state.py; DeepSpeed#3634, Pai-Megatron-Patch#332, vllm#414, "
        "AdaptThink#1",
    ),
    KnownError(
        "lightning-devices",
        "PyTorch",
        (
            "MisconfigurationException: No supported gpu backend found",
            "MisconfigurationException: You requested gpu",
        ),
        kind="configuration",
        cause="Lightning was asked for GPUs that this node does not show it.",
        fix="see them: ssh {node} nvidia-smi; devices and num_nodes of the Trainer as the launch has them; take "
        "CUDA_VISIBLE_DEVICES out of profiles",
        source="Lightning src/lightning/fabric/utilities/device_parser.py",
    ),
    KnownError(
        "nan-gradient",
        "PyTorch",
        (
            "returned nan values in its 0th output",
            "probability tensor contains either `inf`, `nan` or element < 0",
            "found NaN in local grad norm",
            "found Inf in local grad norm",
            "found NaN in local forward loss calculation",
        ),
        kind="configuration",
        cause="The numbers of the training have become nan or inf: the learning rate is too high, fp16 overflows, or a "
        "sample has no label.",
        fix="bf16: true instead of fp16, a smaller learning rate, max_grad_norm: 1.0; see the loss of the steps before",
        source="PyTorch torch/csrc/autograd/functions/utils.h, aten/src/ATen/native; Megatron-LM "
        "megatron/core/distributed/param_and_grad_buffer.py",
    ),
    KnownError(
        "llamafactory-arguments",
        "LLaMA-Factory",
        (
            "Quantization is only compatible with the LoRA",
            "incompatible with DeepSpeed ZeRO-3",
            "DeepSpeed ZeRO-3 or FSDP is incompatible with",
            "GaLore and APOLLO are incompatible with DeepSpeed",
            "Distributed training does not support layer-wise",
            "is incompatible with `streaming`",
            "Please provide `model_name_or_path`",
            "Please specify dataset for training",
            "Cannot specify `val_size` if",
            "Please make sure eval_dataset be provided",
            "The dataset is not applicable in the current training stage",
            "This device does not support `pure_bf16`",
            "Cannot use device map for quantized models in training",
            "is only valid for LoRA training",
            "Adapter is only valid for the LoRA method",
            "Please check whether the correct `template` is used",
            "cannot be set as True except SFT",
        ),
        kind="configuration",
        cause="Two arguments of the YAML exclude each other, or one is missing; the message names them.",
        fix="correct the YAML, or for one run: --set KEY=VALUE; multinode check JOB finds some of these before the "
        "start",
        source="LLaMA-Factory src/llamafactory/hparams/parser.py, data_args.py, finetuning_args.py, data/mm_plugin.py",
    ),
    KnownError(
        "no-valid-checkpoint",
        "Accelerate, Transformers",
        (
            "Can't find a valid checkpoint at",
            "No valid checkpoint found in output directory",
        ),
        kind="missing_file",
        cause="The run shall resume, and the directory on this node has no whole checkpoint: checkpoints of a training "
        "stand on node 0 alone unless the file system is shared.",
        fix="name one that is whole, on every node at the same path; multinode launch --restarts finds the last "
        "complete one",
        source="Transformers transformers/trainer.py",
    ),
    KnownError(
        "deepspeed-no-launcher",
        "DeepSpeed",
        ("No module named 'mpi4py'",),
        kind="configuration",
        cause="DeepSpeed found no RANK and WORLD_SIZE, took the start for one by MPI, and MPI is not there: the script "
        "was started by plain python.",
        fix="start it with multinode launch, torchrun or deepspeed; for one process by hand: export RANK=0 "
        "WORLD_SIZE=1 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500",
        source="DeepSpeed deepspeed/comm/comm.py",
    ),
    KnownError(
        "gpu-xid",
        "CUDA",
        (
            "NVRM: Xid (...): 48,",
            "NVRM: Xid (...): 62,",
            "NVRM: Xid (...): 64,",
            "NVRM: Xid (...): 74,",
            "NVRM: Xid (...): 79,",
            "NVRM: Xid (...): 94,",
            "NVRM: Xid (...): 95,",
            "NVRM: Xid (...): 119,",
            "NVRM: Xid (...): 120,",
        ),
        kind="hardware",
        cause="The driver reported an error of the GPU's hardware: 48, 94 and 95 are memory, 74 NVLink, 79 a GPU that "
        "is gone, 119 and 120 its system processor.",
        fix="reset or replace the GPU, or leave it out (gpus= in the hostfile); how often: ssh {node} dmesg -T | grep "
        "-i xid",
        source="NVIDIA Xid Errors",
    ),
    KnownError(
        "gpu-peer-access",
        "CUDA",
        (
            "peer access is not supported between these two devices",
            "peer mapping resources exhausted",
            "failed to peer with device",
        ),
        kind="configuration",
        cause="Two GPUs of the node cannot read each other's memory: no path over PCIe, an IOMMU or ACS that forbids "
        "it, or more GPUs than the driver can join.",
        fix="without it: --env NCCL_P2P_DISABLE=1; what the paths are: ssh {node} nvidia-smi topo -p2p r; IOMMU and "
        "ACS off in the BIOS for good",
        source="CUDA runtime API, errors 217 and 711; NCCL src/transport/p2p.cc",
    ),
    KnownError(
        "nccl-ib-device",
        "NCCL",
        (
            "NET/IB : Unable to open device",
            "NET/IB : Unable to query device",
            "NET/IB : Unable to query port",
            "NET/IB : No IP interface found",
        ),
        kind="configuration",
        cause="NCCL sees RDMA NICs and cannot open them: a container without /dev/infiniband, no right to it, or a NIC "
        "without an address.",
        fix="docker run --device /dev/infiniband --cap-add IPC_LOCK; which NICs work: ssh {node} ibv_devinfo; name "
        "those: env.NCCL_IB_HCA=...; over TCP: env.NCCL_NET=Socket",
        source="NCCL src/transport/net_ib.cc (2.18 to 2.27), src/transport/net_ib/init.cc (2.28)",
    ),
    KnownError(
        "nccl-ib-mixed",
        "NCCL",
        (
            "Attempted to connect incompatible devices",
            "Attempted to merge incompatible devices",
            "device is incompatible with the local",
            "net devices with different link_layer",
            "multiple devices together with different link_layer",
            "has a different number of devices=",
            "Detected mixed local Net device counts",
        ),
        kind="configuration",
        cause="The nodes have different RDMA NICs, or NICs of both InfiniBand and Ethernet, and NCCL joined some that "
        "do not fit.",
        fix="name NICs of one kind, as many on every node: env.NCCL_IB_HCA=...; which there are: multinode check",
        source="NCCL src/transport/net_ib.cc (2.20 to 2.27), src/transport/net_ib (2.28), src/init.cc (2.30)",
    ),
    KnownError(
        "nccl-imex",
        "NCCL",
        (
            "is available but not supported on this system. Check the IMEX",
            "is available but not working on this system. Check the IMEX",
        ),
        kind="configuration",
        cause="The nodes belong to one NVLink domain (GB200), and its service nvidia-imex does not run on them, or the "
        "container has no channel of it.",
        fix="start nvidia-imex on every node of the domain, and give the container /dev/nvidia-caps-imex-channels; "
        "without it: --env NCCL_MNNVL_ENABLE=0",
        source="NCCL src/mnnvl.cc (2.26 to 2.30)",
    ),
    KnownError(
        "nccl-stranger",
        "NCCL",
        (
            "socketFinalizeAccept: wrong magic",
            "socketFinalizeAccept: wrong type",
            "Invalid NCCL_COMM_ID, please use format",
        ),
        kind="configuration",
        cause="Something else than a rank of this job connected to NCCL: a worker of another job at the same "
        "rendezvous, or a scanner of ports.",
        fix="a MASTER_PORT of its own for each job, and none left from before: multinode clean; take NCCL_COMM_ID out "
        "of profiles",
        source="NCCL src/misc/socket.cc, src/bootstrap.cc",
    ),
    KnownError(
        "nccl-algorithm",
        "NCCL",
        ("no algorithm/protocol available",),
        kind="configuration",
        cause="NCCL_ALGO or NCCL_PROTO leaves nothing for a collective on these nodes.",
        fix="take NCCL_ALGO and NCCL_PROTO out of profiles and /etc/nccl.conf",
        source="NCCL src/enqueue.cc",
    ),
    KnownError(
        "model-not-found",
        "Accelerate, Transformers",
        (
            "is not a local folder and is not a valid model identifier",
            "is not a local folder or a valid repository name",
            "does not appear to have a file named",
            "We couldn't connect to ... to load the files",
            "We couldn't connect to ... to load this file",
            "LocalEntryNotFoundError",
            "RepositoryNotFoundError",
            "GatedRepoError",
            "You are trying to access a gated repo",
            "Cannot access gated repo for url",
            "HFValidationError",
            "Incorrect path_or_model_id",
            "OfflineModeIsEnabled",
            "HTTPSConnectionPool(host='huggingface.co'",
            "HTTPSConnectionPool(host='hf-mirror.com'",
        ),
        kind="missing_file",
        cause="The model is not on this node at the path that the job names, and could not be had from the hub either: "
        "it is "
        "not reached, does not know the name, or wants a token for a gated repository.",
        fix="it has to be on every node at the same path, whole: multinode check JOB; nothing is copied there. A gated "
        "one needs your token: --env HF_TOKEN",
        source="Transformers transformers/utils/hub.py; huggingface_hub; trl#3604, TTRL#25, trl#4282",
        checks=("paths", "content"),
    ),
    KnownError(
        "package-version",
        "Accelerate, Transformers",
        (
            "is required for a normal functioning of this module, but found",
            "but found ...==",
            "compiled against API version",
            "compiled against ABI version",
            "were compiled with different CUDA versions",
            "mismatches the version that was used to compile PyTorch",
            "The detected CUDA version ... mismatches",
        ),
        kind="version_mismatch",
        cause="Two packages of the training environment do not fit together.",
        fix="install the version that the message names, on every node; compare them: multinode check. "
        "LLaMA-Factory's own check is switched off by --env DISABLE_VERSION_CHECK=1",
        source="Transformers transformers/utils/versions.py",
        checks=("versions",),
        is_last=True,
    ),
    KnownError(
        "undefined-symbol",
        "System",
        (".so: undefined symbol", "symbol lookup error: "),
        kind="version_mismatch",
        cause="A compiled package (flash-attn, DeepSpeed operations, torchvision) was built for another torch.",
        fix="install it anew for the node's torch; compare the nodes' versions: multinode check",
        source="ld.so(8)",
        checks=("versions",),
    ),
    KnownError(
        "noexec",
        "System",
        ("failed to map segment from shared object",),
        kind="configuration",
        cause="A library that was compiled or unpacked on the node lies on a file system that is mounted noexec, often "
        "/tmp or the home directory; torch.compile, Triton and DeepSpeed load from there.",
        fix="where it is mounted so: ssh {node} findmnt -T /tmp; move it elsewhere: --env TMPDIR=/var/tmp --env "
        "TRITON_CACHE_DIR=/var/tmp/triton --env TORCHINDUCTOR_CACHE_DIR=/var/tmp/inductor --env "
        "TORCH_EXTENSIONS_DIR=/var/tmp/ext",
        source="glibc elf/dl-load.c; pytorch#91005, pytorch#123054",
        checks=("noexec",),
    ),
    KnownError(
        "system-library-too-old",
        "System",
        ("version `GLIBC_...' not found", "version `GLIBCXX_...' not found", "version `CXXABI_...' not found"),
        kind="version_mismatch",
        cause="A compiled package or program was built on a newer system than the node's: its C or C++ library is too "
        "old for it. Nodes that share one environment need equally new systems.",
        fix="GLIBCXX and CXXABI: install a newer libstdc++ into the environment (conda install -c conda-forge "
        "libstdcxx-ng) and put its lib first by --env LD_LIBRARY_PATH=...; GLIBC: build the environment on {node}, or "
        "use a container",
        source="glibc elf/dl-version.c",
    ),
    KnownError(
        "python-home",
        "System",
        (
            "No module named 'encodings'",
            "init_fs_encoding: failed to get the Python codec of the filesystem encoding",
        ),
        kind="configuration",
        cause="The interpreter does not find its own standard library: PYTHONHOME points to another Python, or the "
        "environment was copied from a machine where its Python lay elsewhere.",
        fix="unset PYTHONHOME in the node's profile: ssh {node} env | grep PYTHONHOME; else make the environment anew "
        "on the node, and name its interpreter by python= in the hostfile",
        source="CPython Python/pylifecycle.c, Modules/getpath.py",
    ),
    KnownError(
        "missing-module",
        "System",
        (
            "ModuleNotFoundError",
            "ImportError",
            ": No module named ",
            "cannot import name",
            "cannot open shared object file",
        ),
        kind="missing_module",
        cause="What the job imports is not installed for the interpreter that runs it on this node.",
        fix="install it into the training environment of every node; compare them: multinode check",
        source="CPython Lib/importlib; ld.so(8)",
        checks=("packages", "interpreter"),
        is_last=True,
    ),
    KnownError(
        "permission-denied",
        "System",
        ("PermissionError", "[Errno 13] Permission denied"),
        kind="configuration",
        cause="The user of the job may not read or write a file on the node.",
        fix="the message names the file; output_dir has to be writable on every node: multinode check JOB",
        source="CPython Objects/exceptions.c",
        checks=("paths",),
        is_last=True,
    ),
    KnownError(
        "missing-file",
        "System",
        (
            "FileNotFoundError",
            "[Errno 2] No such file or directory",
            "can't open file",
            "bash: ...: No such file or directory",
        ),
        kind="missing_file",
        cause="The job names a file that is not on this node.",
        fix="it has to be on every node at the same path; compare them: multinode check JOB",
        source="CPython Objects/exceptions.c",
        checks=("paths", "workdir"),
        is_last=True,
    ),
    KnownError(
        "file-system-gone",
        "System",
        (
            "Stale file handle",
            "Read-only file system",
            "Transport endpoint is not connected",
            "[Errno 5] Input/output error",
            "[Errno 121] Remote I/O error",
            "[Errno 108] Cannot send after transport endpoint shutdown",
        ),
        kind="missing_file",
        cause="A network file system went away under the job, or a disk with errors became read-only.",
        fix="mount it anew on {node}; what the kernel says: ssh {node} dmesg -T | tail",
        source="errno(3)",
        checks=("paths",),
    ),
    KnownError(
        "address-in-use",
        "PyTorch",
        (
            "The server socket has failed to listen on any local network address",
            "Tried to launch distributed communication on port",
            "name: EADDRINUSE",
            "errno: 98 - Address already in use",
            "RuntimeError: Address already in use",
            "EADDRINUSE, message: address already in use",
        ),
        kind="connection",
        cause="Another process on node 0 listens on MASTER_PORT: a second job, or the rest of an earlier one.",
        fix="choose another port: --master-port; what earlier runs left: multinode check; who it is: ssh {node} ss "
        "-tlnp",
        source="PyTorch torch/csrc/distributed/c10d/socket.cpp; Accelerate accelerate/utils/launch.py",
        checks=("master-port", "leftovers"),
    ),
    KnownError(
        "ssh-host-key-changed",
        "SSH",
        ("REMOTE HOST IDENTIFICATION HAS CHANGED",),
        kind="connection",
        cause="The host shows another key than known_hosts has: it was reinstalled, or something is in between.",
        fix="compare the key with the host's own; then ssh-keygen -R HOST and accept the new one",
        source="OpenSSH sshconnect.c",
        checks=("ssh",),
    ),
    KnownError(
        "ssh-host-key-unknown",
        "SSH",
        ("Host key verification failed", "host key is known for"),
        kind="connection",
        cause="known_hosts does not have the host's key, and nobody was there to accept it.",
        fix="compare the fingerprint and accept it once, by hand: ssh HOST; multinode check prints the command",
        source="OpenSSH sshconnect.c, sshconnect2.c",
        checks=("ssh",),
    ),
    KnownError(
        "ssh-permission-denied",
        "SSH",
        (
            "Permission denied (publickey",
            "Permission denied (password",
            "Permission denied (gssapi",
            "Too many authentication failures",
        ),
        kind="connection",
        cause="The host accepted none of the keys for this user.",
        fix="ssh-copy-id USER@HOST; user= and key= in the hostfile; with many keys in the agent: IdentitiesOnly yes",
        source="OpenSSH sshconnect2.c, auth.c",
        checks=("ssh",),
    ),
    KnownError(
        "ssh-key-permissions",
        "SSH",
        ("UNPROTECTED PRIVATE KEY FILE", "Bad owner or permissions on"),
        kind="configuration",
        cause="Others may read the private key, or write ~/.ssh/config: ssh does not use it then.",
        fix="chmod 600 on the file, chmod 700 ~/.ssh, and chown to the user",
        source="OpenSSH authfile.c, readconf.c",
        checks=("ssh",),
    ),
    KnownError(
        "ssh-refused",
        "SSH",
        ("ssh: connect to host ...: Connection refused",),
        kind="connection",
        cause="No sshd listens on that port of the host.",
        fix="start sshd there, or name its port: port= in the hostfile",
        source="OpenSSH sshconnect.c",
        checks=("ssh",),
    ),
    KnownError(
        "ssh-unreachable",
        "SSH",
        (
            "ssh: connect to host ...: Connection timed out",
            "ssh: connect to host ...: No route to host",
            "ssh: connect to host ...: Network is unreachable",
        ),
        kind="connection",
        cause="The host is down, in another network, or behind a firewall that drops the packets.",
        fix="ping HOST; check its address, power and firewall",
        source="OpenSSH sshconnect.c",
        checks=("ssh",),
    ),
    KnownError(
        "ssh-unknown-host",
        "SSH",
        ("Could not resolve hostname",),
        kind="connection",
        cause="The name is neither in DNS, /etc/hosts nor ~/.ssh/config.",
        fix="correct it in the hostfile, or give it a HostName in ~/.ssh/config",
        source="OpenSSH ssh.c",
        checks=("ssh",),
    ),
    KnownError(
        "name-resolution",
        "System",
        (
            "[Errno -2] Name or service not known",
            "[Errno -3] Temporary failure in name resolution",
            "gai error: -2 - Name or service not known",
            "gai error: -3 - Temporary failure in name resolution",
            "error encountered when getting address info : ",
        ),
        kind="configuration",
        cause="The node cannot resolve a name, often that of MASTER_ADDR.",
        fix="an address instead of the name (multinode's launches give the address); or the name in /etc/hosts of "
        "every node",
        source="getaddrinfo(3); PyTorch torch/csrc/distributed/c10d/socket.cpp",
        checks=("hostname",),
        is_last=True,
    ),
    KnownError(
        "ssh-no-banner",
        "SSH",
        ("kex_exchange_identification: ",),
        kind="connection",
        cause="sshd closed the connection before the handshake: too many at once (MaxStartups, 10:30:100 by default), "
        "a block list, or it is overloaded.",
        fix="raise MaxStartups in sshd_config of the host; see whether fail2ban or hosts.deny blocks you",
        source="OpenSSH kex.c",
        checks=("ssh",),
    ),
    KnownError(
        "ssh-sessions",
        "SSH",
        ("Session open refused by peer",),
        kind="connection",
        cause="More sessions over one connection than sshd allows (MaxSessions, 10 by default).",
        fix="raise MaxSessions in sshd_config of the host, or close other sessions that share the connection",
        source="OpenSSH mux.c",
        checks=("ssh",),
    ),
    KnownError(
        "ssh-broken-pipe",
        "SSH",
        ("client_loop: send disconnect", "Timeout, server ... not responding"),
        kind="connection",
        cause="The SSH connection died: a sleeping laptop, a NAT that forgot it, a restarted host. A job started "
        "through it by hand dies with it.",
        fix="multinode's jobs live in a session of their own and are taken up again: multinode attach; for ssh by "
        "hand: ServerAliveInterval 30",
        source="OpenSSH clientloop.c",
        checks=("ssh",),
    ),
    KnownError(
        "sigusr",
        "PyTorch",
        (
            "got signal: 10",
            "got signal: 12",
            "Received 10 death signal",
            "Received 12 death signal",
            "Received Signals.SIGUSR1 death signal",
            "Received Signals.SIGUSR2 death signal",
        ),
        kind="killed",
        cause="torchrun got SIGUSR1 or SIGUSR2: Slurm sends one before the time limit where --signal asks for it.",
        fix="a longer --time; or let the script handle the signal and save a checkpoint, and leave torchrun out of it: "
        "--signal=B:USR1@120 reaches the batch script alone",
        source="PyTorch torch/distributed/elastic/multiprocessing/api.py; Slurm doc/man/man1/sbatch.1",
    ),
    KnownError(
        "sigint",
        "PyTorch",
        ("got signal: 2", "Received 2 death signal", "Received Signals.SIGINT death signal"),
        kind="killed",
        cause="torchrun got SIGINT: somebody pressed Ctrl-C, or a scheduler sent it.",
        fix="ask who stopped it",
        source="PyTorch torch/distributed/elastic/multiprocessing/api.py",
    ),
    KnownError(
        "sigterm",
        "PyTorch",
        ("got signal: 15", "Received 15 death signal", "Received Signals.SIGTERM death signal"),
        kind="killed",
        cause="torchrun was asked to end: by a job scheduler, a person, or multinode, which stops all nodes when one "
        "fails.",
        fix="look for the first error on the other nodes: multinode show last; else ask who stopped it",
        source="PyTorch torch/distributed/elastic/multiprocessing/api.py",
        of_peers=True,
    ),
    KnownError(
        "sighup",
        "PyTorch",
        ("got signal: 1", "Received 1 death signal", "Received Signals.SIGHUP death signal"),
        kind="killed",
        cause="torchrun got SIGHUP: the terminal or SSH session that started it was closed. nohup does not help, "
        "torchrun sets its own handler.",
        fix="multinode launch --detach; by hand: setsid, tmux or systemd-run",
        source="PyTorch torch/distributed/elastic/multiprocessing/api.py; pytorch#67538, LlamaFactory#3036",
    ),
    KnownError(
        "slurm-out-of-memory",
        "Slurm",
        (
            "oom_kill event in StepId",
            "oom_kill events in StepId",
            "oom-kill event(s) in",
            "oom_kill event...Some of the step tasks have been OOM Killed",
            "srun: error: ...: task ...: Out Of Memory",
        ),
        kind="out_of_memory",
        cause="The step used more memory than the job asked for, and the kernel killed a process of it.",
        fix="ask for more (--mem=0 is all of a node), or use less: fewer data loader workers, no offload; what it "
        "used: sacct -j JOB --format=JobID,MaxRSS,ReqMem",
        source="Slurm src/plugins/cgroup/common/cgroup_common.c, src/slurmd/slurmstepd/mgr.c",
        checks=("machine",),
    ),
    KnownError(
        "slurm-time-limit",
        "Slurm",
        ("DUE TO TIME LIMIT",),
        kind="killed",
        cause="The job reached its time limit, and Slurm ended it.",
        fix="a longer --time, or shorter parts that go on from their last checkpoint: --restarts",
        source="Slurm src/slurmd/slurmstepd/req.c",
    ),
    KnownError(
        "slurm-preempted",
        "Slurm",
        ("DUE TO PREEMPTION",),
        kind="killed",
        cause="A job of higher priority took the nodes.",
        fix="submit it again to a partition or QOS that is not preempted; save checkpoints more often",
        source="Slurm src/slurmd/slurmstepd/req.c",
    ),
    KnownError(
        "slurm-node-failure",
        "Slurm",
        ("DUE TO NODE FAILURE", "srun: error: Node failure on", "Job credential expired"),
        kind="node_lost",
        cause="Slurm lost contact with a node of the job, and ended it.",
        fix="which node, and why: sinfo -R; leave it out of the next job: --exclude=NODE",
        source="Slurm src/slurmd/slurmstepd/req.c, src/srun/srun_job.c",
    ),
    KnownError(
        "slurm-cancelled",
        "Slurm",
        ("slurmstepd: error: *** JOB ... CANCELLED AT", "slurmstepd: error: *** STEP ... CANCELLED AT"),
        kind="killed",
        cause="Slurm ended the job or step: somebody cancelled it, or another task of it had failed.",
        fix="look for the first task that ended, above; who cancelled it: sacct -j JOB --format=JobID,State,ExitCode",
        source="Slurm src/slurmd/slurmstepd/req.c",
        of_peers=True,
        is_general=True,
    ),
    KnownError(
        "killed",
        "System",
        (
            "is killed by signal: Killed",
            "died with <Signals.SIGKILL",
            "return code = -9",
            "exitcode ...: -9 (pid",
            "exit code 137",
            "exit code 247",
            "terminated with signal SIGKILL",
            "line ...: ... Killed  ",
        ),
        kind="killed",
        cause="The process got SIGKILL: from a person, a job scheduler, or the kernel for lack of memory.",
        fix="see whether the kernel did it: ssh {node} dmesg -T | grep -i oom; else ask who stopped it",
        source="PyTorch torch/csrc/DataLoader.cpp, torch/distributed/elastic; DeepSpeed deepspeed/launcher/launch.py",
        checks=("machine",),
        is_general=True,
    ),
    KnownError(
        "collective-timeout",
        "PyTorch",
        (
            "Watchdog caught collective operation timeout",
            "Some NCCL operations have failed or timed out",
            "we are taking the entire process down",
            "the collective timed out",
        ),
        kind="timeout",
        cause="A collective did not end within its timeout (30 minutes unless ddp_timeout says otherwise): a rank "
        "came late or never, the link is too slow for what is sent, or packets are dropped.",
        fix="a worker was slow or gone, or a port is blocked: multinode check; while it hangs, --hang-timeout says "
        "who is behind",
        source="PyTorch torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp; LlamaFactory#5558",
        checks=("strategy", "ports", "link"),
        of_peers=True,
    ),
    KnownError(
        "watchdog-stuck",
        "PyTorch",
        ("watchdog got stuck for", "Heartbeat monitor timed out"),
        kind="timeout",
        cause="NCCL's watchdog thread made no progress for 8 minutes: a CUDA call hangs, mostly because a peer is "
        "gone or the GPU is.",
        fix="look at the node that failed first, and at the GPU: ssh {node} dmesg -T | grep -i xid; more time: "
        "--env TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=1800",
        source="PyTorch torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp",
        checks=("gpus",),
        of_peers=True,
    ),
    KnownError(
        "gloo-timeout",
        "gloo",
        (
            "Timed out waiting ...ms for recv operation",
            "Timed out waiting ...ms for send operation",
            "Application timeout caused pair closure",
            "gloo/transport/...Read timeout",
            "gloo/transport/...Write timeout",
        ),
        kind="timeout",
        cause="A peer did not take part in a collective within the timeout: it is late, hangs, or cannot be reached.",
        fix="a worker was slow or gone, or a port is blocked: multinode check; while it hangs, --hang-timeout says "
        "who is behind",
        source="gloo gloo/transport/tcp/unbound_buffer.cc",
        checks=("ports", "link", "strategy"),
        of_peers=True,
    ),
    KnownError(
        "not-all-joined",
        "PyTorch",
        ("waiting for clients. ... clients joined", "Timed out initializing process group in store based barrier"),
        kind="timeout",
        cause="Not all workers came to the rendezvous: a node was not started, has fewer workers, or cannot reach "
        "MASTER_PORT.",
        fix="start all nodes with one command, as multinode launch does, and open MASTER_PORT to all: multinode check",
        source="PyTorch torch/csrc/distributed/c10d/TCPStore.cpp",
        checks=("master-port", "ports", "gpus"),
        of_peers=True,
    ),
    KnownError(
        "monitored-barrier",
        "PyTorch",
        ("failed to pass monitoredBarrier", "timed out in monitoredBarrier"),
        kind="timeout",
        cause="The ranks that the message names did not reach the barrier in time.",
        fix="look at those ranks' node and log: multinode logs last --node NODE",
        source="PyTorch torch/csrc/distributed/c10d/ProcessGroupGloo.cpp",
        of_peers=True,
    ),
    KnownError(
        "store-timeout",
        "PyTorch",
        (
            "got error: Socket Timeout",
            "got error: wait timeout",
            "wait timeout after ...ms, keys:",
            "Timeout waiting for key:",
            "Socket Timeout",
            "DistStoreError: wait timeout",
        ),
        kind="timeout",
        cause="A rank waited at the rendezvous for another that had not come yet: rank 0 still tokenises the data or "
        "loads the model, has failed, or hangs.",
        fix="prepare the data once (tokenized_path), or set a longer ddp_timeout; see what rank 0 did: multinode logs "
        "last --node NODE",
        source="PyTorch torch/csrc/distributed/c10d/TCPStore.cpp; LlamaFactory#2424, LlamaFactory#81",
        checks=("ports", "shared"),
        of_peers=True,
    ),
    KnownError(
        "master-unreachable",
        "PyTorch",
        (
            "The client socket has timed out after ... while trying to connect to",
            "The client socket has failed to connect to any network address of",
            "TCP client failed to connect/validate to host",
            "The connection to the C10d store has failed",
            "RendezvousConnectionError",
            "RendezvousTimeoutError",
            "DistNetworkError: Connection reset by peer",
            "DistNetworkError: Broken pipe",
        ),
        kind="connection",
        cause="The node cannot reach MASTER_ADDR:MASTER_PORT: node 0 has not started or has failed, the address is "
        "not one of the data plane, a firewall blocks the port, or two jobs share it (29400 and 29500 are torchrun's "
        "defaults) and the other one's torchrun ended.",
        fix="multinode check says which node cannot reach which port; by hand, MASTER_ADDR has to be an address of "
        "node 0 that the others reach, and each job needs a MASTER_PORT of its own",
        source="PyTorch torch/csrc/distributed/c10d/socket.cpp, "
        "torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py",
        checks=("master-port", "ports", "interface"),
        of_peers=True,
    ),
    KnownError(
        "nccl-id",
        "PyTorch",
        ("is setting up NCCL communicator and retrieving ncclUniqueId from [0]",),
        kind="connection",
        cause="Rank 0 ended before the first collective: its own error comes first, on node 0.",
        fix="read the log of node 0: multinode logs last --node NODE",
        source="PyTorch torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp",
        of_peers=True,
    ),
    KnownError(
        "peer-gone",
        "PyTorch",
        (
            "Failed to recv, got 0 bytes",
            "Failed to send, sent 0 bytes",
            "Did the remote server shutdown or crash",
            "RuntimeError: Connection reset by peer",
            "RuntimeError: Broken pipe",
            "RendezvousClosedError",
            "RendezvousGracefulExitError",
        ),
        kind="connection",
        cause="Rank 0, which holds the rendezvous, ended.",
        fix="look for the first error on the other nodes: multinode show last; the network between the nodes: "
        "multinode check",
        source="PyTorch torch/csrc/distributed/c10d/Utils.hpp",
        of_peers=True,
    ),
    KnownError(
        "nccl-timed-out",
        "NCCL",
        (
            "connect to ...> returned Connection timed out",
            "connect to ...> returned No route to host",
            "Connect to ...> returned 110(",
            "Connect to ...> returned 113(",
            "Connect to ...> failed : Connection timed out",
            "Connect to ...> failed : No route to host",
            "connect returned Connection timed out",
            "connect returned No route to host",
            "socketStartConnect: exceeded timeouts",
            "socketPollConnect: exceeded timeouts",
            "poll() returned ..., no POLLOUT events",
        ),
        kind="connection",
        cause="The other node does not answer on the port that NCCL chose, one of all ephemeral ports: a firewall, or "
        "an interface without a way there (docker0, VPN).",
        fix="open all ports between the nodes (MASTER_PORT alone is not enough): multinode check names node and port, "
        "and the firewall command",
        source="NCCL src/misc/socket.cc (2.18 to 2.29), src/os/linux.cc (2.30); nccl#352, nccl#388, nccl#1618, "
        "sglang#3820, "
        "LlamaFactory#8045",
        checks=("ports", "interface", "link"),
        of_peers=True,
    ),
    KnownError(
        "nccl-refused",
        "NCCL",
        (
            "connect to ...> returned Connection refused",
            "Connect to ...> returned 111(",
            "Connect to ...> failed : Connection refused",
            "connect returned Connection refused",
            "Call to connect failed : Connection refused",
            "socketStartConnect: exceeded retries",
            "socketPollConnect: exceeded retries",
        ),
        kind="connection",
        cause="Nothing listens at the address that the other rank announced: its worker has ended, or it announced an "
        "interface that leads elsewhere (docker0 has the same address on every machine).",
        fix="look for the first error on the other nodes; then the interface: multinode check",
        source="NCCL src/misc/socket.cc (2.18 to 2.29), src/os/linux.cc (2.30)",
        checks=("interface", "variables", "ports"),
        of_peers=True,
    ),
    KnownError(
        "nccl-cannot-connect",
        "NCCL",
        (
            "Connect to ...> failed : ",
            "Connect to ...> returned ... errno ",
            "connect to ...> returned ..., exceeded error retry count",
            "socketPollConnect: connect returned ..., exceeded error retry count",
            "socketStartConnect: connect returned ..., exceeded error retry count",
            "socketPollConnect poll() failed with error",
            "SocketPollConnect to ...> failed with error",
        ),
        kind="connection",
        cause="NCCL could not connect to the address that another rank announced: no route leads there (Network is "
        "unreachable), it is an IPv6 link-local address (Cannot assign requested address), or the first try failed and "
        "NCCL's second one hides why (Software caused connection abort).",
        fix="the interface that NCCL takes on every node: multinode check; name it by ifname= in the hostfile, and "
        "look "
        "for the first error on the other nodes",
        source="NCCL src/misc/socket.cc (2.18 to 2.29), src/os/linux.cc (2.30); nccl#1515",
        checks=("interface", "ports"),
        of_peers=True,
    ),
    KnownError(
        "nccl-peer-gone",
        "NCCL",
        (
            "Connection closed by remote peer",
            "ncclRemoteError",
            "remote process exited or there was a network error",
            "Call to recv from ...> failed : ",
            "Call to send to ...> failed : ",
        ),
        kind="connection",
        cause="The worker at the other end ended, or the network between the two broke.",
        fix="look for the first error on the other nodes: multinode show last; the network between the nodes: "
        "multinode check",
        source="NCCL src/misc/socket.cc, src/os/linux.cc, src/init.cc; PyTorch "
        "torch/csrc/distributed/c10d/NCCLUtils.cpp; LlamaFactory#6849",
        checks=("link", "ports"),
        of_peers=True,
    ),
    KnownError(
        "nccl-cuda-error",
        "NCCL",
        ("ncclUnhandledCudaError", "unhandled cuda error"),
        kind="crashed",
        cause="A CUDA call inside NCCL failed; NCCL's line above names it.",
        fix="read NCCL's own WARN lines (a launch shows them; else nccl.*.log of the run on {node}); the GPU: ssh "
        "{node} "
        "dmesg -T | grep -i xid",
        source="NCCL src/init.cc; PyTorch torch/csrc/distributed/c10d/NCCLUtils.cpp",
        checks=("gpus", "versions"),
        is_general=True,
    ),
    KnownError(
        "nccl-invalid-usage",
        "NCCL",
        (
            "ncclInvalidUsage",
            "ncclInvalidArgument",
            "invalid usage (run with NCCL_DEBUG",
            "invalid argument (run with NCCL_DEBUG",
        ),
        kind="configuration",
        cause="Mostly two workers on one GPU, or different versions of NCCL.",
        fix="read NCCL's own WARN lines (a launch shows them; else nccl.*.log of the run on {node}); as many workers "
        "as "
        "GPUs: multinode check",
        source="NCCL src/init.cc; PyTorch torch/csrc/distributed/c10d/NCCLUtils.cpp",
        checks=("gpus", "versions"),
        is_general=True,
    ),
    KnownError(
        "nccl-system-error",
        "NCCL",
        ("ncclSystemError", "unhandled system error"),
        kind="connection",
        cause="A system call of NCCL failed, mostly on a socket: a peer is gone, or an interface leads nowhere.",
        fix="read NCCL's own WARN lines (a launch shows them; else nccl.*.log of the run on {node}); the network "
        "between "
        "the nodes: multinode check",
        source="NCCL src/init.cc; PyTorch torch/csrc/distributed/c10d/NCCLUtils.cpp",
        checks=("interface", "ports", "machine"),
        of_peers=True,
        is_general=True,
    ),
    KnownError(
        "nccl-internal-error",
        "NCCL",
        ("ncclInternalError", "internal error - please report this issue to the NCCL developers"),
        kind="connection",
        cause="NCCL met something it did not expect: mostly an interface, RDMA NIC or GPU that it cannot use.",
        fix="read NCCL's own WARN lines (a launch shows them; else nccl.*.log of the run on {node}); then multinode "
        "check",
        source="NCCL src/init.cc; nccl#1837",
        checks=("interface", "variables", "gpus"),
        of_peers=True,
        is_general=True,
    ),
    KnownError(
        "gloo-connect",
        "gloo",
        (
            "Gloo connectFullMesh failed with",
            "SO_ERROR: Connection refused",
            "SO_ERROR: Connection timed out",
            "SO_ERROR: No route to host",
            "gloo/transport/...timed out connecting: ",
        ),
        kind="connection",
        cause="A worker could not connect to another at the address it announced: that worker has ended, announced an "
        "address that leads nowhere from here (127.0.1.1, docker0), or a firewall stands between.",
        fix="look for the first error on the other nodes; then addresses and ports: multinode check; by hand, on each "
        "node: export GLOO_SOCKET_IFNAME=<interface>",
        source="PyTorch torch/csrc/distributed/c10d/ProcessGroupGloo.cpp; gloo gloo/transport/tcp/helpers.h; gloo#223",
        checks=("hostname", "interface", "ports"),
        of_peers=True,
    ),
    KnownError(
        "gloo-peer-gone",
        "gloo",
        (
            "Connection closed by peer [",
            "gloo/transport/...Connection closed by peer",
            "gloo/transport/...Connection reset by peer",
            "gloo/transport/...Broken pipe",
            "gloo/transport/...Socket unexpectedly closed",
            "gloo/transport/...Socket closed",
            "Socket unexpectedly closed [",
            "gloo: Connection reset by peer",
        ),
        kind="connection",
        cause="The worker at the other end ended or was killed.",
        fix="look for the first error on the other nodes: multinode show last; the network between the nodes: "
        "multinode check",
        source="gloo gloo/transport/tcp/pair.cc",
        checks=("link",),
        of_peers=True,
    ),
    KnownError(
        "dataloader-exited",
        "PyTorch",
        ("DataLoader worker (pid(s) ...) exited unexpectedly", "DataLoader worker (pid ...) is killed by signal: "),
        kind="crashed",
        cause="A data loader worker died; why stands above it: memory, /dev/shm, or an exception of its own.",
        fix="run once with dataloader_num_workers: 0, which shows the exception; ssh {node} dmesg -T | tail",
        source="PyTorch torch/utils/data/dataloader.py",
        checks=("machine",),
    ),
    KnownError(
        "command-not-found",
        "System",
        ("command not found", "sh: ...: ...: not found"),
        kind="missing_module",
        cause="A program is not on the PATH that the job has on this node: .bashrc of many systems stops early in a "
        "non-interactive shell.",
        fix="name the training environment's interpreter in the hostfile: python=; or set the environment up in "
        "--setup",
        source="bash execute_cmd.c; LLaMA-Factory#5216",
        checks=("packages", "interpreter"),
        is_last=True,
    ),
    KnownError(
        "hostname-not-retrieved",
        "PyTorch",
        ("The hostname of the client socket cannot be retrieved",),
        cause="torch wanted a name for its log and found none. It disturbs nothing.",
        fix="none needed",
        source="PyTorch torch/csrc/distributed/c10d/socket.cpp",
        is_harmless=True,
    ),
    KnownError(
        "no-ipv6",
        "PyTorch",
        ("(errno: 97 - Address family not supported by protocol)",),
        cause="torch tried IPv6 first, which the node does not have, and used IPv4.",
        fix="none needed",
        source="PyTorch torch/csrc/distributed/c10d/socket.cpp",
        is_harmless=True,
    ),
    KnownError(
        "nccl-no-plugin",
        "NCCL",
        ("NET/Plugin : No plugin found", "NET/Plugin: No plugin found", "NET/IB : No device found."),
        cause="NCCL found no network plugin and no RDMA NIC, and uses sockets.",
        fix="none needed, unless the node has RDMA NICs: multinode check",
        source="NCCL src/net.cc, src/transport/net_ib.cc",
        checks=("rdma",),
        is_harmless=True,
    ),
    KnownError(
        "gloo-falls-back-to-loopback",
        "PyTorch",
        ("Unable to resolve hostname to a (local) address",),
        cause="gloo found no address for the host's own name and listens on loopback, where no other node gets to: "
        "the next error is a connection that fails.",
        fix="name the interface: multinode's launches do; by hand, on each node: export GLOO_SOCKET_IFNAME=<interface>",
        source="PyTorch torch/csrc/distributed/c10d/ProcessGroupGloo.cpp",
        checks=("hostname",),
        is_harmless=True,
    ),
    KnownError(
        "timeout",
        "System",
        (
            "DistStoreError...timed out",
            "DistNetworkError...timed out",
            "DistStoreError: Timed out",
            "timed out after",
            "Timed out waiting",
            "TimeoutError",
            "TimeoutExpired",
        ),
        kind="timeout",
        cause="Something was waited for in vain: a service, a program, a file, or another worker.",
        fix="the message names what did not answer; if it is another node: multinode check; while a run hangs, "
        "--hang-timeout "
        "says who is behind",
        source="any other timeout",
        checks=("ports", "link"),
        is_general=True,
        is_last=True,
    ),
    KnownError(
        "connection",
        "PyTorch",
        (
            "DistNetworkError",
            "DistBackendError",
            "DistStoreError",
            "NCCL error in: ",
            "NCCL communicator was aborted on rank",
            "NCCL communicator encountered error set by ProcessGroupNCCL",
        ),
        kind="connection",
        cause="A connection between the workers could not be made, or broke: mostly because another worker ended.",
        fix="look for the first error on the other nodes: multinode show last; the network between the nodes: "
        "multinode check",
        source="PyTorch torch/csrc/distributed/c10d/NCCLUtils.hpp, c10/util/Exception.h: any other error of c10d",
        checks=("ports", "interface", "link"),
        of_peers=True,
        is_general=True,
    ),
    KnownError(
        "service-connection",
        "System",
        (
            "ConnectionError",
            "ConnectionRefusedError",
            "ConnectionResetError",
            "ConnectionAbortedError",
            "BrokenPipeError",
            "ConnectTimeout",
            "ReadTimeout",
            "Max retries exceeded with url",
            "Failed to establish a new connection",
            "[Errno 111] Connection refused",
            "[Errno 104] Connection reset by peer",
            "[Errno 32] Broken pipe",
            "[Errno 113] No route to host",
        ),
        kind="connection",
        cause="A connection of the job's own was refused or broke: to a hub, W&B, a database or a file server, not "
        "that "
        "between the workers.",
        fix="the message names the address; try it from {node}: ssh {node} curl -I URL; a proxy has to stand in the "
        "job's environment (launch --env HTTPS_PROXY=...); offline: --env HF_HUB_OFFLINE=1 --env WANDB_MODE=offline",
        source="CPython Objects/exceptions.c; Requests requests/exceptions.py",
        is_general=True,
        is_last=True,
    ),
)
ERRORS_BY_ID = {error.id: error for error in ERRORS}

_LETTERS = re.compile("[a-z]+")
# Words that stand in most logs.
_COMMON = frozenset(
    _LETTERS.findall("""
    address and are at available backend but by call cannot card cluster code command communication config could cuda
    data dataset default device distributed error exception exit failed failure file for found from got group have
    host in info input installed ipv is it json launch library line list load loading message model module name net
    network no node not number object of on only operation option output package please port process python rank ranks
    read received remote request required runtime script server setting size so start step support system tensor that
    the this time to token torch train training type value version was with worker workers
    """)
)


def anchor(text: str) -> str:
    """A word that every line with this text has: the rarest, by its length."""
    parts = text.lower().split("...")
    whole = [
        word[0]
        for number, part in enumerate(parts)
        for word in _LETTERS.finditer(part)
        if (word.start() or not number) and (word.end() < len(part) or number == len(parts) - 1)
    ]
    return max(whole, key=lambda word: (word not in _COMMON, len(word)))


def _anchors() -> Mapping[str, tuple[int, ...]]:
    found: defaultdict[str, list[int]] = defaultdict(list)
    for place, error in enumerate(ERRORS):
        for word in sorted({anchor(text) for text in error.texts}):
            found[word].append(place)
    return {word: tuple(places) for word, places in found.items()}


_ANCHORS = _anchors()


def find_error(text: str) -> KnownError | None:
    """The first of the catalogue that explains a text; None where nothing does."""
    return next((error for error in _find_all(text) if not error.is_harmless), None)


def _find_all(text: str) -> Iterator[KnownError]:
    words = _ANCHORS.keys() & set(_LETTERS.findall(text.lower()))
    places = sorted(set(itertools.chain.from_iterable(_ANCHORS[word] for word in words)))
    return (ERRORS[place] for place in places if ERRORS[place].matches(text))
