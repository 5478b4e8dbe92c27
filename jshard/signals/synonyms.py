"""Words of Megatron, MaxText, torchtitan, DeepSpeed, haliax and JAX, with their equivalents in jshard."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from jshard.errors import did_you_mean

# jshard's words -> words of other frameworks. A row applies where its first word is allowed.
WORDS = {
    "row": "dp ddp data batch data_parallel data_parallelism",
    "column": "colwise col colwiseparallel column_parallel columnparallellinear tp mp tensor tensor_parallel model_parallel",
    "reduction": "rowwise rowwiseparallel row_parallel rowparallellinear tp mp tensor tensor_parallel model_parallel",
    "sequence": "sp seq sequence_parallel sequenceparallel",
    "ring": "cp context context_parallel ring_attention",
    "attention: ulysses": "ulysses",
    "expert": "ep experts expert_parallel moe",
    "stage": "pp stages pipeline_parallel",
    "shard": "spec pspec partition_spec partitionspec sharding placements",
    "store": "fsdp fsdp2 hsdp fully_shard full_shard zero zero_stage zero2 zero3",
    "store: {optimizer: data}": "zero1 distributed_optimizer use_distributed_optimizer",
    "remat": "ac checkpoint checkpoint_policy remat_policy activation_checkpoint activation_checkpointing "
    "gradient_checkpointing recompute recompute_granularity",
    "dtype: {compute: bfloat16}": "bf16 fp16 amp precision mixed_precision compute_dtype",
    "dtype: {param: bfloat16}": "param_dtype weight_dtype",
    "match": "path paths pattern patterns glob globs regex params parameters rules modules where",
    # under jshard
    "mesh: {data: 2, tensor: 4}": "mesh_shape mesh_axes device_mesh axis_names parallel_dims parallelism ici_parallelism "
    "dcn_parallelism dp tp pp cp ep fsdp tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
    "ici_tensor_parallelism ici_fsdp_parallelism ici_data_parallelism dcn_data_parallelism",
    'mesh, and a signal for each rule: up: {column: tensor, match: ["**/up/**"]}': "logical_axis_rules axis_rules rules",
    "pipeline: {axis: stage}": "pp pipelining pipeline_parallel",
    # under jshard.train
    "batch": "batch_size global_batch global_batch_size train_batch_size per_device_batch_size per_device_train_batch_size",
    "microbatches": "accumulate accumulation grad_accum grad_accum_steps gradient_accumulation gradient_accumulation_steps "
    "micro_batches num_microbatches num_micro_batches n_microbatches",
    "steps": "epochs num_epochs max_steps num_steps total_steps train_steps iters train_iters iterations",
    "optimizer: {name: adamw, learning_rate: 1.0e-3}": "lr learning_rate",
    "optimizer: {name: adamw, clip: 1.0}": "clip clip_grad grad_clip gradient_clipping max_grad_norm",
    "optimizer: {name: adamw, schedule: warmup_cosine}": "schedule scheduler lr_schedule lr_scheduler warmup warmup_steps",
    "evaluation": "eval eval_every eval_interval eval_steps val validation",
    "checkpoint": "ckpt save save_every save_interval save_steps checkpointing",
    "output": "output_dir run_dir workdir",
    # words that a key takes
    "products": "dots dots_saveable checkpoint_dots dots_with_no_batch_dims dots_with_no_batch_dims_saveable minimal matmuls "
    "checkpoint_dots_with_no_batch_dims selective",
    "full": "all everything nothing_saveable save_nothing block",
    "false": "everything_saveable none off",
    "float32": "fp32 f32 float single",
    "bfloat16": "bf16",
    "float16": "fp16 f16 half",
    "float64": "fp64 f64 double",
    "bfloat16 or float16, the narrowest there are": "float8 fp8 f8 float8_e4m3 float8_e4m3fn float8_e5m2 int8 int4 fp4",
    "gather": "all_gather allgather",
    "sum": "all_reduce allreduce psum",
    "scatter": "reduce_scatter psum_scatter",
    "ulysses": "all_to_all alltoall",
    "all_reduce": "psum allreduce",
    "reduce_scatter": "psum_scatter",
    "auto": "gspmd shardy",
    "explicit": "manual shard_map",
    "zero_bubble": "zb zb1p zbh1 zb_h1 zbvzerobubble interleavedzerobubble",
}  # fmt: skip
MESH_AXES = {
    "data": "dp ddp fsdp batch replica", "tensor": "tp mp model mdl", "model": "tp mp tensor", "fsdp": "data dp store",
    "stage": "pp pipe pipeline", "pipe": "pp stage", "sequence": "sp seq", "context": "cp", "expert": "ep",
}  # fmt: skip


def meant(word: object, known: Iterable[str], words: Mapping[str, str] = WORDS) -> list[str]:
    """Return jshard's words for a word of another framework, if they begin with a `known` word."""
    name, heads = str(word).lower().replace("-", "_"), {*known}
    return [ours for ours, theirs in words.items() if name in theirs.split() and re.split(r"\W", ours)[0] in heads]


def suggest(
    word: str, known: Iterable[str], otherwise: str, *, inside: str = "", words: Mapping[str, str] = WORDS
) -> str:
    """Return a hint for an unknown word: its translation to jshard's words, or the nearest known word."""
    known = list(known)
    ours = meant(word, known, words)
    if ours and (ours[1:] or ours[0] not in known):
        return f"write {' or '.join(inside + each for each in ours)}"
    return did_you_mean(inside + (ours or [word])[0], [inside + each for each in known], otherwise)
