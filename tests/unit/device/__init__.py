"""Tests of lab/device, and of lab/convolution."""
