"""network_of_scan: an nccl-test's report -> NetworkModel: the network as collectives found it. Pure."""

from __future__ import annotations

from multinode.analyse.collectives.traffic import Layout
from multinode.analyse.nccl_test.size_curve import SizeCurve, fit_curve, held_back, median_error
from multinode.analyse.nccl_test.size_scan import ScanReport
from multinode.analyse.prediction.carried_network import Link, NetworkModel
from multinode.errors import UsageError

__all__ = ["network_of_scan", "stated_network"]

_ETHERNET_MTU = 1500
# Smaller messages take what every message costs, whatever they carry.
_LEAST_BYTES = 1 << 20


def network_of_scan(report: ScanReport, link_gbit_per_s: float | None) -> NetworkModel:
    """What the sweep measured.

    Args:
        report: of an nccl-test on several nodes.
        link_gbit_per_s: rate of a node's card; None is unknown.

    Raises:
        UsageError: it ran on one node, its link's rate is not known, or it has no times that can be.
    """
    nodes = len(report.nodes)
    if nodes <= 1:
        raise UsageError(
            f"nccl-test {report.run_id} ran on one node: that tells nothing of a network",
            hint="measure on several: multinode nccl-test --hosts H",
        )
    if link_gbit_per_s is None:
        raise UsageError(
            f"nccl-test {report.run_id} does not tell the rate of its link: no other link can be told from it",
            hint="name it, in Gbit/s: --link-measured 1",
        )
    curves = {name: _again(curve, report.run_id) for name, curve in report.curves.items()}
    errors = [median_error(held_back(curve.points, _LEAST_BYTES)) for curve in curves.values()]
    over_rdma = report.path is not None and report.path.over_rdma
    rdma = over_rdma or (report.nccl is not None and report.nccl.network == "IB")
    return NetworkModel(
        link=Link(gbit_per_s=link_gbit_per_s, mtu=report.mtu or _ETHERNET_MTU, rdma=rdma),
        layout=Layout(nodes=nodes, workers_per_node=max(1, report.world_size // nodes)),
        backend=report.backend,
        curves=curves,
        error=max((error for error in errors if error is not None), default=0.0),
    )


def stated_network(link: Link, layout: Layout, backend: str) -> NetworkModel:
    """Of a link whose rate is all that is known."""
    return NetworkModel(link=link, layout=layout, backend=backend)


def _again(curve: SizeCurve, run_id: str) -> SizeCurve:
    """Through the same points: a file may hold anything."""
    try:
        return fit_curve(curve.points)
    except ValueError as error:
        raise UsageError(
            f"nccl-test {run_id} cannot be used: {error}", hint="measure anew: multinode nccl-test"
        ) from None
