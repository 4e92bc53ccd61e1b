"""A made-up tree of control groups that this very process is in, wherever it really is."""

from __future__ import annotations

from pathlib import Path

__all__ = ["own_group"]

# By whether it is version 2: the mount, and the files of limit and use.
_VERSIONS = {
    True: ("cgroup2 cgroup2 rw", "memory.max", "memory.current"),
    False: ("cgroup cgroup rw,memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
}


def own_group(tmp_path: Path, limit: str | None = None, used: str | None = None) -> str:
    """The mountinfo of a tree in which our group says these, in bytes, in the version that this machine has."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    groups = {not controllers: path for _, controllers, path in lines if controllers in {"", "memory"}}
    unified = True in groups
    mount, limit_name, used_name = _VERSIONS[unified]
    place = tmp_path / "groups"
    group = place / groups[unified].strip("/")
    group.mkdir(parents=True)
    (place / "cgroup.procs").touch()
    for name, text in ((limit_name, limit), (used_name, used)):
        if text is not None:
            (group / name).write_text(f"{text}\n")
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"31 22 0:27 / {place} rw - {mount}\n")
    return str(mounts)
