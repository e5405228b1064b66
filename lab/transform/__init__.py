"""Models made of models, before they reach a device."""
