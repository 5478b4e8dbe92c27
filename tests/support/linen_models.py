"""Linen models of others, unmodified and tiny: those of transformers 4, and nano-moe."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.other_models import TINY, Size

rng = np.random.default_rng(0)
HEADS = 8


@dataclasses.dataclass
class Model:
    """Parameters and a loss of them, the globs of a tensor-parallel plan, and one step of decoding."""

    params: Any
    loss: Callable[..., Any]
    batch: dict[str, np.ndarray]
    columns: str = ""
    sums: str = ""
    cache: Any = None
    decode: Callable[..., Any] | None = None  # of params, cache, tokens, place
    generate: Callable[..., Any] | None = None  # of params, key, prompts
    tensor: int = 4

    def decoded(self, run: Callable[..., Any], params: Any) -> list[Any]:
        """The logits of two steps of decoding, or the tokens that are generated; `run` is what calls a function."""
        if self.generate is not None:
            return [run(self.generate)(params, np.zeros(2, np.uint32), self.batch["x"][:, :5])]
        if self.decode is None:
            return []
        step, cache, logits = run(self.decode), self.cache, []
        for at in range(2):
            found, cache = step(params, cache, self.batch["y"][:, at : at + 1], np.int32(at))
            logits.append(found)
        return logits

    def plans(self) -> dict[str, dict[str, Any]]:
        """Configurations by name: none but data parallel and FSDP where there is nothing to split."""

        def split(sizes: dict[str, int], store: dict[str, str], **words: str) -> dict[str, Any]:
            """Without `columns` every parameter is whole in use."""
            found: dict[str, Any] = {"jshard": {"mesh": sizes}}
            if "tensor" in sizes:
                found["columns"] = {"row": "data", "column": "tensor", "match": self.columns.split(), **words, **store}
                found["sums"] = {"row": "data", "reduction": "tensor", "match": self.sums.split(), **words, **store}
            return found | {"rest": {"row": "data", "match": ["**"], **store}}

        both, stored = {"data": 8 // self.tensor, "tensor": self.tensor}, {"store": "data"}
        plans = {"data": split({"data": 8}, {}), "fsdp": split({"data": 8}, stored)}
        if self.columns:
            plans["tensor"] = split(both, {})
            plans["tensor and fsdp"] = split(both, stored)
            plans["tensor and sequence"] = split(both, {}, sequence="tensor")
        return plans


def cross_entropy(logits: Any, targets: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1).mean()


def words(size: Size) -> np.ndarray:
    return rng.integers(0, size.words, (size.rows, size.tokens)).astype(np.int32)


def images(size: Size, pixels: int) -> dict[str, np.ndarray]:
    x = rng.normal(size=(size.rows, 3, pixels, pixels)).astype(np.float32)
    return {"x": x, "y": rng.integers(0, 8, size.rows).astype(np.int32)}


def of_transformers(package: str, kind: str, input_shape: Any = None, **config: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they take names that JAX is going to remove
        module = importlib.import_module(f"transformers.models.{package}.modeling_flax_{package}")
        configs = importlib.import_module(f"transformers.models.{package}.configuration_{package}")
        model = getattr(module, f"Flax{kind}")
        module.jnp = _OlderNumpy()
        given = {} if input_shape is None else {"input_shape": input_shape}
        return model(getattr(configs, model.config_class.__name__)(**config), **given)


class _OlderNumpy:
    """T5 says `jnp.clip(x, a_max=...)`, which no JAX that jshard runs on takes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)

    @staticmethod
    def clip(x: Any, a_min: Any = None, a_max: Any = None) -> Any:
        return jnp.clip(x, a_min, a_max)


def decoder_only(size: Size, model: Any, columns: str, sums: str) -> Model:
    def loss(params: Any, batch: Any, key: Any) -> Any:
        logits = model(batch["x"], params=params, train=True, dropout_rng=key).logits
        return cross_entropy(logits, batch["y"])

    def decode(params: Any, cache: Any, tokens: Any, place: Any) -> Any:
        where = jnp.broadcast_to(place, tokens.shape)
        out = model(
            tokens,
            params=params,
            past_key_values=cache,
            position_ids=where,
            attention_mask=jnp.ones((size.rows, size.tokens)),
        )
        return out.logits, out.past_key_values

    batch = {"x": words(size), "y": words(size)}
    return Model(model.params, loss, batch, columns, sums, model.init_cache(size.rows, size.tokens), decode)


def encoder_decoder(
    size: Size, model: Any, x: np.ndarray, columns: str, sums: str, **more: Callable[[Any], Any]
) -> Model:
    def loss(params: Any, batch: Any, key: Any) -> Any:
        logits = model(batch["x"], decoder_input_ids=batch["before"], params=params, train=True, dropout_rng=key).logits
        return cross_entropy(logits, batch["y"])

    def decode(params: Any, cache: Any, tokens: Any, place: Any) -> Any:
        cache, seen = cache
        given = {name: make(place) for name, make in more.items()}
        out = model.decode(tokens, (seen,), params=params, past_key_values=cache,
                           decoder_attention_mask=jnp.ones((size.rows, size.tokens)), **given)  # fmt: skip
        return out.logits, (out.past_key_values, seen)

    batch = {"x": x, "before": words(size), "y": words(size)}
    seen = model.encode(x)
    cache = model.init_cache(size.rows, size.tokens, seen)
    return Model(model.params, loss, batch, columns, sums, (cache, seen.last_hidden_state), decode)


def gpt2(size: Size = TINY) -> Model:
    """Its q, k and v are one kernel."""
    model = of_transformers("gpt2", "GPT2LMHeadModel", vocab_size=size.words, n_positions=size.tokens, n_embd=size.width, n_layer=size.layers,
                            n_head=HEADS, bos_token_id=1, eos_token_id=2)  # fmt: skip
    return decoder_only(
        size,
        model,
        "transformer/h/*/{attn/c_attn,mlp/c_fc}/**",
        "transformer/h/*/{attn,mlp}/c_proj/** transformer/wte/**",
    )


def llama(size: Size = TINY) -> Model:
    model = of_transformers("llama", "LlamaForCausalLM", vocab_size=size.words, hidden_size=size.width, num_hidden_layers=size.layers,
                            intermediate_size=2 * size.width, num_attention_heads=HEADS, max_position_embeddings=size.tokens)  # fmt: skip
    return decoder_only(
        size, model, "model/layers/*/self_attn/{q,k,v}_proj/** model/layers/*/mlp/{gate,up}_proj/** lm_head/**",
        "model/layers/*/self_attn/o_proj/** model/layers/*/mlp/down_proj/** model/embed_tokens/**",
    )  # fmt: skip


def bert(size: Size = TINY) -> Model:
    model = of_transformers("bert", "BertForMaskedLM", vocab_size=size.words, hidden_size=size.width, num_hidden_layers=size.layers,
                            num_attention_heads=HEADS, intermediate_size=2 * size.width, max_position_embeddings=size.tokens)  # fmt: skip

    def loss(params: Any, batch: Any, key: Any) -> Any:
        return cross_entropy(model(batch["x"], params=params, train=True, dropout_rng=key).logits, batch["y"])

    return Model(
        model.params, loss, {"x": words(size), "y": words(size)},
        "bert/encoder/layer/*/attention/self/** bert/encoder/layer/*/intermediate/** cls/predictions/bias",
        "bert/encoder/layer/*/{attention/output,output}/dense/** bert/embeddings/word_embeddings/**",
    )  # fmt: skip


def t5(size: Size = TINY) -> Model:
    """Of two layers in its decoder the second takes the bias of positions that the first one makes."""
    model = of_transformers("t5", "T5ForConditionalGeneration", vocab_size=size.words, d_model=size.width, d_kv=size.width // HEADS, d_ff=2 * size.width,
                            num_layers=size.layers, num_decoder_layers=2, num_heads=HEADS)  # fmt: skip
    return encoder_decoder(
        size, model, words(size), "**/{q,k,v}/** **/wi/** **/relative_attention_bias/**", "**/o/** **/wo/** shared/**"
    )


def vit(size: Size = TINY) -> Model:
    """An odd number of patches, and one place more: ten, or 82."""
    pixels = 4 * (math.isqrt(size.tokens) | 1)
    model = of_transformers("vit", "ViTForImageClassification", hidden_size=size.width, num_hidden_layers=size.layers,
                            num_attention_heads=HEADS, intermediate_size=2 * size.width, image_size=pixels, patch_size=4,
                            num_labels=8)  # fmt: skip

    def loss(params: Any, batch: Any, key: Any) -> Any:
        return cross_entropy(model(batch["x"], params=params, train=True, dropout_rng=key).logits, batch["y"])

    return Model(
        model.params, loss, images(size, pixels),
        "vit/encoder/layer/*/attention/attention/** vit/encoder/layer/*/intermediate/**",
        "vit/encoder/layer/*/{attention/output,output}/dense/**", tensor=2,
    )  # fmt: skip


def resnet(size: Size = TINY) -> Model:
    model = of_transformers("resnet", "ResNetForImageClassification", embedding_size=8, hidden_sizes=[32, 32, 64, 64],
                            depths=[1, 1, 1, 1], num_labels=8)  # fmt: skip

    def loss(params: Any, batch: Any, key: Any) -> Any:
        out, statistics = model(batch["x"], params=params, train=True)
        return cross_entropy(out.logits, batch["y"]) + sum(map(jnp.sum, jax.tree.leaves(statistics))) * 0.01

    return Model(model.params, loss, images(size, 16))


def whisper(size: Size = TINY) -> Model:
    model = of_transformers("whisper", "WhisperForConditionalGeneration", vocab_size=size.words, num_mel_bins=8,
                            encoder_layers=size.layers, encoder_attention_heads=HEADS, decoder_layers=size.layers, d_model=size.width,
                            decoder_attention_heads=HEADS, decoder_ffn_dim=2 * size.width, encoder_ffn_dim=2 * size.width,
                            max_source_positions=size.tokens, max_target_positions=size.tokens, pad_token_id=0, bos_token_id=1,
                            eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
                            begin_suppress_tokens=None, input_shape=(1, 8, 2 * size.tokens))  # fmt: skip
    return encoder_decoder(
        size, model, rng.normal(size=(size.rows, 8, 2 * size.tokens)).astype(np.float32),
        "**/{q,k,v}_proj/** **/fc1/**", "**/out_proj/** **/fc2/** model/decoder/embed_tokens/**",
        decoder_position_ids=lambda place: jnp.broadcast_to(place, (size.rows, 1)),
    )  # fmt: skip


def nano_moe(size: Size = TINY) -> Model:
    from nano_moe import NanoMoE, NanoMoEConfig  # pyright: ignore[reportMissingImports]

    model = NanoMoE(
        NanoMoEConfig(
            vocab_size=size.words,
            n_layers=size.layers,
            n_heads=HEADS,
            d_model=size.width,
            d_ff=2 * size.width,
            block_size=size.tokens,
        )
    )

    def loss(params: Any, batch: Any, key: Any) -> Any:
        logits, beside = model.apply({"params": params}, batch["x"], deterministic=False, rngs={"dropout": key})
        return cross_entropy(logits, batch["y"]) + 0.01 * beside

    batch = {"x": words(size), "y": words(size)}
    params = model.init(jax.random.key(0), batch["x"][:1])["params"]
    generate = functools.partial(model.generate, max_new_tokens=3, top_k_sample=8)
    return Model(params, loss, batch, generate=generate)


def package(name: str) -> str:
    return "nano_moe" if name == "nano_moe" else "transformers"


MODELS = {each.__name__: each for each in (gpt2, llama, bert, t5, vit, resnet, whisper, nano_moe)}
