"""Each error of the catalogue is found by a line as its project prints it: captured, or filled into its source."""

# ruff: noqa: E501 - lines stand here as they are printed
from __future__ import annotations

import subprocess
import sys

import msgspec
import pytest

from multinode.check.check import CHECK_NAMES
from multinode.diagnose.evidence import NodeEvidence
from multinode.diagnose.failure import classify, first_failure
from multinode.diagnose.known_errors import PROJECTS, decode_catalogue, find_error, known_errors
from multinode.records.run import Failure, NodeRun
from multinode.records.samples import ExceptionSample
from multinode.records.status import Status
from tests.golden import Golden, raised

LINES = {
    "nccl-locked-memory": [
        "node1:17:99 [0] misc/ibvwrap.cc:151 NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory",
        "[1646833944.77] [g07:2281 :0]  ib_iface.c:1012 UCX  ERROR ibv_create_cq(cqe=4096) failed: Cannot allocate memory",
    ],
    "cuda-out-of-memory": [
        "RuntimeError: merge_sort: failed to synchronize: cudaErrorMemoryAllocation: out of memory",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 23.64 GiB",
        "node1:301:301 [0] enqueue.cc:1085 NCCL WARN Cuda failure 2 'out of memory'",
    ],
    "ray-out-of-memory": [
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
        "(raylet) 1 Workers (tasks / actors) killed due to memory pressure (OOM), 0 Workers crashed due to other reasons",
    ],
    "amd-gpu": [
        "HW Exception by GPU node-9 (Agent handle: 0x631351bb5a20) reason :GPU Hang",
        "Memory access fault by GPU node-3 (Agent handle: 0x5a5c587a51c0) on address 0x709843600000. Reason: Unknown.",
        "RuntimeError: HIP error: an illegal memory access was encountered",
        ":0:rocdevice.cpp:2660: 12345 us: Device::callbackQueue aborting with error : HSA_STATUS_ERROR_MEMORY_APERTURE_VIOLATION",
    ],
    "hccl-timeout": [
        "EI0006: [PID: 1292363] 2025-04-08-18:07:20.444.436 Getting socket times out. Reason: Remote Rank did not send",
        "EI0002: [PID: 4711] 2025-04-08-18:07:20.444.436 Notify register times out.",
    ],
    "nccl-bind": ["misc/socket.cc:379 NCCL WARN Call to bind failed : Cannot assign requested address"],
    "nccl-ofi": [
        "nccl_net_ofi_domain_get_ep:969 NCCL WARN NET/OFI Creating new endpoint for domain 0x7f failed: Invalid argument",
        "nccl_ofi_ofiutils_init_connection:274 NCCL WARN NET/OFI Couldn't open CQ. RC: -22, ERROR: Invalid argument",
        "libfabric:85:1747438790::core:core:fi_getinfo_():1392<warn> fi_getinfo: provider efa output empty list",
    ],
    "oneccl": ["|CCL_ERROR| atl_ofi_helper.cpp:1635 atl_ofi_open_nw_provs: can not open network providers"],
    "mpi-start": [
        "Abort(3712399) on node 0 (rank 0 in comm 0): Fatal error in PMPI_Init: Other MPI error, error stack:",
        "It looks like MPI_INIT failed for some reason; your parallel process is likely to abort.",
    ],
    "gloo-address-families": [
        "RuntimeError: [enforce fail at ../third_party/gloo/gloo/transport/tcp/device.cc:276] ss1.ss_family == ss2.ss_family. 2 vs 10",
        "RuntimeError: [enforce fail at ../third_party/gloo/gloo/transport/tcp/device.cc:83] ifa != nullptr. Unable to find interface for: [10.0.0.7]",
    ],
    "nccl-other-version": ["Invalid config blocking attribute value -2147483648"],
    "zero-ranks-disagree": [
        "RuntimeError: disagreement between rank0 and rank3: rank0: [290, 291, 292], rank3: [293, 294, 295]"
    ],
    "local-rank-argument": ["train.py: error: unrecognized arguments: --local-rank=0"],
    "container-start": [
        "slurmstepd: error: pyxis:     enroot-switchroot: failed to execute: /bin/bash: No such file or directory",
        "slurmstepd: error: pyxis:     [ERROR] Command not found: nvidia-container-cli, see https://github.com/NVIDIA/libnvidia-container",
    ],
    "container-failed": ["slurmstepd: error: pyxis: container start failed with error code: 1"],
    "file-taken": [
        "FileNotFoundError: [Errno 2] No such file or directory: './out/tmp-checkpoint-1' -> './out/checkpoint-1'"
    ],
    "nccl-shared-memory": [
        "misc/shmutils.cc:42 NCCL WARN Call to posix_fallocate failed : Operation not permitted",
        "misc/shmutils.cc:87 NCCL WARN Error: failed to extend /dev/shm/nccl-fz2gAG to 33030532 bytes",
        "misc/shmutils.cc:128 NCCL WARN Error while creating shared memory segment /dev/shm/nccl-c2FRoN (size 33030528), error: No space left on device (28)",
    ],
    "bus-error": [
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
        "RuntimeError: DataLoader worker (pid 3919213) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit.",
    ],
    "shared-memory-full": [
        "RuntimeError: unable to allocate shared memory(shm) for file </torch_1462_3868046783_0>: No space left on device (28)"
    ],
    "open-files": [
        "OSError: [Errno 24] Too many open files: '/data/shard-00017.parquet'",
        "RuntimeError: unable to open shared memory object </torch_4711_2290155103_0> in read-write mode: Too many open files (24)",
        "RuntimeError: received 0 items of ancdata",
    ],
    "thread-limit": [
        "RuntimeError: can't start new thread",
        "OpenBLAS blas_thread_init: pthread_create failed for thread 61 of 64: Resource temporarily unavailable",
        "libgomp: Thread creation failed: Resource temporarily unavailable",
    ],
    "out-of-memory": [
        "OSError: [Errno 12] Cannot allocate memory",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes.",
    ],
    "oom-killer": [
        "    Reason:       OOMKilled",
        "[12345.6] Out of memory: Killed process 4711 (python) total-vm:98765432kB, anon-rss:65432100kB",
    ],
    "disk-full": [
        "RuntimeError: [enforce fail at inline_container.cc:603] . PytorchStreamWriter failed writing file data/12: file write failed",
        'safetensors_rust.SafetensorError: Error while serializing: IoError(Os { code: 28, kind: StorageFull, message: "x" })',
        "OSError: [Errno 28] No space left on device: '/out/checkpoint-500/optimizer.pt'",
    ],
    "nccl-no-interface": [
        "bootstrap.cc:99 NCCL WARN no device found matching NCCL_OOB_NET_IFNAME=eth9, ignoring",
        "node1:17:17 [0] bootstrap.cc:126 NCCL WARN Bootstrap : no socket interface found",
        "node1:17:17 [0] transport/net_socket.cc:61 NCCL WARN NET/Socket : no interface found",
        "ncclSocketInit: connecting to address  with family 59936 is neither AF_INET(2) nor AF_INET6(10)",
    ],
    "gloo-interface": [
        "RuntimeError: [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/device.cc:84] ifa != nullptr. Unable to find address for: eno9"
    ],
    "gloo-loopback": [
        "RuntimeError: Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:152] timed out connecting: SO_ERROR: Connection refused, remote=[127.0.1.1]:48019$0",
    ],
    "nccl-version-mismatch": [
        "init.cc:1043 NCCL WARN Mismatched NCCL version detected : rank 0 version 22705 rank 1 version 22105"
    ],
    "nccl-rank-taken": ["bootstrap.cc:348 NCCL WARN Bootstrap Root : rank 0 of 4 ranks has already checked in"],
    "nccl-rank-count": [
        "bootstrap.cc:173 NCCL WARN Bootstrap Root : mismatch in rank count from procs 4 : 2",
        "bootstrap.cc:335 NCCL WARN Bootstrap Root : mismatch in info from procs, nranks 4 vs 2, nroots 1 vs 1, iroot 0 vs 0",
    ],
    "nccl-duplicate-gpu": [
        "init.cc:737 NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1a000",
        "init.cc:1057 NCCL WARN Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this configuration.",
    ],
    "nccl-network-not-found": [
        "net.cc:579 NCCL WARN Error: network AWS Libfabric not found.",
        "plugin/net.cc:277 NCCL WARN Failed to initialize any NET plugin",
    ],
    "nccl-ib-completion": [
        "NCCL WARN NET/OFI Request 0x7f completed with error. RC: 113. Error: unreachable remote",
        "transport/net_ib.cc:829 NCCL WARN NET/IB : Got completion with error 12, opcode 0, len 0, vendor err 129",
        "transport/net_ib.cc:1050 NCCL WARN NET/IB : Got completion from peer 192.0.2.7<43211> with error 5, opcode 48, len 0, vendor err 244 (Recv)",
        "transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 192.0.2.7<43211> with status=12 opcode=0 len=0 vendor err 129 (Send)",
        "transport/net_ib/p2p.cc:688 NCCL WARN NET/IB: Got completion from peer 192.0.2.7<43211> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0)",
    ],
    "nccl-truncated": [
        "bootstrap.cc:224 NCCL WARN Message truncated : received 1024 bytes instead of 256",
        "transport/net_socket.cc:638 NCCL WARN NET/Socket : peer 192.0.2.7<43211> message truncated : receiving 1048576 bytes instead of 65536.",
    ],
    "gloo-length": [
        "RuntimeError: [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 8 vs 4"
    ],
    "ddp-unequal-models": [
        "RuntimeError: DDP expects same model across all ranks, but Rank 1 has 290 params, while rank 0 has inconsistent 291 params.",
        "RuntimeError: [1]: params[0] in this process with sizes [151936, 896] appears not to match sizes of the same param in process 0.",
    ],
    "collective-mismatch": [
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: CollectiveFingerPrint(SequenceNumber=7, OpType=ALLREDUCE"
    ],
    "ddp-unused-parameters": [
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that your module has parameters"
    ],
    "missing-rank": [
        "ValueError: Error initializing torch.distributed using env:// rendezvous: environment variable RANK expected, but not set",
        "KeyError: 'LOCAL_RANK'",
    ],
    "no-process-group": [
        "ValueError: Default process group has not been initialized, please make sure to call init_process_group."
    ],
    "nccl-without-gpu": ["ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!"],
    "no-backend-for-device": ["RuntimeError: No backend type associated with device type cpu"],
    "devices-not-numbers": [
        "ValueError: invalid literal for int() with base 10: 'GPU-8f2e4f0a-1b2c-3d4e-5f60-718293a4b5c6'",
        "ValueError: invalid literal for int() with base 10: 'MIG-1c2d3e4f'",
    ],
    "checkpoint-device": [
        "RuntimeError: Attempting to deserialize object on CUDA device 1 but torch.cuda.device_count() is 1. Please use torch.load with map_location to map your storages to an existing device.",
        "RuntimeError: Attempting to deserialize object on a CUDA device but torch.cuda.is_available() is False. If you are running on a CPU-only machine, please use torch.load with map_location=torch.device('cpu') to map your storages to the CPU.",
    ],
    "allocator-settings": [
        "ValueError: Unrecognized key 'max_split_size' in CUDA allocator config.",
        "RuntimeError: Unrecognized CachingAllocator option: max_split_size",
    ],
    "graph-capture": [
        "torch.AcceleratorError: CUDA error: operation not permitted when stream is capturing",
        "RuntimeError: CUDA error: operation failed due to a previous error during capture",
    ],
    "invalid-device": ["RuntimeError: CUDA error: invalid device ordinal"],
    "no-gpu": [
        "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env variable CUDA_VISIBLE_DEVICES after program start.",
        "RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver",
        "RuntimeError: No CUDA GPUs are available",
        "AssertionError: Torch not compiled with CUDA enabled",
    ],
    "no-kernel-image": [
        "RuntimeError: CUDA error: device kernel image is invalid",
        "NVIDIA GeForce RTX 5090 with CUDA capability sm_120 is not compatible with the current PyTorch installation.",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    ],
    "driver-too-old": [
        "RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain.",
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver",
        "NCCL WARN Cuda failure 'CUDA driver version is insufficient for CUDA runtime version'",
    ],
    "uncorrectable-ecc": ["RuntimeError: CUDA error: uncorrectable ECC error encountered"],
    "illegal-memory-access": ["RuntimeError: CUDA error: an illegal memory access was encountered"],
    "device-assert": ["RuntimeError: CUDA error: device-side assert triggered"],
    "deepspeed-batch-size": [
        "AssertionError: Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size 16 != 2 * 4 * 1"
    ],
    "deepspeed-config-mismatch": [
        "ValueError: Please correct the following DeepSpeed config values that mismatch TrainingArguments values:"
    ],
    "deepspeed-cuda-mismatch": [
        "deepspeed.ops.op_builder.builder.CUDAMismatchException: >- DeepSpeed Op Builder: Installed CUDA version 12.4 does not match the version torch was compiled with 11.8, unable to compile cuda/cpp extensions without a matching cuda version."
    ],
    "deepspeed-no-nvcc": [
        "deepspeed.ops.op_builder.builder.MissingCUDAException: CUDA_HOME does not exist, unable to compile CUDA op(s)",
        "FileNotFoundError: [Errno 2] No such file or directory: '/usr/local/cuda/bin/nvcc'",
    ],
    "deepspeed-cannot-compile": [
        "RuntimeError: Unable to JIT load the cpu_adam op due to ninja not being installed.",
        "AttributeError: 'DeepSpeedCPUAdam' object has no attribute 'ds_opt_adam'",
    ],
    "deepspeed-loss-scale": [
        "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."
    ],
    "deepspeed-no-gpu": ["RuntimeError: Unable to proceed, no GPU resources available"],
    "deepspeed-ssh": [
        "pdsh@head: node1: ssh exited with exit code 255",
        "RuntimeError: Using hostfile at /job/hostfile but host=node1 was not reachable via ssh. If you are running with a single node please remove /job/hostfile or setup passwordless ssh.",
        "RuntimeError: Unable to detect suitable master address via `hostname -I`, please manually specify one via --master_addr",
    ],
    "deepspeed-launcher": ["RuntimeError: launcher 'pdsh' not installed."],
    "deepspeed-hostfile": [
        "ValueError: Hostfile contains a bad entry: node1 gpus=4, unable to proceed with launching",
        "ValueError: Hostfile contains multiple entries for node1, unable to proceed with launching",
    ],
    "rtx-4000-p2p": [
        'Using RTX 4000 series doesn\'t support faster communication broadband via P2P or IB. Please set `NCCL_P2P_DISABLE="1"`'
    ],
    "model-card-of-an-adapter": [
        "AttributeError: 'Qwen2ForCausalLM' object has no attribute 'create_or_update_model_card'"
    ],
    "abort-at-exit": ["terminate called without an active exception"],
    "bf16-unsupported": [
        "ValueError: fp16 mixed precision requires a GPU (not 'cpu').",
        "ValueError: Your setup doesn't support bf16/gpu. You need to assign use_cpu if you want to train the model on CPU.",
    ],
    "llamafactory-not-distributed": [
        "ValueError: Please launch distributed training with `llamafactory-cli` or `torchrun`.",
        "ValueError: Please use `FORCE_TORCHRUN=1` to launch DeepSpeed training.",
    ],
    "llamafactory-unknown-key": [
        "ValueError: Some keys are not used by the HfArgumentParser: ['cutof_len']",
        "ValueError: Some specified arguments are not used by the HfArgumentParser: ['--local-rank=1']",
    ],
    "llamafactory-output-dir": [
        "ValueError: Output directory already exists and is not empty. Please set `overwrite_output_dir`."
    ],
    "llamafactory-template": ["ValueError: Template qwen9 does not exist."],
    "llamafactory-streaming": ["ValueError: Please specify `max_steps` in streaming mode."],
    "llamafactory-dataset": [
        "ValueError: Undefined dataset mine in dataset_info.json.",
        "ValueError: Cannot open data/dataset_info.json due to [Errno 2] No such file or directory: 'data/dataset_info.json'.",
    ],
    "llamafactory-no-samples": ["RuntimeError: Cannot find valid samples, check `data/README.md` for the data format."],
    "model-not-found": [
        "OSError: We couldn't connect to 'https://huggingface.co' to load this file, couldn't find it in the cached files",
        "huggingface_hub.errors.LocalEntryNotFoundError: An error happened while trying to locate the file on the Hub",
        "huggingface_hub.errors.RepositoryNotFoundError: 401 Client Error.",
        "huggingface_hub.errors.GatedRepoError: 401 Client Error.",
        "OSError: You are trying to access a gated repo.",
        "Cannot access gated repo for url https://huggingface.co/google/gemma-2-2b-it/resolve/main/config.json.",
        "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/models/qwen'. Use `repo_type` argument if needed.",
        "OSError: Incorrect path_or_model_id: '/models/qwen'. Please provide either the path to a local folder or the repo_id of a model on the Hub.",
        "huggingface_hub.errors.OfflineModeIsEnabled: Cannot reach https://huggingface.co/x: offline mode is enabled.",
        "requests.exceptions.ConnectTimeout: (MaxRetryError(\"HTTPSConnectionPool(host='huggingface.co', port=443): Max retries exceeded with url: /x\"))",
        "requests.exceptions.ConnectionError: (MaxRetryError(\"HTTPSConnectionPool(host='hf-mirror.com', port=443): Max retries exceeded with url: /x\"))",
        "OSError: /models/qwen is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'",
        "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files.",
    ],
    "package-version": [
        "RuntimeError: module compiled against API version 0x10 but this version of numpy is 0xf",
        "RuntimeError: Detected that PyTorch and torchvision were compiled with different CUDA versions.",
        "RuntimeError: The detected CUDA version (11.8) mismatches the version that was used to compile PyTorch (12.1).",
        "ImportError: transformers>=4.49.0,<=4.57.1 is required for a normal functioning of this module, but found transformers==4.45.0.",
    ],
    "undefined-symbol": [
        "ImportError: /env/lib/flash_attn_2_cuda.cpython-311-x86_64-linux-gnu.so: undefined symbol: _ZN3c104cuda9SetDeviceEi"
    ],
    "no-ninja": [
        "RuntimeError: Ninja is required to load C++ extensions (pip install ninja to get it)",
        "FileNotFoundError: [Errno 2] No such file or directory: 'ninja'",
    ],
    "half-built-extension": [
        "ImportError: /root/.cache/torch_extensions/py311_cu121/fused_adam/fused_adam.so: cannot open shared object file: No such file or directory",
        "ImportError: /home/a/.cache/torch_extensions/py310_cu118/cpu_adam/cpu_adam.so: file too short",
        "ImportError: /scratch/ext/fused_adam/fused_adam.so: file too short",
        "ImportError: /root/.cache/torch_extensions/py311_cu121/utils/utils.so: invalid ELF header",
    ],
    "noexec": [
        "ImportError: /tmp/torchinductor_a/ab/cab.so: failed to map segment from shared object",
        "OSError: /home/a/.triton/cache/0f/cuda_utils.so: failed to map segment from shared object: Operation not permitted",
    ],
    "system-library-too-old": [
        "ImportError: /lib/x86_64-linux-gnu/libc.so.6: version `GLIBC_2.34' not found (required by /env/lib/python3.11/site-packages/x.so)",
        "ImportError: /usr/lib/x86_64-linux-gnu/libstdc++.so.6: version `GLIBCXX_3.4.32' not found (required by /env/lib/libicuuc.so.78)",
        "/lib64/libstdc++.so.6: version `CXXABI_1.3.13' not found (required by ./nccl-test)",
    ],
    "python-home": [
        "ModuleNotFoundError: No module named 'encodings'",
        "Fatal Python error: init_fs_encoding: failed to get the Python codec of the filesystem encoding",
    ],
    "missing-module": [
        "ModuleNotFoundError: No module named 'flash_attn'",
        "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
    ],
    "permission-denied": ["PermissionError: [Errno 13] Permission denied: '/out/checkpoint-500'"],
    "missing-file": [
        "bash: line 1: /work/train.sh: No such file or directory",
        "FileNotFoundError: [Errno 2] No such file or directory: '/data/train.json'",
        "python3: can't open file '/work/train.py': [Errno 2] No such file or directory",
    ],
    "file-system-gone": [
        "OSError: [Errno 5] Input/output error: '/mnt/data/x'",
        "OSError: [Errno 108] Cannot send after transport endpoint shutdown",
        "OSError: [Errno 116] Stale file handle: '/nfs/model'",
        "OSError: [Errno 30] Read-only file system",
    ],
    "address-in-use": [
        "RuntimeError: Address already in use",
        "[W socket.cpp:436] [c10d] The server socket has failed to bind to [::]:29500 (errno: 98 - Address already in use).",
        "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
        "ConnectionError: Tried to launch distributed communication on port `29500`, but another process is utilizing it. Please specify a different port",
    ],
    "name-resolution": [
        "socket.gaierror: [Errno -2] Name or service not known",
        "socket.gaierror: [Errno -3] Temporary failure in name resolution",
        "nslookup: can't resolve 'train-master-0'",
        "misc/socket.cc:320 NCCL WARN Net : error encountered when getting address info : Name or service not known",
        "[W socket.cpp:697] [c10d] The IPv4 network addresses of (gpu-a, 29500) cannot be retrieved (gai error: -2 - Name or service not known).",
    ],
    "ssh-host-key-changed": ["@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @"],
    "ssh-host-key-unknown": [
        "Host key verification failed.",
        "No ED25519 host key is known for node1 and you have requested strict checking.",
    ],
    "ssh-permission-denied": [
        "alice@node1: Permission denied (publickey,password).",
        "Received disconnect from 192.0.2.7 port 22:2: Too many authentication failures",
    ],
    "ssh-key-permissions": [
        "@         WARNING: UNPROTECTED PRIVATE KEY FILE!          @",
        "Bad owner or permissions on /home/alice/.ssh/config",
    ],
    "ssh-refused": ["ssh: connect to host node1 port 22: Connection refused"],
    "ssh-unreachable": [
        "ssh: connect to host node1 port 22: Connection timed out",
        "ssh: connect to host node1 port 22: No route to host",
    ],
    "ssh-unknown-host": ["ssh: Could not resolve hostname node9: Name or service not known"],
    "ssh-no-banner": [
        "kex_exchange_identification: read: Connection reset by peer",
        "kex_exchange_identification: Connection closed by remote host",
    ],
    "ssh-sessions": ["mux_client_request_session: session request failed: Session open refused by peer"],
    "ssh-broken-pipe": [
        "client_loop: send disconnect: Broken pipe",
        "Timeout, server node1 not responding.",
    ],
    "sigusr": [
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4711 got signal: 12",
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4711 got signal: 10",
        "WARNING:torch.distributed.elastic.agent.server.api:Received Signals.SIGUSR2 death signal, shutting down workers",
        "WARNING:torch.distributed.elastic.agent.server.api:Received Signals.SIGUSR1 death signal, shutting down workers",
        "W1122 15:40:00.123 4710 torch/distributed/elastic/agent/server/api.py:753] Received 10 death signal, shutting down workers",
        "W1122 15:40:00.123 4710 torch/distributed/elastic/agent/server/api.py:753] Received 12 death signal, shutting down workers",
    ],
    "sigint": [
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4711 got signal: 2",
        "W1122 15:40:00.123 4710 torch/distributed/elastic/agent/server/api.py:753] Received 2 death signal, shutting down workers",
        "WARNING:torch.distributed.elastic.agent.server.api:Received Signals.SIGINT death signal, shutting down workers",
        "[2025-02-20 20:27:14,902] [INFO] [launch.py:328:sigkill_handler] Main process received SIGINT, exiting",
        "srun: sending Ctrl-C to StepId=4711.0",
    ],
    "sigterm": [
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4711 got signal: 15",
        "W1122 15:40:00.123 4710 torch/distributed/elastic/agent/server/api.py:753] Received 15 death signal, shutting down workers",
        "[2025-02-20 20:27:14,902] [INFO] [launch.py:328:sigkill_handler] Main process received SIGTERM, exiting",
    ],
    "sighup": [
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4711 got signal: 1",
        "WARNING:torch.distributed.elastic.agent.server.api:Received Signals.SIGHUP death signal, shutting down workers",
    ],
    "killed": [
        "train.sh: line 3:  4711 Killed                  python train.py",
        "torch.multiprocessing.spawn.ProcessExitedException: process 0 terminated with signal SIGKILL",
        "RuntimeError: DataLoader worker (pid 2637) is killed by signal: Killed.",
        "[2026-11-21 22:45:34,226] [ERROR] [launch.py:259:sigkill_handler] ['python', 'train.py'] exits with return code = -9",
        "  exitcode  : -9 (pid: 4711)",
    ],
    "collective-timeout": [
        "[rank3]:[E1122 10:00:00.1 ProcessGroupNCCL.cpp:616] [Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600026 milliseconds before timing out.",
        "[Rank 3] Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels, subsequent GPU operations might run on corrupted/incomplete data.",
        "[Rank 3] To avoid data inconsistency, we are taking the entire process down.",
    ],
    "watchdog-stuck": [
        "[PG ID 0 PG GUID 0(default_pg) Rank 1] ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives.",
        "[rank25]:[E ProcessGroupNCCL.cpp:1316] [PG 0 Rank 25] Heartbeat monitor timed out! Process will be terminated after dumping debug info. workMetaList_.size()=2",
    ],
    "gloo-timeout": [
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation to complete",
        "RuntimeError: Application timeout caused pair closure",
    ],
    "not-all-joined": [
        "RuntimeError: Timed out initializing process group in store based barrier on rank: 1, for key: store_based_barrier_key:1 (world_size=4, worker_count=2, timeout=0:30:00)",
        "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients. 1/2 clients joined.",
        "torch.distributed.DistStoreError: Timed out after 601 seconds waiting for workers. 7/8 workers joined.",
    ],
    "monitored-barrier": [
        "RuntimeError: Rank 1 failed to pass monitoredBarrier in 1800000 ms",
        "RuntimeError: [Rank 0]: Rank 1 timed out in monitoredBarrier after 1800000 ms.",
    ],
    "store-timeout": [
        "torch.distributed.DistBackendError: [1] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Socket Timeout",
        "torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//cuda//0",
    ],
    "master-unreachable": [
        "torch.distributed.DistNetworkError: Connection reset by peer",
        "torch.distributed.DistNetworkError: Broken pipe",
        "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (192.0.2.7, 29500).",
        "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed. See inner exception for details.",
    ],
    "nccl-id": [
        "torch.distributed.DistBackendError: [3] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via c10d key-value store by key '0', but store->get('0') got error: Connection reset by peer"
    ],
    "peer-gone": [
        "RuntimeError: Connection reset by peer",
        "RuntimeError: Broken pipe",
        "torch.distributed.elastic.rendezvous.api.RendezvousClosedError",
        "torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?",
    ],
    "nccl-timed-out": [
        "misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 172.17.0.1<46785> failed : No route to host",
        "misc/socket.cc:563 NCCL WARN socketPollConnect: Connect to 192.0.2.7<43211> returned 113(No route to host) errno 115(Operation now in progress)",
        "misc/socket.cc:577 NCCL WARN socketPollConnect: connect returned No route to host, exceeded error retry count (35)",
        "misc/socket.cc:602 NCCL WARN socketPollConnect poll() returned 1, no POLLOUT events",
        "os/linux.cc:288 NCCL WARN socketPollConnect: connect to 192.0.2.7<43211> returned Connection timed out, exceeded error retry count after 35 attempts",
    ],
    "nccl-refused": [
        "misc/socket.cc:352 NCCL WARN Call to connect failed : Connection refused",
        "misc/socket.cc:577 NCCL WARN socketPollConnect: connect to 192.0.2.7<43211> returned Connection refused, exceeded error retry count after 35 attempts",
        "misc/socket.cc:577 NCCL WARN socketPollConnect: connect returned Connection refused, exceeded error retry count (35)",
        "NCCL INFO Call to connect returned Connection refused, retrying",
    ],
    "nccl-peer-gone": [
        "misc/socket.cc:71 NCCL WARN socketProgress: Connection closed by remote peer node0<43211>",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        "misc/socket.cc:57 NCCL WARN socketProgressOpt: Call to recv from 192.0.2.7<43211> failed : Broken pipe",
    ],
    "nccl-cuda-error": [
        "RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:1970, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5"
    ],
    "nccl-invalid-usage": [
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version 2.21.5"
    ],
    "nccl-system-error": [
        "RuntimeError: NCCL error in: ProcessGroupNCCL.cpp:410, unhandled system error (run with NCCL_DEBUG=INFO for details)",
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error. ",
    ],
    "nccl-internal-error": [
        "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:219, internal error - please report this issue to the NCCL developers, NCCL version 2.27.5"
    ],
    "gloo-connect": [
        "RuntimeError: Gloo connectFullMesh failed with [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:144] no error",
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:150] timed out connecting: SO_ERROR: Connection refused, remote=[192.0.2.7]:31247",
    ],
    "gloo-peer-gone": [
        "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:544] Connection closed by peer [192.0.2.7]:31247"
    ],
    "dataloader-exited": [
        "RuntimeError: DataLoader worker (pid 2637) is killed by signal: Segmentation fault.",
        "RuntimeError: DataLoader worker (pid(s) 3919213) exited unexpectedly",
    ],
    "mpi-launch": [
        "mpirun was unable to find the specified executable file, and therefore",
        "There are not enough slots available in the system to satisfy the 2 slots",
        "ORTE was unable to reliably start one or more daemons.",
    ],
    "horovod-shut-down": [
        "tensorflow.python.framework.errors_impl.UnknownError: Horovod has been shut down. This was caused by an exception on one of the ranks",
    ],
    "ray-worker-lost": [
        "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: x",
        "ray.exceptions.WorkerCrashedError: The worker died unexpectedly while executing this task. Check the logs",
    ],
    "slurm-out-of-memory": [
        "slurmstepd: error: Detected 1 oom_kill event in StepId=4711.0. Some of the step tasks have been OOM Killed.",
        "slurmstepd: error: Detected 1 oom-kill event(s) in step 4711.batch cgroup. Some of your processes may have been killed by the cgroup out-of-memory handler.",
        "srun: error: gpu-b: task 1: Out Of Memory",
        "State: OUT_OF_MEMORY (exit code 0)",
    ],
    "slurm-time-limit": [
        "slurmstepd: error: *** JOB 4711 ON gpu-a CANCELLED AT 2026-11-21T22:45:34 DUE TO TIME LIMIT ***",
        "State: TIMEOUT (exit code 0)",
    ],
    "slurm-preempted": [
        "slurmstepd: error: *** JOB 4711 ON gpu-a CANCELLED AT 2026-11-21T22:45:34 DUE TO PREEMPTION ***"
    ],
    "slurm-node-failure": [
        "slurmstepd: error: *** STEP 4711.0 ON gpu-a CANCELLED AT 2026-11-21T22:45:34 DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***",
        "srun: error: Node failure on gpu-b",
    ],
    "slurm-cancelled": ["slurmstepd: error: *** STEP 4711.0 ON gpu-a CANCELLED AT 2026-11-21T22:45:34 ***"],
    "cuda-driver-mismatch": [
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 803: system has unsupported display driver / cuda driver combination",
        "Failed to initialize NVML: Driver/library version mismatch",
        "RuntimeError: CUDA error: forward compatibility was attempted on non supported HW",
    ],
    "fabric-manager": [
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
        "NCCL WARN Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401 'the operation cannot be performed in the present state'.",
    ],
    "gpu-busy": [
        "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable",
    ],
    "gpu-lost-in-container": [
        "Failed to initialize NVML: Unknown Error",
        "pynvml.NVMLError_Unknown: Unknown Error",
        "Failed to initialize NVML: Insufficient Permissions",
    ],
    "gpu-fell-off": [
        "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost. Reboot the system to recover this GPU",
        "NVRM: GPU at PCI:0000:3b:00: GPU has fallen off the bus",
        "pynvml.NVMLError_GpuIsLost: GPU is lost",
    ],
    "cuda-kernel-crash": [
        "RuntimeError: CUDA error: misaligned address",
        "RuntimeError: CUDA error: an illegal instruction was encountered",
        "RuntimeError: CUDA error: the launch timed out and was terminated",
        "RuntimeError: CUDA error: unknown error",
        "RuntimeError: CUDA error: invalid program counter",
        "RuntimeError: CUDA error: hardware stack error",
        "RuntimeError: CUDA error: invalid argument",
        "RuntimeError: CUDA error: operation not supported",
    ],
    "cublas-cudnn": [
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb, m, n, k`",
        "RuntimeError: CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling",
        "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling",
        "RuntimeError: CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling",
        "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
        "RuntimeError: cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "RuntimeError: cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
        "RuntimeError: cuDNN error: CUDNN_STATUS_MAPPING_ERROR",
        "Unable to load any of {libcudnn_ops.so.9.1.0, libcudnn_ops.so.9.1, libcudnn_ops.so.9, libcudnn_ops.so}",
    ],
    "cuda-in-fork": [
        "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method"
    ],
    "flash-attention-gpu": [
        "RuntimeError: FlashAttention only supports Ampere GPUs or newer.",
        "FlashAttention only supports Ampere or Hopper GPUs",
        "ImportError: FlashAttention2 has been toggled on, but it cannot be used due to the following error: the package flash_attn seems to be not installed.",
    ],
    "ddp-ready-twice": [
        "RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the following reasons: 1) Use of a module parameter outside the `forward` function.",
        "Parameter at index 385 with name vision_model.encoder.layers.23.mlp.fc2.weight has been marked as ready twice.",
    ],
    "no-gradient": [
        "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
        "RuntimeError: DistributedDataParallel is not needed when a module doesn't have any parameters that require a gradient.",
    ],
    "fsdp-mixed-parameters": [
        "ValueError: Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32",
        "ValueError: Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`",
        "ValueError: Must flatten tensors with uniform requires_grad when use_orig_params=False",
        "ValueError: `FlatParameter` requires uniform `requires_grad`",
    ],
    "tensors-on-several-devices": [
        "RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!",
        "RuntimeError: Expected all tensors to be on the same device, but got index is on cpu, different from other tensors on cuda:0",
    ],
    "mixed-types": [
        "RuntimeError: expected mat1 and mat2 to have the same dtype, but got: float != c10::BFloat16",
        "RuntimeError: mat1 and mat2 must have the same dtype, but got Float and BFloat16",
        "RuntimeError: expected scalar type Half but found Float",
        "RuntimeError: expected scalar type BFloat16 but found Float",
        "RuntimeError: expected scalar type Float but found BFloat16",
    ],
    "fp16-gradients": ["ValueError: Attempting to unscale FP16 gradients."],
    "weights-only": [
        "_pickle.UnpicklingError: Weights only load failed. This file can still be loaded, to do so you have two options"
    ],
    "checkpoint-of-another-model": [
        "size mismatch for model.embed_tokens.weight: copying a param with shape torch.Size([151936, 896]) from checkpoint, the shape in current model is torch.Size([151643, 896]).",
        "ValueError: loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
    ],
    "damaged-weights": [
        "safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge",
        "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
        "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
        "_pickle.UnpicklingError: unpickling stack underflow",
        "_pickle.UnpicklingError: invalid load key, 'v'.",
    ],
    "numpy-2": [
        "A module that was compiled using NumPy 1.x cannot be run in",
        "RuntimeError: Numpy is not available",
        "ValueError: numpy.dtype size changed, may indicate binary incompatibility. Expected 96 from C header, got 88 from PyObject",
        "UserWarning: Failed to initialize NumPy: _ARRAY_API not found",
    ],
    "no-compiler": [
        "RuntimeError: Failed to find C compiler. Please specify via CC environment variable.",
        "nvcc fatal   : Unsupported gpu architecture 'compute_120'",
        "/usr/bin/ld: cannot find -lcurand: No such file or directory",
        "/usr/bin/ld: cannot find -lcudart",
        "OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root.",
        "RuntimeError: Error building extension 'fused_adam'",
        "ninja: build stopped: subcommand failed.",
    ],
    "bitsandbytes-cuda": [
        "CUDA Setup failed despite GPU being available. Please run the following command to get more information:",
        "Could not find the bitsandbytes CUDA binary at PosixPath('/env/libbitsandbytes_cuda124.so')",
    ],
    "zero3-device-map": [
        "ValueError: DeepSpeed Zero-3 is not compatible with `low_cpu_mem_usage=True` or with passing a `device_map`."
    ],
    "deepspeed-no-sync": [
        "AssertionError: no_sync context manager is incompatible with gradient partitioning logic of ZeRO stage 3",
        "AssertionError: no sync context manager is incompatible with gradientpartitioning logic of ZeRo stage 3",
    ],
    "deepspeed-other-world-size": [
        "deepspeed.runtime.zero.utils.ZeRORuntimeException: The checkpoint being loaded used a DP world size of 8 but the current world size is 16.",
        "Automatic adjustment of ZeRO's optimizer state partitioning with a new world size is not currently supported.",
    ],
    "deepspeed-missing-shard": [
        "FileNotFoundError: [Errno 2] No such file or directory: 'saves/checkpoint-9/global_step9/zero_pp_rank_4_mp_rank_00_optim_states.pt'",
        "FileNotFoundError: [Errno 2] No such file or directory: '/out/global_step9/mp_rank_00_model_states.pt'",
        "[WARNING] [engine.py:1656:_get_all_zero_checkpoints] The following zero checkpoints paths are missing: ['checkpoints/global_step9000/zero_pp_rank_8_mp_rank_00_optim_states.pt']",
        "ValueError: [deepspeed] failed to resume from checkpoint saves/checkpoint-9",
        "ValueError: Expected 4 of '*_optim_states.pt' under '/out/global_step9' but found 2 files.",
    ],
    "device-map-distributed": [
        "ValueError: You can't train a model that has been loaded with `device_map='auto'` in any distributed mode.",
        "ValueError: You can't train a model that has been loaded in 8-bit precision on a different device than the one you're training on.",
    ],
    "unknown-architecture": [
        "ValueError: The checkpoint you are trying to load has model type `qwen3` but Transformers does not recognize this architecture.",
        "Exception: data did not match any variant of untagged enum ModelWrapper at line 757443 column 3",
    ],
    "trust-remote-code": [
        "ValueError: Loading this model requires you to execute the configuration file in that repo on your local machine.",
        "Please pass the argument `trust_remote_code=True` to allow custom code to be run.",
    ],
    "padding-token": [
        "ValueError: Asking to pad but the tokenizer does not have a padding token.",
        "ValueError: Cannot handle batch sizes > 1 if no padding token is defined.",
    ],
    "lora-targets": [
        "ValueError: Target modules ['q_proj', 'v_proj'] not found in the base model. Please check the target modules and try again.",
        "ValueError: No target modules passed, or all of them were excluded",
    ],
    "image-tokens": [
        "ValueError: Image features and image tokens do not match: tokens: 2456, features 3360",
        "ValueError: Videos features and video tokens do not match: tokens: 0, features 777",
        "ValueError: Processor was not found, please check and update your model file.",
        "ValueError: The number of images does not match the number of <image> tokens in [{'content': 'x'}].",
        "ValueError: The number of videos does not match the number of <video> tokens in [{'content': 'x'}].",
    ],
    "dataset-worker-died": [
        "RuntimeError: One of the subprocesses has abruptly died during map operation.To debug the error, disable multiprocessing."
    ],
    "dataset-format": [
        "datasets.exceptions.DatasetGenerationError: An error occurred while generating the dataset",
        "pyarrow.lib.ArrowInvalid: JSON parse error: Column() changed from object to array in row 0",
        "because column names don't match",
    ],
    "wandb-key": [
        "wandb.errors.errors.UsageError: api_key not configured (no-tty). call wandb.login(key=[your_api_key])"
    ],
    "parallel-sizes": [
        "RuntimeError: world_size (6) is not divisible by tensor_model_parallel_size 4",
        "ValueError: Total number of attention heads (28) must be divisible by tensor parallel size (8)",
        "ValueError: num_query_groups (2) must be divisible by tensor_model_parallel_size (4).",
        "AssertionError: num_attention_heads (52) must be divisible by 8",
        "RuntimeError: world_size (6) is not divisible by (tensor_model_parallel_size (4) x pipeline_model_parallel_size (1))",
        "AssertionError: First dimension of the tensor should be divisible by tensor parallel size",
        "AssertionError: num_heads (52) must be divisible by mp_size (8)",
    ],
    "lightning-devices": [
        "lightning.fabric.utilities.exceptions.MisconfigurationException: No supported gpu backend found!",
        "lightning.fabric.utilities.exceptions.MisconfigurationException: You requested gpu: [0, 1]",
    ],
    "nan-gradient": [
        "RuntimeError: Function 'MmBackward0' returned nan values in its 0th output.",
        "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0",
        "AssertionError: Rank 5: found NaN in local grad norm in backward pass before data-parallel communication collective.",
        "RuntimeError: Rank 5, node gpu-17: found NaN in local forward loss calculation.",
    ],
    "llamafactory-arguments": [
        "ValueError: Quantization is only compatible with the LoRA or OFT method.",
        "ValueError: `pure_bf16` is incompatible with DeepSpeed ZeRO-3.",
        "ValueError: DeepSpeed ZeRO-3 or FSDP is incompatible with PTQ-quantized models.",
        "ValueError: GaLore and APOLLO are incompatible with DeepSpeed yet.",
        "ValueError: Distributed training does not support layer-wise GaLore.",
        "ValueError: `max_samples` is incompatible with `streaming`.",
        "ValueError: Please provide `model_name_or_path`.",
        "ValueError: Please specify dataset for training.",
        "ValueError: Cannot specify `val_size` if `dataset` is None.",
        "ValueError: The dataset is not applicable in the current training stage.",
        "ValueError: This device does not support `pure_bf16`.",
        "ValueError: Cannot use device map for quantized models in training.",
        "ValueError: `loraplus_lr_ratio` is only valid for LoRA training.",
        "ValueError: This model does not support image input. Please check whether the correct `template` is used.",
    ],
    "no-valid-checkpoint": [
        "ValueError: Can't find a valid checkpoint at /out/checkpoint-500",
        "ValueError: No valid checkpoint found in output directory (/out)",
    ],
    "deepspeed-no-launcher": ["ModuleNotFoundError: No module named 'mpi4py'"],
    "gpu-xid": [
        "kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU is gone",
        "[12345.6] NVRM: Xid (PCI:0000:3b:00): 48, pid=4711, DBE",
        "NVRM: Xid (PCI:0000:3b:00): 119, pid=4711, Timeout waiting for RPC from GSP",
    ],
    "gpu-peer-access": [
        "RuntimeError: CUDA error: peer access is not supported between these two devices",
        "NCCL WARN Cuda failure 'peer mapping resources exhausted'",
        "transport/p2p.cc:233 NCCL WARN failed to peer with device 3(=3b000): 217 peer access is not supported",
    ],
    "nccl-ib-device": [
        "transport/net_ib.cc:188 NCCL WARN NET/IB : Unable to open device mlx5_1",
        "transport/net_ib.cc:201 NCCL WARN NET/IB : Unable to query port_num 1",
        "transport/net_ib.cc:199 NCCL WARN NET/IB : Unable to query device mlx5_1",
        "transport/net_ib.cc:160 NCCL WARN NET/IB : No IP interface found.",
    ],
    "nccl-ib-mixed": [
        "transport/net_ib.cc:1271 NCCL WARN NET/IB : Attempted to connect incompatible devices: [0]mlx5_0:1/IB and [1]mlx5_1:1/RoCE. Try selecting NICs of only one link type using NCCL_IB_HCA",
        "transport/net_ib.cc:1001 NCCL WARN NET/IB : Local mergedDev=mlx5_0 has a different number of devices=1 as remoteDev=mlx5_0 nRemDevs=2",
        "transport/net_ib.cc:1012 NCCL WARN NET/IB : Can't merge net devices with different link_layer. i=0 remMeta.ndevs=1 link_layer=1 rem_link_layer=2",
        "NCCL WARN Detected mixed local Net device counts across ranks (min 1, max 2). Set NCCL_IGNORE_NET_MISMATCH=1 to continue.",
    ],
    "nccl-imex": [
        "mnnvl.cc:44 NCCL WARN MNNVL (cliqueSize 8) is available but not supported on this system. Check the IMEX configuration.",
        "mnnvl.cc:44 NCCL WARN MNNVL (cliqueSize 8) is available but not working on this system. Check the IMEX channel configuration (/dev/nvidia-caps-imex-channels).",
    ],
    "nccl-stranger": [
        "misc/socket.cc:430 NCCL WARN socketFinalizeAccept: wrong magic 1234 != 5678",
        "misc/socket.cc:440 NCCL WARN socketFinalizeAccept: wrong type 3 != 4",
        "bootstrap.cc:47 NCCL WARN Invalid NCCL_COMM_ID, please use format: <ipv4>:<port> or [<ipv6>]:<port> or <hostname>:<port>",
    ],
    "nccl-algorithm": [
        "enqueue.cc:1361 NCCL WARN Error : no algorithm/protocol available",
        "enqueue.cc:1802 NCCL WARN No algorithm/protocol available for function AllGather with datatype ncclInt8. NCCL_ALGO was set to tree.",
    ],
    "command-not-found": ["bash: line 1: torchrun: command not found", "/bin/sh: 1: torchrun: not found"],
    "timeout": ["RuntimeError: the job server timed out after 30 s"],
    "connection": ["torch.distributed.DistBackendError: something new"],
    "service-connection": [
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='api.wandb.ai', port=443): Max retries exceeded with url: /graphql",
    ],
    "nccl-ib-connect": [
        "misc/ibvwrap.cc:160 NCCL WARN Call to ibv_modify_qp failed with error Connection timed out errno 110",
        "misc/ibvwrap.cc:291 NCCL WARN Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0:1, curr state INIT, next state RTR, local GID index 3, local GID ::ffff:192.0.2.7, remote GID ::ffff:192.0.2.8",
        "misc/ibvwrap.cc:160 NCCL WARN Call to ibv_modify_qp failed with error Network is unreachable",
        "misc/ibvwrap.cc:160 NCCL WARN Call to ibv_modify_qp failed with error Invalid argument errno 22",
    ],
    "nccl-ib-port": [
        "transport/net_ib.cc:94 NCCL WARN NET/IB : Got async event : port error",
        "transport/net_ib.cc:102 NCCL WARN NET/IB : mlx5_2:1 Got async event : port error",
        "transport/net_ib/init.cc:171 NCCL WARN NET/IB : mlx5_2:1 Got non-fatal async event: port error(10)",
    ],
    "nccl-cannot-connect": [
        "misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to fe80::1%eth0<46785> failed : Cannot assign requested address",
        "misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 192.0.2.7<46785> failed : Software caused connection abort",
        "misc/socket.cc:576 NCCL WARN socketStartConnect: connect returned Network is unreachable, exceeded error retry count (35)",
    ],
}
HARMLESS = {
    "deepspeed-no-hostfile": "[WARNING] [runner.py:214:fetch_hostfile] Unable to find hostfile, will proceed with training with local resources only.",
    "hostname-not-retrieved": "[W1122 socket.cpp:767] [c10d] The hostname of the client socket cannot be retrieved. err=-3",
    "no-ipv6": "[W socket.cpp:464] [c10d] The server socket cannot be initialized on [::]:29500 (errno: 97 - Address family not supported by protocol).",
    "nccl-no-plugin": "node0:17:17 [0] NCCL INFO NET/IB : No device found.",
    "gloo-falls-back-to-loopback": "[W1122 ProcessGroupGloo.cpp:760] Warning: Unable to resolve hostname to a (local) address. Using the loopback address as fallback.",
}


def failure(message: str = "the job ended with exit code 1", log: str = "") -> Failure:
    return Failure(node="node1", node_rank=1, message=message, log_tail=log)


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in LINES.items() for line in lines])
def test_a_line_of_a_log_is_told_with_its_cause_and_what_fixes_it(name: str, line: str) -> None:
    error = known_errors()[name]
    for found in (classify(failure(f"rank 0 raised {line}")), classify(failure(log=f"step 3\n{line}\nend\n"))):
        assert (found.error_id, found.kind, found.cause) == (name, error.kind, error.cause)
        assert "{node}" not in str(found.hint)
        assert ("node1" in str(found.hint)) == ("{node}" in error.fix)


@pytest.mark.parametrize(("name", "line"), HARMLESS.items())
def test_a_line_that_also_stands_in_good_runs_is_on_the_page_and_explains_nothing(name: str, line: str) -> None:
    assert known_errors()[name].matches(line)
    found = find_error(line)
    assert found is None or found.id == "connection"


def test_every_error_has_a_line_here_a_section_and_checks_that_exist() -> None:
    assert {*LINES, *HARMLESS} == {*known_errors()}
    for error in known_errors().values():
        assert error.is_harmless == (error.id in HARMLESS)
        assert error.project in PROJECTS
        assert {*error.checks} <= {*CHECK_NAMES}


_ENTRY = """
[told]
project = 'System'
texts = ['told']
cause = 'It was told.'
fix = 'listen'
source = 'errno(3)'
"""


def test_an_entry_that_is_not_as_it_should_be_is_named(golden: Golden) -> None:
    assert [*decode_catalogue(_ENTRY)] == ["told"]
    changes = {
        "no fix": ("fix = ", "# "),
        "an unknown key": ("source", "is_genral = true\nsource"),
        "a text that is no list": ("['told']", "'told'"),
        "a key twice": ("source", "cause = 'twice'\nsource"),
    }
    errors = {case: raised(ValueError, decode_catalogue, _ENTRY.replace(*words, 1)) for case, words in changes.items()}
    golden.check_errors("catalogue_entries", errors)


_WENT_WELL = """
from multinode.diagnose import known_errors
from multinode.diagnose.evidence import NodeEvidence
from multinode.diagnose.failure import first_failure
from multinode.launch import execute
from multinode.records.run import NodeRun
from multinode.records.status import Status
status = Status(state="ended", cause="exited", exit_code=0, ended_s=1.0)
run = NodeRun(name="node0", node_rank=0, state="ended", status=status)
assert first_failure([NodeEvidence(run=run, log="step 3\\n")]) is None
print(known_errors.known_errors.cache_info().currsize)
"""


def test_a_run_that_goes_well_does_not_read_the_catalogue() -> None:
    said = subprocess.run([sys.executable, "-c", _WENT_WELL], capture_output=True, text=True, timeout=600, check=True)
    assert said.stdout == "0\n"


def test_of_a_worker_that_aborted_itself_the_exception_behind_it_is_told() -> None:
    log = (
        "rank 0 is in\n"
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n"
        "  what():  [enforce fail at gloo/transport/tcp/pair.cc:456] op.preamble.length <= op.nbytes. 2000 vs 1000.\n"
    )
    aborted = msgspec.structs.replace(failure("rank 0 was killed by SIGABRT", log), signal="SIGABRT")
    assert (classify(aborted).kind, classify(aborted).error_id) == ("desync", "gloo-length")
    silent = msgspec.structs.replace(aborted, log_tail="ModuleNotFoundError: No module named 'apex'\n")
    assert (classify(silent).kind, classify(silent).error_id) == ("crashed", None)


def test_a_text_with_dots_does_not_reach_into_other_lines() -> None:
    assert find_error("Template\nqwen does not exist.") is None
    assert find_error(f"Template {'x' * 300} does not exist.") is None


def test_an_error_that_names_its_own_cause_comes_before_what_its_peers_say() -> None:
    def ended(rank: int, said: str, time_s: float) -> NodeEvidence:
        status = Status(state="ended", cause="exited", exit_code=1, ended_s=time_s)
        return NodeEvidence(
            run=NodeRun(name=f"node{rank}", node_rank=rank, state="ended", status=status),
            exceptions=[
                ExceptionSample(rank=rank, time_s=time_s, type="DistBackendError", message=said, traceback=said)
            ],
        )

    found = first_failure(
        [
            ended(0, "NCCL error: ncclRemoteError: A call failed possibly due to a network error", 1.0),
            ended(1, "NCCL error: invalid usage\nLast error:\nDuplicate GPU detected : rank 1 and rank 0", 2.0),
        ]
    )
    assert found is not None
    assert (found.node, found.error_id) == ("node1", "nccl-duplicate-gpu")
