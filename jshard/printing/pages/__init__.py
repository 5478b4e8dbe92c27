"""The common parts of jshard's pages: shell and style, and words for numbers, layouts and places. No JAX."""
