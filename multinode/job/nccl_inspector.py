"""NCCL's Inspector plugin: the variables that load it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from multinode.cluster.accelerators import accelerator_named
from multinode.cluster.facts import NodeFacts
from multinode.errors import UsageError
from multinode.records.plan import Place
from multinode.stats.unknown import or_empty, or_none

PLUGIN = "NCCL_PROFILER_PLUGIN"
_PLUGIN_SINCE = (2, 28)
# Often enough for the ring of 1024 operations per communicator (since 2.30.3), and to match records with measured
# steps.
_WRITE_EVERY_US = 500_000


def inspector_environment(place: Place, env: Mapping[str, str], facts: NodeFacts | None) -> dict[str, str]:
    """Variables that make NCCL load its Inspector plugin and write to the run's directory.

    `env` are the user's on this node, which may name the plugin.
    """
    given, there = env.get(PLUGIN), or_none(facts.nccl_inspector) if facts is not None else None
    if facts is not None:
        if accelerator_named(place.accelerator).backend != "nccl" or not or_empty(facts.gpus):
            raise UsageError("--nccl-inspector needs NCCL, which the node's workers do not use", node=place.node)
        nccl = or_none(facts.nccl_version)
        version = tuple(map(int, re.findall(r"\d+", nccl or "")[:2]))
        if version and version < _PLUGIN_SINCE:
            raise UsageError(
                f"NCCL {nccl} has no Inspector plugin; it needs 2.28 or newer",
                node=place.node,
                hint="install a torch build with NCCL 2.28 or newer, or remove --nccl-inspector",
            )
        if given is None and there is None:
            raise UsageError(
                "NCCL's Inspector plugin (libnccl-profiler-inspector.so) was not found",
                node=place.node,
                hint=(
                    "build it from plugins/profiler/inspector of NCCL 2.30.3 or newer (it works with older NCCL), "
                    f"then set in the hostfile: env.{PLUGIN}=PATH"
                ),
            )
    return {
        PLUGIN: given or there or "libnccl-profiler-inspector.so",
        "NCCL_INSPECTOR_ENABLE": "1",
        "NCCL_INSPECTOR_DUMP_DIR": f"{place.run_dir}/nccl-inspector",
        "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": str(_WRITE_EVERY_US),
    }
