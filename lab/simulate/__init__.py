"""A cost model and an event simulation: step times on hardware that one does not have."""
