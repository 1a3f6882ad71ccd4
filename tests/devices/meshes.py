"""One list of layouts for the tests on 8 devices, and calls of linear_cross_entropy in every mode of JAX's meshes."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from cce_jax import linear_cross_entropy
from tests.cases import Case, Inputs, inputs

MODES = ("auto", "explicit", "checked", "unchecked", "partial")


@dataclass(frozen=True)
class Layout:
    """A mesh, and how e and c lie over it. c: for vocab_axis=0."""

    name: str
    mesh: dict[str, int]
    e: P
    c: P

    def __str__(self) -> str:
        return self.name

    def specs(self, vocab_axis: int = 0) -> dict[str, P]:
        """The spec of each array of a call."""
        tokens, (vocabulary, width) = P(*self.e[:2]), (*self.c, None, None)[:2]
        return {
            "e": self.e,
            "c": P(width, vocabulary) if vocab_axis else P(vocabulary, width),
            "targets": tokens,
            "token_weight": tokens,
            "bias": P(vocabulary),
            "class_weight": P(vocabulary),
        }

    def manual(self, mode: str) -> frozenset[str]:
        """The axes over which the test itself calls jax.shard_map."""
        names = {"checked": tuple(self.mesh), "unchecked": tuple(self.mesh), "partial": tuple(self.mesh)[:1]}
        return frozenset(names.get(mode, ()))

    def allows(self, mode: str) -> bool:
        """Inside jax.shard_map c's width can be split only over axes that split tokens."""
        beside = {a for a in axes_of(P(*self.c[1:])) if a not in axes_of(self.e)}
        return not beside & self.manual(mode) and (mode != "partial" or len(self.mesh) > 1)


LAYOUTS = [
    Layout("tokens", {"data": 8}, P("data"), P()),
    Layout("vocabulary", {"tensor": 8}, P(), P("tensor")),
    Layout("tokens and vocabulary", {"data": 2, "tensor": 4}, P("data"), P("tensor")),
    Layout("sequence", {"data": 2, "context": 4}, P("data", "context"), P()),
    Layout("c's width over data", {"data": 8}, P("data"), P(None, "data")),
    Layout("c's vocabulary over data", {"data": 8}, P("data"), P("data")),
    Layout("width over fsdp, vocabulary over tensor", {"fsdp": 4, "tensor": 2}, P("fsdp"), P("tensor", "fsdp")),
    Layout("width over tensor", {"data": 2, "tensor": 4}, P("data"), P(None, "tensor")),
    Layout("sequence and vocabulary over tensor", {"data": 2, "tensor": 4}, P("data", "tensor"), P("tensor")),
    Layout("vocabulary over two axes", {"tensor": 4, "data": 2}, P("data"), P(("tensor", "data"))),
    Layout("all replicated", {"data": 2, "tensor": 4}, P(), P()),
    Layout("three axes", {"data": 2, "context": 2, "tensor": 2}, P("data", "context"), P("tensor", "data")),
]

BY_NAME = {layout.name: layout for layout in LAYOUTS}

EVERYTHING = Case(
    "everything",
    leading=(8, 8),
    width=16,
    vocabulary=64,
    arrays=("bias", "class_weight", "token_weight"),
    options={"softcap": 40.0, "logit_scale": 1.3, "label_smoothing": 0.2, "z_loss": 0.02},
)
PLAIN = Case("plain", leading=(8, 8), width=16, vocabulary=64)


def uneven(case: Case, dtype: str = "float32", seed: int = 0) -> Inputs:
    """Inputs in which the first eighth of the tokens is ignored, and the next but for one.

    With a bias, every exponential of one eighth of the vocabulary is below float32's range beside the others.
    """
    given = inputs(case, dtype, seed)
    part = case.leading[0] // 8
    given.targets[:part] = -100
    given.targets[part : 2 * part].reshape(-1)[1:] = -100
    if "bias" in given.optional:
        part = case.vocabulary // 8
        given.optional["bias"][part : 2 * part] -= 300.0 if not case.options.get("label_smoothing") else 30.0
    return given


def axes_of(spec: P) -> tuple[str, ...]:
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec if entry is not None]
    return tuple(a for entry in entries for a in entry)


def over(axes: frozenset[str], spec: P) -> P:
    """The spec over these axes alone."""
    entries = [() if entry is None else (entry,) if isinstance(entry, str) else entry for entry in spec]
    return P(*(tuple(a for a in entry if a in axes) or None for entry in entries))


def mesh_of(layout: Layout, mode: str) -> jax.sharding.Mesh:
    kind = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    shape = tuple(layout.mesh.values())
    return jax.make_mesh(shape, tuple(layout.mesh), axis_types=(kind,) * len(shape))


def arrays(given: Inputs, layout: Layout, mesh: jax.sharding.Mesh, vocab_axis: int = 0) -> dict[str, jax.Array]:
    """The arrays of a call, on the devices."""
    made = {"e": given.e, "c": given.c.T if vocab_axis else given.c, "targets": given.targets, **given.optional}
    specs = layout.specs(vocab_axis)
    return {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in made.items()}


def loss_of(layout: Layout, mode: str, **options: Any) -> Callable[..., Any]:
    """linear_cross_entropy as a function of the arrays, each over the whole mesh. reduction: "mean" or "sum"."""
    options = {"precision": "highest", "impl": "chunked", **options}
    specs = layout.specs(options.get("vocab_axis", 0))
    if mode != "explicit":
        options["sharding"] = specs["e"], specs["c"]

    def loss(arrays: dict[str, jax.Array]) -> jax.Array:
        given = dict(arrays)
        return linear_cross_entropy(given.pop("e"), given.pop("c"), given.pop("targets"), **given, **options)

    axes = layout.manual(mode)
    if not axes:
        return loss

    def mapped(arrays: dict[str, jax.Array]) -> jax.Array:
        at = {name: over(axes, specs[name]) for name in arrays}
        return jax.shard_map(loss, in_specs=(at,), out_specs=P(), axis_names=axes, check_vma=mode != "unchecked")(
            arrays
        )

    return mapped


def gradient_of(layout: Layout, mode: str, **options: Any) -> Callable[..., Any]:
    """(leaves, others) -> loss and gradients of the leaves, both dictionaries of arrays."""
    loss = loss_of(layout, mode, **options)
    return jax.value_and_grad(lambda leaves, others: loss({**leaves, **others}))


def leaves_of(given: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """What is differentiated, and the rest."""
    names = [name for name in given if name in ("e", "c", "bias", "token_weight")]
    return {k: given[k] for k in names}, {k: v for k, v in given.items() if k not in names}


def compiled_gradient(given: Inputs, layout: Layout, mode: str, **options: Any) -> tuple[Any, dict, dict]:
    """The program of the loss and its gradients over the devices, and the arrays that it takes."""
    mesh = mesh_of(layout, mode)
    leaves, others = leaves_of(arrays(given, layout, mesh, options.get("vocab_axis", 0)))
    with jax.set_mesh(mesh):
        return jax.jit(gradient_of(layout, mode, **options)).lower(leaves, others).compile(), leaves, others


def on_one_device(given: Inputs, vocab_axis: int = 0, **options: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Loss and gradients by impl="reference" on one device."""
    made = {"e": given.e, "c": given.c.T if vocab_axis else given.c, "targets": given.targets, **given.optional}
    leaves, others = leaves_of(jax.tree.map(jax.numpy.asarray, made))
    options = {"precision": "highest", "vocab_axis": vocab_axis, **options, "impl": "reference"}

    def loss(leaves):
        given = {**leaves, **others}
        return linear_cross_entropy(given.pop("e"), given.pop("c"), given.pop("targets"), **given, **options)

    value, gradients = jax.value_and_grad(loss)(leaves)
    return np.asarray(value), {k: np.asarray(v) for k, v in gradients.items()}


# What is exchanged for B = T = 8, D = 16, V = 64 beside the sums of the loss: e is f32[8,8,16], c f32[64,16]. Both
# passes gather c; XLA does it once where one program has both. N: the tokens of a chunk, or all that a device has.
EXCHANGED = {
    "tokens": {"all-reduce f32[64,16]": 1},
    "vocabulary": {"all-gather f32[8,3,N]": 1, "all-reduce f32[8,8,16]": 1},
    "tokens and vocabulary": {"all-gather f32[4,3,N]": 1, "all-reduce f32[4,8,16]": 1, "all-reduce f32[16,16]": 1},
    "sequence": {"all-reduce f32[64,16]": 1},
    "c's width over data": {"all-gather f32[64,16]": 1, "reduce-scatter f32[64,2]": 1},
    "c's vocabulary over data": {"all-gather f32[64,16]": 1, "reduce-scatter f32[8,16]": 1},
    "width over fsdp, vocabulary over tensor": {
        "all-gather f32[32,16]": 1,
        "reduce-scatter f32[32,4]": 1,
        "all-gather f32[2,3,N]": 1,
        "all-reduce f32[2,8,16]": 1,
    },
    "sequence and vocabulary over tensor": {  # e is smaller than c; targets are gathered with it
        "all-gather f32[4,8,16]": 1,
        "all-gather s32[4,8]": 1,
        "all-gather f32[4,3,N]": 1,
        "reduce-scatter f32[4,2,16]": 1,
        "all-reduce f32[16,16]": 1,
    },
    "all replicated": {},
}
WHOLE = {"vocabulary": 64, "tokens and vocabulary": 32, "width over fsdp, vocabulary over tensor": 16}
WHOLE |= {"sequence and vocabulary over tensor": 32}


def assert_exchanged(compiled: Any, layout: Layout, sizes: dict[str, int]) -> None:
    """sizes: of each layout N. Beside this, the sums of the loss."""
    found, size = collectives(compiled), str(sizes.get(layout.name))
    scalars = {k: found.pop(k) for k in list(found) if k.endswith("[]")}
    want = Counter({k.replace("N", size): n for k, n in EXCHANGED[layout.name].items()})
    assert found == want, f"{found}, not {want}"
    assert all(k.startswith("all-reduce") for k in scalars)


COLLECTIVES = "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"


def collectives(compiled: Any) -> Counter[str]:
    """The collectives of a compiled program, each with its result's shapes, such as "all-reduce f32[64,16]"."""
    found: Counter[str] = Counter()
    for result, name in re.findall(rf"= (\S[^=]*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(", compiled.as_text()):
        found.update(f"{name} {shape}" for shape in re.findall(r"\w+\[[\d,]*\]", result))
    return found
