"""The table of models that take cce_patch, drawn at random and tried again."""

import random
import re
from pathlib import Path

import pytest

from cce_torch.transformers import cce_patch, cce_unpatch
from cce_torch.transformers.lazy_logits import LazyLogits
from tests import causal_sweep
from tests.causal_models import uncompiled  # noqa: F401  # for all tests of this file
from tests.nightly import draws

PAGE = Path(__file__).parents[1] / "docs" / "hugging-face-models.md"
TABLE = dict(re.findall(r"^\| (\w+) \| [\w, ]+ \| (.+) \|$", PAGE.read_text(), re.MULTILINE))
YES = [name for name, said in TABLE.items() if said == "yes"]
DRAWN = [name for name in random.Random(1).sample(YES, draws(10, len(YES))) if name in causal_sweep.classes()]


def test_at_least_150_classes_take_the_patch():
    assert len(YES) >= 150
    assert not [said for said in TABLE.values() if said.startswith("wrong")]


@pytest.mark.parametrize("name", DRAWN)
def test_drawn_classes_take_the_patch(name):
    assert causal_sweep.answer(name) == "yes"


@pytest.mark.parametrize("name", ["Gemma3ForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"])
def test_models_that_see_images_take_the_patch(name):
    assert TABLE[name] == "yes"
    assert causal_sweep.answer(name) == "yes"
    for model_type in causal_sweep.classes()[name]:
        assert cce_unpatch(cce_patch(model_type)).__name__ == name


def test_refused_classes_say_why():
    assert causal_sweep.answer("ProphetNetForCausalLM") == TABLE["ProphetNetForCausalLM"]
    assert TABLE["ProphetNetForCausalLM"].startswith("no: of its logits it uses the index")


def test_the_sweep_finds_a_wrong_loss(monkeypatch):
    assert causal_sweep.answer("GraniteForCausalLM") == "yes"
    monkeypatch.setattr(LazyLogits, "__truediv__", lambda logits, number: logits * number)
    assert causal_sweep.answer("GraniteForCausalLM").startswith("wrong: ")
