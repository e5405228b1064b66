"""Models: each module has a function that makes one."""
