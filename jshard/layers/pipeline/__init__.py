"""Run programs with layers on the stages of a pipeline, by a table of each stage's work in each tick."""
