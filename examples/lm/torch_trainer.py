"""Training steps, evaluation and checkpoints in PyTorch."""

import math
import shutil
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from .settings import Settings
from .torch_model import MODELS, LanguageModel, load_flax, split

# PyTorch's checkpoints say so at every call in a process without others.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def learning_rate(settings: Settings, step: int) -> float:
    if step < settings.warmup:
        return settings.learning_rate * step / settings.warmup
    part = (step - settings.warmup) / (settings.steps + 1 - settings.warmup)
    return settings.learning_rate * (1 + math.cos(math.pi * part)) / 2


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _split_alike(parameters: Iterable[Tensor]) -> list[list[Any]]:
    """The parameters in groups, each over one mesh, by one placement: PyTorch updates such a group in a few kernels."""
    groups: dict[Any, list[Tensor]] = {}
    for x in parameters:
        groups.setdefault((x.device_mesh, x.placements) if isinstance(x, DTensor) else None, []).append(x)
    return list(groups.values())


def _sum_of_squares(gradients: list[Tensor]) -> Tensor:
    """The sum over all elements of gradients that are split alike."""
    total = torch.stack([_local(x).square().sum() for x in gradients]).sum()
    first = gradients[0]
    if not isinstance(first, DTensor):
        return total
    parts = [Replicate() if x.is_replicate() else Partial() for x in first.placements]
    return DTensor.from_local(total, first.device_mesh, parts).full_tensor()


class Trainer:
    """The model and its optimizer, on one device or, in processes that torchrun started, on a mesh (`split`)."""

    def __init__(
        self,
        settings: Settings,
        vocabulary: int,
        mesh: DeviceMesh | None = None,
        params: dict | None = None,
        model_type: type[LanguageModel] | None = None,
    ) -> None:
        """params: those of the model in Flax, to start from; without them they are drawn, by the settings' seed."""
        if settings.dtype == "bfloat16":
            torch.set_float32_matmul_precision("high")  # for full logits: see full_logits_loss
        self.settings, self.mesh, self.count = settings, mesh, 0
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.parts, self.part = 1, 0  # of a batch, along the mesh axis "data"
        if mesh is not None and "data" in (mesh.mesh_dim_names or ()):
            self.parts, self.part = mesh["data"].size(), mesh["data"].get_local_rank()
        torch.manual_seed(settings.seed)
        self.model = (model_type or MODELS[settings.loss])(settings, vocabulary)
        if params is not None:
            load_flax(self.model, params)
        self.model.to(self.device)
        if mesh is not None:
            split(self.model, mesh)
        self.groups = _split_alike(self.model.parameters())
        self.optimizer = torch.optim.AdamW(
            [{"params": group} for group in self.groups],
            settings.learning_rate,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def _on_device(self, tokens: np.ndarray) -> Tensor:
        """This process' part of tokens (..., B, T)."""
        part = torch.from_numpy(np.array_split(tokens, self.parts, axis=-2)[self.part].astype(np.int64))
        if self.device.type == "cuda":  # from pinned memory the copy does not wait for the GPU
            part = part.pin_memory()
        return part.to(self.device, non_blocking=True)

    def _mean_over_processes(self, loss: Tensor) -> Tensor:
        mean = _whole(loss.detach()).clone()
        if self.mesh is not None:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        return mean

    def step(self, parts: np.ndarray) -> Tensor:
        """One optimizer step on a batch of tokens, (accumulation, B, T). Returns its mean loss, without waiting.

        On several devices each process is given the whole batch, and computes its part of it.
        """
        self.optimizer.zero_grad()
        loss = torch.zeros((), device=self.device)
        for tokens in self._on_device(parts):
            value = self.model(tokens, self.settings.targets / self.parts)  # FSDP takes the mean over the parts
            value.backward()
            loss = loss + _whole(value.detach())
        self._average_copies()
        # clip_grad_norm_, but with a norm that is exact on CPUs too: PyTorch's float32 one is off by up to 1e-3 there.
        squares = [_sum_of_squares([x.grad for x in group]) for group in self.groups]
        norm = torch.stack(squares).sum().sqrt()
        for group in self.groups:
            nn.utils.clip_grads_with_norm_(group, 1.0, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.settings, self.count)
        self.optimizer.step()
        self.count += 1
        return self._mean_over_processes(loss)

    def _average_copies(self) -> None:
        """Makes gradients equal on the processes of the mesh axis "tensor", which have copies of most parameters.

        They compute the same gradients, but not with the same bits: attention's kernels on a GPU add in any order. The
        copies would part more and more, and the loss, which takes them for equal, would no longer fall as fast.
        """
        if self.mesh is None or "tensor" not in (self.mesh.mesh_dim_names or ()):
            return
        tensor = self.mesh["tensor"]
        for group in self.groups:
            if isinstance(group[0], DTensor) and "tensor" in (group[0].device_mesh.mesh_dim_names or ()):
                continue  # the rows of the embedding are split
            for x in group:
                gradient = _local(x.grad)
                dist.all_reduce(gradient, group=tensor.get_group())
                gradient /= tensor.size()

    @torch.no_grad()
    def evaluate(self, batches: list[np.ndarray]) -> float:
        """The mean loss on batches of tokens, (B, T) each, in nats per token."""
        targets = batches[0][:, 1:].size / self.parts
        losses = [self._mean_over_processes(self.model(self._on_device(tokens), targets)) for tokens in batches]
        return torch.stack(losses).mean().item()

    @torch.no_grad()
    def head_inputs(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What the loss is given on tokens (B, T): the hidden states (B, T, D) and the head's matrix (V, D)."""
        model = self.model
        with torch.autocast(self.device.type, model.dtype, enabled=model.dtype != torch.float32):
            hidden = model.hidden(self._on_device(tokens))
        embedding = model.tokens.weight.to(hidden.dtype)
        return hidden.float().cpu().numpy(), embedding.float().cpu().numpy()

    def _state(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "count": self.count}

    def save(self, folder: Path) -> None:
        state_dict_saver.save(self._state(), checkpoint_id=folder / str(self.count))
        if not dist.is_initialized() or dist.get_rank() == 0:
            for old in sorted(_complete(folder))[:-2]:
                shutil.rmtree(folder / str(old))

    def restore(self, folder: Path) -> None:
        """Goes on from the latest checkpoint; from the start if there is none."""
        counts = _complete(folder)
        if counts:
            state = self._state()
            state_dict_loader.load(state, checkpoint_id=folder / str(max(counts)))
            set_state_dict(
                self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
            self.count = state["count"]


def _complete(folder: Path) -> list[int]:
    """The steps of the checkpoints that were written to their end: PyTorch writes the file .metadata last."""
    return [int(path.parent.name) for path in folder.glob("*/.metadata")]
