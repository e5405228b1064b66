"""Tasks: loss, metrics, and the required targets and outputs."""
