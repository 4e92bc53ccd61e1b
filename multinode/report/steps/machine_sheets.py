"""machine_sheets: what the nodes' cards, processors and GPUs did, a row each, as tables of text."""

from __future__ import annotations

from collections.abc import Sequence

from multinode.analyse.telemetry.machine_use import CardUse, GpuUse, NodeUse
from multinode.report.render.sheet import UNKNOWN, Column, Sheet, figure, percent

__all__ = ["card_sheet", "gpu_sheet", "processor_sheet"]

_NODE = Column("node", words=True)


def card_sheet(nodes: Sequence[NodeUse]) -> Sheet:
    """A row a network card: rates in the steady state, share of the link, errors of the whole run."""
    return Sheet(
        title="network, a row a card",
        columns=(
            _NODE,
            Column("card", words=True),
            Column("in", "Gbit/s"),
            Column("out", "Gbit/s"),
            Column("peak", "Gbit/s"),
            Column("link", "Gbit/s"),
            Column("of link"),
            Column("errors", "/drops"),
            Column("resent"),
        ),
        rows=tuple(_card_row(node, card) for node in nodes for card in node.cards),
        notes=("mean over the steps that count; peak is between two samples; resent: TCP segments of the node",),
    )


def processor_sheet(nodes: Sequence[NodeUse]) -> Sheet:
    """A row a node: processors and memory."""
    rows = [_processor_row(node) for node in nodes]
    return Sheet(
        title="processors and memory",
        columns=(
            _NODE,
            Column("busy", "%"),
            Column("iowait", "%"),
            Column("stolen", "%"),
            Column("job", "cores"),
            Column("quota", "cores"),
            Column("held", "by quota"),
            Column("free", "GiB"),
            Column("worker", "GiB"),
        ),
        # A row with nothing but the node's name says nothing.
        rows=tuple(row for row in rows if set(row[1:]) != {UNKNOWN}),
        notes=("free: the least that was available; worker: the most that one had, on its GPU where it has one",),
    )


def gpu_sheet(nodes: Sequence[NodeUse]) -> Sheet:
    """A row a GPU."""
    return Sheet(
        title="GPUs",
        columns=(
            _NODE,
            Column("GPU"),
            Column("SM", "%"),
            Column("memory", "GiB"),
            Column("power", "W"),
            Column("clock", "MHz"),
            Column("temp", "C"),
            Column("PCIe", words=True),
            Column("held by", words=True),
        ),
        rows=tuple(_gpu_row(node, gpu) for node in nodes for gpu in node.gpus),
        notes=(
            "medians; memory and temperature are the highest. A waiting NCCL kernel runs, too: 100 % SM is no proof",
        ),
    )


def _card_row(node: NodeUse, card: CardUse) -> tuple[str, ...]:
    peaks = [peak for peak in (card.peak_in_gbit_per_s, card.peak_out_gbit_per_s) if peak is not None]
    return (
        node.node,
        card.ifname,
        figure(card.in_gbit_per_s, ".3f"),
        figure(card.out_gbit_per_s, ".3f"),
        figure(max(peaks, default=None), ".3f"),
        figure(card.link_gbit_per_s, "g"),
        percent(card.share),
        f"{figure(card.errors, 'd')}/{figure(card.drops, 'd')}",
        percent(node.retransmitted_share, ".2f"),
    )


def _processor_row(node: NodeUse) -> tuple[str, ...]:
    return (
        node.node,
        figure(node.cpu_busy_percent),
        figure(node.cpu_iowait_percent),
        figure(node.cpu_steal_percent),
        figure(node.job_cores, ".2f"),
        figure(node.quota_cores, "g"),
        percent(node.throttled_share),
        figure(node.memory_available_gib),
        figure(max(node.peak_worker_memory_gib.values(), default=None), ".2f"),
    )


def _gpu_row(node: NodeUse, gpu: GpuUse) -> tuple[str, ...]:
    held = ", ".join(f"{reason} {percent(share, '.0f')}" for reason, share in gpu.throttle.items())
    return (
        node.node,
        str(gpu.index),
        figure(gpu.sm_percent, ".0f"),
        _of(gpu.peak_memory_gib, gpu.memory_total_gib, ".1f"),
        _of(gpu.power_w, gpu.power_limit_w, ".0f"),
        _of(gpu.sm_clock_mhz, gpu.sm_clock_max_mhz, ".0f"),
        figure(gpu.temperature_c, ".0f"),
        (gpu.pcie or UNKNOWN) + (" (reduced)" if gpu.pcie_reduced else ""),
        held or UNKNOWN,
    )


def _of(value: float | None, whole: float | None, form: str) -> str:
    return figure(value, form) if whole is None or value is None else f"{value:{form}}/{whole:{form}}"
