"""The kernels' way to a GPU, on a machine without one: JAX's lowering to Triton or Mosaic, then Triton's compiler."""

import contextlib
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import jax
from jax._src.pallas.triton import lowering as pallas_triton
from jax.sharding import AbstractMesh, use_abstract_mesh

LIMITS = {"8.0": 163, "8.6": 99, "8.9": 99, "9.0": 227, "10.0": 227, "12.0": 99}  # KiB of shared memory a program
REGISTERS = 255  # a thread, on every GPU
# What a load or store says of the caches, as JAX up to 0.11 writes it, and as 0.12 does. Triton 3.7 cannot parse the
# second form, and 3.9 not the first. It takes no registers and no shared memory.
EVICTION = r" evictionPolicy = \w+| \{cachePolicy = #tt\.cache_policy<[^>]*>\}"


class Kernel(NamedTuple):
    """A kernel that a program launches, and with what."""

    name: str  # without cce_
    module: str  # Triton's, as text
    warps: int
    stages: int


class Resources(NamedTuple):
    shared: int  # bytes
    registers: int
    stack: int  # bytes of spilled registers and local arrays
    in_loops: int  # how many instructions of the loops around a matmul go to the stack


def _gpu_at_hand() -> contextlib.AbstractContextManager:
    """JAX 0.11 wants to be told which GPU it lowers for; 0.10 assumes compute capability 9.0.

    It matters for float8 alone, so the module that is lowered here for 9.0 is every GPU's.
    """
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    from jax.sharding import AbstractDevice

    device = AbstractDevice("NVIDIA H100", None, platform="gpu")
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def mesh_of_gpus(kind: Any, **sizes: int) -> Any:
    """A mesh of GPUs that are not there, with axes of this AxisType, for use_abstract_mesh."""
    more = {}
    if jax.__version_info__ >= (0, 11):
        from jax.sharding import AbstractDevice

        more["abstract_device"] = AbstractDevice("NVIDIA H100", None, platform="gpu")
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes), **more)


TRITON, MOSAIC = ("pallas_call",), ("core_map", "mpmd_map")  # in JAX 0.10, in 0.11
LOOPS = "scan", "while"


def _launches(jaxpr, primitives: tuple[str, ...]) -> Iterator[Any]:
    """The parameters of every such call in a traced program, at any depth, that is not interpreted."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in TRITON + MOSAIC:
            if eqn.primitive.name in primitives and not eqn.params["interpret"]:
                yield eqn.params
            continue
        for inner in nested(eqn):
            yield from _launches(inner, primitives)


def nested(eqn) -> list:
    """The programs inside an equation: loop bodies, branches, calls."""
    values = [x for v in eqn.params.values() for x in (v if isinstance(v, tuple | list) else [v])]
    return [p for p in (getattr(x, "jaxpr", x) for x in values) if hasattr(p, "eqns")]


def exported(
    function: Callable, *arguments: Any, platforms: tuple[str, ...], allowed: tuple[str, ...] = ()
) -> set[str]:
    """The custom calls of the function, exported for these platforms. allowed: those whose safety check is disabled."""
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in allowed]
    with _gpu_at_hand():
        found = jax.export.export(jax.jit(function), platforms=platforms, disabled_checks=checks)(*arguments)
    return set(re.findall(r"custom_call @([\w$.]+)", found.mlir_module()))


def for_hopper(function: Callable, *arguments: Any, mesh: Any = None) -> list[str]:
    """The names, without cce_, of those that the function, lowered for CUDA, launches through Mosaic GPU.

    mesh: of several GPUs, by mesh_of_gpus.
    """
    with _gpu_at_hand() if mesh is None else use_abstract_mesh(mesh):
        traced = jax.jit(function).trace(*arguments)
        traced.lower(lowering_platforms=("cuda",))  # raises what Mosaic's verifier and its shared memory refuse
    return [p["name"].removeprefix("cce_") for p in _launches(traced.jaxpr.jaxpr, MOSAIC)]


def loop_equations(function: Callable, *arguments: Any) -> list[Any]:
    """The equations of the bodies of loops that launch through Mosaic GPU, each with those nested in it."""
    found = []

    def visit(jaxpr, of_loop: bool) -> None:
        for eqn in jaxpr.eqns:
            found.extend([eqn] if of_loop else [])
            loop = eqn.primitive.name in LOOPS and any(next(_launches(x, MOSAIC), None) for x in nested(eqn))
            if eqn.primitive.name not in TRITON + MOSAIC:
                for inner in nested(eqn):
                    visit(inner, of_loop or loop)

    with _gpu_at_hand():
        visit(jax.jit(function).trace(*arguments).jaxpr.jaxpr, False)
    return found


def kernels(function: Callable, *arguments: Any, mesh: Any = None) -> list[Kernel]:
    """The Triton kernels that the function, lowered for CUDA, launches. ValueError if Triton's verifier refuses one.

    mesh: of several GPUs, by mesh_of_gpus.
    """
    modules = []
    lower = pallas_triton.lower_jaxpr_to_triton_module

    def recorded(*args, **kwargs):
        result = lower(*args, **kwargs)
        operation = result.module.operation
        try:
            valid = operation.verify()
        except Exception as error:  # JAX's bindings raise what the verifier says
            raise ValueError(f"an invalid Triton module: {error}") from None
        text = operation.get_asm(enable_debug_info=False)
        if not valid or '"builtin.module"' in text:  # the form in which MLIR prints what is not valid
            raise ValueError(f"an invalid Triton module:\n{text}")
        modules.append(text)
        return result

    pallas_triton.lower_jaxpr_to_triton_module = recorded
    try:
        with _gpu_at_hand() if mesh is None else use_abstract_mesh(mesh):
            traced = jax.jit(function).trace(*arguments)
            traced.lower(lowering_platforms=("cuda",))
    finally:
        pallas_triton.lower_jaxpr_to_triton_module = lower
    launched = {_name(p): p["compiler_params"] for p in _launches(traced.jaxpr.jaxpr, TRITON)}
    named = [(re.search(r"tt\.func public @(\w+)", m).group(1), m) for m in modules]  # type: ignore[union-attr]
    return [
        Kernel(name.removeprefix("cce_"), m, launched[name].num_warps, launched[name].num_stages) for name, m in named
    ]


def _name(parameters) -> str:
    return parameters["jaxpr"].debug_info.func_name


@lru_cache(None)
def resources(kernel: Kernel, capability: str) -> Resources:
    """Compile a kernel for a compute capability and read what it takes."""
    compiled = _compiled(kernel, capability)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = re.search(r"REG:(\d+) STACK:(\d+)", _cuobjdump("-res-usage", cubin.name))
        assert usage is not None
        registers, stack = map(int, usage.groups())
        matmul = "tt.dot " in kernel.module
        in_loops = stack_accesses_in_loops(_cuobjdump("-sass", cubin.name)) if stack and matmul else 0
    return Resources(compiled.metadata.shared, registers, stack, in_loops)


def accesses_of_two_bytes(kernel: Kernel, capability: str) -> int:
    """How many loads and stores of one 16-bit element a thread does in global memory, as the code has them."""
    return len(re.findall(r"(?:ld|st)\.global\S*\.b16", _compiled(kernel, capability).asm["ptx"]))


@lru_cache(None)
def _compiled(kernel: Kernel, capability: str):
    import triton
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend

    target = GPUTarget("cuda", int(capability.replace(".", "")), 32)
    options = {"num_warps": kernel.warps, "num_stages": kernel.stages, "enable_fp_fusion": True}
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/kernel.ttir"
        with open(path, "w") as file:
            file.write(re.sub(EVICTION, "", kernel.module))
        # triton.compile skips the first passes of a .ttir file; one of them turns a dot and an add into a dot.
        backend, context = CUDABackend(target), ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        parsed = ir.parse_mlir_module(path, context)
        parsed.context = context
        first = backend.make_ttir(parsed, {}, backend.parse_options(options), target.arch)
        with open(path, "w") as file:
            file.write(first.str_nodebug())  # without this folder's name, so that Triton's cache knows the kernel again
        return triton.compile(path, target=target, options=options)


def _cuobjdump(*arguments: str) -> str:
    import triton

    tools = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin")
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}  # it calls nvdisasm
    command = [f"{tools}/cuobjdump", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def stack_accesses_in_loops(sass: str) -> int:
    """In the innermost loops with a matmul, which are those over D or over what a product sums."""
    lines = [(int(at, 16), what) for at, what in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass)]

    def places(pattern: str) -> list[int]:
        return [at for at, what in lines if re.search(pattern, what)]

    multiplies = places(r"MMA\b") or places(r"FFMA\b")  # float32 may be multiplied without tensor cores
    jumps = [(int(to, 16), at) for at, what in lines for to in re.findall(r"\bBRA\b.*0x([0-9a-f]+)", what)]
    loops = [(to, at) for to, at in jumps if to < at and any(to <= x <= at for x in multiplies)]
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    assert inner, "no loop with a matmul"
    return sum(any(first <= at <= last for first, last in inner) for at in places(r"\b(LDL|STL)\b"))
