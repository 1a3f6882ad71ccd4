"""What is trained, and in which order: what matters most comes first."""

from dataclasses import dataclass

OURS, REFERENCE = "cce_torch", "float32 logits"
ALL, ROUNDED, CUT, LIGER = 'cce_torch, "all"', "bfloat16 logits", "cut_cross_entropy", "Liger"
TOLERANT = {"cce_torch, τ = 2⁻⁷": 2.0**-7, "cce_torch, τ = 2⁻⁵": 2.0**-5}  # with 16-bit weights
LIGER_SETTINGS = {LIGER: 1, f"{LIGER}, chunk_mem_const=4": 4, f"{LIGER}, chunk_mem_const=16": 16}
OURS_IN_JAX, REFERENCE_IN_JAX = "cce_jax", "float32 logits (Optax)"
REFERENCES = {"torch": REFERENCE, "jax": REFERENCE_IN_JAX}
SEEDS = 3


@dataclass(frozen=True)
class Job:
    """A training with one loss, or the search for the largest batch with it.

    variant: "nudged" begins with weights that differ from those of the seed by one unit in the last place, "repeated"
    is the same training a second time. They show how far two trainings part without any other difference.
    """

    kind: str  # "train" or "largest"
    loss: str
    seed: int = 0
    variant: str = ""
    package: str = "torch"

    @property
    def label(self) -> str:
        return f"{self.loss}, seed {self.seed}" + (f", {self.variant}" if self.variant else "")

    @property
    def file(self) -> str:
        """The name of the file of the final weights, without its ending."""
        return "".join(x if x.isalnum() else "-" for x in f"{self.package} {self.label}")


def jobs() -> list[Job]:
    first = [Job("train", loss, seed) for seed in range(SEEDS) for loss in (REFERENCE, OURS)]
    return [
        *first[:2],
        Job("train", REFERENCE, 0, "nudged"),
        Job("train", CUT),
        Job("train", LIGER),
        *first[2:],
        *(Job("train", loss, seed) for loss in TOLERANT for seed in range(SEEDS)),
        Job("train", ROUNDED),
        Job("train", ALL),
        *(Job("largest", loss) for loss in (REFERENCE, OURS, ROUNDED, CUT, *LIGER_SETTINGS)),
        Job("train", REFERENCE, 0, "repeated"),
        Job("train", REFERENCE_IN_JAX, package="jax"),
        Job("train", OURS_IN_JAX, package="jax"),
    ]
