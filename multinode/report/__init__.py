"""Pure views: rich tables and live views, from state to renderable."""
