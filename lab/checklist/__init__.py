"""The checklist of the first hour on a GPU: commands, figures and their expected ranges."""
