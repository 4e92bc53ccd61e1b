"""Status: how the job goes on a node, as the node reports it."""

from __future__ import annotations

import msgspec


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The node's status.json, as far as it is kept; None until the node has reported it."""

    state: str | None = None  # `starting`, `running`, `stopping` or `ended`
    exit_code: int | None = None  # the job's; None while it runs, or if a signal ended it
    signal: str | None = None
    cause: str | None = None  # `exited`, `stopped`, `lease_expired`, `supervisor_lost`, `not_started`
    message: str | None = None  # why the job was not started, or what became of its supervisor
    ended_s: float | None = None  # on the node's wall clock
    processes_left: int | None = None  # processes of the run that survived the stop
    # processes that the kernel killed for lack of memory meanwhile, in the job's cgroup if visible, otherwise on the
    # whole node
    oom_kills: int | None = None
    disk_free_bytes: int | None = None  # on the log's file system when the job ended
    # who ordered the stop; None if nobody did, for example after a signal to the supervisor
    stopped_by: str | None = None

    @property
    def recorded(self) -> Status:
        """The status alone, of a record of the node that is one."""
        return Status(**msgspec.structs.asdict(self))

    @property
    def failed(self) -> bool:
        """Whether the job ended otherwise than with exit code 0."""
        return self.exit_code != 0 or self.signal is not None
