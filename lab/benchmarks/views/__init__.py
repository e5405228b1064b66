"""Tables and figures of benchmarks."""
