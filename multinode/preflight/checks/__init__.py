"""The checks: an Inspection in, findings out; one small pure function each. Their rules say what a user reads."""
