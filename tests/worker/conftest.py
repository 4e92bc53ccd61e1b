from __future__ import annotations

from tests.node.conftest import archive, node

__all__ = ["archive", "node"]
