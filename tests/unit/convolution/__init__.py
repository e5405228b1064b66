"""Tests of lab/convolution."""
