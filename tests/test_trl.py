"""cce_torch.trl: TRL's own function and its trainers, with and without the patch."""

import math
import random
import re
from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="needs TRL")

import trl.trainer.utils
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl.kernels import ChunkedLogProbFunction
from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

import cce_torch.trl
from cce_torch import linear_divergence
from tests import tolerance
from tests.pages import ROOT
from tests.test_torch_divergence import given as of_teacher

OUTPUTS = cce_torch.trl.OUTPUTS
RESULTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
CHUNK = 16  # of the vocabulary, for TRL's function


@pytest.fixture(autouse=True)
def unpatched():
    """Also before a test: a page of the documentation may have patched TRL."""
    trl.trainer.utils._ChunkedLogProbFunction = ChunkedLogProbFunction
    yield
    trl.trainer.utils._ChunkedLogProbFunction = ChunkedLogProbFunction


@pytest.fixture
def calls(monkeypatch):
    """How many calls of linear_log_probs asked for each output."""
    found, own = Counter(), cce_torch.trl.linear_log_probs

    def counted(*given: Any, **options: Any) -> Any:
        asked = "entropy", "predicted", "mean_logit"
        found.update(["call", *(name for name in asked if options.get(name))])
        return own(*given, **options)

    monkeypatch.setattr(cce_torch.trl, "linear_log_probs", counted)
    return found


def patched(**options: Any) -> Any:
    """What TRL finds in place of its function."""
    cce_torch.trl.patch(**options)
    return trl.trainer.utils._ChunkedLogProbFunction


def given(seed: int = 0, tokens: int = 40, types: tuple = (F32, F32), with_bias: bool = True) -> list[Any]:
    """Hidden states, a classifier of 50 rows, its bias, and targets, some of which have the largest logit."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, 24, generator=generator).to(types[0])
    weight = (torch.randn(50, 24, generator=generator) / 2).to(types[1])
    bias = torch.randn(50, generator=generator).to(types[1]) if with_bias else None
    targets = torch.randint(50, (tokens,), generator=generator)
    if tokens:
        targets[::3] = (hidden.float() @ weight.float().T + (0 if bias is None else bias.float())).argmax(-1)[::3]
    return [hidden, weight, bias, targets]


def results(function: Any, tensors: list[Any], options: tuple, outputs: tuple, double: bool = False) -> dict[str, Any]:
    """The results by name and the gradients of their weighted sum. double: of the same tensors in float64."""
    leaves = [x if x is None else (x.double() if double else x).clone().requires_grad_() for x in tensors[:3]]
    temperature, softcap, scale = options
    found = function.apply(*leaves, tensors[3], temperature, CHUNK, softcap, scale, outputs)
    named = {name: x for name, x in zip(RESULTS, found, strict=True) if x is not None}
    tokens = torch.arange(len(tensors[3]))
    objective = (torch.cos(tokens) * named["log_probs"]).sum()
    if "entropy" in named and named["entropy"].requires_grad:
        objective = objective + (torch.sin(tokens) * named["entropy"]).sum()
    kept = [x for x in leaves if x is not None]
    gradients = dict(zip(("hidden", "weight", "bias"), torch.autograd.grad(objective, kept), strict=False))
    return {name: x.detach() for name, x in named.items()} | gradients


def assert_as_trl(ours: dict[str, Any], theirs: dict[str, Any], truth: dict[str, Any]) -> None:
    """Ours has the names, types and shapes of TRL's, and is at most as far from float64 as rounding allows."""
    assert ours.keys() == theirs.keys() == truth.keys()
    for name, x in ours.items():
        assert (x.dtype, x.shape) == (theirs[name].dtype, theirs[name].shape), name
        if name == "is_top1":
            assert torch.equal(x, truth[name])
            continue
        kind = str(x.dtype)[6:]
        allowed = tolerance.K * tolerance.error(theirs[name].double(), truth[name])
        allowed += tolerance.FLOOR[kind] * tolerance.roundoff(kind)
        assert tolerance.error(x.double(), truth[name]) <= allowed, name


@pytest.mark.parametrize("seed", range(10))
def test_the_function_of_trl(seed, calls):
    draw = random.Random(seed)
    outputs = ("log_probs", *(name for name in OUTPUTS[1:] if draw.random() < 0.5))
    options = draw.choice([1.0, 0.7, 2]), draw.choice([None, 3.0]), draw.choice([1.0, 0.3, -1.5])
    tensors = given(seed, draw.choice([1, 7, 40]), with_bias=draw.random() < 0.5)
    truth, theirs = (results(ChunkedLogProbFunction, tensors, options, outputs, x) for x in (True, False))
    assert_as_trl(results(patched(), tensors, options, outputs), theirs, truth)
    names = {"entropy": "entropy", "mean_logit": "mean_logits", "predicted": "is_top1"}
    assert calls == Counter({"call": 1} | {ours: 1 for ours, name in names.items() if name in outputs})


@pytest.mark.parametrize(("with_bias", "autocast"), [(True, None), (False, BF16)], ids=["bias", "autocast"])
@pytest.mark.parametrize(
    "types", [(BF16, BF16), (F16, F16), (F32, BF16), (F32, F16), (BF16, F32), (BF16, F16)], ids=str
)
def test_types(types, with_bias, autocast):
    """Beside TRL's function in float64, of tensors that are rounded to the type in which it computes."""
    tensors = given(1, types=types, with_bias=with_bias)
    rounded = [x if x is None or x is tensors[3] else x.to(autocast or types[0]) for x in tensors]
    options, outputs = (0.7, None, 1.0), ("log_probs", "entropy")
    truth = results(ChunkedLogProbFunction, rounded, options, outputs, double=True)
    function = patched()
    with torch.autocast("cpu", autocast, enabled=autocast is not None):
        theirs = results(ChunkedLogProbFunction, tensors, options, outputs)
        ours = results(function, tensors, options, outputs)
    assert_as_trl(ours, theirs, truth)


def test_a_logit_that_only_rounding_makes_the_largest():
    """TRL rounds logits to the type of the hidden states, and the first of equal ones counts."""
    hidden, weight = torch.ones(1, 2, dtype=BF16), torch.tensor([[1.0, 0.0], [1.0, 2.0**-10]], dtype=BF16)
    tensors = [hidden, weight, None, torch.tensor([1])]
    options = (1.0, None, 1.0), ("log_probs", "is_top1")
    assert not results(ChunkedLogProbFunction, tensors, *options)["is_top1"]
    assert results(patched(), tensors, *options)["is_top1"]


def test_no_tokens_and_an_ignored_target():
    """TRL passes no ignored target to its function: it has no gradient."""
    theirs, ours = (results(x, given(tokens=0), (0.7, 3.0, 2.0), OUTPUTS) for x in (ChunkedLogProbFunction, patched()))
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        assert (x.dtype, x.shape) == (theirs[name].dtype, theirs[name].shape), name
        assert not x.any(), name
    tensors = given()
    tensors[3][5] = -100
    found = results(patched(), tensors, (0.7, None, 1.0), OUTPUTS)
    assert not any(found[name][5].any() for name in (*OUTPUTS, "hidden"))


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), ()])
def test_frozen_tensors(needed):
    tensors = given()
    for i in needed:
        tensors[i].requires_grad_()
    log_probs = patched().apply(*tensors, 1.0, CHUNK, None, 1.0, ("log_probs",))[0]
    assert log_probs.requires_grad == bool(needed)
    if needed:
        log_probs.sum().backward()
        assert [x.grad is not None for x in tensors[:3]] == [i in needed for i in range(3)]


def test_a_detached_entropy():
    tensors = given()
    tensors[0].requires_grad_()
    found = patched(entropy="detached").apply(*tensors, 1.0, CHUNK, None, 1.0, ("log_probs", "entropy"))
    assert not found[1].requires_grad
    torch.testing.assert_close(found[1], ChunkedLogProbFunction.apply(*tensors, 1.0, CHUNK)[1].detach())


def test_what_is_lacking_says_what_to_do(monkeypatch):
    for outputs in ((("log_probs", "log_sum_sq_probs"),), ()):  # by default TRL's function has it
        with pytest.raises(NotImplementedError, match=r"compute log_sum_sq_probs.*use_weighting=True.*unpatch\(\)"):
            patched().apply(*given(), 1.0, CHUNK, None, 1.0, *outputs)
    monkeypatch.setattr("transformers.integrations.deepspeed.is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(NotImplementedError, match=r"ZeRO 3.*ZeRO 2 or FSDP 2"):
        patched().apply(*given(), 1.0, CHUNK, None, 1.0, ("log_probs",))


def test_versions_that_are_not_known_are_refused(monkeypatch):
    monkeypatch.setattr(cce_torch.trl, "version", lambda _: "1.17.0")
    with pytest.raises(ImportError, match=r"TRL 1\.17\.0 is installed.*knows TRL 1\.16\.0.*install trl==1\.16\.0"):
        cce_torch.trl.patch()
    assert trl.trainer.utils._ChunkedLogProbFunction is ChunkedLogProbFunction

    def missing(_: str) -> str:
        raise cce_torch.trl.PackageNotFoundError

    monkeypatch.setattr(cce_torch.trl, "version", missing)
    with pytest.raises(ImportError, match=r"needs TRL: pip install trl==1\.16\.0"):
        cce_torch.trl.patch()


def test_the_version_that_is_tested_is_the_one_that_the_documentation_names():
    pinned = re.findall(r"(?m)^trl==(.*)$", (ROOT / "constraints.txt").read_text())
    named = re.findall(r"It knows TRL ([\d.]+) and", (ROOT / "docs" / "hugging-face.md").read_text())
    assert pinned == named == [cce_torch.trl.KNOWN[-1]]


def test_options_are_checked_and_replaced(monkeypatch):
    for wrong in ({"impl": "cuda"}, {"memory_budget": -1}, {"precision": "low"}, {"entropy": False}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            cce_torch.trl.patch(**wrong)
    with pytest.raises(ValueError, match="TRL is not patched"):
        cce_torch.trl.unpatch()
    patched()
    found = {}
    monkeypatch.setattr(cce_torch.trl, "linear_log_probs", lambda *_, **options: found.update(options) or 1 / 0)
    options = {"impl": "torch_compile", "memory_budget": 3e6, "precision": "high"}
    with pytest.raises(ZeroDivisionError):
        patched(**options).apply(*given(), 1.0, CHUNK, None, 1.0, ("log_probs",))
    assert options.items() <= found.items()
    cce_torch.trl.unpatch()
    assert trl.trainer.utils._ChunkedLogProbFunction is ChunkedLogProbFunction


@pytest.mark.parametrize(("kind", "beta"), [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.3)])
def test_a_divergence_of_trl(kind, beta):
    share = {"beta": beta} if kind == "jsd" else {}
    x = of_teacher(divergence=kind, temperature=0.8, softcap=3.0, reduction="none", return_entropy=True, **share)
    of_trl = ChunkedDivergenceFunction.apply(
        x["e"], x["c"], None, x["teacher_e"], x["teacher_c"], None, beta, 0.8, 1.0, 3.0
    )
    both = [(value, entropy.detach()) for value, entropy in (linear_divergence(**x), of_trl)]
    torch.testing.assert_close(*both, rtol=1e-4, atol=1e-5)
    found = (torch.autograd.grad(value.mean(), (x["e"], x["c"])) for value, _ in both)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(61))]
OF_TIME = "time", "per_second"  # in the names of what is logged


def tokenizer() -> PreTrainedTokenizerFast:
    found = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=found, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    """A saved model of two layers. Its head is its embedding, so it likes to repeat a word."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.2,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def text(draw: random.Random, words: int) -> str:
    """Each word twice, so that some tokens are predicted."""
    return "".join(f" {word} {word}" for word in draw.sample(WORDS[3:], words))


def pairs(draw: random.Random) -> dict[str, str]:
    """A prompt and two answers of unequal lengths, so that there is padding."""
    return {"prompt": text(draw, 2), "chosen": text(draw, draw.randrange(1, 5)), "rejected": text(draw, 3)}


def judged(draw: random.Random) -> dict[str, Any]:
    return {"prompt": text(draw, 2), "completion": text(draw, draw.randrange(1, 5)), "label": draw.random() < 0.5}


def distinct_words(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(x.split()))) for x in completions]


SAMPLED = {"num_generations": 4, "max_completion_length": 6, "temperature": 0.8, "beta": 0.1, "entropy_coef": 0.05}
# The names of a trainer and its arguments, a row of its data, and the outputs that it asks for besides log_probs.
TRAINERS: dict[str, tuple] = {
    "sft": ("SFT", {}, {}, lambda draw: {"text": text(draw, draw.randrange(2, 7))}, {"entropy", "predicted"}),
    "dpo": ("DPO", {}, {}, pairs, {"entropy", "predicted", "mean_logit"}),
    "kto": ("KTO", {}, {}, judged, {"entropy", "mean_logit"}),
    "grpo": ("GRPO", SAMPLED, {"reward_funcs": distinct_words}, lambda draw: {"prompt": text(draw, 2)}, {"entropy"}),
}
WITHOUT_ACCURACY = "kto", "grpo"


def trained(kind: str, path: str, folder: Any, on_gpu: bool = False) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """What two steps log, without times, and the parameters after them."""
    name, options, more, row, _ = TRAINERS[kind]
    arguments = getattr(trl, f"{name}Config")(
        str(folder),
        max_steps=2,
        per_device_train_batch_size=4,
        learning_rate=0.05,
        optim="sgd",
        report_to=[],
        logging_steps=1,
        use_cpu=not on_gpu,
        bf16=False,
        save_strategy="no",
        disable_tqdm=True,
        seed=1,
        **options,
    )
    draw = random.Random(0)
    trainer = getattr(trl, f"{name}Trainer")(
        model=LlamaForCausalLM.from_pretrained(path),
        args=arguments,
        train_dataset=Dataset.from_list([row(draw) for _ in range(16)]),
        processing_class=tokenizer(),
        **more,
    )
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    logs = [{k: x for k, x in log.items() if not any(of in k for of in OF_TIME)} for log in trainer.state.log_history]
    after = {name: p.detach() for name, p in trainer.model.named_parameters()}
    assert any(not torch.equal(x, before[name]) for name, x in after.items())
    return logs, after


@pytest.mark.parametrize("on_gpu", [False, pytest.param(True, marks=pytest.mark.gpu)], ids=["cpu", "gpu"])
@pytest.mark.parametrize("kind", TRAINERS)
def test_a_training(kind, on_gpu, path, tmp_path, calls):
    """Two steps: the losses, the metrics and the parameters are those of TRL alone."""
    expected, references = trained(kind, path, tmp_path / "alone", on_gpu)
    assert not calls
    cce_torch.trl.patch()
    logs, parameters = trained(kind, path, tmp_path / "patched", on_gpu)
    assert calls["call"] >= 2
    assert {name for name in calls if calls[name]} == {"call"} | TRAINERS[kind][-1]
    assert len(logs) == len(expected) == 3
    for log, reference in zip(logs, expected, strict=True):
        assert log.keys() == reference.keys()
        for name, x in log.items():
            assert math.isclose(x, reference[name], rel_tol=1e-4, abs_tol=1e-5), (name, x, reference[name])
    steps = expected[:2]
    assert all(log["entropy"] > 1 for log in steps)
    assert kind in WITHOUT_ACCURACY or any(0 < log["mean_token_accuracy"] < 1 for log in steps)
    torch.testing.assert_close(parameters, references)


def test_a_trainer_that_was_made_before(path, tmp_path, calls):
    """And DPO with use_weighting asks for what is lacking."""
    arguments = trl.DPOConfig(str(tmp_path), use_weighting=True, use_cpu=True, bf16=False, report_to=[])
    draw = random.Random(0)
    rows = Dataset.from_list([pairs(draw) for _ in range(8)])
    model = LlamaForCausalLM.from_pretrained(path)
    trainer = trl.DPOTrainer(model, args=arguments, train_dataset=rows, processing_class=tokenizer())
    cce_torch.trl.patch()
    with pytest.raises(NotImplementedError, match="use_weighting"):
        trainer.train()


def test_a_head_cast_to_float32(path, calls):
    """cast_lm_head_to_fp32 of a model in bfloat16: float32 hidden states beside a classifier in bfloat16."""

    def step() -> tuple[Any, Any]:
        model = LlamaForCausalLM.from_pretrained(path, dtype=BF16)
        trl.trainer.utils.add_fused_lm_head(model, 0.8, cast_lm_head_to_fp32=True, outputs=("log_probs", "entropy"))
        tokens = torch.arange(3, 27).reshape(2, 12)
        found = model(input_ids=tokens, labels=tokens, fused_lm_head=True)
        found.loss.backward()
        return torch.stack([found.log_probs, found.entropy]).detach(), model.lm_head.weight.grad

    (expected, reference), _ = step(), cce_torch.trl.patch()
    found, gradient = step()
    assert calls["call"] == 1
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, reference)
