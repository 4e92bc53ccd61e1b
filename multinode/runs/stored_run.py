"""StoredRun: a run on disk, and which runs there are. Decodes; judges and prints nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import msgspec

from multinode.cluster.cluster import Cluster
from multinode.cluster.facts import NodeFacts
from multinode.errors import MultinodeError, UsageError
from multinode.levers.levers import NONE, Levers
from multinode.model.workload import Workload
from multinode.profile.observed import Observed, observe_run
from multinode.profile.summary import Summary
from multinode.records.invocation import Invocation
from multinode.records.plan import CODE_FILE, CodeCopy, LaunchPlan
from multinode.records.run import VERDICT_FILE, EarlyVerdict, Run
from multinode.records.run_directory import RunDirectory, list_runs, scan_runs
from multinode.runs.document import RESULTS, RunDocument
from multinode.stats.unknown import or_none

T = TypeVar("T")

# What is read from disk, of which the rest follows.
_PARTS = {"run", "plan", "summary", "workload", "facts", "cluster", "verdict", "observed", "model", "results"}


class StoredRun:
    """A run on disk. Each part is decoded when it is first used. A missing part is None.

    If a part cannot be decoded, using it raises MultinodeError.

    Args:
        directory: its files.
        say: is told of long reading.
    """

    def __init__(self, directory: RunDirectory, say: Callable[[str], None] = lambda _: None) -> None:
        self.directory = directory
        self.results: dict[Callable[[RunDirectory], Any], Any] = {}  # what `result` has read, by its reader
        self._say = say

    @classmethod
    def open(cls, root: Path, run_id: str, say: Callable[[str], None] = lambda _: None) -> StoredRun:
        """One run, by a unique beginning of its id; `last` is the newest.

        Raises:
            UsageError: there is none of this name, or several match.
        """
        return cls(RunDirectory.open(root, run_id), say)

    def having(self, **parts: Any) -> Self:
        """A copy with other parts than those on disk, by their names; what follows from them is found anew."""
        other = type(self)(self.directory, self._say)
        vars(other).update({name: part for name, part in vars(self).items() if name in _PARTS} | parts)
        return other

    @property
    def run_id(self) -> str:
        """Its name."""
        return self.directory.run_id

    @cached_property
    def run(self) -> Run:
        """Its record; a run of runs that says `running` though nobody is at it was stopped.

        Raises:
            UsageError: the directory is no run.
        """
        run = self.directory.read_run()
        if run is None:
            raise UsageError(f"{self.directory.path} is not a run: it has no run.json")
        # The controller holds the directory of what consists of runs until the end.
        held = run.has_parts and (run.kind != "launch" or bool(run.attempts))
        if run.status == "running" and held and not self.directory.is_locked:
            return msgspec.structs.replace(run, status="stopped")
        return run

    @cached_property
    def plan(self) -> LaunchPlan | None:
        """What was launched; None for a run of runs and an import."""
        return self.directory.read("plan.json", LaunchPlan)

    @cached_property
    def summary(self) -> Summary | None:
        """Its figures; None if it ended too early."""
        return self.directory.read("summary.json", Summary)

    @cached_property
    def workload(self) -> Workload | None:
        """The training; None for benchmarks."""
        return self.directory.read("workload.json", Workload)

    @cached_property
    def facts(self) -> dict[str, NodeFacts]:
        """Facts of each probed node, by its name, in node-rank order."""
        return {fact.node: fact for fact in self.directory.read("facts.json", list[NodeFacts]) or ()}

    @cached_property
    def cluster(self) -> Cluster | None:
        """The nodes of its hostfile, in node-rank order."""
        return self.directory.read("cluster.json", Cluster)

    @cached_property
    def verdict(self) -> EarlyVerdict | None:
        """Whether one node was found to be faster while it ran."""
        return self.directory.read(VERDICT_FILE, EarlyVerdict)

    @cached_property
    def observed(self) -> Observed:
        """The samples of its nodes, as far as they were fetched.

        Raises:
            UsageError: it launched nothing itself.
        """
        return observe_run(self.directory, self.require_plan(), self._say)

    @cached_property
    def sampled(self) -> StoredRun | None:
        """The run that has its samples: after restarts its last attempt, else itself; None if it launched nothing."""
        if self.run.attempts:
            path = self.directory.path.with_name(self.run.attempts[-1].run_id)
            # Another user's directory may have the name of an attempt that is no more.
            return StoredRun(RunDirectory(path), self._say) if path in list_runs(path.parent) else None
        return self if self.plan is not None else None

    def result(self, read: Callable[[RunDirectory], T]) -> T:
        """What a verb has left in its directory, read once by that verb's reader."""
        if read not in self.results:
            self.results[read] = read(self.directory)
        found: T = self.results[read]
        return found

    @property
    def levers(self) -> Levers:
        """What changed its training."""
        return self.plan.levers if self.plan is not None else NONE

    @cached_property
    def node_names(self) -> tuple[str, ...]:
        """In node-rank order; empty if it launched nothing itself, as all that follows from its plan."""
        return tuple(place.node for place in self.plan.places) if self.plan is not None else ()

    @cached_property
    def workers(self) -> tuple[int, ...]:
        """Of each node, in node-rank order."""
        return self.plan.workers if self.plan is not None else ()

    @cached_property
    def devices(self) -> tuple[dict[str, int], ...]:
        """Of each node, how many workers compute on which; empty if unknown."""
        from multinode.runs.devices import devices_of

        return devices_of(self.plan, self.facts) if self.plan is not None else ()

    @cached_property
    def cores(self) -> tuple[int | None, ...]:
        """Processors of each node; None if unknown, or shared with other nodes, as those of a lab are."""
        own = {node.name for node in self.cluster.nodes if not node.is_virtual} if self.cluster is not None else set()
        return tuple(
            or_none(self.facts[name].cores) if name in own & set(self.facts) else None for name in self.node_names
        )

    @cached_property
    def price_per_hour(self) -> float | None:
        """Of its nodes together, by the hostfile; None if one of them has none."""
        return self._price("hourly")

    @cached_property
    def price_purchase(self) -> float | None:
        """The price to buy its nodes; None if unknown."""
        return self._price("purchase")

    def _price(self, kind: Literal["hourly", "purchase"]) -> float | None:
        plan, cluster = self.plan, self.cluster
        if plan is None or cluster is None:
            return None
        from multinode.profile.measured import hostfile_price

        return hostfile_price(plan, cluster, kind)

    @cached_property
    def link_gbit_per_s(self) -> float | None:
        """Rate of the slowest NIC, as in LaunchPlan."""
        return self.plan.link_gbit_per_s if self.plan is not None else None

    @cached_property
    def model(self) -> dict[str, Any] | None:
        """The config.json of its model, as node 0 has it."""
        return next((facts.model_config for facts in self.facts.values()), None)

    @property
    def command(self) -> Invocation | None:
        """The command line that started it; None if none did."""
        return self.run.command

    @property
    def part_of(self) -> str | None:
        """The id of the run that it is a part of; None for a run by itself."""
        return self.run.part_of

    def require_plan(self) -> LaunchPlan:
        """The plan.

        Raises:
            UsageError: it launched nothing itself.
        """
        if self.plan is None:
            raise UsageError(f"run {self.run_id} consists of other runs", hint="list them: multinode runs --all")
        return self.plan

    def require_summary(self) -> Summary:
        """The figures of a training.

        Raises:
            UsageError: it is no training, or ended too early.
        """
        if self.plan is None or self.summary is None:
            raise UsageError(
                f"run {self.run_id} has no training figures",
                hint="name runs of launch, or the two sides of a contrast; list them: multinode runs",
            )
        return self.summary

    def document(self, run: Run | None = None) -> RunDocument:
        """The run as JSON, with its results.

        Args:
            run: its record, if that is newer than the one on disk.
        """
        record = run or self.run
        fields: dict[str, Any] = {name: getattr(record, name) for name in Run.__struct_fields__ if name != "schema"}
        fields |= {name: self.directory.read(file, dict[str, Any]) for name, file in RESULTS.items()}
        return RunDocument(
            **fields,
            directory=str(self.directory),
            code=self.directory.read(CODE_FILE, CodeCopy),
            summary=self.summary,
            early_verdict=self.verdict,
        )


def load_run(root: Path, run_id: str, say: Callable[[str], None] = lambda _: None) -> StoredRun:
    """One run, with its record; `say` is told of long reading.

    Raises:
        UsageError: there is none of this name.
        MultinodeError: its record cannot be read.
    """
    stored = StoredRun.open(root, run_id, say)
    _ = stored.run
    return stored


def load_runs(root: Path, tell: Callable[[str], None] = lambda _: None) -> list[StoredRun]:
    """All runs, oldest first; `tell` is called with those that cannot be read."""
    folders = scan_runs(root)
    for ignored in folders.ignored.values():
        tell(ignored)
    runs = []
    for path in folders.ours:
        stored = StoredRun(RunDirectory(path))
        try:
            _ = stored.run, stored.summary
        except MultinodeError as error:
            tell(error.message)
        else:
            runs.append(stored)
    return runs


def load_parts(root: Path, whole: Run) -> list[StoredRun]:
    """The runs of a bench, sweep, contrast, try or launch with restarts, in the order in which they ended."""
    parts = []
    for path in list_runs(root):
        stored = StoredRun(RunDirectory(path))
        # A record that cannot be read is of no part that could be shown.
        with contextlib.suppress(MultinodeError):
            if stored.part_of == whole.run_id:
                parts.append(stored)
    return parts


def launched_runs(root: Path, stored: StoredRun) -> list[StoredRun]:
    """The run itself if it started processes, otherwise its parts; nothing for an import."""
    return [stored] if stored.run.nodes and not stored.run.has_parts else load_parts(root, stored.run)


def whole_runs(runs: Sequence[StoredRun]) -> list[StoredRun]:
    """Runs that are no part of another one of them: of a bench, sweep, contrast or tune, or an attempt."""
    names = {stored.run_id for stored in runs}
    return [stored for stored in runs if stored.part_of not in names]
