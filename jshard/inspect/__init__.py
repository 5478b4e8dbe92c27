"""Reads programs and changes none: what they ask of the wire, and what the compiler made of it."""
