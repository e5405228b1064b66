"""Signs of values, and one magnitude for all."""
