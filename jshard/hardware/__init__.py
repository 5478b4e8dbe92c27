"""Hardware: the chips that jshard knows, and what this host has. No JAX."""
