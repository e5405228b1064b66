"""The lab's subject: gradient buckets, and one file for each exchange."""
