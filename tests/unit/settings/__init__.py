"""Settings and command lines."""
