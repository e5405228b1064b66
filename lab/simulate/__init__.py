"""A cost model and an event simulation: step times on hardware that is not at hand."""
