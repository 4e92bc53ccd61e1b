"""Figures of samples as files have them, raw and row by row. Apart from `samples`, which every launch imports."""

from __future__ import annotations

from typing import Any

from multinode.figures.figure import Figure

_WALL = Figure[float]("time_s", about="the node's wall clock")
_CLOCK = Figure[int]("mono_ns", about="the node's monotonic clock")
RANK = Figure[int]("rank", about="global rank of the worker")
TRAFFIC = Figure[int]("traffic", about="key that leads from a step to its calls in the table `calls`")

STEP: tuple[Figure[Any], ...] = (
    RANK,
    Figure("step", about="optimizer step, counted from 1"),
    Figure("total_steps", about="total number of training steps"),
    Figure("time_s", about="the node's wall clock at the end of the step"),
    Figure("mono_ns", about="the node's monotonic clock at the end of the step"),
    Figure("step_time_us", about="time since the end of the previous step"),
    Figure("samples", about="nominal samples of this worker: batch size per device x accumulation steps"),
    Figure("micro_steps", about="number of forward passes with gradients"),
    Figure("tokens", about="tokens that this worker processed, including padding"),
    Figure("effective_tokens", about="tokens that this worker processed, excluding padding"),
    Figure("peak_memory_bytes", about="peak allocated memory on the GPU; on a CPU, resident memory of the process"),
    Figure("peak_reserved_bytes", about="peak memory that torch's allocator reserved on the GPU"),
    TRAFFIC,
)
DDP: tuple[Figure[Any], ...] = (
    Figure("ddp_forward_us", about="time of the last micro-batch's forward pass, from DDP's counter"),
    Figure("ddp_backward_us", about="time of the backward computation, from DDP's counter"),
    Figure(
        "ddp_comm_us",
        about=("time from the start of the first bucket's reduction to the end of the last one's, from DDP's counter"),
    ),
    Figure("ddp_overlap_us", about="part of `ddp_comm_us` that overlaps with the backward computation"),
)
NIC: tuple[Figure[Any], ...] = (
    _WALL,
    _CLOCK,
    Figure("ifname", about="NIC or RDMA port"),
    Figure("rx_bytes", about="bytes received since the interface came up, including Ethernet headers"),
    Figure("tx_bytes", about="bytes sent since the interface came up, including Ethernet headers"),
    Figure("rx_packets", about="packets received since the interface came up"),
    Figure("tx_packets", about="packets sent since the interface came up"),
    Figure("rx_errors", about="receive errors since the interface came up"),
    Figure("tx_errors", about="send errors since the interface came up"),
    Figure("rx_dropped", about="received packets dropped since the interface came up"),
    Figure("tx_dropped", about="packets dropped before sending since the interface came up"),
)
TCP: tuple[Figure[Any], ...] = (
    Figure("tcp_sent_segments", about="TCP segments sent since the node booted"),
    Figure("tcp_retransmitted_segments", about="TCP segments retransmitted since the node booted"),
)
CGROUP: tuple[Figure[Any], ...] = (
    Figure("cgroup_quota_cores", about="CPU cores that the job's cgroup may use"),
    Figure("cgroup_throttled_us", about="time for which the cgroup was throttled since it was created"),
    Figure("cgroup_periods", about="enforcement periods of the cgroup since it was created"),
    Figure("cgroup_throttled_periods", about="enforcement periods in which the cgroup was throttled"),
)
CPU: tuple[Figure[Any], ...] = (
    _WALL,
    _CLOCK,
    Figure("busy_percent", about="CPU use of all cores since the previous sample"),
    Figure("iowait_percent", about="CPU time spent waiting for disks since the previous sample"),
    Figure("steal_percent", about="CPU time that the hypervisor took since the previous sample"),
    Figure("job_cores", about="CPU cores that the job used since the previous sample"),
    Figure("memory_available_gib", about="memory that the job can still allocate"),
    Figure("memory_total_gib", about="memory of the machine, or the limit of the job's cgroups if that is smaller"),
)
GPU: tuple[Figure[Any], ...] = (
    _WALL,
    _CLOCK,
    Figure("index", about="NVML's index of the GPU"),
    Figure("mig", about="whether the GPU is partitioned with MIG"),
    Figure(
        "sm_percent", about=("percentage of the time in which a kernel ran; a waiting NCCL kernel counts as running")
    ),
    Figure("memory_used_gib", about="memory in use by all processes"),
    Figure("memory_total_gib", about="memory of the GPU"),
    Figure("power_w", about="power draw"),
    Figure("power_limit_w", about="power limit"),
    Figure("sm_clock_mhz", about="current SM clock"),
    Figure("sm_clock_max_mhz", about="maximum SM clock"),
    Figure("temperature_c", about="temperature of the GPU"),
    Figure("pcie_gen", about="current PCIe generation"),
    Figure("pcie_gen_max", about="maximum PCIe generation of GPU and slot"),
    Figure("pcie_width", about="current number of PCIe lanes"),
    Figure("pcie_width_max", about="maximum number of PCIe lanes of GPU and slot"),
    Figure("pcie_rx_gb_per_s", about="PCIe transfer rate into the GPU, over the last 20 ms"),
    Figure("pcie_tx_gb_per_s", about="PCIe transfer rate out of the GPU, over the last 20 ms"),
    Figure("throttle", about="reasons for reduced clocks, as NVML names them"),
    Figure("energy_j", about="energy used since the driver was loaded"),
    Figure("ecc_uncorrected", about="uncorrectable memory errors since the driver was loaded"),
)
COLLECTIVE: tuple[Figure[Any], ...] = (
    RANK,
    Figure("local_rank", about="rank of the worker on its node"),
    Figure("index", about="index of the message in the request"),
    Figure("collective", about="collective operation, as nccl-tests names it"),
    Figure("dtype", about="element type, as nccl-tests names it"),
    Figure("redop", about="reduction, as nccl-tests names it"),
    Figure("size_bytes", about="size of the message, as nccl-tests counts it"),
    Figure("count", about="number of elements, as nccl-tests counts them"),
    Figure("num_wrong", about="number of elements with wrong values"),
)
CALL: tuple[Figure[Any], ...] = (
    Figure("op", about="operation of torch.distributed"),
    Figure("group", about="name of the process group"),
    Figure("size_bytes", about="size of one call, as nccl-tests counts it"),
    Figure("count", about="number of these calls in a step"),
    Figure("source", about="`call` for a call of torch.distributed, `ddp` for a bucket of DDP's reducer"),
)
