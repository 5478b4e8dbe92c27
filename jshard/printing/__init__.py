"""Printing: numbers with units, tables as text and as HTML, and the parts of every HTML page. No JAX."""
