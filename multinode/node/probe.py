"""The verb `probe`: reads the facts of this node, without judging them. An unknown fact has a reason in `missing`."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Optional

from .channel import Channel, Record
from .facts.aside import READ_S, LateError, Readings
from .facts.files import ContentReader, find_mount, find_noexec, look_at, read_model
from .facts.gpus import (
    TOOLS,
    find_nvidia_smi,
    join_processes,
    parse_gpus,
    parse_processes,
    query_gpus,
    query_processes,
)
from .facts.network import find_port_users, find_routes, is_port_taken, list_interfaces, read_port_range
from .facts.nics import list_rdma_ports
from .facts.software import (
    Installed,
    find_interpreter,
    find_tools,
    parse_absent,
    parse_packages,
    parse_tools,
    parse_unknown,
    query_interactive,
    query_packages,
    read_deepspeed_env,
    read_machine,
    read_nccl_files,
    select_variables,
)
from .facts.torch_devices import DeviceCache, parse_devices, query_devices
from .files import Mount, read_mounts
from .nccl_files import find_inspector
from .programs import Query, QueryFailed, find_program
from .run.runs import find_run_processes

_RESOLVE_S = 3.0
# The deadline of nvidia-smi, too.
_TOOL_S = 30.0
# Importing torch from a cold disk; and the whole probe, for which the controller waits 45 s.
_TORCH_S = 20.0
_PROBE_S = 40.0
_LATE = {"hostname_address": f"the resolver did not answer within {_RESOLVE_S:.0f} s"}
_NOT_ASKED = "not asked for"
_INSTALLED = ("python_version", "cuda_version", "nccl_version")
# Kinds of accelerator that torch addresses as `cuda`.
_TORCH_CUDA = ("cuda", "rocm")


def run(request: Record, channel: Channel) -> None:
    """The verb `probe`: emits one record `facts`."""
    channel.emit({"kind": "facts", **Probe(request).collect()})


class Probe:
    """One look at the node."""

    def __init__(self, request: Record) -> None:
        self._request = request
        self._path = os.environ.get("PATH", os.defpath)
        self._missing: dict[str, str] = {}
        self._hung: list[Record] = []
        self._began = time.monotonic()
        # The job's directory and interpreter, once they are known.
        self._place: dict[str, Optional[str]] = {"cwd": None, "python": None}

    def collect(self) -> Record:
        """All facts, by the names of NodeFacts."""
        readings = self._begin_reading()
        cwd = self._place["cwd"] = self._take_cwd(readings)
        python = self._place["python"] = self._take_python(readings)
        # Slow queries start first, so that everything else is read meanwhile.
        keys: list[str] = self._request.get("arguments", [])
        modules: list[str] = self._request.get("modules", [])
        is_asked = keys or modules or self._request.get("packages")
        packages = query_packages(python, cwd, keys, modules) if python and is_asked else None
        gpus = self._query_gpus()
        others = self._query_others() if gpus is None else None
        contents = ContentReader(self._request.get("contents", []), self._request.get("datasets", []), cwd or "/")
        facts = {**self._read_machine(), **self._read_network(), "python": python, "cwd": cwd}
        facts["paths"] = self._take_paths(readings, cwd or "/")
        facts["noexec"] = self._take(readings, "noexec") or {}
        facts["nccl_inspector"] = self._take(readings, "nccl_inspector")
        if facts["nccl_inspector"] is None:
            self._missing.setdefault("nccl_inspector", "no such library was found")
        facts["model"] = self._take(readings, "model")
        facts.update(_read_variables(dict(os.environ)))
        facts["hostname_address"] = self._take(readings, "hostname_address")
        readings.close()
        facts.update(self._read_gpus(gpus))
        installed = self._read_packages(packages if self._request.get("packages") else None)
        facts.update({name: getattr(installed, name, None) for name in _INSTALLED})
        facts["packages"] = installed.packages if installed is not None else {}
        facts["accelerator"] = "cuda" if facts["gpus"] else None
        if others is not None:
            facts.update(self._read_others(*others))
        if facts["accelerator"] is None:
            self._missing["accelerator"] = self._missing.get("gpus", "no device is listed")
        facts["torch_devices"] = self._read_devices(installed, facts)
        facts["unknown_arguments"] = self._read_arguments(packages if keys else None)
        facts["absent_modules"] = self._read_modules(packages if modules else None)
        facts.update(self._read_tools(python, facts["packages"]), contents=contents.facts(), hung_paths=self._hung)
        # The clock is read last: the controller compares it with its own when the answer arrives.
        return {**facts, "missing": self._missing, "time_s": time.time()}

    def _try(self, name: str, read: Callable[[], Any]) -> Optional[Any]:
        try:
            return read()
        except (OSError, ValueError, LookupError, QueryFailed) as error:
            self._missing[name] = str(error)
            return None

    def _begin_reading(self) -> Readings:
        """Start the reads that may never answer: those of the job's file systems, and a name server's."""
        paths, mounts = self._request.get("paths", []), read_mounts()
        readings = Readings()
        readings.add("cwd", self._read_cwd)
        readings.add("python", self._read_python)
        for path in paths:
            readings.add(f"path {path}", partial(self._look_at, path, mounts))
        readings.add("noexec", lambda: find_noexec(os.environ))
        readings.add("nccl_inspector", lambda: find_inspector(os.environ, self._place["python"]))
        readings.add("model", lambda: self._read_model(self._place["cwd"] or "/"))
        readings.add("hostname_address", _resolve_own_name, _RESOLVE_S)
        readings.start()
        return readings

    def _take(self, readings: Readings, name: str) -> Optional[Any]:
        try:
            return readings.take(name)
        except LateError:
            self._missing[name] = _LATE.get(name, f"not read within {READ_S:g} s")
        except ValueError as error:
            self._missing[name] = str(error)
        return None

    def _asked_cwd(self) -> Optional[str]:
        """The job's directory as requested: the hostfile's, else the controller's own."""
        workdir: Optional[str] = self._request.get("workdir")
        same: Optional[str] = self._request.get("controller_cwd")
        return os.path.join(os.path.expanduser("~"), os.path.expanduser(workdir)) if workdir is not None else same

    def _read_cwd(self) -> bool:
        cwd = self._asked_cwd()
        is_there = cwd is not None and os.path.isdir(cwd)
        # Later readings in the same child start from it.
        self._place["cwd"] = cwd if is_there else os.path.expanduser("~")
        return is_there

    def _take_cwd(self, readings: Readings) -> Optional[str]:
        cwd, home = self._asked_cwd(), os.path.expanduser("~")
        try:
            is_there = readings.take("cwd")
        except LateError:
            self._note_hung(cwd or home, home)
            return None
        if is_there:
            return cwd
        if self._request.get("workdir") is None:
            return home
        self._missing["workdir"] = f"{cwd} is not a directory"
        return None

    def _read_python(self) -> tuple[Optional[str], str]:
        interpreter = find_interpreter(self._request.get("python"), self._path, self._place["cwd"])
        self._place["python"] = interpreter[0]
        return interpreter

    def _take_python(self, readings: Readings) -> Optional[str]:
        given: Optional[str] = self._request.get("python")
        python: Optional[str] = None
        try:
            python, reason = readings.take("python")
        except LateError:
            reason = f"{given or 'python3'} was not found within {READ_S:g} s"
            if given is not None:
                self._note_hung(given, "/")
        if python is None:
            self._missing["python"] = reason
        return python

    def _look_at(self, path: str, mounts: list[Mount]) -> Record:
        return look_at(path, self._place["cwd"] or "/", mounts)

    def _take_paths(self, readings: Readings, cwd: str) -> list[Record]:
        return [look for path in self._request.get("paths", []) if (look := self._take_path(readings, path, cwd))]

    def _take_path(self, readings: Readings, path: str, cwd: str) -> Optional[Record]:
        try:
            look: Record = readings.take(f"path {path}")
        except LateError:
            self._note_hung(path, cwd)
        except ValueError as error:
            self._missing[f"path {path}"] = str(error)
        else:
            return look
        return None

    def _note_hung(self, path: str, cwd: str) -> None:
        # Links are not followed, since that would hang, too.
        mount = find_mount(os.path.normpath(os.path.join(cwd, os.path.expanduser(path))), read_mounts())
        place = {"filesystem": mount.filesystem, "device": mount.device, "place": mount.place} if mount else {}
        self._hung.append({"path": path, **place})

    def _read_machine(self) -> Record:
        facts, missing = read_machine()
        self._missing.update(missing)
        return facts

    def _read_network(self) -> Record:
        interfaces = self._try("interfaces", list_interfaces) or []
        return {
            "interfaces": interfaces,
            "port_range": self._try("port_range", read_port_range),
            "routes": find_routes(self._request.get("peers", []), interfaces),
            "port_users": self._read_port_users(),
        }

    def _read_port_users(self) -> dict[str, str]:
        ports: list[int] = self._request.get("ports", [])
        taken = [port for port in ports if self._try(f"port {port}", partial(is_port_taken, port))]
        return {str(port): user for port, user in find_port_users(taken).items()} if taken else {}

    def _query_gpus(self) -> Optional[tuple[Query, Query]]:
        program = find_nvidia_smi(self._path)
        if program is None:
            self._missing["gpus"] = "nvidia-smi not found"
            return None
        return query_gpus(program), query_processes(program)

    def _query_others(self) -> Optional[tuple[str, Query]]:
        """Query the first other vendor whose program is on PATH."""
        for kind, tool in TOOLS.items():
            program = find_program(tool.program, self._path)
            if program is not None:
                return kind, Query([program, *tool.arguments], deadline_s=_TOOL_S)
        return None

    def _read_others(self, kind: str, query: Query) -> Record:
        del self._missing["gpus"]
        gpus = self._try("gpus", lambda: TOOLS[kind].parse(query.answer())) or []
        return {"gpus": gpus, "accelerator": kind if gpus else None}

    def _read_gpus(self, queries: Optional[tuple[Query, Query]]) -> Record:
        ours = self._try("run_processes", find_run_processes) or []
        gpus: list[Record] = []
        if queries is not None:
            table, processes = queries
            listed = self._try("gpus", lambda: parse_gpus(table.answer())) or []
            holders = self._try("gpu_processes", lambda: parse_processes(processes.answer())) or []
            gpus = join_processes(listed, holders, {process["pid"]: process["run_id"] for process in ours})
        waited_s = queries[0].waited_s if queries is not None else None
        if waited_s is None:
            self._missing["gpu_query_s"] = "nvidia-smi was not waited for"
        return {"gpus": gpus, "gpu_query_s": waited_s, "run_processes": ours, "rdma": list_rdma_ports()}

    def _read_packages(self, query: Optional[Query]) -> Optional[Installed]:
        packages = None if query is None else self._try("packages", lambda: parse_packages(query.answer()))
        if packages is None:
            reason = self._missing.get("python", _NOT_ASKED)
            self._missing.setdefault("packages", reason)
            self._missing.update(dict.fromkeys(_INSTALLED, self._missing["packages"]))
        else:
            self._missing.update(packages.missing)
        return packages

    def _read_devices(self, installed: Optional[Installed], facts: Record) -> Optional[Record]:
        """Ask torch whether it can use these GPUs: nothing else can tell."""
        env: Optional[dict[str, str]] = self._request.get("torch_env")
        python, kind = self._place["python"], facts["accelerator"]
        if env is None or installed is None or python is None:
            self._missing["torch_devices"] = self._missing.get("packages", _NOT_ASKED)
        elif kind not in _TORCH_CUDA:
            self._missing["torch_devices"] = self._missing.get("accelerator", f"not asked of {kind} devices")
        elif installed.torch_build is None:
            self._missing["torch_devices"] = "torch is not installed"
        elif kind == "cuda" and installed.cuda_version is None:
            self._missing["torch_devices"] = installed.missing["cuda_version"]
        else:
            cache = DeviceCache(os.path.expanduser("~"))
            gpus = [[gpu["uuid"], gpu["driver"]] for gpu in facts["gpus"]]
            key = cache.key(env, python, installed.torch_build, facts["boot_id"], gpus)
            devices = cache.get(key)
            if devices is None:
                left_s = min(_TORCH_S, _PROBE_S - (time.monotonic() - self._began))
                query = query_devices(python, self._place["cwd"], env, left_s)
                devices = self._try("torch_devices", lambda: parse_devices(query.answer()))
                if devices is not None and devices["available"]:
                    cache.put(key, devices)
            return devices
        return None

    def _read_arguments(self, query: Optional[Query]) -> dict[str, Optional[str]]:
        if query is None:
            self._missing["unknown_arguments"] = self._missing.get("python", _NOT_ASKED)
            return {}
        return self._try("unknown_arguments", lambda: parse_unknown(query.answer())) or {}

    def _read_modules(self, query: Optional[Query]) -> list[str]:
        if query is None:
            self._missing["absent_modules"] = self._missing.get("python", _NOT_ASKED)
            return []
        return self._try("absent_modules", lambda: parse_absent(query.answer())) or []

    def _read_model(self, cwd: str) -> Record:
        model: Optional[str] = self._request.get("model")
        if model is None:
            raise LookupError(_NOT_ASKED)
        return read_model(model, cwd)

    def _read_tools(self, python: Optional[str], packages: dict[str, str]) -> Record:
        names: list[str] = self._request.get("tools", [])
        tools = find_tools(names, python, self._path)
        lost = [name for name in names if name not in tools]
        # An interpreter without torch is often the wrong one, so the user's shell is asked for another.
        torchless = bool(names) and (python is None or ("packages" not in self._missing and "torch" not in packages))
        if torchless:
            lost.append("python3")
        answers = self._try("interactive", lambda: parse_tools(query_interactive(lost).answer(), lost)) if lost else {}
        interactive = dict(answers or {})
        other = interactive.pop("python3", None)
        if other is not None and other != python and self._has_torch(other):
            interactive["python3"] = other
        return {"tools": tools, "interactive": interactive}

    def _has_torch(self, python: str) -> bool:
        packages = self._try("interactive", lambda: parse_packages(query_packages(python, None).answer()))
        return packages is not None and "torch" in packages.packages


def _resolve_own_name() -> str:
    """The address of the node's own name. The C library's resolver has no deadline and cannot be interrupted."""
    # As bytes: loading the codec for names that are not ASCII takes longer than the answer.
    name: Any = os.uname().nodename.encode()
    return socket.gethostbyname(name)


def _read_variables(env: dict[str, str]) -> Record:
    return {
        "env": select_variables(env),
        "nccl_files": read_nccl_files(env),
        "deepspeed_env": read_deepspeed_env(os.path.expanduser("~")),
    }
