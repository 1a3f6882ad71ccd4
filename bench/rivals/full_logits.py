"""PyTorch with all logits: a matmul in the type of the model, then float32."""

from collections.abc import Callable
from typing import Any

# torch is imported when a function is called, as the other packages are: a run without it lists what it misses.


def numbers(compiled: bool = False) -> Callable[..., Any]:
    import torch

    return torch.compile(_numbers, dynamic=False) if compiled else _numbers


def _numbers(e, c, targets, temperature):
    log_p = ((e @ c.T).float() / temperature).log_softmax(-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def divergence(beta: float, compiled: bool = False) -> Callable[..., Any]:
    import torch

    function = {0.0: _forward_kl, 1.0: _reverse_kl, 0.5: _jsd}[beta]
    return torch.compile(function, dynamic=False) if compiled else function


def _log_p(e, c):
    return (e @ c.T).float().log_softmax(-1)


def _kl(log_p, log_q):
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def _forward_kl(e, c, teacher_e, teacher_c):
    return _kl(_log_p(teacher_e, teacher_c), _log_p(e, c))


def _reverse_kl(e, c, teacher_e, teacher_c):
    return _kl(_log_p(e, c), _log_p(teacher_e, teacher_c))


def _jsd(e, c, teacher_e, teacher_c):
    s, t = _log_p(e, c), _log_p(teacher_e, teacher_c)
    middle = s.logaddexp(t) - 0.6931471805599453  # log 2
    return (_kl(t, middle) + _kl(s, middle)) / 2
