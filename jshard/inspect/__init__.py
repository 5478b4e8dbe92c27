"""Tools that read programs and change none: their collectives, their compiled form, their layouts and costs."""
