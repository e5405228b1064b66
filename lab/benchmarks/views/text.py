"""Words that views share with lab.benchmarks.present."""

from lab.benchmarks.present import about, machine, ranged

__all__ = ["about", "machine", "ranged"]
