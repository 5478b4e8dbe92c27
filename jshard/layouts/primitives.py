"""The primitives with a rule, and their parameters: read by the rule, or irrelevant for a reason."""

from __future__ import annotations

import numpy as np

from jshard.programs.jaxprs import Eqn

KEPT, FIXED, LOOKUP = "kept", "fixed", "lookup"  # any other kind is the reduction over devices: sum, max, min

ELEMENTWISE = frozenset(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type "
    "cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to "
    "erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow "
    "is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul mulhi name ne neg nextafter not "
    "one_minus_square or polygamma polynomial population_count pow real "
    "reduce_precision rem round rsqrt select_n shift_left shift_right_arithmetic "
    "shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor zeta "
    "random_gamma_grad".split()
)
REDUCTIONS = {
    "reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min", "reduce_or": "max", "reduce_and": "min",
    "reduce_prod": FIXED, "reduce_xor": FIXED, "reduce": FIXED, "argmax": FIXED, "argmin": FIXED,
}  # fmt: skip
CUMULATIVE = "cumsum cumprod cummax cummin cumlogsumexp"
WINDOWED = (
    "reduce_window_max reduce_window_min reduce_window_sum reduce_window select_and_scatter_add select_and_gather_add"
)
SCATTERS = ("scatter", *(f"scatter{mark}{word}" for mark in "-_" for word in ("add", "sub", "mul", "min", "max")))
FROM_WHOLE = (  # jax 0.10 can't lower a split regularized_incomplete_beta
    "random_bits iota random_seed random_split random_fold_in random_wrap random_unwrap random_gamma empty empty2 "
    "platform_index call_hi_primitive custom_linear_solve regularized_incomplete_beta"
)
MATRICES = "cholesky eig eigh qr lu triangular_solve svd tridiagonal_solve"
ATTENTION = "dot_product_attention_fwd_wrapper dot_product_attention_bwd_wrapper"
OWN_DERIVATIVES = "custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr"
CALLED = "jit pjit closed_call core_call custom_lin"
REFUSED = frozenset(("pallas_call", "shard_map"))
PLACED = "sharding_constraint reshard mesh_cast"
PLAIN = "dynamic_update_slice optimization_barrier random_clone"  # no parameters

# Primitives, and the parameters read by their rule.
READ = {
    " ".join(ELEMENTWISE): "",
    " ".join(REDUCTIONS): "axes dimensions",
    f"{CUMULATIVE} stack unstack": "axis",
    WINDOWED: "window_dimensions window_strides padding base_dilation",
    " ".join(SCATTERS): "dimension_numbers",
    FROM_WHOLE: "",
    PLAIN: "",
    "iota": "dimension dtype",
    "broadcast_in_dim": "broadcast_dimensions shape",
    "concatenate sort": "dimension",
    "conv_general_dilated": "dimension_numbers feature_group_count batch_group_count",
    "dot_general": "dimension_numbers",
    "ragged_dot_general": "ragged_dot_dimension_numbers",
    ATTENTION: "layout dropout_rate score_mod",
    "dynamic_slice": "slice_sizes",
    "fft": "fft_lengths",
    "gather": "dimension_numbers slice_sizes mode fill_value",
    "pad": "padding_config",
    "reshape": "new_sizes dimensions",
    "rev squeeze": "dimensions",
    "slice": "start_indices limit_indices strides",
    "split": "axis sizes",
    "tile": "",
    "top_k": "axis",
    "transpose": "permutation",
    MATRICES: "",
    "cond": "branches branches_platforms",
    "while": "cond_jaxpr cond_nconsts body_jaxpr body_nconsts",
    "scan": "jaxpr length reverse unroll num_consts num_carry ft_in ft_out",
    "checkpoint remat remat2": "jaxpr policy prevent_cse",
    "regathered": "jaxpr",
    OWN_DERIVATIVES: "call_jaxpr fun_jaxpr",
    CALLED: "jaxpr call_jaxpr",
    "by_hand": "jaxpr rule",
    PLACED: "",
}
# Reasons for ignoring parameters in a split; the primitives, and their parameters.
IRRELEVANT = {
    "It acts on each number alone.": {
        " ".join(ELEMENTWISE): "accuracy exponent_bits input_dtype mantissa_bits name new_dtype out_dtype rounding_method "
        "unroll weak_type y",
        "conv_general_dilated dot_general ragged_dot_general": "precision preferred_element_type",
        "argmax argmin": "index_dtype",
    },
    "It names a layout, and the configuration decides on layouts.": {
        "broadcast_in_dim conv_general_dilated convert_element_type dot_general empty empty2 iota ragged_dot_general reshape "
        + " ".join(REDUCTIONS): "out_sharding sharding memory_space",
        PLACED: "sharding dst_sharding layout context_mesh unconstrained_dims concrete_mesh",
        CALLED: "in_shardings out_shardings in_layouts out_layouts ctx_mesh",
    },
    "It acts along whole axes, and equally for all others.": {
        "reduce": "computation jaxpr consts",
        CUMULATIVE: "reverse",
        WINDOWED: "window_dilation jaxpr consts select_prim",
        "conv_general_dilated": "window_strides padding lhs_dilation rhs_dilation",
        "fft": "fft_type",
        "sort": "num_keys is_stable",
        "top_k": "k is_stable",
        ATTENTION: "scale seed mask_type sliding_window_length variadic_args is_training",
        MATRICES: "algorithm compute_left_eigenvectors compute_right_eigenvectors compute_uv conjugate_a enable_eigvec_derivs "
        "full_matrices implementation left_side lower perturb_singular pivoting sort_eigenvalues subset_by_index "
        "symmetrize_input transpose_a unit_diagonal use_magma",
    },
    "A device's part of sorted or distinct places is sorted or distinct; the rule drops it where it moves places.": {
        f"gather {' '.join(SCATTERS)}": "indices_are_sorted unique_indices",
    },
    "It acts equally on each written row, on devices with all rows.": {
        " ".join(SCATTERS): "mode update_jaxpr update_consts",
    },
    "The shapes imply it.": {"tile": "reps"},
    "The operation runs on whole arrays.": {
        FROM_WHOLE: "_prim bit_width const_lengths dtype impl jaxprs log_space platforms shape",
        "ragged_dot_general": "group_offset",  # not implemented in JAX
    },
    "JAX reads it when the equation runs unchanged.": {
        OWN_DERIVATIVES: "bwd fwd_jaxpr_thunk jvp_jaxpr_fun jvp_fun num_consts out_trees symbolic_zeros",
    },
    "The body runs in place of its call, in the same compiled program.": {
        CALLED: "compiler_options_kvs donated_invars inline keep_unused name transpose_jaxpr",
        "checkpoint remat remat2": "differentiated name",
    },
}  # fmt: skip


def _told() -> dict[str, frozenset[str]]:
    known: dict[str, frozenset[str]] = {}
    for rows in (READ, *IRRELEVANT.values()):
        for primitives, parameters in rows.items():
            for name in primitives.split():
                known[name] = known.get(name, frozenset()) | frozenset(parameters.split())
    return known


PARAMETERS = _told()


def unknown_parameters(eqn: Eqn) -> list[str]:
    """Return the parameters of an equation without a rule or a reason, as of a newer JAX. Empty for
    a primitive without a rule, or a refused primitive."""
    known = PARAMETERS.get(eqn.primitive.name)
    return [] if known is None or eqn.params.keys() <= known else sorted(eqn.params.keys() - known)


def is_joined(name: str, dtype: np.dtype) -> bool:
    """Return whether a collective joins the results of devices: XLA has none for bits of integers or for complex extremes."""
    return dtype.kind == "b" if name in ("reduce_or", "reduce_and") else name == "reduce_sum" or dtype.kind != "c"
