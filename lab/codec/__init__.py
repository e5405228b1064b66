"""Tensors to wire bytes and back: pure functions."""
