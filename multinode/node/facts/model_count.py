"""The tensors of the model that a job builds, counted by the job's own interpreter on torch's meta device.

Nothing is loaded but config.json, and no memory is needed. How the model is built and its adapters are attached is the
question's: a Python source that defines `build(asked)` and `attach(model, asked)`, from the module of the job's
framework. Code from the model's directory runs only if the job itself trusts it. The weights that a token is multiplied
with, of a mixture of experts those that are active, are counted as workers count them, with the question's copy of
worker/token_work.py.
"""

from __future__ import annotations

import json
import os
from typing import Any, Optional

from ..channel import Record
from ..programs import Query, QueryFailed
from .files import digest_file

_MARK = "multinode-count:"
_MOST_BYTES = 8 << 20
COUNTING = """
def counted(asked):
    with torch.device("meta"):
        model = build(asked)
        base, embedding, head = (set(map(id, model.parameters())), model.get_input_embeddings(),
                                 model.get_output_embeddings())
        told = dict(hidden=int(embedding.weight.shape[1]), table=int(embedding.weight.numel()),
                    tied=head is not None and getattr(head, "weight", None) is embedding.weight)
        names = set(getattr(model, "_no_split_modules", None) or ())
        model = attach(model, asked)
    layers = [name + "." for name, module in model.named_modules() if type(module).__name__ in names]
    # A layer inside a layer belongs to the outer one.
    layers = {name for name in layers if not any(name != other and name.startswith(other) for other in layers)}
    parts, last = [], None
    for name, tensor in model.named_parameters():
        place, found = "", name.split(".")
        for depth in range(1, len(found)):
            if ".".join(found[:depth]) + "." in layers:
                place = ".".join(found[:depth])
                break
        if last is None or place != last:
            parts.append(dict(times=1, layer=bool(place), tensors=[]))
        last = place
        parts[-1]["tensors"].append([tensor.numel(), tensor.dim() > 1, tensor.requires_grad, id(tensor) not in base])
    merged = []
    for part in parts:
        if merged and merged[-1]["layer"] and all(merged[-1][key] == part[key] for key in ("layer", "tensors")):
            merged[-1]["times"] += 1
        else:
            merged.append(part)
    try:
        work = token_work(weights_of(model), [model])
    except Exception as error:
        work = {"is": "unknown", "reason": "%s: %s" % (type(error).__name__, error)}
    return dict(told, parts=merged, work=work)
def adapters(told):
    return sum(each[0] * part["times"] for part in told["parts"] for each in part["tensors"] if each[3])
"""
"""Defines `counted(asked)` where the question's sources are defined and torch imported."""
_SCRIPT = f"""
import sys; sys.path[:] = [p for p in sys.path if p]
import json, os
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", CUDA_VISIBLE_DEVICES="", TRANSFORMERS_VERBOSITY="error")
asked = json.load(sys.stdin)
import torch
exec(asked["work"])
exec(asked["source"])
{COUNTING}
try:
    answer = counted(asked)
    adapted = None
    if not adapters(answer):
        try:
            adapted = counted(dict(asked, arguments=dict(asked["arguments"], **asked["adapter"])))
        except Exception:
            pass
    answer = dict(answer, adapted=adapted if adapted and adapters(adapted) else None)
except Exception as error:
    answer = dict(trouble="%s: %s" % (type(error).__name__, error))
print("\\n{_MARK}" + json.dumps(answer))
"""


def query_count(python: str, model: str, question: Record, deadline_s: float) -> Query:
    """Ask the interpreter to build the model of a directory and to count its tensors."""
    asked = {"model": model, **{key: question[key] for key in ("work", "source", "arguments", "adapter")}}
    # Not the job's directory: a file there must not stand in for a package.
    return Query([python, "-c", _SCRIPT], deadline_s=deadline_s, cwd="/", stdin=json.dumps(asked))


def model_directory(model: str, cwd: str) -> str:
    """Absolute path of the model."""
    return os.path.join(cwd, os.path.expanduser(model))


def digest_config(folder: str) -> Optional[str]:
    """Digest of a model's config.json; None if it cannot be read."""
    try:
        return digest_file(os.path.join(folder, "config.json"))[0]
    except OSError:
        return None


def parse_count(text: str) -> Record:
    """The answer of `query_count`, with the fields of CountedModel.

    Raises:
        QueryFailed: the model could not be built, or the text has no answer.
    """
    lines = [line[len(_MARK) :] for line in text.splitlines() if line.startswith(_MARK)]
    try:
        if len(lines[-1]) > _MOST_BYTES:
            raise QueryFailed("the model has too many tensors")
        answer: dict[str, Any] = json.loads(lines[-1])
    except (LookupError, ValueError) as error:
        raise QueryFailed("the interpreter did not return the model's tensors") from error
    if "trouble" in answer:
        raise QueryFailed(str(answer["trouble"]))
    return answer
