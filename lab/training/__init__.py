"""One run, from settings to record."""
