"""`jshard.Decoder`: one device's numbers under every plan, at the cost that its formula says; sizes of public model cards."""

from __future__ import annotations

import collections
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jshard
from jshard.cli import main
from jshard.cli.experiment import sketched
from jshard.cli.target import Target
from jshard.errors import JShardError
from jshard.layers.creating import abstract
from jshard.layers.decoder import Block
from jshard.layers.layer_stack import KVCache
from jshard.programs.flops import arithmetic_of
from jshard.programs.jaxprs import equations
from jshard.signals.config import load_configuration
from tests.support.other_models import MODELS, TINY, is_installed, tunix_batch

FOLDER = Path(__file__).parents[2] / "configs" / "decoder"
SIZES = sorted(path for path in FOLDER.glob("*.yaml") if path.stem != "placement")
SMALL = {
    "vocabulary": 64, "width": 32, "depth": 2, "heads": 8, "kv_heads": 4, "head_dim": 8, "hidden": 64, "qk_norm": True,
    "rope": {"theta": 10_000.0},
}  # fmt: skip
ROWS, LENGTH = 8, 8
ACTIVATIONS = ROWS * LENGTH * SMALL["width"] * 4  # bytes of B x T x D
HEAD = {"head": {"extends": "_split", "column": "tensor", "match": ["head/**"]}}
PLANS = {
    "data": ("jshard.mesh={data: 8, tensor: 1}", "_split={row: data}", "rest={row: data, match: ['**']}"),
    "fsdp": ("jshard.mesh={data: 8, tensor: 1}",),
    "tensor": ("_split={row: data}", "rest={row: data, match: ['**']}"),
    "tensor and sequence": ("_split={row: data, sequence: tensor}", "rest={row: data, match: ['**']}"),
    "tensor and fsdp": (),
}


def load(plan, *more):
    """`configs/decoder/placement.yaml`, as a user changes it."""
    jshard.load({"jshard": {"include": str(FOLDER / "placement.yaml")}, **HEAD}, [*PLANS[plan], *more])


def cross_entropy(model, tokens, targets):
    logs = jax.nn.log_softmax(model(tokens))
    return -jnp.take_along_axis(logs, targets[..., None], -1).mean()


def decoder(**more):
    return jshard.Decoder(**{**SMALL, **more}, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def alone():
    batch = np.random.default_rng(0).integers(0, SMALL["vocabulary"], (2, ROWS, LENGTH)).astype(np.int32)
    jshard.unload()
    model = decoder()
    loss, gradients = nnx.jit(nnx.value_and_grad(cross_entropy))(model, *batch)
    return batch, model(batch[0]), loss, jax.device_get(gradients)


def by_path(model):
    return {"/".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}


@pytest.mark.seconds
def test_a_decoder_is_its_formula(alone):
    (tokens, _), logits, *_ = alone
    jshard.unload()
    model = decoder()

    def norm(x, scale):
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6) * scale

    x = model.embed.embedding[...][tokens]
    for layer in range(SMALL["depth"]):
        block = Block(model.config, rngs=nnx.Rngs(0))
        nnx.update(block, jax.tree.map(lambda array, layer=layer: array[layer], nnx.state(model.blocks)))
        x = x + block.attn(norm(x, block.attn_norm.scale[...]))
        x = x + block.mlp(norm(x, block.mlp_norm.scale[...]))
    head = norm(x, model.norm.scale[...]) @ model.head.kernel[...]
    np.testing.assert_allclose(logits, head, rtol=1e-4, atol=1e-5)
    assert np.isfinite(logits).all()


def test_a_decoder_of_experts_sends_a_token_to_two():
    assert nnx.eval_shape(lambda: decoder(experts=4)).blocks.mlp.top_k == 2


def test_a_cache_is_kept_by_each_layer():
    def built():
        model = decoder()
        model.init_cache(3, 5)
        return model

    kept = nnx.state(nnx.eval_shape(built), KVCache)
    shape = (SMALL["depth"], 3, SMALL["kv_heads"], 5, SMALL["head_dim"])
    assert [each.shape for each in jax.tree.leaves(kept)] == [shape, shape]


@pytest.mark.seconds
@pytest.mark.parametrize("plan", PLANS)
def test_a_decoder_equals_one_device_under_every_plan(alone, plan):
    batch, logits, loss, gradients = alone
    load(plan)
    model, sharded = jshard.shard(decoder(), batch[0]), jshard.shard(cross_entropy)
    np.testing.assert_allclose(model(batch[0]), logits, rtol=1e-4, atol=1e-5)
    got, found = nnx.jit(nnx.value_and_grad(sharded))(model, *batch)
    np.testing.assert_allclose(got, loss, rtol=1e-6)
    placed = by_path(model)
    for path, gradient in by_path(found).items():
        wanted = by_path(gradients)[path]
        np.testing.assert_allclose(gradient, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max(), err_msg=path)
        assert gradient.sharding == placed[path].sharding, path
    kernel = placed["blocks/attn/q/kernel"]
    stored = {"fsdp": 8, "tensor and fsdp": 2}.get(plan, 1)
    part = (SMALL["width"] // stored, SMALL["heads"] // (4 if "tensor" in plan else 1), SMALL["head_dim"])
    assert kernel.addressable_shards[0].data.shape == (SMALL["depth"], *part)


# For two layers of tensor parallel, all-reduces of B x T x D: behind the lookup, the attention and the MLP of each layer, and
# as many backward, of what the head, each attention and each MLP are given. With `sequence` each is a scatter and a gather.
TEN = {("all_reduce", "forward"): 5, ("all_reduce", "backward"): 5}
FORMULA = {
    "data": {}, "fsdp": {}, "tensor": TEN, "tensor and fsdp": TEN,
    "tensor and sequence": {(op, phase): 5 for op in ("all_gather", "reduce_scatter") for phase in ("forward", "backward")},
}  # fmt: skip


@pytest.mark.seconds
@pytest.mark.parametrize("plan", PLANS)
def test_a_decoder_asks_for_what_the_formula_says(alone, plan):
    batch = alone[0]
    load(plan)
    model, sharded = jshard.shard(decoder(), batch[0]), jshard.shard(cross_entropy)
    counts = collections.Counter()
    for line in jshard.explain(lambda *args: nnx.value_and_grad(sharded)(*args), model, *batch):
        assert line.signal != "-", line
        assert "redistribute" not in line.via, line
        if line.mesh_axes == ("tensor",) and line.payload == ACTIVATIONS // 2:  # rows are over two
            counts[line.collective, line.phase] += line.count
    assert counts == FORMULA[plan]


def products(store, remat, batch):
    """How many products the program of a decoder's gradients has."""
    layers = {"row": "data", "store": store, "remat": remat, "match": ["blocks/**"]}
    jshard.load({"jshard": {"mesh": {"data": 4}}, "layers": layers, "rest": {"row": "data", "match": ["**"]}})
    graph, parameters = nnx.split(jshard.shard(decoder()))
    loss = jshard.shard(lambda state, *batch: cross_entropy(nnx.merge(graph, state), *batch))
    program = jax.make_jaxpr(jax.grad(loss))(parameters, *batch)
    return [eqn.primitive.name for eqn in equations(program)].count("dot_general")


@pytest.mark.seconds
@pytest.mark.parametrize("store, less", [("data", 6), ({"parameters": "data", "prefetch": True}, 3 * 6)])
def test_what_a_decoder_names_is_kept_where_remat_says_so(alone, store, less):
    """Of a layer's seven products and two of attention the scores and attention's last are computed anew. Of layers that are
    gathered ahead three stand in the backward pass."""
    saved = {"save": ["q", "k", "v", "attention", "gate", "up"]}
    assert products(store, "full", alone[0]) - products(store, saved, alone[0]) == less


def by_permutes(remat="full", mesh={"data": 4, "tensor": 2}):  # noqa: B006
    """A decoder under `configs/decoder/fsdp.yaml`, whose gradients leave by permutes as on a TPU."""
    store = {"parameters": "data", "prefetch": True}
    kernel = {"reduce_scatter": "permute"}
    words = {"jshard": {"include": str(FOLDER / "fsdp.yaml"), "mesh": mesh}}
    layer = {"extends": "_split", "store": store, "kernel": kernel, "remat": remat}
    jshard.load({**words, "_layer": layer})
    return decoder(hidden=128)


@pytest.fixture(scope="module")
def wider_alone(alone):
    jshard.unload()
    return jax.device_get(nnx.jit(nnx.value_and_grad(cross_entropy))(decoder(hidden=128), *alone[0]))


@pytest.mark.seconds
@pytest.mark.parametrize("remat", ["full", "products", {"save": ["attention"]}])
def test_gradients_that_leave_a_part_at_a_time_are_those_of_one_device(alone, wider_alone, remat):
    batch, wanted = alone[0], wider_alone
    model = jshard.shard(by_permutes(remat), batch[0])
    got = nnx.jit(nnx.value_and_grad(jshard.shard(cross_entropy)))(model, *batch)
    np.testing.assert_allclose(got[0], wanted[0], rtol=1e-6)
    gradients = by_path(wanted[1])
    for path, gradient in by_path(got[1]).items():
        near = {"rtol": 1e-4, "atol": 1e-5 * np.abs(gradients[path]).max(), "err_msg": path}
        np.testing.assert_allclose(gradient, gradients[path], **near)
        assert gradient.sharding == by_path(model)[path].sharding, path


@pytest.mark.seconds
def test_a_gradient_that_leaves_by_permutes_is_multiplied_a_part_at_a_time(alone):
    """Of seven kernels, for each of four devices, in the three turns that stand in the program; whole for XLA's scatter."""
    model = jshard.shard(by_permutes(), alone[0][0])
    graph, parameters = nnx.split(model)
    loss = jshard.shard(lambda state, *batch: cross_entropy(nnx.merge(graph, state), *batch))
    shapes = collections.Counter()
    for eqn in equations(jax.make_jaxpr(jax.grad(loss))(parameters, *alone[0])):
        if eqn.primitive.name == "dot_general" and eqn.outvars[0].aval.ndim == 2:
            shapes[tuple(sorted(eqn.outvars[0].aval.shape))] += 1
    whole, part = (SMALL["width"], 64), (SMALL["width"] // 4, 64)
    assert (shapes[whole], shapes[part]) == (0, 3 * 4 * 3)


@pytest.mark.slow
def test_a_product_that_nothing_reads_is_not_counted(alone):
    """Derivatives of layers that are gathered ahead are traced with what they are derivatives of, of which nothing is read."""

    def flops(store, remat):
        by_permutes()
        layer = {"extends": "_split", "store": store, "remat": remat, "kernel": {"reduce_scatter": "permute"}}
        mesh = {"mesh": {"data": 4, "tensor": 2}}
        jshard.load({"jshard": {"include": str(FOLDER / "fsdp.yaml"), **mesh}, "_layer": layer})
        graph, parameters = nnx.split(jshard.shard(decoder(hidden=128), alone[0][0]))
        loss = jshard.shard(lambda state, *batch: cross_entropy(nnx.merge(graph, state), *batch))
        return arithmetic_of(jax.make_jaxpr(jax.grad(loss))(parameters, *alone[0])).total

    prefetch = {"parameters": "data", "prefetch": True}
    assert flops(prefetch, "full") == flops("data", "full") > flops(prefetch, "products") == flops("data", "products")


@pytest.mark.slow
def test_a_decoder_whose_gradients_leave_a_part_at_a_time_is_proven(alone):
    proof = jshard.verify(jshard.shard(cross_entropy), by_permutes(), *alone[0])
    assert proof.ok, proof


@pytest.mark.seconds
def test_a_decoder_of_experts_equals_one_device(alone):
    (tokens, _), experts = alone[0], {"experts": 4, "hidden": 16}
    jshard.unload()
    wanted = decoder(**experts)
    logits, losses = wanted(tokens), wanted.blocks.mlp.auxiliary.get_value()
    assert losses.shape == (SMALL["depth"],)
    columns = ["blocks/attn/{q,k,v}/kernel", "head/**"]
    jshard.load({
        "jshard": {"mesh": {"data": 2, "expert": 2, "tensor": 2}},
        "columns": {"row": ["data", "expert"], "column": "tensor", "match": columns},
        "sums": {"row": ["data", "expert"], "reduction": "tensor", "match": ["blocks/attn/o/kernel", "embed/**"]},
        "up": {"row": ["data", "expert"], "expert": "expert", "column": "tensor", "match": ["blocks/mlp/{gate,up}/kernel"]},
        "down": {"row": ["data", "expert"], "expert": "expert", "reduction": "tensor", "match": ["blocks/mlp/down/kernel"]},
        "rest": {"row": ["data", "expert"], "match": ["**"]},
    })  # fmt: skip
    model = jshard.shard(decoder(**experts), tokens)
    np.testing.assert_allclose(model(tokens), logits, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.blocks.mlp.auxiliary.get_value(), losses, rtol=1e-5)
    kernel = by_path(model)["blocks/mlp/up/kernel"]
    assert kernel.addressable_shards[0].data.shape == (SMALL["depth"], 2, SMALL["width"], 8)


@pytest.mark.seconds
def test_packed_rows_and_a_tied_head_equal_one_device(alone):
    tokens = alone[0][0]
    inputs = {
        "tokens": tokens,
        "positions": np.repeat([[0, 1, 2, 3, 4, 0, 1, 2]], ROWS, 0).astype(np.int32),
        "segments": np.repeat([[1, 1, 1, 1, 1, 2, 2, 2]], ROWS, 0).astype(np.int32),
    }
    jshard.unload()
    wanted = decoder(tied=True)(inputs)
    np.testing.assert_allclose(wanted[:, 5:], decoder(tied=True)(tokens[:, 5:]), rtol=1e-4, atol=1e-5)
    jshard.load({"jshard": {"include": str(FOLDER / "placement.yaml")}})
    model = jshard.shard(decoder(tied=True), inputs)
    np.testing.assert_allclose(model(inputs), wanted, rtol=1e-4, atol=1e-5)
    assert "head/kernel" not in by_path(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_logits_are_those_of_another_qwen3_on_the_same_weights(extra):
    """google-tunix's; it turns its heads by the base of Qwen3, whatever its config says."""
    if not is_installed("tunix"):
        extra("tunix")
    jshard.unload()
    theirs = MODELS["qwen3"].build()
    ours = decoder(rope={"theta": 1_000_000})
    paths = {
        r"embedder/input_embedding": "embed/embedding", r"lm_head/w": "head/kernel", r"final_norm/w": "norm/scale",
        r"layers/(\d+)/attn/([qkvo])_proj/w": r"blocks/\1/attn/\2/kernel",
        r"layers/(\d+)/attn/([qk])_norm/w": r"blocks/\1/attn/\2_norm/scale",
        r"layers/(\d+)/mlp/(\w+)_proj/kernel": r"blocks/\1/mlp/\2/kernel",
        r"layers/(\d+)/input_layernorm/w": r"blocks/\1/attn_norm/scale",
        r"layers/(\d+)/post_attention_layernorm/w": r"blocks/\1/mlp_norm/scale",
    }  # fmt: skip
    given = {}
    for path, leaf in by_path(theirs).items():
        (found,) = (re.sub(here, there, path) for here, there in paths.items() if re.fullmatch(here, path))
        given[found] = leaf
    for path, variable in nnx.to_flat_state(nnx.state(ours, nnx.Param)):
        name = "/".join(path)
        each = [given.pop(name.replace("blocks", f"blocks/{layer}")) for layer in range(2)] if "blocks" in path else []
        variable.set_value(jnp.stack(each) if each else given.pop(name))
    assert not given
    tokens, _, positions, mask = tunix_batch(TINY)
    np.testing.assert_allclose(ours(tokens), theirs(tokens, positions, None, mask)[0], rtol=1e-5, atol=1e-5)


def test_weights_of_hugging_face_are_read_into_each_device_s_part(tmp_path):
    sizes = {"depth": 2, "width": 16, "heads": 8, "kv_heads": 4, "head_dim": 128, "hidden": 32, "vocabulary": 8}
    draw, shapes = np.random.default_rng(0), {"q": (1024, 16), "k": (512, 16), "v": (512, 16), "o": (16, 1024)}
    shapes = {f"self_attn.{name}_proj": shape for name, shape in shapes.items()}
    shapes |= {f"self_attn.{name}_norm": (128,) for name in "qk"}
    shapes |= {"mlp.gate_proj": (32, 16), "mlp.up_proj": (32, 16), "mlp.down_proj": (16, 32)}
    shapes |= {"input_layernorm": (16,), "post_attention_layernorm": (16,)}
    shapes = {f"model.layers.{layer}.{name}": shape for layer in range(2) for name, shape in shapes.items()}
    shapes |= {"model.embed_tokens": (8, 16), "model.norm": (16,), "lm_head": (8, 16)}
    file = {f"{name}.weight": draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    jshard.unload()
    jshard.save_weights(jax.tree.map(jnp.asarray, file), tmp_path / "model.safetensors")
    load("tensor and fsdp")
    described = nnx.eval_shape(lambda: decoder(**sizes))
    model = jshard.shard(described, jax.ShapeDtypeStruct((ROWS, LENGTH), np.int32))
    jshard.load_weights(model, tmp_path / "model.safetensors", rename=FOLDER / "huggingface.txt")
    found = by_path(model)
    assert found["blocks/attn/q/kernel"].addressable_shards[0].data.shape == (2, 8, 2, 128)
    layer, x = "model.layers.1.", draw.normal(size=(3, 16))
    heads = (x @ file[f"{layer}self_attn.k_proj.weight"].T).reshape(3, 4, 128)  # as it is called there
    np.testing.assert_allclose(np.einsum("td,dnh->tnh", x, found["blocks/attn/k/kernel"][1]), heads, rtol=1e-5)
    y = draw.normal(size=(3, 8, 128))
    out = np.einsum("tnh,nhd->td", y, found["blocks/attn/o/kernel"][1])
    np.testing.assert_allclose(out, y.reshape(3, -1) @ file[f"{layer}self_attn.o_proj.weight"].T, rtol=1e-5)
    np.testing.assert_array_equal(found["blocks/mlp/down/kernel"][1], file[f"{layer}mlp.down_proj.weight"].T)
    np.testing.assert_array_equal(found["blocks/attn/k_norm/scale"][1], file[f"{layer}self_attn.k_norm.weight"])
    np.testing.assert_array_equal(found["blocks/mlp_norm/scale"][1], file[f"{layer}post_attention_layernorm.weight"])
    np.testing.assert_array_equal(found["head/kernel"], file["lm_head.weight"].T)


@pytest.mark.parametrize("path", SIZES, ids=[path.stem for path in SIZES])
def test_a_size_has_the_parameters_of_its_model_card(path):
    found = load_configuration(path)
    assert found.has_claims
    card = re.search(r"([\d,]+) parameters", path.read_text())
    assert card is not None
    model = dict(found.train["model"])
    assert model.pop("path") == "jshard:Decoder"
    jshard.unload()
    shapes = by_path(abstract(lambda: jshard.Decoder(**model, rngs=nnx.Rngs(0))))
    assert sum(leaf.size for leaf in shapes.values()) == int(card[1].replace(",", ""))


@pytest.mark.seconds
@pytest.mark.usefixtures("in_the_root")
def test_seventy_billion_on_512_chips_are_explained_here_by_the_same_formula():
    counts, rows = collections.Counter(), 8 * 4096 * 8192 * 2  # bytes of a device's, in bfloat16
    with sketched(Target("configs/decoder/llama3.1-70b.yaml", ())) as experiment:
        for line in experiment.asked:
            if line.mesh_axes == ("tensor",) and line.payload in (
                rows,
                rows // 16,
            ):  # the head's come 256 places at a time
                counts[line.collective, line.phase] += line.count * line.payload / rows
    once = (
        1 + 2 * 80
    )  # each way; `remat: full`, and the loss, gather all anew, and one of two in each layer is scattered
    assert counts == {
        ("reduce_scatter", "forward"): once, ("all_gather", "forward"): once,
        ("reduce_scatter", "backward"): once + 80, ("all_gather", "backward"): once + 161,
    }  # fmt: skip


@pytest.mark.parametrize(("sizes", "sentence"), [
    ({"widht": 8}, 'a jshard.Decoder has no "widht"; did you mean "width"?'),
    ({"kv_heads": 3}, "jshard.Attention has 8 heads and 3 kv_heads, which don't divide them; use kv_heads: 2"),
    ({"heads": 7}, "jshard.Attention has 7 heads and 4 kv_heads, which don't divide them; use kv_heads: 1"),
    ({"head_dim": None, "width": 33},
     "jshard.Attention divides width 33 among 8 heads; use width 32, or write head_dim: 128"),
    ({"head_dim": 7},
     "jshard.Attention has heads of 7, which rope turns by pairs; use head_dim: 8, or leave rope out"),
    ({"experts": 2, "top_k": 3}, "jshard.MoE chooses top_k=3 of 2 experts; use top_k from 1 to 2"),
    ({"heads": 0}, "a jshard.Decoder has heads: 0; use a whole number, 1 or more"),
    ({"kv_heads": 0}, "a jshard.Decoder has kv_heads: 0; use a whole number, 1 or more"),
    ({"window": -1}, "a jshard.Decoder has window: -1; use a whole number, 1 or more"),
    ({"width": "64"}, "a jshard.Decoder has width: '64'; use a whole number, 1 or more"),
    ({"depth": True}, "a jshard.Decoder has depth: True; use a whole number, 1 or more"),
    ({"vocabulary": None}, "a jshard.Decoder has vocabulary: None; use a whole number, 1 or more"),
    ({"dropout": 1.0}, "a jshard.Decoder has dropout: 1.0; use 0, or a share below 1"),
    ({"dropout": -0.1}, "a jshard.Decoder has dropout: -0.1; use a number, 0 or more"),
    ({"norm_eps": "1e-6"}, "a jshard.Decoder has norm_eps: '1e-6'; use a number, 0 or more"),
    ({"capacity": True}, "a jshard.Decoder has capacity: True; use a number, 0 or more"),
    ({"dtype": "bfloat61"}, "a jshard.Decoder has dtype: 'bfloat61'; did you mean \"bfloat16\"?"),
    ({"param_dtype": "int8"}, "a jshard.Decoder has param_dtype: 'int8'; use float32, bfloat16, float16, float64"),
], ids=lambda each: next(iter(each)) if isinstance(each, dict) else "")  # fmt: skip
def test_a_mistake_in_the_sizes_is_told(sizes, sentence):
    with pytest.raises(JShardError) as error:
        nnx.eval_shape(lambda: decoder(**sizes))
    assert str(error.value) == sentence


@pytest.mark.parametrize("sizes", [
    {"kv_heads": 1}, {"head_dim": 2}, {"head_dim": 7, "rope": None}, {"window": 1}, {"dropout": 0}, {"experts": 1, "top_k": 1},
    {"norm_eps": np.float32(0)},
    {"width": np.int64(64)}, {"dtype": "bfloat16"}, {"param_dtype": "float16"},
], ids=str)  # fmt: skip
def test_a_decoder_takes_the_least_that_there_is(sizes):
    nnx.eval_shape(lambda: decoder(**sizes))


@pytest.mark.usefixtures("in_the_root")
def test_a_mistake_in_the_sizes_of_a_file_is_told_with_its_line(capsys):
    path = "configs/decoder/qwen3-0.6b.yaml"
    assert main(["explain", path, "model.widht=8"]) == 2
    line = next(at for at, text in enumerate(Path(path).read_text().splitlines(), 1) if "model:" in text)
    assert capsys.readouterr().err.splitlines()[-1] == (
        f'jshard.train.model ({path}:{line}) is "jshard:Decoder", which takes no argument "widht"; did you mean "width"?'
    )
    assert main(["explain", path, "model.heads=0"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f'jshard.train.model ({path}:{line}) is "jshard:Decoder": a jshard.Decoder has heads: 0; use a whole number, 1 or more'
    )


def test_a_size_that_is_missing_is_told():
    with pytest.raises(JShardError) as error:
        jshard.Decoder(vocabulary=8, width=8, depth=1, heads=1, rngs=nnx.Rngs(0))
    assert str(error.value) == "a jshard.Decoder has no hidden; give hidden too"
