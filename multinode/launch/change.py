"""Change: settings of `launch` that differ from the job's file, as options and as a YAML file. Pure.

The file is written by `multinode tune` and read by `launch --with`: the options of launch by name.
"""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from multinode.errors import UsageError
from multinode.job.deepspeed import parse_deepspeed_edits
from multinode.job.job import override_text, parse_overrides
from multinode.records.averaging import Averaging, read_averaging
from multinode.records.balance import Balance, parse_balance
from multinode.strict_yaml import decode_yaml, dump_yaml

_Count = Annotated[int, Meta(ge=1, le=1_000_000)]


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """A change that can be applied automatically."""

    overrides: tuple[str, ...] = ()  # `KEY=VALUE` for `--set`
    deepspeed: tuple[str, ...] = ()  # `DOTTED.KEY=VALUE` for `--deepspeed-set`
    grad_compress: str | None = None
    averaging: Averaging | None = None  # what nodes average every H steps
    balance: Balance | None = None  # speeds of the nodes, by which samples are dealt out
    nodes: int | None = None  # number of first nodes of the hostfile to use; None is unchanged
    workers_per_node: int | None = None  # None is unchanged

    @property
    def options(self) -> str:
        """As options of `multinode launch`, quoted for a shell."""
        words = [
            *(("--nodes", str(self.nodes)) if self.nodes is not None else ()),
            *(("--workers-per-node", str(self.workers_per_node)) if self.workers_per_node is not None else ()),
            *(("--grad-compress", self.grad_compress) if self.grad_compress is not None else ()),
            *(self.averaging.options if self.averaging is not None else ()),
            *(("--balance", self.balance.words) if self.balance is not None else ()),
            *(word for override in self.overrides for word in ("--set", override)),
            *(word for edit in self.deepspeed for word in ("--deepspeed-set", edit)),
        ]
        return shlex.join(words)

    def joined(self, second: Change) -> Change:
        """Both changes; the second wins."""
        return Change(
            overrides=(*self.overrides, *second.overrides),
            # A job without DeepSpeed has no configuration to edit.
            deepspeed=() if "deepspeed=null" in second.overrides else (*self.deepspeed, *second.deepspeed),
            grad_compress=second.grad_compress or self.grad_compress,
            averaging=second.averaging or self.averaging,
            balance=second.balance or self.balance,
            nodes=second.nodes if second.nodes is not None else self.nodes,
            workers_per_node=second.workers_per_node or self.workers_per_node,
        )


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="kebab", omit_defaults=True):
    """The file: options of `launch` by name."""

    nodes: _Count | None = None
    workers_per_node: _Count | None = None
    sync_every: _Count | None = None
    diloco: str | int | None = None
    sync_dtype: str | None = None
    grad_compress: str | None = None
    balance: str | None = None
    set_: dict[str, Any] = msgspec.field(name="set", default_factory=dict)
    deepspeed_set: dict[str, Any] = {}


_HINT = f"its keys are options of launch: {', '.join(_File.__struct_encode_fields__)}"


def parse_change(text: str, source: object) -> Change:
    """A change from its file; `source` is its path, for messages.

    Raises:
        UsageError: it is not YAML, or has an unknown key or an invalid value.
    """
    file = decode_yaml(text, _File, source, _HINT)
    try:
        averaging = read_averaging(file.sync_every, None if file.diloco is None else str(file.diloco), file.sync_dtype)
        change = Change(
            overrides=tuple(override_text(key, value) for key, value in file.set_.items()),
            deepspeed=tuple(override_text(key, value) for key, value in file.deepspeed_set.items()),
            grad_compress=file.grad_compress,
            averaging=averaging,
            balance=parse_balance(file.balance) if file.balance is not None else None,
            nodes=file.nodes,
            workers_per_node=file.workers_per_node,
        )
        parse_overrides(change.overrides)
        parse_deepspeed_edits(change.deepspeed)
    except UsageError as error:
        raise UsageError(f"{source}: {error.message}", hint=error.hint) from None
    return change


def change_text(change: Change, comment: str) -> str:
    """A change as a file, with a comment on its origin."""
    averaging = change.averaging
    outer = averaging is not None and averaging.outer_lr is not None
    file = _File(
        nodes=change.nodes,
        workers_per_node=change.workers_per_node,
        sync_every=averaging.every if averaging is not None and not outer else None,
        diloco=averaging.option.removeprefix("--diloco ") if averaging is not None and outer else None,
        sync_dtype=averaging.dtype if averaging is not None else None,
        grad_compress=change.grad_compress,
        balance=change.balance.words if change.balance is not None else None,
        set_=parse_overrides(change.overrides),
        deepspeed_set={".".join(edit.path): edit.value for edit in parse_deepspeed_edits(change.deepspeed)},
    )
    written = msgspec.to_builtins(file)
    # A comment ends with its line.
    said = " ".join(comment.split())
    return f"# {said}\n{dump_yaml(written) if written else '{}' + chr(10)}"
