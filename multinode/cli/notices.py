"""Telling others of a run that a verb follows: `--on-end` and `--notify`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import typer

from multinode.cli.options import Notify, OnEnd
from multinode.errors import MultinodeError

if TYPE_CHECKING:
    from multinode.launch.context import RunContext
    from multinode.launch.notice import Notice
    from multinode.records.progress import RunProgress
    from multinode.records.run import Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoticeOptions:
    """Who is told of a run."""

    on_end: OnEnd = None
    notify: Notify = None

    @property
    def are_wanted(self) -> bool:
        """Whether anyone is told."""
        return self.on_end is not None or self.notify is not None

    @contextlib.contextmanager
    def watch(self, context: RunContext) -> Iterator[Callable[[Run], None]]:
        """Tell of hangs and of what ends the following while inside, and of the end when it is called."""
        if not self.are_wanted:
            yield lambda _: None
            return
        from multinode.launch.notice import (
            LOG,
            Notifier,
            check_url,
            end_notice,
            interrupted_notice,
            new_notices,
            notice_document,
            notice_environment,
        )

        notifier = Notifier(self.on_end, check_url(self.notify) if self.notify is not None else None)
        observe = context.observe
        latest: RunProgress | None = None

        def tell(notice: Notice) -> None:
            log = context.runs / notice.run / LOG
            notifier.tell(notice_document(notice), notice_environment(notice), log)

        def observe_and_tell(progress: RunProgress) -> None:
            nonlocal latest
            for notice in new_notices(latest, progress, context.runs / progress.run_id):
                tell(notice)
            latest = progress
            observe(progress)

        def tell_end(run: Run) -> None:
            if run.status != "running":
                tell(end_notice(run, context.runs / run.run_id))

        context.observe = observe_and_tell
        try:
            yield tell_end
        except MultinodeError as error:
            if latest is not None:
                tell(interrupted_notice(latest, str(error), context.runs / latest.run_id))
            raise
        finally:
            for failure in notifier.close():
                typer.echo(f"warning: {failure}", err=True)
