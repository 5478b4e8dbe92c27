"""Analysis of programs: jaxprs, their products and provenance, and the protocol buffers of XLA."""
