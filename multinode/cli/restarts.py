"""Restarting a run that fails: `--restarts` and what goes with it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from multinode.errors import UsageError
from multinode.units import parse_duration

if TYPE_CHECKING:
    from multinode.launch.restart import RestartOptions

_PANEL = "Run control"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restarts:
    """How often, after what, and on which nodes."""

    restarts: Annotated[
        int,
        typer.Option(
            min=0,
            max=1000,
            metavar="N",
            rich_help_panel=_PANEL,
            help="Restart a failed run from its last complete checkpoint, at most N times.",
        ),
    ] = 0
    node_wait: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            rich_help_panel=_PANEL,
            help="Time that a restart waits for a node that is unreachable or fails a check, such as 90s, 10m or 2h.",
        ),
    ] = "10m"
    min_nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="K",
            rich_help_panel=_PANEL,
            help="Restart without nodes that do not return, on at least K nodes, with the same global batch.",
        ),
    ] = None
    scale_batch: Annotated[
        bool,
        typer.Option(
            "--scale-batch",
            rich_help_panel=_PANEL,
            help="With --min-nodes: let the global batch shrink if no accumulation can keep it.",
        ),
    ] = False
    restart_after_oom: Annotated[
        bool,
        typer.Option("--restart-after-oom", rich_help_panel=_PANEL, help="Also restart a run that ran out of memory."),
    ] = False

    def options(self, *, detach: bool) -> RestartOptions | None:
        """The options; None where the run is not restarted.

        Raises:
            UsageError: they do not go together, or the time is none.
        """
        if self.min_nodes is not None and not self.restarts:
            raise UsageError("--min-nodes needs --restarts")
        if self.scale_batch and self.min_nodes is None:
            raise UsageError("--scale-batch needs --min-nodes")
        if self.restarts and detach:
            raise UsageError(
                "--restarts needs this command to keep running; a detached run is not restarted",
                hint="remove --detach; in Slurm, use multinode submit",
            )
        try:
            node_wait_s = parse_duration(self.node_wait)
        except ValueError as error:
            raise UsageError(f"--node-wait: {error}") from None
        if not self.restarts:
            return None
        from multinode.launch.restart import RestartOptions

        return RestartOptions(
            restarts=self.restarts,
            node_wait_s=node_wait_s,
            after_oom=self.restart_after_oom,
            min_nodes=self.min_nodes,
            scale_batch=self.scale_batch,
        )
