"""Figures of samples as files have them, raw and row by row. Apart from `samples`, which every launch imports."""

from __future__ import annotations

from typing import Any

from multinode.figures.figure import Figure

_WALL = Figure[float]("time_s", about="the node's wall clock")
_CLOCK = Figure[int]("mono_ns", about="the node's monotonic clock")
RANK = Figure[int]("rank", about="global rank of the worker")
TRAFFIC = Figure[int]("traffic", about="number of the step's calls in this worker, as in `calls`")

STEP: tuple[Figure[Any], ...] = (
    RANK,
    Figure("step", about="optimizer step, counted from 1"),
    Figure("total_steps", about="steps of the training"),
    Figure("time_s", about="the node's wall clock at the end of the step"),
    Figure("mono_ns", about="the node's monotonic clock at the end of the step"),
    Figure("step_time_us", about="time since the end of the previous step"),
    Figure("samples", about="nominal samples of this worker"),
    Figure("micro_steps", about="forward passes with gradients"),
    Figure("tokens", about="tokens of this worker, including padding"),
    Figure("effective_tokens", about="tokens without padding"),
    Figure("peak_memory_bytes", about="peak allocation on the GPU, or resident memory of the process"),
    Figure("peak_reserved_bytes", about="peak reserved by torch's allocator on the GPU"),
    TRAFFIC,
)
DDP: tuple[Figure[Any], ...] = (
    Figure("ddp_forward_us", about="DDP's counter of the last micro-batch's forward pass"),
    Figure("ddp_backward_us", about="DDP's counter of the backward computation"),
    Figure("ddp_comm_us", about="DDP's counter from the first bucket's reduction to the end of the last"),
    Figure("ddp_overlap_us", about="the part of it during the backward computation"),
)
NIC: tuple[Figure[Any], ...] = (
    _WALL,
    _CLOCK,
    Figure("ifname", about="NIC or RDMA port"),
    Figure("rx_bytes", about="received since it came up, including Ethernet headers"),
    Figure("tx_bytes", about="sent since it came up, including Ethernet headers"),
    Figure("rx_packets", about="packets received since it came up"),
    Figure("tx_packets", about="packets sent since it came up"),
    Figure("rx_errors", about="errors in receiving since it came up"),
    Figure("tx_errors", about="errors in sending since it came up"),
    Figure("rx_dropped", about="received packets that were dropped since it came up"),
    Figure("tx_dropped", about="packets that were dropped before they were sent, since it came up"),
)
TCP: tuple[Figure[Any], ...] = (
    Figure("tcp_sent_segments", about="TCP segments that the node has sent since it booted"),
    Figure("tcp_retransmitted_segments", about="TCP segments that it has sent again"),
)
CGROUP: tuple[Figure[Any], ...] = (
    Figure("cgroup_quota_cores", about="CPUs that the job's cgroup may use"),
    Figure("cgroup_throttled_us", about="time that the cgroup was throttled, since it was created"),
    Figure("cgroup_periods", about="enforcement periods since it was created"),
    Figure("cgroup_throttled_periods", about="periods in which it was throttled"),
)
CPU: tuple[Figure[Any], ...] = (
    _WALL,
    _CLOCK,
    Figure("busy_percent", about="of all cores, since the previous sample"),
    Figure("iowait_percent", about="idle while waiting for a disk, since the previous sample"),
    Figure("steal_percent", about="taken by the hypervisor, since the previous sample"),
    Figure("job_cores", about="cores that the job's processes used, since the previous sample"),
    Figure("memory_available_gib", about="memory that the job can still allocate"),
    Figure("memory_total_gib", about="limit of the machine or of the job's cgroups, whichever is smaller"),
)
GPU: tuple[Figure[Any], ...] = (
    _WALL,
    _CLOCK,
    Figure("index", about="of the GPU, as NVML counts"),
    Figure("mig", about="whether MIG divides it"),
    Figure("sm_percent", about="share of time with a kernel running; a waiting NCCL kernel counts as running"),
    Figure("memory_used_gib", about="memory in use by all processes"),
    Figure("memory_total_gib", about="memory of the GPU"),
    Figure("power_w", about="power draw"),
    Figure("power_limit_w", about="limit of the power draw"),
    Figure("sm_clock_mhz", about="current clock"),
    Figure("sm_clock_max_mhz", about="maximum clock"),
    Figure("temperature_c", about="temperature of the chip"),
    Figure("pcie_gen", about="current PCIe generation"),
    Figure("pcie_gen_max", about="maximum PCIe generation of GPU and slot"),
    Figure("pcie_width", about="current PCIe lanes"),
    Figure("pcie_width_max", about="maximum PCIe lanes of GPU and slot"),
    Figure("pcie_rx_gb_per_s", about="into the GPU, over the last 20 ms"),
    Figure("pcie_tx_gb_per_s", about="out of the GPU, over the last 20 ms"),
    Figure("throttle", about="reasons for reduced clocks, by NVML's names"),
    Figure("energy_j", about="energy since the driver was loaded"),
    Figure("ecc_uncorrected", about="uncorrectable memory errors since the driver was loaded"),
)
COLLECTIVE: tuple[Figure[Any], ...] = (
    RANK,
    Figure("local_rank", about="rank of the worker on its node"),
    Figure("index", about="of the message in the request"),
    Figure("collective", about="operation, as nccl-tests names it"),
    Figure("dtype", about="nccl-tests' name of the element type"),
    Figure("redop", about="nccl-tests' name of the reduction"),
    Figure("size_bytes", about="size of the message, as nccl-tests counts it"),
    Figure("count", about="elements, as nccl-tests counts them"),
    Figure("num_wrong", about="elements with a wrong value"),
)
CALL: tuple[Figure[Any], ...] = (
    Figure("op", about="operation of torch.distributed"),
    Figure("group", about="name of the process group"),
    Figure("size_bytes", about="size of one call, as nccl-tests counts it"),
    Figure("count", about="calls of this kind and size in a step"),
    Figure("source", about="`call` of torch.distributed, or `ddp` for the buckets of DDP's reducer"),
)
