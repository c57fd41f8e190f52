"""One request → one plan record; the record, its file and its text."""
