"""Other people's models, unmodified and tiny, from the package index: what builds each, its loss, a batch, a step of decoding, and
the configurations that it runs under. A test and a benchmark read this table; the packages are named in the Makefile."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import math
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


@dataclasses.dataclass(frozen=True)
class Size:
    rows: int = 8
    tokens: int = 8
    width: int = 32
    words: int = 64
    layers: int = 2  # of a model of Linen


TINY = Size()


@dataclasses.dataclass(frozen=True)
class Adopted:
    """A model of somebody else's. `decode(model, *start())` is a few tokens at once, and one more by what was kept of them."""

    package: str
    make: Callable[[Size], nnx.Module]
    loss: Callable[..., jax.Array]
    batch: Callable[[Size], tuple[Any, ...]]
    plans: dict[str, dict[str, Any]]
    decode: Callable[..., Any] | None = None
    start: Callable[[], tuple[Any, ...]] = tuple

    def build(self, size: Size = TINY) -> nnx.Module:
        """The model, every parameter moved away from what it starts with: zeros have no gradients to compare."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they take names that JAX is going to remove
            model, rng = self.make(size), np.random.default_rng(1)
        nnx.update(
            model,
            jax.tree.map(lambda x: x + 0.05 * rng.normal(size=x.shape).astype(x.dtype), nnx.state(model, nnx.Param)),
        )
        return model


def is_installed(package: str) -> bool:
    return package in sys.modules or importlib.util.find_spec(package) is not None


def empty(*packages: str) -> None:
    """Import these without what their own files import: tokenizers and downloads, which a model does not need."""
    root = packages[0]
    if root not in sys.modules:
        found = importlib.util.find_spec(root)
        assert found is not None, f"{root} is not installed"
        place = Path((found.submodule_search_locations or [""])[0])
        for name in packages:
            package = types.ModuleType(name)
            package.__path__ = [str(place.joinpath(*name.split(".")[1:]))]
            sys.modules[name] = package


def whole(axis: str = "data", **words: Any) -> dict[str, Any]:
    return {"jshard": {"mesh": {axis: 8}}, "rest": {"row": axis, **words, "match": ["**"]}}


DATA = {"data": whole(), "fsdp": whole(store="data")}


def split(mesh: dict[str, int], claims: dict[str, Any], **words: Any) -> dict[str, Any]:
    """A configuration of these claims, every one with rows over data and these words more; a `shard` has room for `store` only."""
    store = {key: word for key, word in words.items() if key == "store"}
    signals = {
        name: {**(store if "shard" in claim else {"row": "data", **words}), **claim} for name, claim in claims.items()
    }
    return {"jshard": {"mesh": mesh}, **signals, "rest": {"row": "data", **store, "match": ["**"]}}


def transformer(claims: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The plans of a transformer."""
    mesh = {"data": 2, "tensor": 4}
    return {
        **DATA,
        "tensor": split(mesh, claims),
        "tensor and sequence": split(mesh, claims, sequence="tensor"),
        "tensor and fsdp": split(mesh, claims, store="data"),
    }


def column(*globs: str, over: Any = "tensor") -> dict[str, Any]:
    return {"column": over, "match": list(globs)}


def reduction(*globs: str, over: Any = "tensor") -> dict[str, Any]:
    return {"reduction": over, "match": list(globs)}


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1).mean()


def words(size: Size, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, size.words, (*shape, size.rows, size.tokens)).astype(np.int32)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


# -- tunix --


def tunix(*models: str) -> None:
    empty(
        "tunix",
        "tunix.models",
        *(f"tunix.models.{name}" for name in ("qwen3", "gemma3")),
        "tunix.generate",
        "tunix.utils",
    )


def tunix_batch(size: Size) -> tuple[Any, ...]:
    rows, tokens = size.rows, size.tokens
    positions = np.tile(np.arange(tokens, dtype=np.int32), (rows, 1))
    return *words(size, 2), positions, np.tile(np.tril(np.ones((tokens, tokens), bool)), (rows, 1, 1))


def tunix_loss(model: Any, tokens: Any, targets: Any, positions: Any, mask: Any) -> jax.Array:
    return cross_entropy(model(tokens, positions, None, mask)[0], targets)


def tunix_decode(model: Any, tokens: Any, positions: Any, mask: Any, cache: Any) -> Any:
    """All tokens but the last at once, and the last by the keys and values of the others."""
    _, cache = model(tokens[:, :-1], positions[:, :-1], cache, mask[:, :-1])
    return model(tokens[:, -1:], positions[:, -1:], cache, mask[:, -1:])


def tunix_start(layers: int, heads: int = 4) -> Callable[[], tuple[Any, ...]]:
    def start() -> tuple[Any, ...]:
        tokens, _, positions, mask = tunix_batch(TINY)
        zeros = np.zeros((TINY.rows, TINY.tokens, heads, TINY.width // 4), np.float32)
        end = np.zeros(TINY.rows, np.int32)
        return (
            tokens,
            positions,
            mask,
            {f"layer_{at}": {"k": zeros, "v": zeros, "end_index": end} for at in range(layers)},
        )

    return start


def qwen3(kv_heads: int, **more: Any) -> Any:
    def make(size: Size) -> Any:
        tunix()
        from tunix.models.qwen3 import model

        config = model.ModelConfig(
            num_layers=2, vocab_size=size.words, embed_dim=size.width, hidden_dim=2 * size.width, num_heads=8,
            head_dim=size.width // 4, num_kv_heads=kv_heads,
            rope_theta=10000, norm_eps=1e-6, **more,
        )  # fmt: skip
        return model.Qwen3(config, rngs=nnx.Rngs(0))

    return make


def gemma3(size: Size) -> Any:
    tunix()
    from tunix.models.gemma3 import model

    config = model.ModelConfig(
        num_layers=6, num_embed=size.words, embed_dim=size.width, hidden_dim=2 * size.width, num_heads=8,
        head_dim=size.width // 4, num_kv_heads=4, sliding_window_size=size.tokens // 2, param_dtype=jnp.float32,
    )  # fmt: skip
    return model.Gemma3(config, rngs=nnx.Rngs(0))


ATTENTION = {
    "queries": column("layers/*/attn/q_proj/**"),
    "keys": column("layers/*/attn/{k,v}_proj/**"),
    "sums": reduction("layers/*/attn/o_proj/**"),
    "table": reduction("embedder/**"),
    "head": column("lm_head/**"),
}
QWEN3 = {**ATTENTION, "up": column("layers/*/mlp/{gate,up}_proj/**"), "down": reduction("layers/*/mlp/down_proj/**")}
TWO = split(
    {"data": 2, "kv": 2, "group": 2},
    {
        name: {
            **claim,
            **{word: "kv" if name == "keys" else ["kv", "group"] for word in ("column", "reduction") if word in claim},
        }
        for name, claim in QWEN3.items()
    },
)
EXPERTS = {**ATTENTION, "up": column("layers/*/mlp/{gate,up}_proj"), "down": reduction("layers/*/mlp/down_proj")}
GEMMA3 = {
    "queries": column("layers/*/attn/q_einsum/**"),
    "keys": {"shard": {"axis": 1, "mesh": "tensor"}, "match": ["layers/*/attn/kv_einsum/**"]},
    "sums": reduction("layers/*/attn/attn_vec_einsum/**", "layers/*/mlp/down_proj/**"),
    "up": column("layers/*/mlp/{gate,up}_proj/**"),
    "table": reduction("embedder/**"),
}
TUNIX = {"loss": tunix_loss, "batch": tunix_batch, "decode": tunix_decode}

# -- the Mambas --


def mamba(version: int) -> Callable[[Size], Any]:
    def make(size: Size) -> Any:
        package = importlib.import_module(f"mamba{version}_jax")
        config = getattr(package, f"Mamba{version}Config")(
            vocab_size=size.words,
            hidden_size=size.width,
            state_size=8,
            head_dim=8,
            chunk_size=size.tokens // 2,
            num_hidden_layers=2,
        )
        return getattr(package, f"Mamba{version}ForCausalLM")(config, rngs=nnx.Rngs(0))

    return make


def mamba_batch(size: Size) -> tuple[Any, ...]:
    return (words(size),)


def mamba_loss(model: Any, tokens: Any) -> jax.Array:
    return model(tokens, tokens)["loss"]


def mamba_decode(model: Any, tokens: Any) -> Any:
    found = model(tokens[:, :-1])
    found = model(tokens[:, -1:], cache=found["cache"])
    return found["logits"], found["cache"]


# -- images --


def canvit(size: Size) -> Any:
    empty("canvit_nnx", "canvit_nnx.model")
    empty("canvit_core")
    from canvit_core import backbone, config

    backbone.BACKBONES["tiny"] = backbone.ViTSpec(embed_dim=size.width, num_heads=4, num_blocks=2, patch_size=4)
    from canvit_nnx.model.canvit import CanViT

    settings = config.CanViTConfig(
        backbone_name="tiny",
        canvas_num_heads=4,
        canvas_head_dim=size.width // 4,
        num_canvas_registers=4,
        num_backbone_registers=2,
    )
    return CanViT(settings, rngs=nnx.Rngs(0))


def canvit_batch(size: Size) -> tuple[Any, ...]:
    pixels = 4 * math.isqrt(size.tokens)
    return normal(size.rows, 2, pixels, pixels, 3), normal(size.rows, 2, 2), np.abs(normal(size.rows, 2))


def canvit_steps(model: Any, glimpses: Any, centers: Any, scales: Any) -> Any:
    """A glimpse, and another one with the canvas that it left."""
    from canvit_nnx.viewpoint import Viewpoint

    state = model.init_state(batch_size=len(glimpses), canvas_grid_size=4)
    for at in range(2):
        found = model(glimpse=glimpses[:, at], state=state, viewpoint=Viewpoint(centers[:, at], scales[:, at]))
        state = found.state
    return found


def canvit_loss(model: Any, *batch: Any) -> jax.Array:
    found = canvit_steps(model, *batch)
    return sum(jnp.square(x).mean() for x in jax.tree.leaves(found))  # type: ignore[return-value]


def healswin(size: Size) -> Any:
    from heal_swin_nnx import HealSwin, HealSwinParams

    params = HealSwinParams(
        nside=8,
        in_channels=2,
        out_channels=3,
        base_pixels=(0, 1),
        embed_dim=16,
        depths=(2, 2),
        num_heads=(4, 8),
        dtype="float32",
    )
    return HealSwin(params, rngs=nnx.Rngs(0))


def healswin_batch(size: Size) -> tuple[Any, ...]:
    return normal(size.rows, 128, 2), normal(size.rows, 128, 3)


def healswin_loss(model: Any, x: Any, y: Any) -> jax.Array:
    return jnp.square(model(x) - y).mean()


CANVIT = {
    "heads": column(
        "canvas_reads/*/q_map/**", "canvas_writes/*/{k,v}_map/**", "backbone/blocks/*/{attn/qkv,mlp/fc1}/**"
    ),
    "sums": reduction("canvas_reads/*/o_map/**", "backbone/blocks/*/{attn/proj,mlp/fc2}/**"),
}
FEW = {"row": "data", "match": ["**/attn/{logit_scale,rope_freqs}"]}  # four heads rest on eight devices as they are
HEALSWIN_MLP = {"up": column("**/mlp/fc1/**"), "down": reduction("**/mlp/fc2/**")}
HEALSWIN = {
    "data": DATA["data"],
    "fsdp": {**DATA["fsdp"], "few": FEW},
    "tensor": split({"data": 2, "tensor": 4}, HEALSWIN_MLP),
    "tensor and sequence": split({"data": 2, "tensor": 4}, HEALSWIN_MLP, sequence="tensor"),
    "tensor and fsdp": split({"data": 2, "tensor": 4}, HEALSWIN_MLP, store="data"),
}

# -- Flax's own layers --


class Images(nnx.Module):
    """Layers of images and of rows that are read one after another."""

    def __init__(self, size: Size, rngs: nnx.Rngs):
        width = size.width
        self.first = nnx.Conv(4, width, (3, 3), use_bias=False, rngs=rngs)  # a norm takes no notice of a bias
        self.second = nnx.Conv(width, width, (3, 3), rngs=rngs)
        self.norm, self.groups = nnx.BatchNorm(width, rngs=rngs), nnx.GroupNorm(width, num_groups=8, rngs=rngs)
        self.lstm = nnx.RNN(nnx.OptimizedLSTMCell(width, width, rngs=rngs))
        self.gru = nnx.RNN(nnx.GRUCell(width, width, rngs=rngs))
        self.dropout, self.head = nnx.Dropout(0.25, rngs=rngs), nnx.Linear(width, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.second(nnx.relu(self.norm(self.first(x))))
        x = self.dropout(self.groups(x)).mean(1)
        return self.head(self.gru(self.lstm(x))[:, -1])


class Text(nnx.Module):
    """Layers of a transformer."""

    def __init__(self, size: Size, rngs: nnx.Rngs):
        width, heads = size.width, 8
        self.embed = nnx.Embed(size.words, width, rngs=rngs)
        self.norms = nnx.List(
            [nnx.LayerNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)]
        )
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, use_bias=False, rngs=rngs)
        self.general = nnx.LinearGeneral(width, (heads, width // heads), rngs=rngs)
        self.einsum = nnx.Einsum("bthd,hde->bte", (heads, width // heads, width), (width,), rngs=rngs)
        self.up, self.down = nnx.Linear(width, 2 * width, rngs=rngs), nnx.Linear(2 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        x = x + self.attention(self.norms[0](x), mask=nnx.make_causal_mask(tokens))
        x = x + self.einsum(nnx.gelu(self.general(self.norms[1](x))))
        x = x + self.dropout(self.down(nnx.gelu(self.up(self.norms[2](x)))))
        return self.embed.attend(x)


def images_batch(size: Size) -> tuple[Any, ...]:
    labels = np.random.default_rng(0).integers(0, 8, size.rows).astype(np.int32)
    return normal(size.rows, 8, size.tokens, 4), labels


def classified(model: Any, x: Any, labels: Any) -> jax.Array:
    return cross_entropy(model(x), labels)


IMAGES = {"columns": column("first/**", "norm/**"), "sums": reduction("second/**")}
TEXT = {
    "columns": column("attention/{query,key,value}/**", "general/**", "up/**"),
    "sums": reduction("attention/out/**", "einsum/**", "down/**", "embed/**"),
}

MODELS = {
    "flax-images": Adopted(
        "flax",
        lambda size: Images(size, nnx.Rngs(0)),
        classified,
        images_batch,
        {
            **DATA,
            "tensor": split({"data": 2, "tensor": 4}, IMAGES),
            "tensor and fsdp": split({"data": 2, "tensor": 4}, IMAGES, store="data"),
        },
    ),
    "flax-text": Adopted(
        "flax",
        lambda size: Text(size, nnx.Rngs(0)),
        classified,
        lambda size: tuple(words(size, 2)),
        transformer(TEXT),
    ),
    "qwen3": Adopted("tunix", qwen3(4), plans=transformer(QWEN3), start=tunix_start(2), **TUNIX),
    "qwen3-kv2": Adopted("tunix", qwen3(2), plans={"two heads for keys": TWO}, start=tunix_start(2, 2), **TUNIX),
    "qwen3-moe": Adopted(
        "tunix",
        qwen3(4, num_experts=8, num_experts_per_tok=2),
        plans=transformer(EXPERTS),
        start=tunix_start(2),
        **TUNIX,
    ),
    "gemma3": Adopted("tunix", gemma3, plans=transformer(GEMMA3), start=tunix_start(6), **TUNIX),
    **{
        f"mamba{version}": Adopted(
            f"mamba{version}_jax",
            mamba(version),
            mamba_loss,
            mamba_batch,
            DATA,
            mamba_decode,
            lambda: mamba_batch(TINY),
        )
        for version in (2, 3)
    },
    "canvit": Adopted("canvit_nnx", canvit, canvit_loss, canvit_batch, transformer(CANVIT)),
    "heal-swin": Adopted("heal_swin_nnx", healswin, healswin_loss, healswin_batch, HEALSWIN),
}
