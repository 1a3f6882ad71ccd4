"""The trainers of TRL, with log-probabilities from `linear_log_probs`. See `patch`."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from cce_kernels import contract
from cce_torch.arguments import IMPLS, PRECISIONS
from cce_torch.log_probs import linear_log_probs
from cce_torch.options import Impl

KNOWN = ("1.16.0",)  # the versions of TRL that the tests have run with
NAME = "_ChunkedLogProbFunction"  # of trl.trainer.utils, which looks it up at each call
OUTPUTS = ("log_probs", "entropy", "mean_logits", "is_top1")


def patch(
    impl: Impl = "auto",
    *,
    memory_budget: float | Literal["all"] | None = None,
    precision: Literal["highest", "high", "medium"] | None = None,
    entropy: Literal[True, "detached"] = True,
) -> None:
    """Make the trainers of TRL compute log-probabilities and entropies with `cce_torch.linear_log_probs`.

        cce_torch.trl.patch()
        SFTTrainer(model, ...).train()

    It serves every model to which TRL adds its fused head, which the SFT, DPO, KTO, GRPO and RLOO trainers do: in this
    process, from the next forward on, also in trainers that were made before. The losses, metrics and gradients stay
    the same up to rounding. In bfloat16 and float16 they are closer to exact ones: TRL rounds each logit to this type,
    and linear_log_probs rounds no logit. So the accuracy of tokens may differ where two logits are almost equal. A
    second call replaces the options of the first.

    Types: without autocast TRL computes in the type of the hidden states e (N, D), and so does this.

    - float32 e beside a 16-bit classifier c (V, D): c is copied to float32, and its gradient is rounded to c's type
      once. `linear_log_probs` itself refuses such a call, since a 16-bit e is faster and gives as good
      log-probabilities. Here the model or TRL's cast_lm_head_to_fp32 asks for float32, and the user cannot change the
      call. The copy and its gradient take 8·V·D bytes.
    - 16-bit e beside float32 c: the products are in 16 bits, and the gradient of c comes in float32. c is not copied
      more than `linear_log_probs` says.
    - The bias is cast with c. Under autocast the products are in autocast's type.

    Args:
      impl, memory_budget, precision: as `linear_log_probs` takes them.
      entropy: True: the entropy has a gradient, as in TRL. "detached": it has none, which makes the backward pass
        cheaper. The trainers of TRL log the entropy; only a bonus for it (entropy_coef and use_adaptive_entropy of
        GRPO) needs its gradient. Such a bonus has no effect with "detached".

    Raises:
      ImportError: TRL is not installed, or in a version that is not known; the message names the known ones.
      ValueError: an option is out of its range.
      NotImplementedError: at a training step: a trainer asks for a number that linear_log_probs does not compute, which
        DPO's use_weighting=True does; or DeepSpeed ZeRO 3 splits the classifier.
    """
    contract.choice("impl", impl, IMPLS)
    contract.memory_budget(memory_budget)
    contract.choice("precision", precision, (None, *PRECISIONS))
    contract.choice("entropy", entropy, (True, "detached"))
    utils = _utils()
    own = getattr(utils, NAME)
    own = own.own if isinstance(own, _LinearLogProbs) else own
    setattr(utils, NAME, _LinearLogProbs(own, impl, memory_budget, precision, entropy))


def unpatch() -> None:
    """Undo `patch`.

    Raises:
      ValueError: TRL is not patched.
      ImportError: as `patch` raises it.
    """
    utils = _utils()
    found = getattr(utils, NAME)
    if not isinstance(found, _LinearLogProbs):
        raise ValueError("TRL is not patched")
    setattr(utils, NAME, found.own)


class _Asked(NamedTuple):
    """The arguments of TRL's function, in its order. Its names for some of them are longer."""

    hidden: Tensor  # (N, D)
    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)
    targets: Tensor  # (N,)
    temperature: float
    chunk_size: int  # of the vocabulary; memory_budget says instead how much memory is used
    softcap: float | None = None
    logit_scale: float = 1.0
    outputs: tuple[str, ...] = (*OUTPUTS, "log_sum_sq_probs")


class _Answer(NamedTuple):
    """The results of TRL's function, in its order: (N,) each, float32 but for is_top1. None where not asked for."""

    log_probs: Tensor
    entropy: Tensor | None
    log_sum_sq_probs: None
    mean_logits: Tensor | None
    is_top1: Tensor | None  # bool


@dataclass(frozen=True)
class _LinearLogProbs:
    """Stands in the place of TRL's autograd function, of which TRL calls `apply`."""

    own: Any  # TRL's
    impl: Impl
    memory_budget: float | Literal["all"] | None
    precision: Literal["highest", "high", "medium"] | None
    entropy: Literal[True, "detached"]

    def apply(self, *given: Any) -> _Answer:
        asked = _Asked(*given)
        _check(asked)
        e, c, bias = _of_one_type(asked.hidden, asked.weight, asked.bias)
        found = linear_log_probs(
            e,
            c,
            asked.targets,
            bias,
            entropy=self.entropy if "entropy" in asked.outputs else False,
            predicted="is_top1" in asked.outputs,
            mean_logit="mean_logits" in asked.outputs,
            temperature=asked.temperature,
            softcap=asked.softcap,
            logit_scale=asked.logit_scale,
            impl=self.impl,
            memory_budget=self.memory_budget,
            precision=self.precision,
        )
        assert found.log_probs is not None
        is_top1 = None if found.predicted is None else found.predicted == asked.targets
        return _Answer(found.log_probs, found.entropy, None, found.mean_logit, is_top1)


def _check(asked: _Asked) -> None:
    lacking = [name for name in asked.outputs if name not in OUTPUTS]
    if lacking:
        raise NotImplementedError(
            f"cce_torch.trl does not compute {', '.join(lacking)}. The DPO trainer asks for log_sum_sq_probs if "
            "use_weighting=True: leave that out, or call cce_torch.trl.unpatch() before training"
        )
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    if is_deepspeed_zero3_enabled():
        raise NotImplementedError(
            "cce_torch.trl does not work with DeepSpeed ZeRO 3, which takes the classifier away before the backward "
            "pass: use ZeRO 2 or FSDP 2, or call cce_torch.trl.unpatch() before training"
        )


def _of_one_type(e: Tensor, c: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """e, c and bias in types that linear_log_probs takes, as `patch` documents them."""
    if torch.is_autocast_enabled(e.device.type):
        return e, c, bias
    dtype = torch.float32 if c.dtype == torch.float32 and e.itemsize == 2 else e.dtype
    return e, c.to(dtype), None if bias is None else bias.to(dtype)


def _utils() -> Any:
    """trl.trainer.utils of a version of TRL that is known."""
    try:
        found = version("trl")
    except PackageNotFoundError:
        raise ImportError(f"cce_torch.trl needs TRL: pip install trl=={KNOWN[-1]}") from None
    if found not in KNOWN:
        raise ImportError(
            f"TRL {found} is installed, and cce_torch.trl knows TRL {', '.join(KNOWN)}: pip install trl=={KNOWN[-1]}, "
            "or leave TRL as it is without cce_torch.trl.patch()"
        )
    import trl.trainer.utils

    return trl.trainer.utils
