"""The algorithms of each op, by name."""

ALGORITHMS = {
    "all_reduce": ("auto", "hierarchical", "in_order", "one_shot", "permute", "ring", "torus", "xla"),
    "reduce_scatter": ("auto", "in_order", "permute", "ring", "xla"),
    "all_gather": ("auto", "in_order", "permute", "ring", "torus", "xla"),
    "matmul": ("auto", "pallas", "xla"),
    "all_gather_matmul": ("auto", "permute", "xla"),
    "matmul_reduce_scatter": ("auto", "permute", "xla"),
}
