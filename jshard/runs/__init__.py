"""Runs: their events, and the names of their files. No JAX."""
