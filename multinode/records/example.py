"""The sample hostfiles and configurations that come with multinode, copied for a new user."""

from __future__ import annotations

import shutil
from pathlib import Path

import multinode
from multinode.errors import UsageError

_PARTS = ("hostfiles", "configs", "scripts/make_tiny.py")


def copy_example(folder: Path) -> tuple[Path, ...]:
    """Copy the sample hostfiles, the configurations, and the generator of the smallest dataset.

    Args:
        folder: destination; created if missing.

    Returns:
        The copied files.

    Raises:
        UsageError: a part of it exists, or a file cannot be written.
    """
    # In a built package; otherwise beside the package, in the repository.
    package = Path(multinode.__file__).parent
    source = package / "example" if (package / "example").is_dir() else package.parent
    for part in _PARTS:
        if (folder / part).exists():
            raise UsageError(f"{folder / part} already exists", hint="choose another directory: -o DIR")
    found = [path for part in _PARTS for path in (source / part, *(source / part).rglob("*")) if path.is_file()]
    names = sorted(path.relative_to(source) for path in found if "__pycache__" not in path.parts)
    try:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            # Contents only: installed files may be read-only.
            shutil.copyfile(source / name, folder / name)
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written: {error.strerror}", hint="choose another directory: -o DIR"
        ) from None
    return tuple(folder / name for name in names)
