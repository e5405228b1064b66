"""Tasks: loss, metrics, and the targets and outputs that these need; one file per task."""
