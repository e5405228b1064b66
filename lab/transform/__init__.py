"""Transforms: they rebuild a model before it is placed on a device."""
