"""Where a run's time went: summary tables, charts over time, and its export."""
