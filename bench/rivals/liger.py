"""Liger: fused linear scaled cross-entropy with entropy, fused linear GRPO and JSD."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

SEQUENCES = 8  # that the tokens are shared out to, for GRPO


def numbers() -> Callable[..., Any]:
    """Its public function: on Hopper kernels in CuTe, which need nvidia-cutlass-dsl, elsewhere chunks of 512 tokens."""
    module: Any = import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    function = module.LigerFusedLinearScaledCrossEntropyFunction
    return _with_entropy(lambda *x: function.apply(*x, -100, 1, True))


def numbers_in_chunks(tokens: int) -> Callable[..., Any]:
    """The function that it takes where it has no kernels. Its public function has no argument for the chunk."""
    module: Any = import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")

    def apply(*given):
        module._FALLBACK_CHUNK_SIZE = tokens
        return module._FusedLinearPPOFallbackFunction.apply(*given, -100, True)

    return _with_entropy(apply)


def _with_entropy(apply: Callable[..., Any]) -> Callable[..., Any]:
    def found(e, c, targets, temperature):
        nll, entropy = apply(e, c, targets, temperature)
        return -nll, entropy

    return found


def policy(sequences: int = 1) -> Callable[..., Any]:
    """GRPO's clip without an entropy bonus, which it lacks. A chunk has so many of SEQUENCES sequences.

    It knows one advantage for each sequence: here the first token's. Its loss is not compiled, which takes longer than
    the few operations that it would save.
    """
    function = import_module("liger_kernel.chunked_loss.grpo_loss").LigerFusedLinearGRPOFunction

    def loss(e, c, targets, old, advantage):
        ids, of_old = targets.view(SEQUENCES, -1), old.view(SEQUENCES, -1)
        mask, of_sequence = of_old.new_ones(ids.shape), advantage.view(SEQUENCES, -1)[:, 0].contiguous()
        whole = e.view(SEQUENCES, -1, e.shape[-1])
        clip = 0.0, 0.2, 0.2, "bnpo", None, "token", 1.0, 1.05, 1.0
        arguments = None, None, of_old, None, None, None, *clip, False, False, sequences
        return function.apply(whole, c, ids, mask, of_sequence, *arguments)[0]

    return loss


def divergence(beta: float, chunk_mem_const: int = 1) -> Callable[..., Any]:
    """chunk_mem_const: a chunk's logits may take about so many times the bytes of e; its own choice on Hopper is 1.

    It has no argument for it, but takes a constant of the module for the GPUs that report a capability of 10.0.
    """
    module: Any = import_module("liger_kernel.ops.fused_linear_jsd")

    def loss(e, c, teacher_e, teacher_c):
        module._max_capability, module._CHUNK_MEM_CONST_B200 = (lambda _: 100), chunk_mem_const
        function = module.LigerFusedLinearJSDFunction
        return function.apply(e, c, teacher_e, teacher_c, None, beta, -100, 1.0)

    return loss
