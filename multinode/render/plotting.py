"""The parts of plotly that charts and pages are made with. It is large, and comes with the extra `report`."""

from __future__ import annotations

from multinode.errors import MultinodeError

try:
    from plotly.graph_objects import Bar, Figure, Scatter
    from plotly.offline import get_plotlyjs
    from plotly.subplots import make_subplots
except ModuleNotFoundError as error:
    raise MultinodeError(
        "a page with charts needs plotly, and it is not installed",
        hint="python -m pip install 'plotly>=6.0' where multinode is installed, or install multinode[report]",
    ) from error

__all__ = ["Bar", "Figure", "Scatter", "get_plotlyjs", "make_subplots"]
