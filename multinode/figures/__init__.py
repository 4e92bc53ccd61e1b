"""What a figure is: its name, title, unit and form, once; and the tables that are made of figures."""
