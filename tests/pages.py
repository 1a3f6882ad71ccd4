"""Runs the code blocks of a page of the documentation, as a reader would: `python -m tests.pages docs/devices.md`."""

import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])

# What a page takes for granted, run before its block of that number. Other pages define all that they use.
GIVEN = {
    ("README.md", 0): """
import jax
embeddings, classifier = jax.numpy.ones((2, 8, 16)), jax.numpy.ones((50, 16))
targets = jax.numpy.zeros((2, 8), int)
""",
    ("README.md", 1): """
import torch
hidden, lm_head = torch.randn(2, 8, 16), torch.nn.Linear(16, 50, bias=False)
input_ids = torch.randint(0, 50, (2, 8))
""",
    ("README.md", 2): """
import transformers
model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2))
""",
    ("docs/devices.md", 0): """
import jax
e, c, targets = jax.numpy.ones((4, 8, 16)), jax.numpy.ones((64, 16)), jax.numpy.zeros((4, 8), int)
""",
    ("docs/devices.md", 4): """
import torch
torch.distributed.init_process_group("gloo", "tcp://localhost:0", rank=0, world_size=1)
tokens, targets, model = torch.randint(0, 64, (4, 8)), torch.randint(0, 64, (4, 8)), Model(64, 16)
""",
    ("docs/devices.md", 5): "data, tensor, num_items = 1, 1, 32",
    ("docs/devices.md", 6): """
group, start, stop = None, 0, 64
h, weight = torch.randn(4, 8, 16), torch.randn(64, 16)
""",
    ("docs/devices.md", 7): """
weight = torch.nn.Parameter(weight)
weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(weight.shape), False
""",
}
GIVEN |= {("docs/index.md", number): GIVEN["README.md", number] for number in range(3)}  # the same blocks


def blocks(page: Path) -> list[tuple[int, str]]:
    """Every block of Python of the page: the number of its first line, and its text."""
    text = page.read_text()
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, block.start(1)) + 1, block.group(1)) for block in found]


def run(page: Path) -> ModuleType:
    """Runs the blocks one after another in one namespace, and returns it. A traceback names the page and its line."""
    name = page.relative_to(ROOT).as_posix()
    module = sys.modules[f"page_{page.stem}"] = ModuleType(f"page_{page.stem}")  # classes look for their module
    for number, (line, text) in enumerate(blocks(page)):
        exec(GIVEN.get((name, number), ""), module.__dict__)
        text = text.replace('"cuda"', '"cpu"')  # the machine that runs the tests may have no GPU
        exec(compile("\n" * (line - 1) + text, page, "exec"), module.__dict__)
    return module


if __name__ == "__main__":
    for given in sys.argv[1:]:
        run(Path(given).resolve())
