"""What `contrast` was asked for, and the launch and the sides that it makes. Contacts no node."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from multinode.contrast.measure import ContrastRequest, Mode, cut_job
from multinode.decoding import parse_option
from multinode.launch.context import ExecuteOptions, Launch
from multinode.launch.inputs import Count, Note, OnHang, Seconds, TrainingInput, read_training, with_data


class ContrastInput(TrainingInput, frozen=True, kw_only=True):
    """Options of `contrast`."""

    nodes: str | None = None
    mode: Mode | None = None
    baseline_gpus: str | None = None
    workers_per_node: Count | None = None
    each_node: bool = False
    steps: Annotated[int, Meta(ge=3)] | None = None
    full_run: bool = False
    repeats: Annotated[int, Meta(ge=1, le=20)] = 1
    synthetic: bool = False
    average: str | None = None
    check: bool = True
    hang_timeout: Seconds = 300.0
    on_hang: OnHang = "stop"
    fresh: bool = False

    def read(self, note: Note) -> tuple[Launch, ContrastRequest]:
        """The launch of the job on all nodes, and which sides are measured."""
        counts = parse_option("--nodes", self.nodes, _parse_numbers) if self.nodes is not None else ()
        training = read_training(
            self,
            note,
            nodes=max(counts, default=None),
            workers_per_node=self.workers_per_node,
            limits_nodes=False,
        )
        job = cut_job(training.read_job(self.set_), self.steps, whole=self.full_run)
        request = ContrastRequest(
            mode=self.mode,
            counts=counts,
            workers=training.workers_per_node,
            each_node=self.each_node,
            baseline_gpus=parse_option("--baseline-gpus", self.baseline_gpus, _parse_numbers)
            if self.baseline_gpus
            else None,
        )
        execute = ExecuteOptions(stall_s=self.hang_timeout or None, on_stall=self.on_hang)
        job = with_data(job, synthetic=self.synthetic)
        return training.make_launch(job, execute, check=self.check), request


def _parse_numbers(text: str) -> tuple[int, ...]:
    """`1,2,4` as numbers."""
    if not all(part.isascii() and part.isdigit() for part in text.split(",")):
        raise ValueError(f"{text!r} is not a list of numbers such as 1,2,4")
    return tuple(int(part) for part in text.split(","))
