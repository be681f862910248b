"""Benchmarks: `ggufspec bench`."""
