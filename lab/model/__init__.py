"""Models: one function per module builds one."""
