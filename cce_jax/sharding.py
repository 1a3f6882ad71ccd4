"""How the arrays of a call lie over the devices of a mesh: a Layout, from the types of e and c, or from `sharding`.

A mesh axis splits one axis of an array into equal parts. What each mesh axis means for the loss:

    it splits the tokens of e                   each device computes its own tokens; dc is summed over the axis
    it splits the vocabulary of c               each device computes its own columns; de is summed over the axis
    it splits the tokens, and also c            the smaller array is gathered, in each pass, and its gradient scattered
    it splits the width of c but no tokens      c is laid out again with this axis on its vocabulary
    it splits neither                           the devices along the axis compute the same

JAX has three kinds of mesh axes. Inside jax.shard_map an axis is Manual: the function sees one device's part. Explicit
axes are in the types of arrays. Auto axes are known to XLA alone, so that `sharding` has to name them.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

Axes = tuple[str, ...]  # the mesh axes that split one axis of an array, the slowest first

HOW = "sharding must be a pair of jax.sharding.PartitionSpec, of e and of c, such as sharding=(P('data'), P('tensor'))"


@dataclass(frozen=True)
class Layout:
    """The mesh axes that split the arrays of a call. An axis of the mesh that is in none of them splits nothing.

    `NOWHERE_SPLIT`, all of whose fields are empty, is the layout of a call that says nothing of a mesh: there is one
    device, or XLA splits the program.
    """

    mesh: AbstractMesh = AbstractMesh((), ())  # noqa: RUF009
    mapped: frozenset[str] = frozenset()  # axes that are not Manual yet: the call makes them Manual itself
    typed: bool = False  # whether the types of arrays say over which Manual axes they vary: jax.shard_map's check_vma
    tokens: tuple[Axes, ...] = ()  # the axes that split each axis of targets
    vocabulary: Axes = ()  # the axes that split c's vocabulary, the axes in `gathered` last
    width: Axes = ()  # the axes that split c's width, all of them in `gathered`
    gathered: frozenset[str] = frozenset()  # axes over which c is gathered, as they split the tokens too
    gathered_tokens: frozenset[str] = frozenset()  # axes over which e is gathered, as they split the vocabulary too
    given_e: tuple[Axes, ...] = ()  # the axes that split each axis of e as the caller has it
    given_c: tuple[Axes, ...] = ()
    # Explicit axes over which dc is left unreduced, as c's type asks for: P(reduced=...)
    reduced: frozenset[str] = frozenset()

    @property
    def is_known(self) -> bool:
        """Whether the call knows how its arrays lie over devices; else XLA may split the program."""
        return not self.mesh.empty

    @property
    def columns(self) -> Axes:
        """The axes over which the columns of the logits are split."""
        return tuple(a for a in self.vocabulary if a not in self.gathered)

    @property
    def all_tokens(self) -> Axes:
        return tuple(a for axes in self.tokens for a in axes)

    def manual(self, axes: Axes) -> Axes:
        """Those of the axes that the caller has made Manual."""
        return tuple(a for a in axes if a not in self.mapped)

    @property
    def summed(self) -> Axes:
        """The Manual axes over which a sum over all tokens extends."""
        return self.manual(self.all_tokens)

    @property
    def gathered_columns(self) -> Axes:
        """The axes over which c is gathered along its vocabulary."""
        return tuple(a for a in self.vocabulary if a in self.gathered)

    @property
    def gathered_of_tokens(self) -> list[tuple[int, Axes]]:
        """(axis of targets, the mesh axes over which e is gathered along it)."""
        of_axis = (tuple(a for a in axes if a in self.gathered_tokens) for axes in self.tokens)
        return [(axis, axes) for axis, axes in enumerate(of_axis) if axes]

    @property
    def explicit(self) -> frozenset[str]:
        return frozenset(a for a in self.mapped if _type(self.mesh, a) is AxisType.Explicit)

    @property
    def spec_of_tokens(self) -> P:
        return self._spec(*self.tokens)

    @property
    def spec_of_sequences(self) -> P:
        """The spec of an array of tokens if every device has whole sequences."""
        return self._spec(*self.tokens[:-1], ())

    @property
    def spec_of_e(self) -> P:
        return self._spec(*self.tokens, ())

    @property
    def spec_of_columns(self) -> P:
        return self._spec(self.vocabulary)

    def spec_of_c(self, vocab_axis: int) -> P:
        spec = self._spec(*_in_order(vocab_axis, self.vocabulary, self.width))
        return spec.update(reduced=self.reduced) if self.reduced else spec

    def spec_of_dc(self, vocab_axis: int) -> P:
        spec = self.spec_of_c(vocab_axis)
        return spec.update(unreduced=self.reduced, reduced=frozenset()) if self.reduced else spec

    def whole_sequences(self, x: jax.Array) -> jax.Array:
        """x, of the shape of targets, with its last axis whole on every device."""
        if axes := self.split_sequences:
            return lax.all_gather(x, axes, axis=x.ndim - 1, tiled=True)
        return self.laid_out(x, self.spec_of_sequences)

    def own_sequences(self, x: jax.Array) -> jax.Array:
        """The inverse of whole_sequences, over Manual axes."""
        if axes := self.split_sequences:
            size = x.shape[-1] // self.size(axes)
            return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, x.ndim - 1)
        return x

    @property
    def split_sequences(self) -> Axes:
        """The Manual axes that split the last axis of targets."""
        return self.manual(self.tokens[-1] if self.tokens else ())

    def _spec(self, *axes: Axes) -> P:
        """The spec of an array over the axes that the call makes Manual."""
        found = (tuple(a for a in entry if a in self.mapped) for entry in axes)
        return P(*(entry or None for entry in found))

    def size(self, axes: Axes) -> int:
        return math.prod(self.mesh.shape[a] for a in axes)

    def whole_vocabulary(self, c: Any, vocab_axis: int) -> int:
        """V. c: the caller's, which is one device's part inside jax.shard_map."""
        return c.shape[vocab_axis] * self.size(self.manual(self.vocabulary))

    def whole_width(self, c: Any, vocab_axis: int) -> tuple[int, int]:
        """The shape of c after it is gathered along its width inside the caller's jax.shard_map."""
        parts = self.size(self.manual(self.width))
        return tuple(n * (parts if axis != vocab_axis else 1) for axis, n in enumerate(c.shape))  # type: ignore[return-value]

    def gathering_c(self) -> "Layout":
        """The layout in which c is gathered over the axes that split the tokens too, never e."""
        gathered = self.gathered | self.gathered_tokens
        vocabulary = tuple(sorted(self.vocabulary, key=lambda a: a in gathered))
        return replace(self, vocabulary=vocabulary, gathered=gathered, gathered_tokens=frozenset())

    def local(self) -> "Layout":
        """The layout over those axes alone that the caller's own jax.shard_map has made Manual."""
        tokens, of_e, of_c = map(self.manual, self.tokens), self.gathered_tokens, self.gathered
        x = replace(self, tokens=tuple(tokens), vocabulary=self.manual(self.vocabulary), width=self.manual(self.width))
        return replace(x, mapped=frozenset(), gathered=of_c - self.mapped, gathered_tokens=of_e - self.mapped)

    def explicit_part(self, spec: P) -> P:
        """spec without the axes that are not Explicit."""
        explicit = (tuple(a for a in entry if a in self.explicit) or None for entry in _entries(spec))
        return P(*explicit, reduced=spec.reduced)

    @property
    def out_sharding(self) -> NamedSharding | None:
        """The sharding of arrays of the shape of targets, for operations that ask for it where axes are Explicit."""
        return NamedSharding(self.mesh, self.explicit_part(self.spec_of_tokens)) if self.explicit else None

    def laid_out(self, x: Any, spec: P, given: tuple[Axes, ...] | None = None) -> Any:
        """x with this spec. Over Explicit axes x moves if its type has another spec; over Auto axes XLA decides.

        given: the axes that split each axis of x. Over Auto axes the gradient of x is then split in the same way.
        """
        if x is None:
            return x
        if self.explicit:
            return self.pinned(x, spec)
        return x if given is None or self._spec(*given) == spec else self.pinned(x, self._spec(*given))

    def pinned(self, x: Any, spec: P) -> Any:
        """x with this spec, and its gradient too."""
        if self.explicit:
            return jax.reshard(x, NamedSharding(self.mesh, self.explicit_part(spec)))
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec)) if self.mapped else x


NOWHERE_SPLIT = Layout()


def varying(x: Any) -> frozenset[str]:
    """The Manual axes over which x varies, by its type."""
    return jax.typeof(x).manual_axis_type.varying


def layout_of(e: Any, c: Any, vocab_axis: int, sharding: Any) -> Layout:
    """The layout of a call.

    ValueError: sharding contradicts the mesh, or the types or sizes of the arrays.
    """
    mesh = next((m for m in (jax.sharding.get_abstract_mesh(), _mesh(e), _mesh(c)) if not m.empty), None)
    if mesh is None:
        if sharding is not None:
            _pair(sharding)
            raise ValueError("sharding names the axes of a mesh, but no mesh is in context: call jax.set_mesh(mesh)")
        return NOWHERE_SPLIT
    manual = frozenset(mesh.manual_axes)
    typed = bool(manual) and jax.eval_shape(lambda: jnp.zeros(())).manual_axis_type is not None
    explicit = frozenset(a for a in mesh.axis_names if _type(mesh, a) is AxisType.Explicit)
    if sharding is None and not explicit and not typed:
        return NOWHERE_SPLIT
    mapped = explicit if sharding is None else frozenset(mesh.axis_names) - manual
    of_e, of_c = _from_types(e, mesh), _from_types(c, mesh)
    if sharding is not None:
        of_e, of_c = (
            _given(name, spec, x, seen, mesh, typed)
            for name, spec, x, seen in zip("ec", _pair(sharding), (e, c), (of_e, of_c), strict=True)
        )
    *tokens, of_width = of_e
    if any(a not in mapped for a in of_width):
        raise ValueError(f"sharding splits the last axis of e over {of_width}, inside jax.shard_map: gather it first")
    vocabulary, width = _in_order(vocab_axis, *of_c)
    splits_tokens = {a for axes in tokens for a in axes}
    sharing = tuple(a for a in width if a not in splits_tokens)  # devices with the same tokens share the columns
    if any(a not in mapped for a in sharing):
        raise ValueError(
            f"sharding splits the width of c over {sharing}, which splits no tokens, inside jax.shard_map: gather c "
            "first, or split its vocabulary"
        )
    width = tuple(a for a in width if a in splits_tokens)

    def size(axes: Any) -> int:
        return math.prod(mesh.shape[a] for a in axes)

    columns = c.shape[vocab_axis]
    last = {a for a in vocabulary if a in splits_tokens and a not in mapped}  # these must come last
    if sharing and not last and columns % (size(vocabulary) * size(sharing)) == 0:
        vocabulary = vocabulary + sharing
    shared = frozenset(vocabulary) & splits_tokens
    # The rows that a device would hold if e were gathered over the shared axes, or if c were.
    rows_of_e = math.prod(e.shape[:-1]) * size(splits_tokens - mapped) // size(splits_tokens - shared)
    rows_of_c = columns * size(set(vocabulary) - mapped) // size(set(vocabulary) - shared)
    of_tokens = shared if rows_of_e < rows_of_c else frozenset()
    gathered = (shared - of_tokens) | frozenset(width)
    ordered = tuple(sorted(vocabulary, key=lambda a: a in gathered))
    local = tuple(a for a in vocabulary if a not in mapped)
    if ordered[: len(local)] != local:  # a device's columns would not be consecutive
        raise ValueError(
            f"sharding splits the vocabulary of c over {vocabulary}, of which {tuple(gathered & set(vocabulary))} "
            "splits the tokens too: inside jax.shard_map this axis must come last"
        )
    reduced = jax.typeof(c).sharding.spec.reduced & mapped
    return Layout(mesh, mapped, typed, tuple(tokens), ordered, width, gathered, of_tokens, of_e, of_c, reduced)


def _pair(sharding: Any) -> tuple[P, P]:
    pair = isinstance(sharding, tuple) and not isinstance(sharding, P) and len(sharding) == 2
    if not pair or not all(isinstance(spec, P) for spec in sharding):
        raise TypeError(f"{HOW}, got {sharding!r}")
    return sharding[0], sharding[1]


def _given(name: str, spec: P, x: Any, seen: tuple[Axes, ...], mesh: AbstractMesh, typed: bool) -> tuple[Axes, ...]:
    """The axes that split each axis of x, by the caller's spec. seen: the Explicit ones among them, by x's type."""
    found = _split(name, spec, x)
    axes = [a for entry in found for a in entry]
    for a in axes:
        if a not in mesh.axis_names:
            raise ValueError(f"sharding names the axis {a!r} for {name}; the mesh has the axes {mesh.axis_names}")
        if axes.count(a) > 1:
            raise ValueError(f"sharding names the axis {a!r} twice for {name}: {spec}")
    explicit = tuple(tuple(a for a in entry if _type(mesh, a) is AxisType.Explicit) for entry in found)
    if explicit != seen:
        raise ValueError(f"sharding says {spec} for {name}, but the type of {name} says {jax.typeof(x).sharding.spec}")
    for axis, entry in enumerate(found):
        manual = tuple(a for a in entry if a in mesh.manual_axes)
        same = [a for a in manual if typed and mesh.shape[a] > 1 and a not in varying(x)]
        if same:
            raise ValueError(f"sharding splits {name} over {same}, but {name} is the same on all devices of this axis")
        parts = math.prod(mesh.shape[a] for a in entry if a not in manual)
        if x.shape[axis] % parts:
            raise ValueError(
                f"sharding splits axis {axis} of {name} {x.shape} into {parts} parts over {entry}, which do not divide "
                f"it: pad {name}, or let this mesh axis split something else (docs/devices.md)"
            )
        found[axis] = (*manual, *(a for a in entry if a not in manual))  # Manual axes were split first
    return tuple(found)


def _from_types(x: Any, mesh: AbstractMesh) -> tuple[Axes, ...]:
    """The Explicit axes that split each axis of x, by x's type."""
    own = _mesh(x)
    if own.empty:
        return ((),) * x.ndim
    split = _split("", jax.typeof(x).sharding.spec, x)
    return tuple(tuple(a for a in entry if _type(mesh, a) is AxisType.Explicit) for entry in split)


def _split(name: str, spec: P, x: Any) -> list[Axes]:
    if len(spec.partitions) > x.ndim:
        raise ValueError(f"sharding says {spec} for {name}, which has {x.ndim} axes: {name} {x.shape}")
    if P.UNCONSTRAINED in spec.partitions:
        raise ValueError(f"sharding says {spec} for {name}: it must say how {name} lies, not leave it open")
    return [*_entries(spec), *[()] * (x.ndim - len(spec.partitions))]


def _entries(spec: P) -> list[Axes]:
    return [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in spec.partitions]


def _mesh(x: Any) -> AbstractMesh:
    return jax.typeof(x).sharding.mesh


def _type(mesh: AbstractMesh, axis: str) -> AxisType:
    return mesh.axis_types[mesh.axis_names.index(axis)]


def _in_order(vocab_axis: int, of_first: Any, of_second: Any) -> tuple[Any, Any]:
    """(vocabulary, width) from (axis 0, axis 1) of c, and back."""
    return (of_first, of_second) if vocab_axis == 0 else (of_second, of_first)
