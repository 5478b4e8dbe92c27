"""Runs programs whose layers are on the stages of a pipeline, by a table of what each stage does in each tick."""
