"""The lab's subject: gradient buckets, and a file for each exchange or its close kin."""
