"""How a profiler's window compares with the trace-free figures, in a sentence."""

from __future__ import annotations

from multinode.profile.trace_view import Agreement


def agreement_words(found: Agreement | None) -> str:
    """Its sentence; empty without a window."""
    if found is None:
        return ""
    worker, counted = found.worker, found.counted
    window = f"{worker.exposed_ms:.1f} ms of {worker.step_ms:.1f} ms"
    if counted is None or counted.exposed_ms is None:
        return f"Exposed communication: {window} per step in the window; it is unknown outside of it."
    both = (
        f"Exposed communication per step: {window} in the window, "
        f"{counted.exposed_ms:.1f} ms of {counted.step_ms:.1f} ms by the counters"
    )
    if found.outcome == "agrees":
        return f"{both}: they agree, {found.apart:.1%} of the step apart."
    return f"{both}: {found.apart:.0%} of the step apart, {_reason(found, counted.step_ms)}."


def _reason(found: Agreement, step_ms: float) -> str:
    worker = found.worker
    match found.outcome:
        case "few_steps":
            return f"and the window has too few steps ({worker.steps}) to tell"
        case "slowed":
            return f"as the profiler made a step {worker.step_ms / step_ms - 1:.0%} longer"
        case "host_bound":
            busy = worker.compute_ms / worker.step_ms
            return f"as the GPU computed {busy:.0%} of the time and waited for the host in the rest"
    return "and nothing recorded says why"
