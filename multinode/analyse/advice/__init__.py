"""Which change of a measured training pays: training states, tuning options and their ranking."""
