import jax, jax.numpy as jnp, numpy as np, time, sys
from functools import partial
from concurrent.futures import ThreadPoolExecutor
from bench.data import Shape, trained
from bench.calls import Call, floor
from bench.measure import in_turns
from cce_jax import linear_cross_entropy, linear_log_probs
from cce_kernels import selections as s
from cce_kernels.numbers import Inputs
from cce_kernels.head import Head

f32 = jnp.float32
for shape in (Shape(8192, 4096, 131072), Shape(4096, 4096, 151936)):
    e, c, t = trained(shape)[:3]
    ids = jnp.asarray(np.random.default_rng(0).integers(shape.vocabulary, size=(shape.tokens, 128)), jnp.int32)

    def sel(e, c, t, ids, budget, width, top=64, with_ids=False):
        own = s._block
        if width:
            s._block = lambda col, k: width if col > 50000 else own(col, k)
        try:
            return s.numbers_and_selections(
                Inputs(e, c, None, t, ids=ids if with_ids else None), Head(), s.Asked(top), budget
            )
        finally:
            s._block = own

    def gat(e, c, t, ids):
        rows = c.at[ids].get(mode="promise_in_bounds")
        return jnp.sum(rows.astype(f32) * e[:, None, :].astype(f32), axis=2)

    def prod(e, c, t, ids, n):
        def step(i, acc):
            z = Head().product(jax.lax.dynamic_slice_in_dim(e, i * n, n), c, 1)
            z = jax.lax.optimization_barrier(z)
            return acc + z[0, 0]

        return jax.lax.fori_loop(0, e.shape[0] // n, step, jnp.float32(0))

    f = {
        "loss": lambda e, c, t, ids: linear_cross_entropy(e, c, t),
        "ids now": lambda e, c, t, ids: linear_log_probs(e, c, t, ids=ids),
        "top now-old": None,
        "gather": gat,
    }
    del f["top now-old"]
    for n in (512, 1024, 4096):
        f[f"product f32 {n}"] = partial(prod, n=n)
    for b in (2**28, 2**29, 2**30, 2**32):
        f[f"top64 {b >> 20}"] = partial(sel, budget=b, width=0)
    for w in (64, 128, 256):
        f[f"top64 512 w{w}"] = partial(sel, budget=2**29, width=w)
    f["top0 512"] = partial(sel, budget=2**29, width=0, top=0)
    f["top1 512"] = partial(sel, budget=2**29, width=0, top=1)
    f["ids by logits 512"] = partial(sel, budget=2**29, width=0, top=0, with_ids=True)
    args = (e, c, t, ids)
    low = {}
    for k, g in f.items():
        low[k] = jax.jit(g).lower(*args)
    with ThreadPoolExecutor(12) as p:
        comp = dict(zip(low, p.map(lambda x: x.compile(), low.values())))
    calls = {k: Call(partial(g, *args), jax.block_until_ready) for k, g in comp.items()}
    found = in_turns(floor(e, c) | calls, 3)
    for k, v in found.items():
        print(f"{k:30s} {v:8.2f} {v / found['loss']:.3f}", flush=True)
