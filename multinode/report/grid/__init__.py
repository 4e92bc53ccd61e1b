"""A training grid as a table, a page, Markdown and CSV, and its progress."""
