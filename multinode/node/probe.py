"""The verb `probe`: reads the facts of this node, without judging them."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Optional, Union

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
from .facts.model_count import digest_config, model_directory, parse_count, query_count
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
from .facts.torch_devices import AnswerCache, parse_devices, query_devices
from .facts.unknown import NO_ANSWER, NOT_ASKED, Unknown, entries, found, or_empty, or_none
from .files import Mount, read_mounts
from .nccl_files import find_inspector
from .programs import Query, find_program
from .run.runs import find_run_processes

_RESOLVE_S = 3.0
# The deadline of nvidia-smi, too.
_TOOL_S = 30.0
# Importing torch from a cold disk; and the whole probe, for which the controller waits 45 s.
_TORCH_S = 20.0
_PROBE_S = 40.0
# Importing transformers, too, for which a probe of its own is asked.
_COUNT_S = 120.0
_LATE = {"hostname_address": f"the resolver did not answer within {_RESOLVE_S:.0f} s"}
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
        self._hung: list[Record] = []
        self._began = time.monotonic()
        # The job's directory and interpreter, once they are known.
        self._place: dict[str, Optional[str]] = {"cwd": None, "python": None}

    def collect(self) -> Record:
        """All facts, by the names of NodeFacts."""
        readings = self._begin_reading()
        cwd = self._take_cwd(readings)
        self._place["cwd"] = or_none(cwd)
        python = self._take_python(readings)
        self._place["python"] = or_none(python)
        # Slow queries start first, so that everything else is read meanwhile.
        keys: list[str] = self._request.get("arguments", [])
        modules: list[str] = self._request.get("modules", [])
        is_asked = keys or modules or self._request.get("packages")
        query: Union[Query, Unknown] = python if isinstance(python, Unknown) else Unknown(NOT_ASKED)
        if is_asked and not isinstance(python, Unknown):
            query = query_packages(python, self._place["cwd"], keys, modules)
        gpus = self._query_gpus()
        others = self._query_others() if gpus is None else None
        folder = self._place["cwd"] or "/"
        contents = ContentReader(self._request.get("contents", []), self._request.get("datasets", []), folder)
        facts = {**read_machine(), **self._read_network(), "python": python, "cwd": cwd}
        facts["paths"] = self._take_paths(readings, folder)
        facts["noexec"] = entries(self._take(readings, "noexec"))
        plugin = self._take(readings, "nccl_inspector")
        facts["nccl_inspector"] = Unknown("no such library was found") if plugin is None else plugin
        facts["model"] = entries(self._take(readings, "model"))
        facts.update(_read_variables(dict(os.environ)))
        facts["hostname_address"] = self._take(readings, "hostname_address")
        readings.close()
        facts.update(self._read_gpus(gpus))
        if others is not None:
            facts.update(_read_others(*others))
        installed = _answer(query, self._request.get("packages"), parse_packages)
        facts.update(_facts_of(installed))
        facts["torch_devices"] = self._read_devices(installed, facts)
        self._count_model(facts)
        facts["unknown_arguments"] = entries(_answer(query, keys, parse_unknown))
        facts["absent_modules"] = _answer(query, modules, parse_absent)
        facts.update(self._read_tools(installed), contents=contents.facts(), hung_paths=self._hung)
        # The clock is read last: the controller compares it with its own when the answer arrives.
        return {**facts, "time_s": time.time()}

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

    def _take(self, readings: Readings, name: str) -> Any:
        try:
            return found(partial(readings.take, name))
        except LateError:
            return Unknown(_LATE.get(name, f"not read within {READ_S:g} s"))

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

    def _take_cwd(self, readings: Readings) -> Union[str, Unknown]:
        cwd, home = self._asked_cwd(), os.path.expanduser("~")
        try:
            is_there = readings.take("cwd")
        except LateError:
            self._note_hung(cwd or home, home)
            return Unknown(NO_ANSWER)
        if cwd is not None and is_there:
            return cwd
        return home if self._request.get("workdir") is None else Unknown(f"{cwd} is not a directory")

    def _read_python(self) -> str:
        python = find_interpreter(self._request.get("python"), self._path, self._place["cwd"])
        self._place["python"] = python
        return python

    def _take_python(self, readings: Readings) -> Union[str, Unknown]:
        given: Optional[str] = self._request.get("python")
        try:
            python: Union[str, Unknown] = found(partial(readings.take, "python"))
        except LateError:
            if given is not None:
                self._note_hung(given, "/")
            return Unknown(f"{given or 'python3'} was not found within {READ_S:g} s")
        return python

    def _look_at(self, path: str, mounts: list[Mount]) -> Record:
        return look_at(path, self._place["cwd"] or "/", mounts)

    def _take_paths(self, readings: Readings, cwd: str) -> list[Record]:
        return [look for path in self._request.get("paths", []) if (look := self._take_path(readings, path, cwd))]

    def _take_path(self, readings: Readings, path: str, cwd: str) -> Optional[Record]:
        try:
            look: Union[Record, Unknown] = found(partial(readings.take, f"path {path}"))
        except LateError:
            self._note_hung(path, cwd)
            return None
        return {"path": path, "kind": look} if isinstance(look, Unknown) else look

    def _note_hung(self, path: str, cwd: str) -> None:
        # Links are not followed, since that would hang, too.
        mount = find_mount(os.path.normpath(os.path.join(cwd, os.path.expanduser(path))), read_mounts())
        place = {"filesystem": mount.filesystem, "device": mount.device, "place": mount.place} if mount else {}
        self._hung.append({"path": path, **place})

    def _read_network(self) -> Record:
        interfaces = found(list_interfaces)
        return {
            "interfaces": interfaces,
            "port_range": found(read_port_range),
            "routes": find_routes(self._request.get("peers", []), or_empty(interfaces)),
            "ports": self._read_ports(),
        }

    def _read_ports(self) -> list[Record]:
        taken = {port: found(partial(is_port_taken, port)) for port in self._request.get("ports", [])}
        held = [port for port, is_taken in taken.items() if is_taken is True]
        users = find_port_users(held) if held else {}
        return [{"port": port, "taken": is_taken, "user": users.get(port)} for port, is_taken in taken.items()]

    def _query_gpus(self) -> Optional[tuple[Query, Query]]:
        program = find_nvidia_smi(self._path)
        return None if program is None else (query_gpus(program), query_processes(program))

    def _query_others(self) -> Optional[tuple[str, Query]]:
        """Query the first other vendor whose program is on PATH."""
        for kind, tool in TOOLS.items():
            program = find_program(tool.program, self._path)
            if program is not None:
                return kind, Query([program, *tool.arguments], deadline_s=_TOOL_S)
        return None

    def _read_gpus(self, queries: Optional[tuple[Query, Query]]) -> Record:
        ours = found(find_run_processes)
        gpus: Any = Unknown("nvidia-smi not found")
        waited_s = None
        if queries is not None:
            table, processes = queries
            gpus = found(lambda: parse_gpus(table.answer()))
            holders = found(lambda: parse_processes(processes.answer()))
            if not isinstance(gpus, Unknown):
                gpus = join_processes(gpus, holders, {process["pid"]: process["run_id"] for process in or_empty(ours)})
            waited_s = table.waited_s
        return {
            "gpus": gpus,
            "accelerator": "cuda" if or_empty(gpus) else None,
            "gpu_query_s": Unknown("multinode did not wait for nvidia-smi") if waited_s is None else waited_s,
            "run_processes": ours,
            "rdma": list_rdma_ports(),
        }

    def _read_devices(self, installed: Union[Installed, Unknown], facts: Record) -> Record:
        """Ask torch whether it can use these GPUs: nothing else can tell."""
        env: Optional[dict[str, str]] = self._request.get("torch_env")
        python, kind = self._place["python"], facts["accelerator"]
        if isinstance(installed, Unknown):
            return installed
        if env is None or python is None:
            return Unknown(NOT_ASKED)
        unusable = _why_unusable(installed, kind, facts["gpus"])
        if unusable is not None:
            return unusable
        cache = AnswerCache(os.path.expanduser("~"), "torch-devices")
        gpus = [[gpu["uuid"], gpu["driver"]] for gpu in facts["gpus"]]
        key = cache.key(env, python, installed.torch_build, or_none(facts["boot_id"]), gpus)
        devices = cache.get(key)
        if devices is None:
            left_s = min(_TORCH_S, _PROBE_S - (time.monotonic() - self._began))
            query = query_devices(python, self._place["cwd"], env, left_s)
            devices = found(lambda: parse_devices(query.answer()))
            if not isinstance(devices, Unknown) and devices["available"]:
                cache.put(key, devices)
        return devices if isinstance(devices, Unknown) else {"is": "devices", **devices}

    def _count_model(self, facts: Record) -> None:
        """Add the tensors of a model that the controller cannot count to the facts of its config.json."""
        question: Optional[Record] = self._request.get("count")
        model, python = facts["model"], self._place["python"]
        if question is None or isinstance(model, Unknown) or python is None:
            return
        values = model["values"]
        # A probe that asks this asks for no packages.
        installed = found(lambda: parse_packages(query_packages(python, self._place["cwd"]).answer()))
        if isinstance(installed, Unknown):
            values["uncounted"] = installed["reason"]
            return
        folder = model_directory(self._request["model"], self._place["cwd"] or "/")
        cache = AnswerCache(os.path.expanduser("~"), "model-counts")
        key = cache.key({}, question, python, installed.packages, digest_config(folder))
        counted = cache.get(key)
        if counted is None:
            query = query_count(python, folder, question, _COUNT_S)
            counted = found(lambda: parse_count(query.answer()))
            if not isinstance(counted, Unknown):
                cache.put(key, counted)
        if isinstance(counted, Unknown):
            values["uncounted"] = counted["reason"]
        else:
            values["counted"] = counted

    def _read_model(self, cwd: str) -> Record:
        model: Optional[str] = self._request.get("model")
        if model is None:
            raise LookupError(NOT_ASKED)
        return read_model(model, cwd)

    def _read_tools(self, installed: Union[Installed, Unknown]) -> Record:
        names: list[str] = self._request.get("tools", [])
        python = self._place["python"]
        tools = find_tools(names, python, self._path)
        lost = [name for name in names if name not in tools]
        # An interpreter without torch is often the wrong one, so the user's shell is asked for another.
        if names and (python is None or (isinstance(installed, Installed) and "torch" not in installed.packages)):
            lost.append("python3")
        interactive = found(lambda: parse_tools(query_interactive(lost).answer(), lost)) if lost else {}
        other = None if isinstance(interactive, Unknown) else interactive.pop("python3", None)
        if other is not None and other != python and _has_torch(other):
            interactive["python3"] = other
        return {"tools": tools, "interactive": entries(interactive)}


def _read_others(kind: str, query: Query) -> Record:
    gpus = found(lambda: TOOLS[kind].parse(query.answer()))
    return {"gpus": gpus, "accelerator": kind if or_empty(gpus) else None}


def _answer(query: Union[Query, Unknown], asked: Any, parse: Callable[[str], Any]) -> Any:
    """A part of what the interpreter answers, if that was asked for."""
    if isinstance(query, Unknown):
        return query
    return found(lambda: parse(query.answer())) if asked else Unknown(NOT_ASKED)


def _facts_of(installed: Union[Installed, Unknown]) -> Record:
    if isinstance(installed, Unknown):
        return dict.fromkeys(("packages", *_INSTALLED), installed)
    return {**{name: getattr(installed, name) for name in _INSTALLED}, "packages": entries(installed.packages)}


def _why_unusable(installed: Installed, kind: Optional[str], gpus: Any) -> Optional[Unknown]:
    """Why torch uses no devices of this kind; None if it may."""
    if kind is None:
        return gpus if isinstance(gpus, Unknown) else Unknown("no device is listed")
    if kind not in _TORCH_CUDA:
        return Unknown(f"not queried for {kind} devices")
    if installed.torch_build is None:
        return Unknown("torch is not installed")
    version = installed.cuda_version
    return version if kind == "cuda" and isinstance(version, Unknown) else None


def _has_torch(python: str) -> bool:
    installed = found(lambda: parse_packages(query_packages(python, None).answer()))
    return isinstance(installed, Installed) and "torch" in installed.packages


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
