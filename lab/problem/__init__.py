"""The problem of a run: data, task and model, built from its settings to fit each other."""
