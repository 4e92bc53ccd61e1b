"""A comparison as a table, a page and Markdown."""
