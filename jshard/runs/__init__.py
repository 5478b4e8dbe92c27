"""Runs: their events, the names of their files, and their stragglers. No JAX."""
