"""Why a run is as slow as it is, and what to switch."""
