"""The parts of plotly that charts and pages use. It is large, and comes with the extra `report`."""

from __future__ import annotations

from multinode.errors import MultinodeError

try:
    from plotly.graph_objects import Bar, Figure, Scatter
    from plotly.offline import get_plotlyjs
    from plotly.subplots import make_subplots
except ModuleNotFoundError as error:
    raise MultinodeError(
        "a page with charts needs plotly, which is not installed",
        hint="run python -m pip install 'plotly>=6.0' in multinode's environment, or install multinode[report]",
    ) from error

__all__ = ["Bar", "Figure", "Scatter", "get_plotlyjs", "make_subplots"]
