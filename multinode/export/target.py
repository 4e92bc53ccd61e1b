"""Target: where to export to, `KIND:WHERE`, and its exporter."""

from __future__ import annotations

import importlib.util
import urllib.parse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from multinode.errors import UsageError
from multinode.export.exporter import Exporter
from multinode.export.mlflow import MlflowRun
from multinode.export.prometheus import MetricsPort, Textfile
from multinode.export.tables import CsvFiles, ParquetFiles
from multinode.export.tensorboard import TensorBoard
from multinode.export.wandb import WandbRun
from multinode.requirements import install_hint

METRICS_PORT = "metrics-port"


class Kind(NamedTuple):
    """One kind of target."""

    where: str  # what follows its name
    meaning: str  # what it writes
    make: Callable[[str], Exporter]  # returns its exporter for a place
    library: str | None = None  # that it needs; None needs none
    package: str | None = None  # that has the library


def _in(exporter: Callable[[Path], Exporter]) -> Callable[[str], Exporter]:
    return lambda where: exporter(Path(where).expanduser())


_TABLES = "all samples in DIR/RUN, after the run has ended"
KINDS = {
    "tensorboard": Kind("DIR", "scalars of each step in DIR/RUN, for `tensorboard --logdir`", _in(TensorBoard)),
    "mlflow": Kind("DIR|URI", "a run in a file store, or on a tracking server", MlflowRun, "mlflow", "mlflow-skinny"),
    "wandb": Kind(
        "DIR", "an offline run of Weights & Biases in DIR/wandb, for `wandb sync`", _in(WandbRun), "wandb", "wandb"
    ),
    "prometheus": Kind("FILE.prom", "metrics for the textfile collector of node_exporter", _in(Textfile)),
    METRICS_PORT: Kind(
        "PORT", "metrics on 127.0.0.1:PORT while multinode follows the run", lambda port: MetricsPort(int(port))
    ),
    "csv": Kind("DIR", _TABLES, _in(CsvFiles)),
    "parquet": Kind("DIR", _TABLES, _in(ParquetFiles), "pyarrow", "pyarrow"),
}
_HIGHEST_PORT = 65535


class Target(NamedTuple):
    """Where to export to."""

    kind: str
    where: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.where}"

    def make(self) -> Exporter:
        """Its exporter, not yet started."""
        return KINDS[self.kind].make(self.where)


def parse_targets(texts: Iterable[str], metrics_port: int | None = None) -> tuple[Target, ...]:
    """The targets in a comma-separated list."""
    targets = [_parse(word.strip()) for text in texts for word in text.split(",")]
    if metrics_port is not None:
        targets.append(Target(METRICS_PORT, str(metrics_port)))
    return tuple(dict.fromkeys(targets))


def _parse(text: str) -> Target:
    name, _, where = text.partition(":")
    kind = KINDS.get(name)
    if kind is None or not where:
        kinds = ", ".join(f"{name}:{kind.where}" for name, kind in KINDS.items())
        raise UsageError(f"{text!r} is not an export target", hint=f"use one of {kinds}")
    if name == METRICS_PORT and not (where.isdecimal() and 0 < int(where) <= _HIGHEST_PORT):
        raise UsageError(f"{text}: not a valid port")
    if name == "prometheus" and not where.endswith(".prom"):
        raise UsageError(f"{text}: node_exporter reads only files ending in .prom")
    if name == "mlflow" and urllib.parse.urlsplit(where).password is not None:
        raise UsageError("mlflow: the address must not contain a password", hint="set MLFLOW_TRACKING_PASSWORD")
    if kind.library is not None and importlib.util.find_spec(kind.library) is None:
        raise UsageError(
            f"{name} needs a library that is not installed: {kind.library}",
            hint=install_hint(kind.package or kind.library),
        )
    return Target(name, where)
