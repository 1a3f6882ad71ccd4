"""The loss without the logits in the causal language models of Hugging Face transformers. See `cce_patch`."""

from cce_torch.transformers.patch import cce_patch, cce_unpatch

__all__ = ["cce_patch", "cce_unpatch"]
