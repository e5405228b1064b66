"""Settings: their schema, composition and checks; and the command line of all commands."""
