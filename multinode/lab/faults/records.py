"""faults.json: what was taken away, oldest first. Written before anything is done, so that nothing is forgotten."""

from __future__ import annotations

import msgspec

from multinode.decoding import decode_json
from multinode.errors import MultinodeError
from multinode.lab.faults.kinds import Fault
from multinode.lab.state import STATE_DIR, write_file

__all__ = ["Record", "add_record", "load_records", "remove_record"]

_FILE = STATE_DIR / "faults.json"


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault that was made, or was going to be.

    Attributes:
        number: counts up; names what the fault leaves in the node.
        boot_id: of the node then; one that was started anew has lost the fault together with its disk.
    """

    number: int
    boot_id: str
    fault: Fault


def load_records() -> tuple[Record, ...]:
    """What is on record, oldest first.

    Raises:
        MultinodeError: the file is not ours.
    """
    try:
        return decode_json(_FILE.read_bytes(), tuple[Record, ...])
    except FileNotFoundError:
        return ()
    except msgspec.DecodeError as error:
        raise MultinodeError(
            f"{_FILE} cannot be read: {error}", hint="multinode lab down ends its faults, too"
        ) from error


def add_record(fault: Fault, boot_id: str) -> Record:
    """Put a fault on record."""
    records = load_records()
    record = Record(number=max((one.number for one in records), default=0) + 1, boot_id=boot_id, fault=fault)
    _save((*records, record))
    return record


def remove_record(record: Record) -> None:
    """Take a fault that is no more off the record."""
    _save(tuple(one for one in load_records() if one.number != record.number))


def _save(records: tuple[Record, ...]) -> None:
    write_file(_FILE, msgspec.json.format(msgspec.json.encode(records), indent=2).decode() + "\n")
