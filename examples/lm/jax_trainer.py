"""Training steps, evaluation and checkpoints in JAX."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from .jax_model import LanguageModel, full_logits_loss, linear_loss
from .mesh import axes
from .settings import Settings

NO_MESH = "data=1"


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    schedule = optax.warmup_cosine_decay_schedule(0, settings.learning_rate, settings.warmup, settings.steps + 1)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=settings.weight_decay))


class Trainer:
    """The model, its parameters and its optimizer, on one device or on a mesh.

    mesh: such as "data=2,tensor=2". The axis "data" splits the batch, "tensor" the rows of the embedding, which is the
    head's matrix too. Either may be missing.
    """

    def __init__(self, settings: Settings, vocabulary: int, mesh: str | None = None, params: Any = None) -> None:
        """params: those to start from; without them they are drawn, by the settings' seed."""
        self.settings, self.model, self.count = settings, LanguageModel(settings, vocabulary), 0
        sizes = axes(mesh or NO_MESH)
        devices = jax.devices()[: int(np.prod(list(sizes.values())))]
        self.mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes), devices=devices)
        self.of_batch, self.of_embedding = (P(name if name in sizes else None) for name in ("data", "tensor"))
        if settings.loss == "full":
            self.loss: Callable[..., jax.Array] = full_logits_loss
        else:  # hidden states (B, T, D) and the embedding (V, D) lie like this
            self.loss = partial(linear_loss, sharding=(self.of_batch, self.of_embedding) if mesh else None)

        if params is None:
            tokens = jnp.zeros((1, settings.context), jnp.int32)
            params = jax.jit(self.model.init)(jax.random.key(settings.seed), tokens)["params"]
        params = jax.tree.map(jnp.array, params)  # copies: a step overwrites its own
        self.optimizer = make_optimizer(settings)
        state = {"params": params, "optimizer": self.optimizer.init(params)}
        shardings = self._shardings(state)
        self.state = jax.device_put(state, shardings)
        self._step = jax.jit(self._update, donate_argnums=0, out_shardings=(shardings, None))
        self._evaluate = jax.jit(self._loss)

    def _shardings(self, tree: Any) -> Any:
        """How each array of the parameters and of the optimizer's state lies."""

        def of(path: tuple, _: jax.Array) -> NamedSharding:
            is_embedding = "tokens" in [getattr(key, "key", None) for key in path]
            return NamedSharding(self.mesh, self.of_embedding if is_embedding else P())

        return jax.tree_util.tree_map_with_path(of, tree)

    def _loss(self, params: Any, tokens: jax.Array, num_items: float) -> jax.Array:
        hidden = self.model.apply({"params": params}, tokens)
        return self.loss(hidden, params["tokens"]["embedding"], tokens, num_items=num_items)

    def _update(self, state: Any, parts: jax.Array) -> tuple[Any, jax.Array]:
        """The state after a step on the batch `parts`, (accumulation, B, T), and the batch's mean loss."""
        params, gradient_of = state["params"], jax.value_and_grad(partial(self._loss, num_items=self.settings.targets))

        def add(total: Any, tokens: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, gradient_of(params, tokens)), None

        total = gradient_of(params, parts[0])
        (loss, gradient), _ = jax.lax.scan(add, total, parts[1:])
        updates, optimizer = self.optimizer.update(gradient, state["optimizer"], params)
        return {"params": optax.apply_updates(params, updates), "optimizer": optimizer}, loss

    def _on_devices(self, tokens: np.ndarray, spec: P) -> jax.Array:
        return jax.device_put(tokens, NamedSharding(self.mesh, spec))

    def step(self, parts: np.ndarray) -> jax.Array:
        """One optimizer step on a batch of tokens, (accumulation, B, T). Returns its mean loss, without waiting."""
        with jax.set_mesh(self.mesh):
            self.state, loss = self._step(self.state, self._on_devices(parts, P(None, *self.of_batch)))
        self.count += 1
        return loss

    def evaluate(self, batches: list[np.ndarray]) -> float:
        """The mean loss on batches of tokens, (B, T) each, in nats per token."""
        targets = batches[0][:, 1:].size
        with jax.set_mesh(self.mesh):
            losses = [
                self._evaluate(self.state["params"], self._on_devices(tokens, self.of_batch), targets)
                for tokens in batches
            ]
        return float(np.mean(jax.device_get(losses)))

    def _checkpoints(self, folder: Path) -> Any:
        import orbax.checkpoint as ocp  # takes seconds, and only checkpoints need it

        return ocp.CheckpointManager(folder.absolute(), options=ocp.CheckpointManagerOptions(max_to_keep=2))

    def save(self, folder: Path) -> None:
        import orbax.checkpoint as ocp

        with self._checkpoints(folder) as checkpoints:
            checkpoints.save(self.count, args=ocp.args.StandardSave(self.state))

    def restore(self, folder: Path) -> None:
        """Goes on from the latest checkpoint; from the start if there is none."""
        import orbax.checkpoint as ocp

        with self._checkpoints(folder) as checkpoints:
            if (count := checkpoints.latest_step()) is not None:
                self.state, self.count = checkpoints.restore(count, args=ocp.args.StandardRestore(self.state)), count
