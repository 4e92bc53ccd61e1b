"""Tables, charts, pages."""
