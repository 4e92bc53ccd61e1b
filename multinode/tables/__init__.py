"""Tables of other people: read, and stored like those of a sweep."""
