"""Convolution algorithms: one signature, three passes, counted operations."""
