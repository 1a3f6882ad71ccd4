"""Which language models of transformers take cce_patch. Writes docs/hugging-face-models.md:

    PYTHONPATH=.:kernels python -m tests.causal_sweep --out docs/hugging-face-models.md

Each class is made small with random weights, and trained one step as it is and one step patched. The losses and all
gradients are compared.
"""

import argparse
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm
from transformers.models.auto import modeling_auto as auto

from cce_torch.in_torch import compiled
from cce_torch.transformers import cce_patch, cce_unpatch
from tests.causal_models import batch, small_config, small_model, step

LARGEST = 5e7  # parameters
CLOSE = 1e-4  # the largest difference of a gradient, over the norm of the largest gradient; float32 makes 1e-6 of it

HEADER = """# Which models of transformers take cce_patch

`python -m tests.causal_sweep` writes this page, from transformers {transformers} and torch {torch}. It takes each class
that transformers has for causal language models, and for models that write text about images, and makes it small with
random weights. Then it trains the class one step as it is and one step patched, on a CPU in float32, with text alone.
**Yes** means that the loss and the gradients of all parameters are equal, to rounding. **Not tried** means that the
script could not train the class as it is, so nothing is known of its patch.

{summary}

| class | model types | takes cce_patch |
| --- | --- | --- |
"""


class NotTriedError(Exception):
    """The class cannot be made small here, or not trained on labels as it is."""


def classes() -> dict[str, list[str]]:
    """The names of all classes of language models that cce_patch is for, and the model types of each."""
    found: dict[str, list[str]] = {}
    text: Any = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    images: Any = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    for model_type, name in sorted({*text.items(), *images.items()}):
        found.setdefault(name, []).append(model_type)
    return dict(sorted(found.items(), key=lambda x: x[0].lower()))


def try_class(name: str) -> None:
    """Train a small model of the class as it is and patched, and compare.

    Raises:
      NotTriedError: the model cannot be trained as it is.
      ValueError, TypeError: cce_patch refuses it.
      AssertionError: the loss or a gradient differs.
    """
    try:
        model_class: Any = getattr(transformers, name)
        config = small_config(model_class.config_class)
        with torch.device("meta"):
            size = sum(p.numel() for p in model_class(config).parameters())
        if size > LARGEST:
            raise MemoryError(f"{size:.0e} parameters")
        model = small_model(config, model_class)
    except Exception as error:
        raise NotTriedError(f"{type(error).__name__}: {error}") from error
    cce_unpatch(cce_patch(model))
    try:
        loss, gradients = step(model, **batch())
    except Exception as error:
        raise NotTriedError(f"{type(error).__name__}: {error}") from error
    found, founds = step(cce_patch(model, impl="torch_compile"), **batch())
    torch.testing.assert_close(found, loss)
    assert founds.keys() == gradients.keys(), "other parameters get a gradient"
    scale = max(x.norm() for x in gradients.values())
    for parameter, x in founds.items():
        assert (x - gradients[parameter]).norm() <= CLOSE * scale, f"the gradient of {parameter} differs"


def answer(name: str) -> str:
    """What the table says of a class."""
    try:
        try_class(name)
    except NotTriedError as error:
        return f"not tried: {_short(error)}"
    except (ValueError, TypeError) as error:
        return f"no: {_short(error)}"
    except AssertionError as error:
        return f"wrong: {_short(error)}"
    return "yes"


def _short(error: Exception) -> str:
    """The first sentence of a message, as a table can hold it."""
    before, operation, after = str(error).partition("operation on them: ")
    words = f"of its logits it uses {after}" if operation else before
    text = " ".join(words.split(". ")[0].split()).replace("|", "\\|").replace("`", "")
    return text if len(text) <= 160 else text[:157] + "..."


def rows() -> Iterator[tuple[str, str, str]]:
    for name, types in tqdm(classes().items(), unit="class"):
        yield name, ", ".join(types), answer(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="the page to write; it is printed without")
    out = parser.parse_args().out
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    compiled._uncompilable.add("cpu")
    table = list(rows())
    count = Counter(said.split(":")[0] for _, _, said in table)
    summary = f"Of {len(table)} classes " + ", ".join(f"{n} {said}" for said, n in count.most_common()) + "."
    page = HEADER.format(transformers=transformers.__version__, torch=torch.__version__, summary=summary)
    page += "".join(f"| {name} | {types} | {said} |\n" for name, types, said in table)
    if out is None:
        print(page)
    else:
        out.write_text(page)
    print(summary)


if __name__ == "__main__":
    main()
