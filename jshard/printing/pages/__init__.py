"""What every page of jshard's is made of: its shell and style, how it says numbers, layouts and places. No JAX."""
