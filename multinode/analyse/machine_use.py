"""Machine use: what each node's cards, processors, memory and GPUs did while the steps that count ran. Pure."""

from __future__ import annotations

import msgspec

__all__ = ["CardUse", "GpuUse", "NodeUse"]


class CardUse(msgspec.Struct, frozen=True, kw_only=True):
    """One network card or RDMA port.

    Attributes:
        ifname: its name.
        in_gbit_per_s: as counted, headers and all, mean over the window; likewise `out_gbit_per_s`.
        peak_in_gbit_per_s: the highest between two samples; likewise `peak_out_gbit_per_s`.
        idle_in_gbit_per_s: before the first worker began; likewise `idle_out_gbit_per_s`; None was not sampled.
        errors: in the whole run, both ways; likewise `drops`.
        link_gbit_per_s: what it says of its speed; `share` of it the busier direction's mean.
    """

    ifname: str
    in_gbit_per_s: float | None = None
    out_gbit_per_s: float | None = None
    peak_in_gbit_per_s: float | None = None
    peak_out_gbit_per_s: float | None = None
    idle_in_gbit_per_s: float | None = None
    idle_out_gbit_per_s: float | None = None
    errors: int | None = None
    drops: int | None = None
    link_gbit_per_s: float | None = None
    share: float | None = None


class GpuUse(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU; medians over the window unless the name says otherwise.

    Attributes:
        index: of the GPU.
        sm_percent: part of the time in which a kernel ran.
        peak_memory_gib: by all processes, of `memory_total_gib`.
        power_w: drawn, of `power_limit_w`.
        energy_j: drawn in the window; None where NVML does not count it.
        sm_clock_mhz: of `sm_clock_max_mhz`.
        temperature_c: the highest.
        pcie: as "gen 3 x8 of gen 4 x16", the lowest seen under load; None is unknown.
        pcie_reduced: whether it has fewer lanes than card and slot could have.
        throttle: part of the samples by reason.
    """

    index: int
    sm_percent: float | None = None
    peak_memory_gib: float | None = None
    memory_total_gib: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    sm_clock_mhz: float | None = None
    sm_clock_max_mhz: float | None = None
    temperature_c: float | None = None
    pcie: str | None = None
    pcie_reduced: bool = False
    throttle: dict[str, float] = {}


class NodeUse(msgspec.Struct, frozen=True, kw_only=True):
    """One node over the window of the steps that count.

    Attributes:
        node: its name.
        node_rank: its node rank.
        ranks: its workers.
        cards: the network cards that were sampled.
        gpus: its GPUs.
        cpu_busy_percent: of all cores, mean; likewise `cpu_iowait_percent`, `cpu_steal_percent`.
        job_cores: cores that the job used, mean.
        quota_cores: processors that its cgroup allows; None is no limit, or unknown.
        throttled_share: part of the window in which the cgroup had used them up; None is unknown.
        memory_available_gib: the least.
        retransmitted_share: of the TCP segments sent in the whole run; None is unknown.
        peak_worker_memory_gib: by rank, on its GPU, else resident in its process.
        missing: reason by name of what could not be sampled.
    """

    node: str
    node_rank: int
    ranks: tuple[int, ...]
    cards: tuple[CardUse, ...] = ()
    gpus: tuple[GpuUse, ...] = ()
    cpu_busy_percent: float | None = None
    cpu_iowait_percent: float | None = None
    cpu_steal_percent: float | None = None
    job_cores: float | None = None
    quota_cores: float | None = None
    throttled_share: float | None = None
    memory_available_gib: float | None = None
    retransmitted_share: float | None = None
    peak_worker_memory_gib: dict[int, float] = {}
    missing: dict[str, str] = {}
