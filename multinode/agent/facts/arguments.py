"""Keys of a training's YAML that the installed LLaMA-Factory has no argument for. Reads its source, imports nothing."""

from __future__ import annotations

import json
from typing import Any, Optional

from ..queries import Query, QueryFailed

__all__ = ["parse_unknown", "query_unknown"]

_DEADLINE_S = 15.0
_MARK = "multinode-arguments:"
_MOST_KEYS = 1000
# Runs under any Python 3.8+. The arguments are the annotated fields of dataclasses; a few that belong to other commands
# than a training are among them, so that a key may pass here and be refused there, and never the other way about.
_SCRIPT = f"""
import sys; sys.path[:] = [p for p in sys.path if p]
import ast, difflib, glob, json, os
from importlib.util import find_spec
known, trouble = set(), None
try:
    own, trainer = (os.path.dirname(find_spec(name).origin) for name in ("llamafactory", "transformers"))
    files = sorted(glob.glob(os.path.join(glob.escape(own), "hparams", "*_args.py")))
    files += [os.path.join(trainer, name) for name in ("training_args.py", "training_args_seq2seq.py")]
    for path in files:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
        for item in ast.walk(tree):
            if isinstance(item, ast.ClassDef):
                fields = (line for line in item.body if isinstance(line, ast.AnnAssign))
                known.update(line.target.id for line in fields if isinstance(line.target, ast.Name))
    # Another layout than that of the releases that we know of.
    if not known >= {{"model_name_or_path", "stage", "cutoff_len", "output_dir", "per_device_train_batch_size"}}:
        trouble = "its arguments were not found in its source"
except (AttributeError, ImportError, OSError, SyntaxError, TypeError, ValueError) as error:
    trouble = "its source cannot be read: %s" % type(error).__name__
# Then extra keys are passed over, or the arguments are another package's.
if any(os.environ.get(name, "").lower() in ("true", "y", "1") for name in ("ALLOW_EXTRA_ARGS", "USE_MCA")):
    known.update(sys.argv[1:])
near = lambda key: (difflib.get_close_matches(key, sorted(known), n=1) or [None])[0]
unknown = {{key: near(key) for key in sys.argv[1:] if key not in known}}
print("\\n{_MARK}" + json.dumps({{"unknown": unknown, "trouble": trouble}}))
"""


def query_unknown(python: str, keys: list[str], cwd: Optional[str]) -> Query:
    """Ask the job's interpreter which of these keys its LLaMA-Factory does not know."""
    return Query([python, "-c", _SCRIPT, *keys[:_MOST_KEYS]], deadline_s=_DEADLINE_S, cwd=cwd)


def parse_unknown(text: str) -> dict[str, Optional[str]]:
    """Those keys, each with the argument whose name is nearest, or None; what was printed around is passed over.

    Raises:
        QueryFailed: it could not tell, or this is no answer.
    """
    lines = [line[len(_MARK) :] for line in text.splitlines() if line.startswith(_MARK)]
    try:
        data: dict[str, Any] = json.loads(lines[-1])
        trouble = data["trouble"]
        unknown = {str(key): None if near is None else str(near) for key, near in data["unknown"].items()}
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise QueryFailed("the interpreter answered with something else than arguments") from error
    if trouble is not None:
        raise QueryFailed(str(trouble))
    return unknown
