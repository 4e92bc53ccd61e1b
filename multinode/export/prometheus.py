"""Prometheus: the text exposition format, in a file for node_exporter or on a port of this machine.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import errno
import http.server
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from multinode.export.exporter import Exporter
from multinode.export.figures import NODE_FIGURES, SUMMARY_FIGURES, Value, node_values, summary_values
from multinode.records.progress import NodeProgress
from multinode.records.run import Run
from multinode.runs.stored_run import StoredRun

_LOOPBACK = "127.0.0.1"
_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# The export of a restarted attempt holds it until it has read the attempt's end.
_PORT_WAIT_S = 60.0
_STRANGE = re.compile(r"[^a-zA-Z0-9_]+")


def metrics_text(run: Run, values: Iterable[Value] = (), summary: Iterable[Value] = ()) -> str:
    """All metrics of a run: its identity, its nodes now, and its summary once it has ended."""
    about = {"run": run.run_id, "job": run.job, "engine": run.engine, "status": run.status}
    lines = [
        "# HELP multinode_run_info the run and its status",
        "# TYPE multinode_run_info gauge",
        f"multinode_run_info{_labels(about.items())} 1",
    ]
    for prefix, figures, labelled in (
        ("multinode", NODE_FIGURES, values),
        ("multinode_summary", SUMMARY_FIGURES, summary),
    ):
        by_name: dict[str, list[Value]] = {}
        for value in labelled:
            by_name.setdefault(value.name, []).append(value)
        for name, ones in by_name.items():
            metric = f"{prefix}_{_STRANGE.sub('_', name.replace('.*', ''))}"
            lines += [f"# HELP {metric} {figures[name].about}", f"# TYPE {metric} gauge"]
            lines += [f"{metric}{_labels([('run', run.run_id), *sample.labels])} {sample.value!r}" for sample in ones]
    return "\n".join(lines) + "\n"


def _labels(labels: Iterable[tuple[str, str]]) -> str:
    def quote(text: str) -> str:
        return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return "{" + ",".join(f'{name}="{quote(text)}"' for name, text in labels) + "}"


class Textfile(Exporter):
    """A file for node_exporter's textfile collector: complete at any time, and world-readable."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def now(self, run: Run, nodes: Sequence[NodeProgress]) -> None:
        """Write the current state of the nodes."""
        self._replace(metrics_text(run, node_values(nodes)))

    def end(self, ended: StoredRun) -> None:
        """Replace it with the summary."""
        self._replace(metrics_text(ended.run, (), summary_values(ended.summary) if ended.summary is not None else ()))

    def _replace(self, text: str) -> None:
        # The collector reads files that end in .prom, as another user.
        fd, partial = tempfile.mkstemp(prefix=f".{self._path.name}.", dir=self._path.parent)
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                os.fchmod(fd, 0o644)
                file.write(text)
            Path(partial).replace(self._path)
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise


class MetricsPort(Exporter):
    """`/metrics` on a port of this machine while the run is followed."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server: http.server.ThreadingHTTPServer | None = None
        self._text = ""

    def begin(self, run: Run) -> None:
        """Listen; wait if the port is taken."""
        self._text = metrics_text(run)
        exporter = self

        class Handler(http.server.BaseHTTPRequestHandler):
            timeout = 10.0

            def do_GET(self) -> None:
                is_known = self.path.partition("?")[0] == "/metrics"
                data = exporter._text.encode() if is_known else b"see /metrics\n"
                self.send_response(200 if is_known else 404)
                self.send_header("Content-Type", _TYPE if is_known else "text/plain")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = _listen(self._port, Handler)
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def now(self, run: Run, nodes: Sequence[NodeProgress]) -> None:
        """Update the current state of the nodes."""
        self._text = metrics_text(run, node_values(nodes))

    def end(self, ended: StoredRun) -> None:  # noqa: ARG002 - whatever it was, nobody is left to ask
        """Stop listening."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()


def _listen(port: int, handler: type[http.server.BaseHTTPRequestHandler]) -> http.server.ThreadingHTTPServer:
    deadline = time.monotonic() + _PORT_WAIT_S
    while True:
        try:
            server = http.server.ThreadingHTTPServer((_LOOPBACK, port), handler)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= deadline:
                raise
            time.sleep(0.2)
            continue
        server.daemon_threads = True
        return server
