"""Models made of models, before they are placed on a device."""
