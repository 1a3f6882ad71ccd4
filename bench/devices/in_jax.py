"""cce_jax on all GPUs of this process: `python -m bench.devices` starts it. Prints a row a line."""

import json
import sys
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from bench.calls import compiled
from bench.data import Shape, trained
from bench.devices.layouts import BUDGETS, LAYOUTS, collectives
from bench.measure import steady
from cce_jax import linear_cross_entropy

SPECS = {"tokens": (P("x"), P()), "vocabulary": (P(), P("x")), "fsdp": (P("x"), P("x"))}
ROUNDS = 8


def bare(layout: str, e: jax.Array, c: jax.Array, gpus: int) -> dict[str, float]:
    """Milliseconds of each matmul and each collective of the layout."""
    of_e, of_c = SPECS[layout if layout != "fsdp" else "tokens"]

    def on_devices(run: Callable, specs: tuple, out: P) -> Callable:
        return jax.shard_map(run, in_specs=specs, out_specs=out, check_vma=False)

    def product(x, y, x_axis, y_axis):
        return lax.dot_general(x, y, (((x_axis,), (y_axis,)), ((), ())))

    def timed(run: Callable, *arguments: jax.Array) -> float:
        return steady(compiled(run, *arguments), ROUNDS)

    of_z = P(None, "x") if layout == "vocabulary" else P("x")
    form = on_devices(partial(product, x_axis=1, y_axis=1), (of_e, of_c), of_z)
    z = jax.jit(form)(e, c)
    found = {
        "z": timed(form, e, c),
        "de": timed(on_devices(partial(product, x_axis=1, y_axis=0), (of_z, of_c), of_e), z, c),
        "dc": timed(on_devices(partial(product, x_axis=0, y_axis=0), (of_z, of_e), of_c), z, e),
    }
    whole, split = partial(NamedSharding, jax.sharding.get_mesh()), P("x")
    total = partial(lax.psum, axis_name="x")
    gather = partial(lax.all_gather, axis_name="x", tiled=True)
    scatter = partial(lax.psum_scatter, axis_name="x", tiled=True)
    runs = {
        "all-reduce of dc": (total, P(), P(), c),
        "all-reduce of de in float32": (total, P(), P(), e.astype(jnp.float32)),
        "all-gather of c": (gather, split, P(), c),
        "reduce-scatter of dc": (scatter, P(), split, c),
    }
    for name in set(collectives(layout, gpus)):
        run, given, out, x = runs[name]
        found[name] = timed(on_devices(run, (given,), out), jax.device_put(x, whole(given)))
    return found


def main() -> None:
    shape, gpus = Shape(*map(int, sys.argv[1].split("x"))), jax.device_count()
    jax.set_mesh(jax.make_mesh((gpus,), ("x",), axis_types=(AxisType.Auto,)))
    mesh = jax.sharding.get_mesh()
    given = trained(shape)
    for layout in LAYOUTS if gpus > 1 else ("tokens",):
        sharding = SPECS[layout]
        e, c = (jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(given[:2], sharding, strict=True))
        targets = jax.device_put(given[2], NamedSharding(mesh, sharding[0]))
        row = {"package": "cce_jax", "gpus": gpus, "layout": layout, "shape": list(shape)}
        whole_c = jax.device_put(c, NamedSharding(mesh, P())) if layout == "fsdp" else c
        print("row", json.dumps(row | {"method": "bare", **bare(layout, e, whole_c, gpus)}), flush=True)
        for name in BUDGETS:
            options = BUDGETS[name] | ({"sharding": sharding} if gpus > 1 else {})
            loss = partial(linear_cross_entropy, targets=targets, **options)
            step = compiled(jax.value_and_grad(loss, (0, 1)), e, c)
            assert step.scratch is not None
            found = {"ms": steady(step, ROUNDS), "held_mb": step.scratch / 2**20, "loss": float(step()[0])}
            print("row", json.dumps(row | {"method": name, **found}), flush=True)


if __name__ == "__main__":
    main()
