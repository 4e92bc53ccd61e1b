"""What all reports are made of: sheets, tables, pages, Markdown, and the escaping of foreign text."""
