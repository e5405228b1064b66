"""The values of largest magnitude, each with its index."""
