"""Several hosts on one machine: network namespaces joined by a switch, with shaped links."""
