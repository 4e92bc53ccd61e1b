"""Process 1 of a lab node, run as a program: takes its namespaces, mounts its root, starts sshd, reaps orphans.

Reads one JSON object on stdin and answers with one on stdout, `{"pid": ...}` or `{"error": ...}`. Standard library
and `node/` alone: it runs as `python -I -S` to be small, and lives as long as its node.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from multinode.node.facts.cgroups import find_hierarchy
from multinode.node.files import read_mounts

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWIPC = 0x08000000
_CLONE_NEWPID = 0x20000000
_CLONE_NEWNET = 0x40000000

_MS_RDONLY = 1
_MS_REMOUNT = 1 << 5
_MS_BIND = 1 << 12
_MS_REC = 1 << 14
_MS_PRIVATE = 1 << 18
_MNT_DETACH = 2

# Mounts of these kinds are not disks: a node has its own of them, or none.
_NO_DISKS = frozenset(
    [
        "autofs",
        "binfmt_misc",
        "bpf",
        "cgroup",
        "cgroup2",
        "configfs",
        "debugfs",
        "devpts",
        "devtmpfs",
        "efivarfs",
        "fusectl",
        "hugetlbfs",
        "mqueue",
        "nsfs",
        "proc",
        "pstore",
        "ramfs",
        "rpc_pipefs",
        "securityfs",
        "selinuxfs",
        "squashfs",
        "sysfs",
        "tmpfs",
        "tracefs",
    ]
)

# What lies below these a node has of its own, in any case.
_OWN_PLACES = ("/run/", "/proc/", "/sys/", "/dev/")
# In memory on many machines, and yet a place where a checkout may lie.
_TMP = "/tmp"  # noqa: S108 - the node's view of it is its own

_LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Become a node's first process, or say why not."""
    config = json.load(sys.stdin)
    try:
        pid = start(config)
    except OSError as error:
        answer: dict[str, Any] = {"error": str(error)}
    else:
        answer = {"pid": pid}
    os.write(1, json.dumps(answer).encode())
    os._exit("error" in answer)


def start(config: dict[str, Any]) -> int:
    """Fork process 1 of the node and wait until its sshd was started; returns its number outside the node."""
    with Path(config["namespace"]).open("rb") as namespace:
        _check(_LIBC.setns(namespace.fileno(), _CLONE_NEWNET), "setns")
    flags = _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWPID
    _check(_LIBC.unshare(flags), "unshare")
    if config["cores"]:
        os.sched_setaffinity(0, config["cores"])
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        run_node(config, writer)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        words = pipe.read()
    if words != "ready":
        raise OSError(words or "process 1 of the node died")
    return pid


def run_node(config: dict[str, Any], writer: int) -> NoReturn:
    """Process 1: set the node up, tell the parent, reap for ever."""
    try:
        mount_root(config)
        Path("/proc/sys/kernel/hostname").write_text(config["name"])
        for file in config["files"]:
            write_file(Path(file["path"]), file["text"], file["mode"])
        unlock_root(Path("/etc/shadow"))
        for path in config["executables"]:
            if not os.access(path, os.X_OK):
                os.write(writer, f"{path} does not exist on the node or is not executable".encode())
                os._exit(1)
        # The parent's stdout ends with the parent, so nothing of the node may hold it.
        null = os.open("/dev/null", os.O_RDWR)
        for fd in (0, 1):
            os.dup2(null, fd)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        sshd = config["executables"][0]
        # The unprivileged part of sshd is confined to this directory.
        Path("/run/sshd").mkdir(mode=0o755)
        os.posix_spawn(sshd, [sshd, "-D", "-e"], {"PATH": os.defpath}, setsigmask=())
    except OSError as error:
        os.write(writer, str(error).encode())
        os._exit(1)
    os.write(writer, b"ready")
    os.close(writer)
    reap_for_ever()


def reap_for_ever() -> NoReturn:
    """Collect every orphan; a node without processes is still a node."""
    while True:
        signal.sigwait({signal.SIGCHLD})
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def mount_root(config: dict[str, Any]) -> None:
    """Replace the root: overlays over the controller's disks, everything written goes to a tmpfs of the node's own."""
    mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    store = Path(config["store"])
    mount("tmpfs", store, "tmpfs", options=f"size={config['disk_bytes']},mode=755")
    root = store / "root"
    for index, disk in enumerate(["/", *submounts(), "/dev"]):
        mount_overlay(store / f"layer{index}", disk, root, needed=disk in {"/", "/dev"})
    mount("proc", root / "proc", "proc")
    mount("sysfs", root / "sys", "sysfs")
    mount_cgroups(root / "sys/fs/cgroup")
    mount("devpts", root / "dev/pts", "devpts", options="newinstance,ptmxmode=0666,mode=620,gid=5")
    mount("tmpfs", root / "dev/shm", "tmpfs", options=f"size={config['disk_bytes']},mode=1777")
    for name, mode in (("run", 0o755), ("root/.ssh", 0o700)):
        mount_own(store / "own" / name, root / name, mode)
    for path in config["shared_files"]:
        share_file(path, root)
    for place, text in config["kernel_files"].items():
        file = store / place.replace("/", "_")
        file.write_text(text + "\n")
        mount(file, root / place.lstrip("/"), None, _MS_BIND)
    os.chdir(root)
    # The new root is mounted over the old one, and the old one, now beneath it, is let go.
    _check(_LIBC.pivot_root(b".", b"."), "pivot_root")
    _check(_LIBC.umount2(b".", _MNT_DETACH), "umount the controller's root")
    os.chdir("/")


def mount_overlay(layer: Path, disk: str, root: Path, *, needed: bool) -> None:
    """Mount a writable view of one of the controller's disks; one that cannot be overlaid is left out."""
    upper, work = layer / "upper", layer / "work"
    for directory in (upper, work):
        directory.mkdir(parents=True)
    root.mkdir(exist_ok=True)
    status = Path(disk).stat()
    upper.chmod(status.st_mode & 0o7777)
    os.chown(upper, status.st_uid, status.st_gid)
    options = f"lowerdir={disk},upperdir={upper},workdir={work},redirect_dir=on"
    source = "mn-dev" if disk == "/dev" else "mn-disk"
    try:
        mount(source, root / disk.lstrip("/"), "overlay", options=options)
    except OSError:
        if needed:
            raise


def mount_cgroups(target: Path) -> None:
    """Show the node which control groups hold its processors and memory, as containers do; it may change none."""
    trees: dict[str, str] = {}
    for controller in ("cpu", "memory"):
        tree = find_hierarchy(controller)
        if tree is not None:
            # Version 1 has a tree for each controller.
            trees["unified" if tree.unified else controller] = tree.place
    if not trees or not target.is_dir():
        return
    if trees.keys() == {"unified"}:
        mount_read_only(trees["unified"], target)
        return
    mount("tmpfs", target, "tmpfs", options="size=64k,mode=755")
    for name, place in trees.items():
        (target / name).mkdir()
        mount_read_only(place, target / name)


def mount_read_only(place: str, target: Path) -> None:
    """Mount a directory of the controller's as it is, and let the node change nothing in it."""
    mount(place, target, None, _MS_BIND)
    mount("none", target, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY)


def mount_own(own: Path, target: Path, mode: int) -> None:
    """Mount an empty directory of the node's own over one of the controller's."""
    own.mkdir(parents=True)
    own.chmod(mode)
    target.mkdir(parents=True, exist_ok=True)
    mount(own, target, None, _MS_BIND)


def share_file(path: str, root: Path) -> None:
    """Show the node a device or a file as it is on the controller, mounted over another one as it may be."""
    target = root / path.lstrip("/")
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    mount(path, target, None, _MS_BIND)


def submounts() -> Iterator[str]:
    """Further disks that the controller has mounted, such as /home: an overlay of / does not see into them."""
    for mount in read_mounts():
        own = mount.place.startswith(_OWN_PLACES) or (mount.filesystem in _NO_DISKS and mount.place != _TMP)
        # These would have to be escaped as overlay's options; no disk is mounted at such a place.
        if mount.place != "/" and not own and not set(mount.place) & set(":,\\ \t\n") and Path(mount.place).is_dir():
            yield mount.place


def write_file(path: Path, text: str, mode: int) -> None:
    """Write a file of the node's own, in place of whatever the controller has there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
    path.chmod(mode)


def unlock_root(shadow: Path) -> None:
    """Without PAM sshd turns a locked account away, and Ubuntu locks root's: no password instead of a locked one."""
    lines = shadow.read_text().splitlines(keepends=True)
    unlocked = [line.replace("root:!", "root:*", 1) if line.startswith("root:!") else line for line in lines]
    if unlocked != lines:
        write_file(shadow, "".join(unlocked), 0o600)


def mount(source: str | Path, target: str | Path, kind: str | None, flags: int = 0, options: str = "") -> None:
    """Let the kernel mount it (mount, section 2 of the manual)."""
    data = [os.fsencode(source), os.fsencode(target), kind.encode() if kind else None]
    _check(_LIBC.mount(*data, ctypes.c_ulong(flags), options.encode() or None), f"mount {kind or 'bind'} at {target}")


def _check(result: int, call: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
