"""Parts of ZeRO and FSDP checkpoints that other nodes have saved, fetched beside those of node 0. Prints nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path, PurePosixPath

from multinode.cluster.cluster import Cluster
from multinode.copy.fetch import Fetched, Wanted, fetch_files
from multinode.errors import ContactLost
from multinode.launch.checkpoints import shards_elsewhere
from multinode.launch.context import Launched
from multinode.transport.agent import AgentTransport
from multinode.units import format_count, format_size


def fetch_shards(  # noqa: PLR0913 - what came from node 0, and from where the rest comes
    agent: AgentTransport,
    launched: Launched,
    cluster: Cluster,
    wanted: Wanted,
    fetched: Fetched,
    *,
    say: Callable[[str], None],
) -> None:
    """Fetch the shards of the other nodes, and name the converter.

    Args:
        agent: the way to the nodes.
        launched: the run.
        cluster: its nodes.
        wanted: what was fetched from node 0.
        fetched: the files that came.
        say: is told what comes.

    Raises:
        NodeError, NodeFailed: a node does not have its shards, or contact was lost.
    """
    # Names begin with the last part of the path that was asked for.
    parents = {PurePosixPath(path).name: PurePosixPath(path).parent for path in wanted.paths}
    nodes = {node.name: node for node in cluster.nodes}
    elsewhere = shards_elsewhere(fetched.files, {one.place.node: one.place.ranks for one in launched.plan.nodes})
    folders: set[PurePosixPath] = set()
    for planned, ended in zip(launched.plan.nodes, launched.run.nodes, strict=True):
        name = planned.place.node
        by_folder: dict[PurePosixPath, list[str]] = {}
        for path in map(PurePosixPath, elsewhere.get(name, ())):
            if path.parts[0] in parents:
                by_folder.setdefault(path.parent, []).append(path.name)
        if by_folder and ended.state == "lost":
            raise ContactLost("its shards were not fetched: contact was lost", node=name)
        for folder, files in by_folder.items():
            there = parents[folder.parts[0]] / folder
            paths = tuple(str(there / file) for file in files)
            of_node = Wanted(node=nodes[name], paths=paths, cwd=planned.output_cwd or planned.command.cwd)
            came = fetch_files(agent, of_node, fetched.directory / folder)
            what = f"{format_count(len(came.files), 'file')} ({format_size(came.size_bytes)}) of {folder}"
            say(f"fetched {what} from {name}")
            folders.add(folder)
    for folder in sorted(folders):
        converter = _converter(fetched.directory / folder)
        if converter is not None:
            say(f"merge the parameters into one file: {converter} OUTPUT_DIR")


def _converter(folder: Path) -> str | None:
    """The command that makes one file of a folder of shards; None for one without parameters."""
    if folder.name.startswith("global_step"):
        return f"python {folder.parent}/zero_to_fp32.py {folder.parent}"
    return f"accelerate merge-weights {folder}" if "model" in folder.name else None
