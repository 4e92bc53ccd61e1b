"""A tuning in words, as a table and as a screen."""
