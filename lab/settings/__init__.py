"""Settings, how they are composed and checked, and how a command answers."""
