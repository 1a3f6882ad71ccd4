"""Memory budgets held to XLA's own count of the bytes of a compiled program, at shapes up to real models'."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import pytest

from cce_jax import linear_cross_entropy, linear_log_probs, passes, plans
from cce_kernels import blocks, divergence
from cce_kernels.block_floats import steps_shape
from cce_kernels.default_budget import default_budget
from cce_kernels.device import H200
from cce_kernels.engines.xla import NUMBERS
from cce_kernels.head import Head
from cce_kernels.numbers import Cotangents, Inputs, Numbers, Wanted, WantedNumbers
from cce_kernels.plan import Plan, choose, plan_of
from cce_kernels.plan.residuals import shapes_of_blocks
from cce_kernels.request import ITEMSIZE, Request
from cce_kernels.tokens import Chunks
from tests.held import MIB, available, held, twins
from tests.search import calls

pytestmark = pytest.mark.skipif(bool(available()), reason=available())

CALLS, CALLS_OF_XLA, CALLS_IN_FORWARD = 12, 12, 16
NAMES = "e", "c", "targets", "bias"


@dataclass(frozen=True)
class Call:
    """One call of the loss and its gradients."""

    tokens: int
    width: int
    vocabulary: int
    dtype: str
    vocab_axis: Literal[0, 1]
    bias: bool
    wanted: tuple[int, ...]  # of NAMES, by number
    softcap: float | None
    label_smoothing: float
    memory_budget: int | None  # None: the default
    mixed: bool = False  # c and bias are float32 beside an e of 16 bits
    impl: Literal["auto", "chunked"] = "auto"
    reduction: Literal["mean", "sum", "none"] = "none"
    precision: Literal["highest"] | None = None
    gradient_tolerance: float = 0.0

    @classmethod
    def drawn(cls, draw: random.Random) -> "Call":
        """Sizes are even in their logarithm; half the Ns, and a quarter of the Vs, are no multiple of 8."""
        width = draw.choice([256, 512, 768, 1024, 2048, 2304, 3072, 4096, 5120])
        tokens = int(2 ** draw.uniform(9, 15))
        tokens -= draw.choice([0, tokens % 8])
        vocabulary = int(2 ** draw.uniform(14, 18))
        vocabulary -= draw.choice([0, vocabulary % 8, vocabulary % 128, vocabulary % 256])
        bias, dtype = draw.random() < 0.3, draw.choice(["bfloat16", "bfloat16", "float16", "float32"])
        wanted = draw.choice([(0, 1), (0, 1), (0,), (1,)]) + (3,) * bias
        softcap, smoothing = draw.choice([(None, 0.0), (None, 0.0), (30.0, 0.0), (None, 0.1)])
        element = jnp.dtype(dtype).itemsize
        everything = element * tokens * (vocabulary + 4 * width) + 64 * MIB
        memory_budget = draw.choice([0, 300 * MIB, int(draw.random() * everything), everything])
        axis, mixed = draw.choice([0, 0, 1]), element == 2 and draw.random() < 0.3
        return cls(tokens, width, vocabulary, dtype, axis, bias, wanted, softcap, smoothing, memory_budget, mixed)

    @classmethod
    def drawn_for_xla(cls, draw: random.Random) -> "Call":
        """A call that the xla engine computes: float32, or "chunked". Most Ns are odd, some Ds, and half the Vs."""
        width = draw.choice([64, 192, 576, 640, 768, 1024, 2304, 4096, int(2 ** draw.uniform(6, 12))])
        tokens = int(2 ** draw.uniform(6, 17 if width < 1024 else 15)) | draw.choice([0, 1, 1])
        vocabulary = int(2 ** draw.uniform(draw.choice([9, 14, 14, 14]), 18))
        vocabulary -= draw.choice([0, vocabulary % 8, vocabulary % 128, vocabulary % 256])
        dtype = draw.choice(["float32", "float32", "float32", "bfloat16", "float16"])
        some = int(draw.random() * 4 * tokens * (vocabulary + 4 * width)) + 64 * MIB
        call, budget = cls.drawn(draw), draw.choice([None, None, 0, 300 * MIB, some])
        call = replace(call, tokens=tokens, width=width, vocabulary=vocabulary, dtype=dtype, memory_budget=budget)
        mixed, impl = dtype != "float32" and draw.random() < 0.5, "auto" if dtype == "float32" else "chunked"
        return replace(call, mixed=mixed, impl=impl, precision=draw.choice([None, "highest"]))

    @classmethod
    def drawn_in_forward(cls, draw: random.Random) -> "Call":
        """A "mean" or "sum" in bfloat16: in half of the calls the Hopper engine can sum dc. Some have a float32 c."""
        call, reduction = cls.drawn(draw), draw.choice(["mean", "sum"])
        wanted = draw.choice([(0, 1), (0, 1), (0,), (1,)])
        call = replace(call, dtype="bfloat16", reduction=reduction, wanted=wanted)
        more = random.Random(call.tokens * call.width)
        call = replace(call, vocab_axis=more.choice([0, 0, 1]), mixed=more.random() < 0.33)
        if draw.random() < 0.8:
            tokens, vocabulary = max(call.tokens, 2048), max(call.vocabulary // 64 * 64, 2**15)
            call = replace(call, tokens=tokens, vocabulary=vocabulary, bias=False, label_smoothing=0.0)
        if call.bias:
            call = replace(call, wanted=(*call.wanted, 3))
        chunk, everything = 512 * (call.vocabulary + 12 * call.width), 2 * call.tokens * call.vocabulary
        some = [64 * MIB + int(chunk * (everything / chunk) ** draw.uniform(0.1, 1)) for _ in range(4)]
        tolerance = more.choice([0.0, 0.0, 2.0**-7])
        return replace(call, memory_budget=draw.choice([64 * MIB, None, *some]), gradient_tolerance=tolerance)

    @property
    def budget(self) -> int:
        if self.memory_budget is None:
            return default_budget(self.tokens, self.width, ITEMSIZE[self.dtype])
        return self.memory_budget

    @property
    def rounded(self) -> int:
        """Bytes of the copies of c and bias in e's type, which are held besides the memory budget.

        Beside them XLA puts some numbers a token into memory of their own, for which it else takes that of the results.
        """
        return (2 * self.vocabulary * (self.width + self.bias) + 64 * self.tokens) * self.mixed

    def held(self) -> int:
        names = ("vocab_axis", "softcap", "label_smoothing", "memory_budget", "impl", "precision", "reduction")
        names += ("gradient_tolerance",)
        options: dict[str, Any] = {name: getattr(self, name) for name in names}

        def loss(e, c, targets, bias):
            return jnp.sum(linear_cross_entropy(e, c, targets, bias=bias, **options))

        c_shape = (self.vocabulary, self.width) if self.vocab_axis == 0 else (self.width, self.vocabulary)
        of_c = "float32" if self.mixed else self.dtype
        e, c = jax.ShapeDtypeStruct((self.tokens, self.width), self.dtype), jax.ShapeDtypeStruct(c_shape, of_c)
        targets = jax.ShapeDtypeStruct((self.tokens,), jnp.int32)
        bias = jax.ShapeDtypeStruct((self.vocabulary,), of_c) if self.bias else None
        return held(jax.value_and_grad(loss, self.wanted), e, c, targets, bias).bytes


def planned(call: Call) -> Plan:
    wanted = Wanted(0 in call.wanted, 1 in call.wanted, 3 in call.wanted)
    head = Head(call.softcap, call.vocab_axis, call.precision)
    return plan_of(
        Request(
            call.tokens,
            call.width,
            call.vocabulary,
            call.dtype,
            head,
            call.bias,
            wanted,
            call.budget,
            numbers=WantedNumbers(sum=call.label_smoothing > 0),
            wide_dc=call.mixed,
            one_factor=call.reduction != "none",
            gradient_tolerance=call.gradient_tolerance,
        ),
        H200,
        call.impl,
    )


def drawn() -> list[Call]:
    kinds = (Call.drawn, CALLS), (Call.drawn_for_xla, CALLS_OF_XLA), (Call.drawn_in_forward, CALLS_IN_FORWARD)
    return [of(draw) for of, count in kinds for draw in [random.Random(0)] for _ in range(count)]


# Each held more than its budget once; beside it, why.
FOUND = [
    (12000, 2304, 256000, {}),  # XLA fused both passes' gathers of e, and so held a second copy
    (30000, 4096, 128256, {"memory_budget": 1024 * MIB}),
    (1024, 1024, 128260, {}),  # XLA split de's sum in 4, and padded what is saved and c to a multiple of 32
    (15092, 256, 151936, {"bias": True}),  # XLA split dc's sum in 2, and padded dz and e to a multiple of 16
    (32763, 4096, 128256, {"dtype": "float32", "memory_budget": 1600 * MIB}),  # e gathered, counted as of 16 bits
    # with JAX 0.12 XLA wrote de before dc was computed, and so gave the gathered e memory besides that of de
    (19488, 2304, 22144, {"dtype": "float16", "softcap": 30.0, "memory_budget": 1229 * MIB}),
    # dz's column sums were not counted
    (8192, 512, 128256, {"bias": True, "label_smoothing": 0.1, "wanted": (0, 1, 3), "memory_budget": 4121 * MIB}),
]
# The same, by the xla engine.
FOUND_BY_XLA = [
    (16383, 768, 50257, {}),  # XLA split dc's sum, and padded dz and e to a multiple of the parts
    (32766, 640, 262144, {}),
    (65535, 640, 262144, {}),
    (131071, 576, 49152, {}),
    (13166, 768, 129280, {"memory_budget": 0}),
    (504, 64, 52864, {"vocab_axis": 1}),  # de's sum: XLA padded dz and the whole c
    (19813, 1222, 1859, {"softcap": 30.0}),  # XLA copied e for the backward pass before the forward pass
    # XLA made one matmul of the logits of both passes
    (3856, 512, 3231, {"dtype": "bfloat16", "impl": "chunked", "vocab_axis": 1, "label_smoothing": 0.1}),
    (2819, 256, 228096, {"wanted": (1,), "label_smoothing": 0.1}),  # the forward pass held more than the plan said
]
MIXED = [
    (8192, 2304, 256000, {"mixed": True}),
    (8192, 4096, 128256, {"mixed": True, "memory_budget": 2 * 8192 * (128256 + NUMBERS)}),
    (4096, 4096, 128256, {"mixed": True, "vocab_axis": 1, "bias": True, "memory_budget": 1024 * MIB}),
]


def found(tokens: int, width: int, vocabulary: int, of: dict, **more) -> Call:
    plain = Call(tokens, width, vocabulary, "bfloat16", 0, False, (0, 1), None, 0.0, 300 * MIB)
    return replace(plain, **more | of)


BY_XLA = [found(*x, dtype="float32", memory_budget=None) for x in FOUND_BY_XLA]


@pytest.mark.parametrize("call", [found(*x) for x in FOUND + MIXED] + BY_XLA + drawn(), ids=str)
def test_a_call_holds_what_its_budget_or_the_least_plan_allows(call):
    plan = planned(call)
    allowed = max(call.budget, planned(replace(call, memory_budget=0)).held)
    actual = call.held() - call.rounded
    assert actual <= plan.held
    assert actual <= allowed, f"{actual / MIB:.1f} MiB of {allowed / MIB:.1f}"


def test_calls_whose_forward_pass_forms_the_gradients_are_drawn_often():
    plans = [planned(call) for call in drawn()[-CALLS_IN_FORWARD:]]
    assert sum(plan.in_forward is not None for plan in plans) >= CALLS_IN_FORWARD // 2


@pytest.mark.parametrize(
    ("reduction", "memory_budget", "mib"),
    [("none", 300 * MIB, 276.2), ("mean", 300 * MIB, 286.1), ("mean", None, 554.1)],
)
def test_what_a_real_head_holds(reduction, memory_budget, mib):
    """The first as measured on an H200."""
    call = Call(8192, 2304, 256000, "bfloat16", 0, False, (0, 1), None, 0.0, memory_budget, reduction=reduction)
    assert round(call.held() / MIB, 1) == mib


OF_A_MEAN = [found(*x, {"reduction": "mean"}) for x in ((8192, 4096, 128256), (8191, 2304, 256000))]


@pytest.mark.parametrize("call", OF_A_MEAN + drawn()[-CALLS_IN_FORWARD:], ids=str)
def test_a_forward_pass_by_itself_is_within_the_budget(call):
    """As a program that writes its results into memory that it is given, like PyTorch's: what it leaves is counted."""
    plan = planned(call)
    if plan.in_forward is None:
        pytest.skip("computes the logits again")
    wanted, head = plan.request.wanted, plan.request.head
    core = plans.Core(
        head,
        "cce" if call.impl == "auto" else call.impl,
        call.memory_budget,
        H200,
        wide_dc=call.mixed,
        numbers=plan.request.numbers,
        gradient_tolerance=call.gradient_tolerance,
    )
    c_shape = (call.vocabulary, call.width) if call.vocab_axis == 0 else (call.width, call.vocabulary)
    shaped = partial(jax.ShapeDtypeStruct, dtype=call.dtype)
    targets = jax.ShapeDtypeStruct((call.tokens,), jnp.int32)
    bias = shaped((call.vocabulary,)) if call.bias else None
    inputs = Inputs(shaped((call.tokens, call.width)), shaped(c_shape), bias, targets)

    def cotangents(numbers, _):
        ones = jnp.ones_like(numbers.log_mass)
        return Cotangents(ones, -ones, None if numbers.sum is None else ones)

    def begin(inputs):
        return passes.begin(inputs, (), cotangents, core, wanted)

    def into(outputs, inputs):
        return begin(inputs)

    outputs = jax.eval_shape(begin, inputs)
    left = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(outputs[1]._replace(de=None, dc=None)))
    assert held(into, outputs, inputs, donated=1).bytes + left <= plan.held


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("wanted", [Wanted(True, True, False), Wanted(True, False, False)], ids=str)
@pytest.mark.parametrize("tolerance", [0.0, 2.0**-7])
def test_the_halves_of_a_chunk_work_in_place(wanted, axis, tolerance):
    """As programs of PyTorch run them on a shard of the vocabulary: in the memory of P, dc and its steps."""
    shaped, vocabulary, width = jax.ShapeDtypeStruct, 64000, 2304
    call = Request(
        8192,
        width,
        vocabulary,
        "bfloat16",
        Head(vocab_axis=axis),
        False,
        wanted,
        640 * MIB,
        wide_de=True,
        one_factor=True,
        gradient_tolerance=tolerance,
    )
    plan = plan_of(call, H200, "auto")
    assert plan.in_forward is not None
    chunks = plan.in_forward.chunks
    n = chunks.size
    e, p = shaped((n, width), jnp.bfloat16), shaped((n, vocabulary), jnp.bfloat16)
    c = shaped((vocabulary, width) if axis == 0 else (width, vocabulary), jnp.bfloat16)
    numbers, dc, steps = shaped((3, n), jnp.float32), shaped(c.shape, jnp.int16), None
    if wanted.c:
        steps = shaped(steps_shape(vocabulary, width), jnp.float32)
    given = e, c, shaped((n,), jnp.int32), shaped((n,), jnp.float32), shaped((1,), jnp.int32)
    multiplied = shapes_of_blocks(plan.request, n)

    def chunk(e, c, targets, reference, count):
        return blocks.Block.of(Inputs(e, c, None, targets), reference, count)

    def first(own, p, *arrays):
        own, columns = blocks.numbers_of(chunk(*arrays), plan)
        return jnp.stack(own[:3]), *columns

    def second(p, de, dc, steps, multiplied, own, numbers, of, *arrays):
        own, numbers, of = Numbers(*own), Numbers(*numbers), Cotangents.of(Numbers(*of))
        columns = blocks.Columns(p, multiplied)
        de, part, *_ = blocks.gradients_of(chunk(*arrays), columns, own, numbers, of, plan)
        if wanted.c:
            dc, steps = blocks.add_dc(jax.lax.bitcast_convert_type(dc, jnp.bfloat16), steps, part, plan)
            dc = jax.lax.bitcast_convert_type(dc, jnp.int16)
        return part.left, de, dc, steps

    de = shaped((n, width), jnp.float32)
    halves = (
        held(first, numbers, p, *given, donated=2),
        held(second, p, de, dc, steps, multiplied, *3 * [numbers], *given, donated=4),
    )
    for half, count in zip(halves, (2, 3 + wanted.c), strict=True):
        assert all(f"{{{k}}}: ({k}, {{}}" in half.hlo.splitlines()[0] for k in range(count)), "not in place"
        large = f"{n},{vocabulary}", ",".join(map(str, c.shape))
        assert not re.search(rf"\[(?:{'|'.join(large)})\]\S* copy\(", half.hlo)
    bytes_ = [x.size * x.dtype.itemsize for x in (p, de, e)]
    assert sum(bytes_) + max(half.bytes for half in halves) <= plan.held


def test_a_program_that_a_cpu_lowers_for_cuda_runs_the_kernels():
    """In chunks of their own: a CPU's chunks hold more bytes. What stays between the passes has one shape."""

    def loss(e, c, targets):
        return linear_cross_entropy(e, c, targets, memory_budget=100 * MIB)

    shapes = (2048, 512), (32768, 512), (2048,)
    arrays = map(jax.ShapeDtypeStruct, shapes, (jnp.bfloat16, jnp.bfloat16, jnp.int32))
    found = held(jax.grad(loss, (0, 1)), *arrays, as_h200=False)
    assert {"cce_statistics", "cce_de", "cce_dc_sum"} <= set(re.findall(r"cce_[a-z_]*[a-z]", found.hlo))
    assert found.bytes <= 100 * MIB


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_evaluation_copies_a_few_rows_of_e_at_a_time(dtype):
    """Under label smoothing too."""
    e, c = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((8187, 4096), (128256, 4096)))
    targets = jax.ShapeDtypeStruct((8187,), jnp.int32)
    loss = partial(linear_cross_entropy, label_smoothing=0.1, impl="cce")
    assert held(loss, e, c, targets).bytes < 18 * MIB


def drawn_with_token_weights(count: int, reduction: str) -> Iterator[calls.Program]:
    """JAX's calls with a gradient of each token's weight, whose caller's program reads lse too.

    For a "mean" or "sum": of the kind whose gradients the forward pass may form, on an H200.
    """
    for x in (call.program for call in calls.losses(0, "gpu")):
        if x.package == "torch" or x.tokens <= 300:
            continue
        x = replace(x, wanted=tuple(sorted({*x.wanted, "e", "token_weight"})), num_items=None, return_lse=True)
        x = replace(x, arrays=tuple(sorted({*x.arrays, "token_weight"})), reduction=reduction)
        if reduction != "none":
            arrays, wanted = (tuple(name for name in names if name != "bias") for names in (x.arrays, x.wanted))
            x = replace(x, arrays=arrays, wanted=wanted, memory_budget=calls.DEFAULT)
            x = replace(x, dtype="bfloat16", mixed=False, impl="auto", vocab_axis=0, label_smoothing=0.0)
            if x.tokens < 512 or x.width % 64 or x.vocabulary % 64 or min(x.width, x.vocabulary) <= 64:
                continue
        yield x
        count -= 1
        if not count:
            return


COUNTS = (("none", 8), ("mean", 3), ("sum", 2))
WEIGHTED = [x for how, n in COUNTS if not available() for x in drawn_with_token_weights(n, how)]  # drawn in 2 s


@pytest.mark.parametrize("program", WEIGHTED, ids=str)
def test_no_fusion_gets_one_array_twice(program, monkeypatch):
    """Else results of one call in twenty were wrong: lse was overwritten while another thread looked lse up."""
    formed, decided = program.reduction != "none", []
    monkeypatch.setattr(choose, "_is_faster", lambda *plans: decided.append(plans) or formed)
    plan_of.cache_clear()
    v, d = program.vocabulary, program.width
    shapes = {"e": (*program.leading, d), "c": (v, d) if program.vocab_axis == 0 else (d, v)}
    shapes |= {"bias": (v,), "class_weight": (v,), "token_weight": program.leading}
    given = {x: jax.ShapeDtypeStruct(shapes[x], program.type_of(x)) for x in ("e", "c", *program.arrays)}
    wanted = {x: given.pop(x) for x in program.wanted}
    given["targets"] = jax.ShapeDtypeStruct(program.leading, jnp.int32)

    def objective(wanted, given, of_loss):
        named = wanted | given
        e, c, targets = (named.pop(x) for x in ("e", "c", "targets"))
        loss, lse = linear_cross_entropy(e, c, targets, impl=program.impl, **named, **options)
        weighted = loss * (of_loss.ravel()[0] if formed else of_loss[..., : loss.shape[-1]])
        return jnp.sum(weighted), (loss, lse)

    options: Any = program.options()
    of_loss = jax.ShapeDtypeStruct(program.leading, jnp.float32)
    assert twins(held(jax.grad(objective, has_aux=True), wanted, given, of_loss).hlo) == {}
    assert not formed or decided
    plan_of.cache_clear()


@pytest.mark.parametrize("axis", [0, 1])
def test_given_ids_hold_no_rows_of_c(axis):
    """The gathered rows would be 8 GiB."""
    n, d, v, k = 8192, 4096, 131072, 128
    e, c = jax.ShapeDtypeStruct((n, d), jnp.bfloat16), jax.ShapeDtypeStruct((d, v) if axis else (v, d), jnp.bfloat16)
    targets, ids = jax.ShapeDtypeStruct((n,), jnp.int32), jax.ShapeDtypeStruct((n, k), jnp.int32)
    found = held(
        lambda e, c, targets, ids: linear_log_probs(e, c, targets, ids=ids, vocab_axis=axis), e, c, targets, ids
    )
    assert found.bytes < 200 * MIB


@pytest.mark.parametrize("shape", [(8192, 4096, 131072), (4096, 4096, 151936), (1000, 512, 50257)])
def test_selections_hold_the_logits_of_a_chunk(shape):
    n, d, v = shape
    e, c = jax.ShapeDtypeStruct((n, d), jnp.bfloat16), jax.ShapeDtypeStruct((v, d), jnp.bfloat16)
    targets = jax.ShapeDtypeStruct((n,), jnp.int32)
    asked: Any = {"top_k": 64, "entropy": True, "mean_logit": True}
    budget = default_budget(n, d, 2)
    assert held(lambda *x: linear_log_probs(*x, **asked), e, c, targets).bytes <= budget


@dataclass(frozen=True)
class Distilled:
    """A divergence from a teacher. The sizes are the student's, and then the teacher's width."""

    tokens: int = 5001
    width: int = 768
    vocabulary: int = 65536
    of_teacher: int = 1024
    dtype: str = "bfloat16"
    type_of_teacher: str = "bfloat16"
    axes: tuple[Literal[0, 1], Literal[0, 1]] = (0, 0)
    kind: divergence.Kind = "jsd"
    bias: bool = False
    memory_budget: int = 2**30

    @classmethod
    def drawn(cls, seed: int) -> "Distilled":
        draw = random.Random(seed)
        width, of_teacher = (128 * draw.randint(2, 16) for _ in range(2))
        of_teacher *= draw.choice([1, 1, 4])
        width -= random.Random(width).choice([0, 0, 8, 13])  # widths that fill no block of columns with a step
        vocabulary = draw.randint(20_000, 90_000)
        types = draw.choice(["bfloat16", "bfloat16", "float16"]), draw.choice(["bfloat16", "float16", "float32"])
        axes: Any = draw.randint(0, 1), draw.randint(0, 1)
        kind: Any = draw.choice(["forward_kl", "reverse_kl", "jsd"])
        sizes = draw.randint(1500, 9000), width, vocabulary, of_teacher
        return cls(*sizes, *types, axes, kind, draw.random() < 0.3, int(2 ** draw.uniform(28, 30.5)))

    def plan(self, chunks: Chunks | None = None) -> Plan:
        sizes, wanted = (self.tokens, self.width, self.vocabulary), Wanted(True, True, self.bias)
        head = Head(None, self.axes[0])
        call = Request(*sizes, self.dtype, head, self.bias, wanted, self.memory_budget)
        call = replace(call, one_factor=True, teacher_width=self.of_teacher)
        return plan_of(call, H200, "auto", chunks)

    def held(self, plan: Plan, function: Any = divergence.formed) -> int:
        def side(width: int, dtype: str, axis: int, bias: bool) -> divergence.Side:
            def array(*shape: int) -> Any:
                return jax.ShapeDtypeStruct(shape, dtype)

            c = array(*(self.vocabulary, width)[:: 1 - 2 * axis])
            return divergence.Side(array(self.tokens, width), c, array(self.vocabulary) if bias else None)

        student = side(self.width, self.dtype, self.axes[0], self.bias)
        teacher = side(self.of_teacher, self.type_of_teacher, self.axes[1], False)
        weight, shares = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((self.tokens,), (2,)))
        how = divergence.Divergence(self.kind, Head(30.0, self.axes[1]), entropy=True)
        return held(
            partial(function, of=how, plan=plan), divergence.Given(student, teacher, weight, None, shares)
        ).bytes


@pytest.mark.parametrize("function", [divergence.formed, divergence.begin])
@pytest.mark.parametrize("seed", range(8))
def test_a_drawn_divergence_holds_no_more_than_its_plan_says(seed, function):
    x = Distilled.drawn(seed)
    plan = x.plan()
    assert x.held(plan, function) <= plan.held, x


def test_two_chunks_of_a_divergence_hold_no_more_than_their_plan_says():
    x = Distilled()
    plan = x.plan(Chunks(2, 2560))
    assert x.held(plan) <= plan.held
