"""Tests of lab/layers."""
