"""Random values, at places that all ranks draw alike."""
