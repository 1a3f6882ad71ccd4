"""One of several processes of JAX: `python -m tests.devices.processes ADDRESS COUNT ID`, as test_devices.py runs it."""

import sys

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from tests.cases import Case
from tests.devices.meshes import LAYOUTS, gradient_of, leaves_of, mesh_of, on_one_device, uneven
from tests.tolerance import assert_close, assert_reference
from tests.truth import truth

NAMES = ("tokens and vocabulary", "width over fsdp, vocabulary over tensor")


def main() -> None:
    address, count, number = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, count, number)
    assert jax.process_count() == count
    assert jax.device_count() == 8
    case = Case("plain", leading=(8, 8), width=16, vocabulary=64, arrays=("bias", "token_weight"))
    given = uneven(case, "float32")
    given = type(given)(given.e, given.c, given.targets, given.optional, np.float32(1.0), given.of_lse)
    want, _, of = truth(given, case.options)
    reference, references = on_one_device(given, **case.options)
    for layout in (x for x in LAYOUTS if x.name in NAMES):
        for mode in ("explicit", "checked"):
            mesh, specs = mesh_of(layout, mode), layout.specs()
            made = {"e": given.e, "c": given.c, "targets": given.targets, **given.optional}
            arrays = {
                name: jax.make_array_from_callback(x.shape, NamedSharding(mesh, specs[name]), lambda i, x=x: x[i])
                for name, x in made.items()
            }
            with jax.set_mesh(mesh):
                loss, gradients = jax.jit(gradient_of(layout, mode))(*leaves_of(arrays))
            assert_close(loss, want, reference, "loss")
            for name, x in gradients.items():
                whole = multihost_utils.process_allgather(x, tiled=True)
                assert_reference(references[name], of[name], name)
                assert_close(whole, of[name], references[name], f"{layout} {mode}: gradient of {name}")
    print("right")


if __name__ == "__main__":
    main()
