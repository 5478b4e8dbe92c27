"""Tiny models of packages that nobody here wrote, for `benchmarks.strangers`: what builds each, its loss and a batch."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

PACKAGES = """equinox==0.13.8 jaxonmodels==0.2.3 equimo==1.1.0 vitax==0.0.10 transformer-in-transformer-flax==0.0.2
bottleneck-transformer-flax==0.0.1 local-attention-flax==0.0.2 dantinox==0.4.14 megalodon-jax==0.2.2 long-range-models==0.0.1
flaxdiff==0.2.11 flax-gated-linear-rnn==1.0.3 esm2quinox==0.2.0 pdequinox==0.1.2 jraphx==0.1.0
jimmy-vision==0.0.7 flaxmodels==0.1.3"""
# What these can't be imported without.
NEEDED = "beartype ftfy wcwidth h5py jaxtyping wadler-lindig einops"
Built = tuple[Callable[..., jax.Array], Any, tuple[Any, ...]]  # a loss, the model or its parameters, and the batch


@dataclasses.dataclass(frozen=True)
class Stranger:
    """A model of somebody else's, and the globs of its kernels that tensor parallelism splits."""

    package: str
    build: Callable[[], Built]
    columns: tuple[str, ...] = ()
    sums: tuple[str, ...] = ()

    def tensor(self) -> dict[str, Any]:
        words = {"row": "data", "store": "data"}
        signals = {"columns": ("column", self.columns), "sums": ("reduction", self.sums)}
        claims = {
            name: {**words, word: "tensor", "match": list(globs)} for name, (word, globs) in signals.items() if globs
        }
        return {"jshard": {"mesh": {"data": 2, "tensor": 4}}, **claims, "rest": {**words, "match": ["**"]}}


def made(name: str) -> Any:
    return importlib.import_module(name)


def images(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(8, *shape)).astype(np.float32)


def words(count: int = 64, length: int = 8) -> np.ndarray:
    return np.random.default_rng(0).integers(0, count, (8, length)).astype(np.int32)


def moved(tree: Any) -> Any:
    """Move every parameter away from what it starts with: zeros have no gradients to compare."""
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: x + jnp.asarray(0.05 * rng.normal(size=x.shape), x.dtype) if inexact(x) else x, tree)


def inexact(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)


def squares(found: Any) -> jax.Array:
    return sum(jnp.mean(jnp.abs(x) ** 2 + jnp.real(x)) for x in jax.tree.leaves(found) if inexact(x))  # type: ignore[return-value]


def of_nnx(model: nnx.Module, *batch: Any, call: Callable[..., Any] = lambda model, *batch: model(*batch)) -> Built:
    nnx.update(model, moved(nnx.state(model, nnx.Param)))
    return (lambda model, *batch: squares(call(model, *batch))), model, batch


def of_linen(module: Any, *batch: Any, **words: Any) -> Built:
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = jax.jit(lambda keys, *batch: module.init(keys, *batch, **words))(keys, *batch)
    params, others = moved(variables["params"]), {key: tree for key, tree in variables.items() if key != "params"}

    def loss(params: Any, others: Any, *batch: Any) -> jax.Array:
        mutable = ["batch_stats"] if others else False
        found = module.apply(
            {"params": params, **others}, *batch, mutable=mutable, rngs={"dropout": jax.random.key(2)}, **words
        )
        return squares(found[0] if others else found)

    return loss, params, (others, *batch)


def of_equinox(model: Any, *batch: Any, call: Callable[..., Any] = lambda model, *one: model(*one)) -> Built:
    eqx = made("equinox")
    params, static = eqx.partition(moved(model), eqx.is_inexact_array)

    def loss(params: Any, *batch: Any) -> jax.Array:
        model = eqx.combine(params, static)
        return squares(jax.vmap(lambda *one: call(model, *one))(*batch))

    return loss, params, batch


KEY = np.zeros(2, np.uint32)  # that of seed 0


def eqx_nn(name: str) -> Callable[[], Built]:
    def build() -> Built:
        nn = made("equinox").nn
        if name == "MLP":
            return of_equinox(nn.MLP(16, 10, 32, 2, key=KEY), images(16))
        if name == "MultiheadAttention":
            return of_equinox(
                nn.MultiheadAttention(4, 32, key=KEY), images(8, 32), call=lambda model, x: model(x, x, x)
            )
        cell = getattr(nn, name)(16, 32, key=KEY)
        start = (jnp.zeros(32), jnp.zeros(32)) if name == "LSTMCell" else jnp.zeros(32)
        run = lambda cell, xs: jax.lax.scan(lambda carry, x: ((carry := cell(x, carry)), None), start, xs)[0]
        return of_equinox(cell, images(8, 16), call=run)

    return build


def jaxonmodels(name: str) -> Callable[[], Built]:
    def build() -> Built:
        if name == "vit":
            vit = made("jaxonmodels.models.vit").VisionTransformer(16, 4, 32, 2, 4, 10, key=KEY)
            return of_equinox(vit, images(3, 16, 16))
        return of_equinox(made("jaxonmodels.models.mamba").Mamba(32, 64, 2, key=KEY), words())

    return build


def equimo(name: str) -> Callable[[], Built]:
    def build() -> Built:
        models = made("equimo.models")
        if name == "vit":
            model = models.VisionTransformer(16, 3, 32, 4, 4, [2], num_classes=10, key=KEY)
        else:
            model = models.ConvNeXt(3, depths=[1, 1], dims=[16, 32], num_classes=10, key=KEY)
        return of_equinox(model, images(3, 16, 16), call=lambda model, x: model(x, key=KEY, inference=True))

    return build


def flaxmodels() -> Built:
    resnet = made("flaxmodels").ResNet18(output="logits", pretrained=None, num_classes=10, normalize=False)
    return of_linen(resnet, images(32, 32, 3))


def vitax() -> Built:
    model = made("vitax").VisionTransformer(10, 3, 16, 4, 2, 4, 64, 32, 0.0, fsdp=True, rngs=nnx.Rngs(0))
    return of_nnx(model, images(16, 16, 3))


def jimmy() -> Built:
    sys.modules.setdefault("flax.nnx.nnx", nnx)
    archives: Any = types.ModuleType("py7zr")  # for downloads
    archives.FILTER_ZSTD = 0
    sys.modules.setdefault("py7zr", archives)
    model = made("jimmy.models.vit").DinoV2(16, 3, 4, 32, 2, 4, rngs=nnx.Rngs(0))
    return of_nnx(model, images(16, 16, 3))


def tnt() -> Built:
    module = made("transformer_in_transformer_flax.tnt")
    sizes = {"image_size": 32, "patch_size": 16, "transformed_patch_size": 4, "num_classes": 10, "depth": 2}
    inner = {"inner_dim": 8, "inner_heads": 2, "inner_dim_head": 4}
    config = module.TNTConfig(**sizes, **inner, outer_dim=32, outer_heads=4, outer_dim_head=8)
    return of_linen(module.TransformerInTransformer(config), images(32, 32, 3))


def botnet() -> Built:
    module = made("bottleneck_transformer_flax.botnet")
    config = module.BoTNetConfig(stage_sizes=[1, 1, 1, 1], num_classes=10, num_heads=2, head_dim=8, initial_filters=8)
    return of_linen(module.BoTNet(config), images(32, 32, 3))


def local_attention() -> Built:
    module = made("local_attention_flax.local_attention_flax").LocalAttention(
        dim=32, window_size=4, heads=4, dim_head=8
    )
    params = module.init(KEY, images(32))["params"]
    loss = lambda params, x: squares(jax.vmap(lambda one: module.apply({"params": params}, one))(x))
    return loss, moved(params), (images(8, 32),)


def dantinox(**more: Any) -> Callable[[], Built]:
    def build() -> Built:
        package = made("dantinox.core.model")
        config = package.ModelConfig(dim=32, n_heads=4, num_blocks=2, vocab_size=64, max_context=16, **more)
        model = package.Transformer(config, rngs=nnx.Rngs(0))
        return of_nnx(model, words(), call=lambda model, x: model(x, deterministic=True))

    return build


def megalodon() -> Built:
    package = made("megalodon_jax")
    sizes = {"model_dim": 32, "num_heads": 2, "z_dim": 16, "value_dim": 32, "ffn_hidden_dim": 64, "cema_ndim": 4}
    config = package.MegalodonConfig(vocab_size=64, num_layers=2, chunk_size=8, norm_num_groups=4, **sizes)
    model = package.MegalodonForCausalLM(config, key=KEY)
    eqx = made("equinox")
    params, static = eqx.partition(moved(model), eqx.is_inexact_array)
    return (lambda params, x: squares(eqx.combine(params, static)(x)[0])), params, (words(),)


def long_range(name: str) -> Callable[[], Built]:
    def build() -> Built:
        package = made("long_range_models")
        layer = {"lru": lambda dim: package.LRULayer(dim, 16), "s5": lambda dim: package.S5Layer(dim, 16)}[name]
        return of_linen(package.SequenceModel(package.S4Module(32, 2, layer), 64), words())

    return build


def flaxdiff() -> Built:
    heads = {"heads": 4}
    unet = made("flaxdiff.models.simple_unet").Unet
    module = unet(emb_features=32, feature_depths=[8, 16], attention_configs=[heads, heads], num_res_blocks=1)
    return of_linen(module, images(16, 16, 3), np.abs(images()), images(4, 32))


def gated_rnn() -> Built:
    sizes = {"n_layer": 2, "d_model": 32, "d_channel_mixing": 64, "d_h": 32, "max_seq_length": 16}
    rates = dict.fromkeys(("channel_mixing_dropout", "time_mixing_dropout", "embedding_dropout"), 0.0)
    ends = {"input_vocab_size": 64, "output_vocab_size": 64, "use_word_embedding": True, "use_head": True}
    module = made("flax_gated_linear_rnn.language_models").gated_linear_rnn_lm.GatedLinearRNNLM
    return of_linen(
        module(**sizes, **rates, **ends, eps=1e-5, positional_encoding_mode="none"), words(), training=False
    )


def esm2() -> Built:
    model = made("esm2quinox").ESM2(2, 32, 4, False, KEY)
    return of_equinox(model, 4 + words(20), call=lambda model, x: model(x).logits)


def pdequinox(name: str, **more: Any) -> Callable[[], Built]:
    def build() -> Built:
        model = getattr(made("pdequinox").arch, name)(1, 3, 3, hidden_channels=16, key=KEY, **more)
        return of_equinox(model, images(3, 32))

    return build


def jraphx(name: str) -> Callable[[], Built]:
    def build() -> Built:
        model = getattr(made("jraphx.nn.models"), name)(16, 32, 2, 10, rngs=nnx.Rngs(0))
        edges = np.stack([words(8, 3).ravel(), np.arange(24, dtype=np.int32) % 8])
        return of_nnx(model, images(16), edges)

    return build


MODELS: dict[str, Stranger] = {
    "MLP": Stranger("equinox", eqx_nn("MLP"), ("layers/0/**",), ("layers/1/**",)),
    "MultiheadAttention": Stranger(
        "equinox", eqx_nn("MultiheadAttention"), ("{query,key,value}_proj/**",), ("output_proj/**",)
    ),
    "GRUCell": Stranger("equinox", eqx_nn("GRUCell"), ("weight_ih",)),
    "LSTMCell": Stranger("equinox", eqx_nn("LSTMCell"), (), ("weight_hh",)),
    "ViT": Stranger("jaxonmodels", jaxonmodels("vit"), ("**/c_fc/**",), ("**/c_proj/**",)),
    "Mamba": Stranger("jaxonmodels", jaxonmodels("mamba"), ("**/in_proj/**",), ("**/out_proj/**",)),
    "VisionTransformer": Stranger("equimo", equimo("vit"), ("**/fc1/**",), ("**/fc2/**",)),
    "ConvNeXt": Stranger("equimo", equimo("convnext"), ("**/pwconv1/**",), ("**/pwconv2/**",)),
    "vitax ViT": Stranger(
        "vitax", vitax, ("**/{query,key,value}/**", "**/mlp/layers/0/**"), ("**/out/**", "**/mlp/layers/3/**")
    ),
    "TNT": Stranger(
        "transformer-in-transformer-flax", tnt, ("**/MlpBlock_*/Dense_0/**",), ("**/MlpBlock_*/Dense_1/**",)
    ),
    "BoTNet": Stranger("bottleneck-transformer-flax", botnet, ("**/Conv_1/**",)),
    "LocalAttention": Stranger("local-attention-flax", local_attention, ("Dense_0/**",), ("Dense_1/**",)),
    "Transformer MHA": Stranger("dantinox", dantinox(), ("**/up_proj/**",), ("**/down_proj/**",)),
    "Transformer GQA": Stranger(
        "dantinox", dantinox(attention="gqa", kv_heads=2), ("**/up_proj/**",), ("**/down_proj/**",)
    ),
    "Transformer MLA": Stranger(
        "dantinox",
        dantinox(attention="mla", down_dim_q=16, down_dim_kv=16, rope_dim=8),
        ("**/up_{k,q,v}/**", "**/up_proj/**"),
        ("**/o_proj/**", "**/down_proj/**"),
    ),
    "Transformer MoE": Stranger("dantinox", dantinox(ffn="moe"), ("**/up_proj/**",), ("**/down_proj/**",)),
    "Megalodon": Stranger("megalodon-jax", megalodon, ("**/fc1/**",), ("**/fc2/**",)),
    "S4 of LRU": Stranger("long-range-models", long_range("lru"), ("**/Dense_0/**",)),
    "S4 of S5": Stranger("long-range-models", long_range("s5"), ("**/Dense_0/**",)),
    "Unet": Stranger("flaxdiff", flaxdiff, ("**/to_{q,k,v}/**",), ("**/to_out_0/**",)),
    "GatedLinearRNNLM": Stranger(
        "flax-gated-linear-rnn",
        gated_rnn,
        ("channel_mixing_layers_*/dense_layers_0/**",),
        ("channel_mixing_layers_*/dense_layers_1/**",),
    ),
    "ESM2": Stranger("esm2quinox", esm2, ("layers/linear1/**",), ("layers/linear2/**",)),
    "FNO": Stranger("pdequinox", pdequinox("ClassicFNO", num_blocks=2), ("**/by_pass_conv/**",)),
    "ModernUNet": Stranger(
        "pdequinox", pdequinox("ModernUNet", num_levels=2, num_blocks=1), ("left_arc_blocks/**/conv_1/**",)
    ),
    "ClassicResNet": Stranger(
        "pdequinox", pdequinox("ClassicResNet", num_blocks=2), ("blocks/*/conv_1/**",), ("blocks/*/conv_2/**",)
    ),
    "DilatedResNet": Stranger("pdequinox", pdequinox("DilatedResNet", num_blocks=1), ("blocks/*/conv_layers/*/**",)),
    "GCN": Stranger("jraphx", jraphx("GCN"), ("convs/0/**",), ("convs/1/**",)),
    "GAT": Stranger("jraphx", jraphx("GAT"), ("convs/0/lin/**",), ("convs/1/lin/**",)),
    "GIN": Stranger("jraphx", jraphx("GIN"), ("convs/0/nn/lins/0/**",), ("convs/0/nn/lins/1/**",)),
    "GraphSAGE": Stranger("jraphx", jraphx("GraphSAGE"), ("convs/0/**",), ("convs/1/**",)),
    "DinoV2": Stranger("jimmy-vision", jimmy, ("**/mlp/fc1/**",), ("**/mlp/fc2/**",)),
    "ResNet18": Stranger("flaxmodels", flaxmodels, ("BasicBlock_*/Conv_0/**",), ("BasicBlock_*/Conv_1/**",)),
}
