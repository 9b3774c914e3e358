"""The CPU engine's dense layers and attention against independent references in float64."""

from __future__ import annotations

import pytest
import torch
from cpu_engine_kernels import DTYPES, attention, close, generator, layers


@pytest.fixture
def rng() -> torch.Generator:
    return generator()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_linear_over_packed_weights(rng, dtype, biased):
    x, w = (torch.randn(*shape, generator=rng).to(dtype) for shape in [(5, 24), (16, 24)])
    bias = torch.randn(16, generator=rng) if biased else None  # SGLang keeps it in fp32
    actual = layers.weight_packed_linear(x, layers.convert_weight_packed(w), bias, True)
    assert actual.dtype == dtype
    close(actual, torch.einsum("ti,oi->to", x.double(), w.double()) + (0 if bias is None else bias.double()))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(rng, dtype):
    x, residual = (torch.randn(7, 32, generator=rng).to(dtype) * 3 for _ in range(2))
    weight = torch.rand(32, generator=rng).to(dtype)
    norm = torch.nn.functional.rms_norm
    close(layers.rmsnorm_cpu(x, weight, 1e-5), norm(x.double(), (32,), weight.double(), 1e-5))

    total = x.double() + residual.double()
    layers.fused_add_rmsnorm_cpu(x, residual, weight, 1e-5)
    close(residual, total)
    close(x, norm(total, (32,), weight.double(), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activation(rng, dtype):
    x = torch.randn(6, 40, generator=rng).to(dtype)
    gate, up = x[:, :20].double(), x[:, 20:].double()
    close(layers.silu_and_mul_cpu(x), gate / (1 + torch.exp(-gate)) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [16, 8])
@pytest.mark.parametrize("flat", [True, False])
def test_rotary_embedding(rng, dtype, neox, rotary_dim, flat):
    tokens, head_size, half = 9, 16, rotary_dim // 2
    positions = torch.randint(0, 50, (tokens,), generator=rng)
    angles = torch.arange(50)[:, None] * 10000.0 ** -(torch.arange(half) / half)
    cache = torch.cat([angles.cos(), angles.sin()], dim=-1)
    query, key = (torch.randn(tokens, heads, head_size, generator=rng).to(dtype) for heads in (6, 2))

    def expected(x: torch.Tensor) -> torch.Tensor:
        x = x.double()
        pairs = (x[..., :half], x[..., half:rotary_dim]) if neox else (x[..., :rotary_dim:2], x[..., 1:rotary_dim:2])
        turn = torch.polar(torch.ones(()).double(), angles.double()[positions])[:, None]
        turned = torch.complex(*pairs) * turn  # rotation as multiplication of complex numbers
        result = x.clone()
        if neox:
            result[..., :half], result[..., half:rotary_dim] = turned.real, turned.imag
        else:
            result[..., :rotary_dim:2], result[..., 1:rotary_dim:2] = turned.real, turned.imag
        return result

    given = [t.flatten(1) if flat else t for t in (query, key)]
    for actual, x, argument in zip(
        layers.rotary_embedding_cpu(positions, *given, head_size, cache, neox),
        (query, key),
        given,
        strict=True,
    ):
        assert actual.shape == argument.shape
        close(actual.view(x.shape), expected(x))


def reference_attention(q, keys, values, scale, cap, sees) -> torch.Tensor:
    """One query [heads, dim] against the keys [n, kv_heads, dim] in `sees`, in float64, head by head."""
    out = []
    for head in range(q.shape[0]):
        kv = head // (q.shape[0] // keys.shape[1])
        scores = torch.stack([(q[head].double() * keys[j, kv].double()).sum() * scale for j in sees])
        if cap:
            scores = cap * torch.tanh(scores / cap)
        weights = scores.exp() / scores.exp().sum()
        out.append(sum(w * values[j, kv].double() for w, j in zip(weights, sees, strict=True)))
    return torch.stack(out)


class Cache:
    """Three requests in a cache whose slots are scattered at random."""

    def __init__(self, rng, dtype, lengths=(5, 1, 8)) -> None:
        self.lengths, self.dtype, self.rng = lengths, dtype, rng
        self.k, self.v = (torch.randn(40, 2, 8, generator=rng).to(dtype) for _ in range(2))
        self.rows = torch.tensor([2, 0, 3])  # row 1 belongs to somebody else
        self.table = torch.randperm(40, generator=rng)[:40].view(4, 10).to(torch.int32)
        self.seq_lens = torch.tensor(lengths)

    def slots(self, request: int) -> torch.Tensor:
        return self.table[self.rows[request], : self.lengths[request]].long()

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.rng).to(self.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_store_cache(rng, dtype):
    cache = Cache(rng, dtype)
    k, v = cache.random(4, 2, 8), cache.random(4, 2, 8)
    where = torch.tensor([7, 0, 31, 12])
    kept = cache.k.clone(), cache.v.clone()
    attention.store_cache_cpu(k.flatten(1), v.flatten(1), cache.k, cache.v, where, 16)
    assert torch.equal(cache.k[where], k) and torch.equal(cache.v[where], v)
    others = [i for i in range(40) if i not in where.tolist()]
    assert torch.equal(cache.k[others], kept[0][others]) and torch.equal(cache.v[others], kept[1][others])


def decode(cache, q, out, key, value, loc, cap=0.0, cross=False, window=0, encoder=None, sinks=None, scale=1.0):
    scratch = torch.zeros(3, 4, 8, 9)
    attention.decode_attention_cpu(
        q, cache.k, cache.v, scale, scale, out, key, value, loc, scratch, cache.table, cache.rows, cache.seq_lens,
        0.3, cap, cross, window, encoder, sinks,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [0.0, 2.0])
@pytest.mark.parametrize("stored", [True, False])
def test_decode_attention(rng, dtype, cap, stored):
    cache = Cache(rng, dtype)
    q, out = cache.random(3, 4, 8), torch.empty(3, 4, 8, dtype=dtype)
    loc = torch.stack([cache.slots(i)[-1] for i in range(3)])
    key, value = cache.random(3, 2, 8), cache.random(3, 2, 8)
    if stored:
        cache.k[loc], cache.v[loc] = key, value
    decode(cache, q, out, *((None, None) if stored else (key, value)), loc, cap)
    assert torch.equal(cache.k[loc], key) and torch.equal(cache.v[loc], value)
    for i, n in enumerate(cache.lengths):
        where = cache.slots(i)
        close(out[i], reference_attention(q[i], cache.k[where], cache.v[where], 0.3, cap, range(n)))


def extend(cache, q, k, v, out, new, mask=None, causal=True, cap=0.0, window=0):
    new = torch.tensor(new)
    attention.extend_attention_cpu(
        q, k, v, out, cache.k, cache.v, 1.0, 1.0, cache.table, cache.rows, cache.seq_lens, new, new.cumsum(0) - new,
        int(new.max()), 0.3, cap, False, window, None, None, mask, causal,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("visibility", ["causal", "everything", "tree"])
@pytest.mark.parametrize("stored", [True, False])
def test_extend_attention(rng, dtype, visibility, stored):
    new = (4, 4, 4) if visibility == "tree" else (3, 1, 0)  # a tree has as many nodes in every request
    cache = Cache(rng, dtype, lengths=(5, 4, 9))
    total = sum(new)
    q, out = cache.random(total, 4, 8), torch.full((total, 4, 8), 9.0, dtype=dtype)
    k, v = cache.random(total, 2, 8), cache.random(total, 2, 8)
    mask = torch.rand(3, 4, 4, generator=rng) < 0.5
    mask[:, range(4), range(4)] = True  # each node sees itself
    if stored:
        where = torch.cat([cache.slots(i)[cache.lengths[i] - new[i] :] for i in range(3)])
        cache.k[where], cache.v[where] = k, v
    given = (None, None) if stored else (k, v)
    extend(
        cache,
        q,
        *given,
        out,
        new,
        mask.flatten() if visibility == "tree" else None,
        visibility == "causal",
        2.0,
    )
    start = 0
    for i, n in enumerate(cache.lengths):
        prefix = n - new[i]
        where = cache.slots(i)[:prefix]
        keys = torch.cat([cache.k[where], k[start : start + new[i]]])
        values = torch.cat([cache.v[where], v[start : start + new[i]]])
        for j in range(new[i]):
            sees = {
                "causal": list(range(prefix + j + 1)),
                "everything": list(range(n)),
                "tree": list(range(prefix)) + [prefix + other for other in range(4) if mask[i, j, other]],
            }[visibility]
            close(out[start + j], reference_attention(q[start + j], keys, values, 0.3, 2.0, sees))
        start += new[i]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"cross": True}, "cross attention"),
        ({"encoder": torch.ones(3)}, "cross attention"),
        ({"window": 4}, "sliding window"),
        ({"sinks": torch.ones(4)}, "attention sinks"),
        ({"scale": 0.5}, "scaled key/value caches"),
    ],
)
def test_attention_refuses_by_name(rng, asked, says):
    cache = Cache(rng, torch.float32)
    q = cache.random(3, 4, 8)
    with pytest.raises(NotImplementedError, match=rf"sgl_kernel\.decode_attention_cpu.*{says}"):
        decode(cache, q, q.clone(), None, None, torch.zeros(3), **asked)
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.extend_attention_cpu.*sliding window"):
        extend(cache, q, None, None, q.clone(), (1, 1, 1), window=4)
