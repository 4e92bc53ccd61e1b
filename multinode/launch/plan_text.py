"""A plan as the commands to type on each node."""

from __future__ import annotations

from multinode.cluster.quoting import bracketed, render_command
from multinode.errors import printable_line
from multinode.records.plan import LaunchPlan, NodePlan
from multinode.units import format_count, format_size

_DIGITS = 16


def plan_text(plan: LaunchPlan) -> str:
    """The plan: comment lines, then each node's command; secrets are redacted."""
    header = [
        f"# {plan.job}: {_describe_workers(plan)}",
        f"# rendezvous at {bracketed(plan.master_addr)}:{plan.master_port}",
        *(f"# note: {note}" for note in plan.notes),
    ]
    if plan.code is not None:
        code = plan.code
        size = f"{format_count(code.files, 'file')}, {format_size(code.size_bytes)}"
        header.append(
            f"# copied to every node first: {size} of {printable_line(code.source)} (digest {code.digest[:_DIGITS]})"
        )
    return "\n".join(header) + "\n" + "\n".join(_node_text(node) for node in plan.nodes)


def _describe_workers(plan: LaunchPlan) -> str:
    if len(set(plan.workers)) > 1:
        return f"{plan.world_size} workers on {len(plan.nodes)} nodes: {', '.join(map(str, plan.workers))}"
    return f"{plan.world_size} workers, {plan.nproc_per_node} on each of {len(plan.nodes)} nodes"


def _node_text(node: NodePlan) -> str:
    ranks = ", ".join(str(rank) for rank in node.ranks)
    lines = [
        "",
        f"# --- {node.node}: node rank {node.node_rank}, ranks {ranks}, {node.addr} on {node.ifname or 'unknown'}",
        *(f"# assumed: {assumption}" for assumption in node.assumed),
        *(f"# sent first: {node.run_dir}/{file.path}" for file in node.files),
        render_command(node.command),
    ]
    return "\n".join(lines)
