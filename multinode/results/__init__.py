"""Stored results of any kind, as a page, as Markdown, as CSV or in a notebook."""
