"""Which change of a measured training pays: levers, situations and their ranking."""
