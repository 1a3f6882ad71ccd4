"""cce_patch: a patched model has the loss and all gradients of the model as it was, and nothing else changes."""

import copy
import functools
import inspect
import pickle
from concurrent.futures import ThreadPoolExecutor
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertLMHeadModel,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MixtralConfig,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutput

from cce_torch import linear_cross_entropy
from cce_torch.transformers import cce_patch, cce_unpatch, forward, heads
from cce_torch.transformers.lazy_logits import LazyLogits
from cce_torch.transformers.settings import Settings
from tests.call_torch import array
from tests.causal_models import (
    B,
    T,
    V,
    assert_same_step,
    batch,
    small_config,
    small_model,
    step,
    uncompiled,  # noqa: F401  # for all tests of this file
)
from tests.test_functions import Largest
from tests.tolerance import assert_close, error, roundoff

WIDE = 0.3  # standard deviation of the initial weights: the logits reach the softcaps

# Each computes its logits in another way; test_causal_sweep.py draws from all classes.
FAMILIES = {
    "llama": (LlamaConfig, {}),
    "llama tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "gemma2": (Gemma2Config, {"final_logit_softcapping": 2.0}),
    "granite": (GraniteConfig, {"logits_scaling": 3.0}),
    "cohere": (CohereConfig, {"logit_scale": 0.25}),
    "gpt2": (GPT2Config, {}),
    "mixtral": (MixtralConfig, {"output_router_logits": True}),
}


def model(config_class: Any = LlamaConfig, model_class: Any = None, **changes: Any) -> Any:
    config = small_config(config_class, initializer_range=WIDE, **changes)
    config._experts_implementation = "eager"  # the one that has float64
    return small_model(config, model_class)


def whole(found: Any) -> Any:
    """The model, compiled without graph breaks, and without what was compiled for other models of its class."""
    torch._dynamo.reset()
    return torch.compile(found, fullgraph=True, backend="eager")


def patched(config_class: Any = LlamaConfig, options: Any = None, **changes: Any) -> Any:
    return cce_patch(model(config_class, **changes), **{"impl": "torch_compile", **(options or {})})


def assert_trains_alike(found: Any, plain: Any, inputs: dict) -> None:
    """The loss and all gradients of a float32 model, against those of the same model as it was."""
    loss, gradients = step(found, **inputs)
    reference, references = step(plain, **inputs)
    truth, truths = step(copy.deepcopy(plain).double(), **inputs)
    assert_close(array(loss), array(truth), array(reference), "loss")
    assert gradients.keys() == references.keys()
    for name, x in gradients.items():
        assert_close(array(x), array(truths[name]), array(references[name]), name)


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family):
    """A step, and in evaluation a loss without logits."""
    config, changes = FAMILIES[family]
    plain = model(config, **changes)
    found = patched(config, **changes)
    assert_trains_alike(found, plain, batch())
    output = found(**batch())
    assert output.logits is None
    assert (getattr(output, "aux_loss", None) is not None) == ("output_router_logits" in changes)
    assert type(found).__name__ == type(plain).__name__
    found.eval()
    expected = plain.eval()(**batch()).loss
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            output, (loss, *others) = found(**batch()), found(**batch(), return_dict=False)
        torch.testing.assert_close(output.loss, expected)
        assert torch.equal(loss, output.loss)
        assert output.logits is None
        assert not any(isinstance(x, LazyLogits) for x in (*output.values(), *others))


LABELS = batch()["labels"]

ARGUMENTS = {
    "items, int": {"num_items_in_batch": 7},
    "items, float": {"num_items_in_batch": 6.5},
    "items, tensor": {"num_items_in_batch": torch.tensor(7)},
    "ignore_index": {"ignore_index": 5},
    "shift_labels": {"shift_labels": LABELS.roll(-2, 1)},
    "tuple": {"return_dict": False},
    "attention_mask": {"attention_mask": (LABELS != -100).long()},
    "embeddings": {"input_ids": None, "inputs_embeds": torch.linspace(-1, 1, B * T * 32).reshape(B, T, 32)},
    "logits_to_keep": {"logits_to_keep": T},
}


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_arguments_behave_as_unpatched(arguments):
    inputs = {**batch(), **ARGUMENTS[arguments]}
    if "ignore_index" in inputs:
        inputs["labels"] = torch.where(LABELS == -100, inputs["ignore_index"], LABELS)
    assert_same_step(patched(), model(), **inputs)


def test_labels_without_a_name_and_a_tuple():
    inputs = batch()
    found = patched(GPT2Config)
    place = list(inspect.signature(found.forward).parameters).index("labels")
    arguments = [inputs["input_ids"], *[None] * (place - 1), inputs["labels"]]
    output = found(*arguments)
    assert output.logits is None
    torch.testing.assert_close(output.loss, model(GPT2Config)(**inputs).loss)
    loss, logits = found(**inputs, return_dict=False, use_cache=False)
    assert (loss.shape, logits) == ((), None)


def test_other_forwards_give_logits():
    found, plain = patched(options={"evaluation": "logits"}), model()
    inputs = batch()
    tokens = inputs["input_ids"]
    assert torch.equal(found(tokens).logits, plain(tokens).logits), "training, no labels"
    found.eval()
    plain.eval()
    expected = plain(**inputs)
    output = found(**inputs)
    assert torch.equal(output.logits, expected.logits), "evaluation"
    assert torch.equal(output.loss, expected.loss), "evaluation"
    cce_patch(found, impl="torch_compile")
    assert torch.equal(found(tokens).logits, plain(tokens).logits), "evaluation, no labels"
    written = found.generate(tokens, max_new_tokens=4, do_sample=False)
    assert torch.equal(written, plain.generate(tokens, max_new_tokens=4, do_sample=False))


@pytest.mark.parametrize("items", [None, 0, 0.0, torch.tensor(0), torch.tensor(0.0)])
def test_the_loss_of_ignored_labels_is_0(items):
    ignored = torch.full_like(LABELS, -100)
    loss, gradients = step(patched(), input_ids=LABELS.clamp(3), labels=ignored, num_items_in_batch=items)
    assert loss == 0
    assert all(not x.any() for x in gradients.values())


def test_reduction_none_gives_each_token():
    """Its numbers: tests/search."""
    plain = model(BertConfig, BertLMHeadModel)
    found = cce_patch(copy.deepcopy(plain), reduction="none", impl="torch_compile")
    loss = found(**batch(), num_items_in_batch=3).loss
    logits = plain(batch()["input_ids"]).logits
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), LABELS[:, 1:].flatten(), reduction="none")
    torch.testing.assert_close(loss, expected.view(B, T - 1))
    assert patched(options={"reduction": "none"})(**batch(), shift_labels=LABELS.roll(-1, 1)).loss.shape == (B, T)


def test_reduction_none_refuses_the_loss_of_a_router():
    found = patched(MixtralConfig, {"reduction": "none"}, output_router_logits=True)
    with pytest.raises(ValueError, match="output_router_logits=False"):
        found(**batch())
    assert found(**batch(), output_router_logits=False).loss.shape == (B, T - 1)
    found = patched(MixtralConfig, {"reduction": "none"})
    with pytest.raises(ValueError, match="the loss of its router"):
        found(**batch(), output_router_logits=True)


def test_options_reach_the_loss_and_wrong_ones_are_named(monkeypatch):
    seen = {}

    def loss(*args, **kwargs):
        seen.update(kwargs)
        return linear_cross_entropy(*args, **kwargs)

    monkeypatch.setattr(heads, "linear_cross_entropy", loss)
    options = {"impl": "reference", "memory_budget": 2e9, "precision": "high", "gradient_tolerance": 2**-7}
    patched(options=options)(**batch())
    assert {name: seen[name] for name in options} == options
    for wrong in (
        {"impl": "cce_exact"},
        {"reduction": "max"},
        {"memory_budget": -1},
        {"precision": "low"},
        {"gradient_tolerance": 1.0},
        {"evaluation": True},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}="):
            cce_patch(model(), **wrong)


@pytest.mark.parametrize(
    ("tokens", "gib", "budget"), [(1024, 32, 2**30), (1024, 8, None), (10**6, 32, None), (10**6, 2048, 2**36)]
)
def test_default_budget_is_a_share_of_the_gpu_or_that_of_the_loss(monkeypatch, tokens, gib, budget):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=gib * 2**30))
    shape = 2, tokens // 2, 2048
    h: Any = SimpleNamespace(
        is_cuda=True, device="cuda", dtype=torch.bfloat16, shape=shape, numel=lambda: tokens * 2048
    )
    assert Settings().of_loss(h)["memory_budget"] == budget
    assert Settings(memory_budget=0).of_loss(h)["memory_budget"] == 0
    assert Settings().of_loss(torch.zeros(2, 8))["memory_budget"] is None


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_default_budget_on_a_gpu(monkeypatch, compiled):
    seen = []

    def loss(*args, memory_budget, **kwargs):
        seen.append(memory_budget)
        return linear_cross_entropy(*args, memory_budget=memory_budget, **kwargs)

    monkeypatch.setattr(heads, "linear_cross_entropy", loss)
    found = patched(options={"impl": "auto"}).bfloat16().cuda()
    run = torch.compile(found, fullgraph=True, backend="aot_eager") if compiled else found
    run(**{name: x.cuda() for name, x in batch().items()}).loss.backward()
    assert seen[-1] == torch.cuda.get_device_properties(0).total_memory // 32


def test_no_tensor_has_the_size_of_the_logits():
    found = patched(options={"impl": "chunked"}, vocab_size=1000)
    inputs = batch(16)
    with Largest() as largest:
        found(**inputs).loss.backward()
    assert largest.elements < 16 * T * 1000
    with Largest() as largest, torch.no_grad():
        found.eval()(**inputs)
    assert largest.elements < 16 * T * 1000
    with Largest() as largest:
        cce_unpatch(found)(**inputs)
    assert largest.elements >= 16 * T * 1000


def test_type_patches_all_models_until_it_is_unpatched():
    before, forward = model(), LlamaForCausalLM.forward
    assert cce_patch("llama", impl="torch_compile") is LlamaForCausalLM
    try:
        for x in (before, model()):
            assert x(**batch()).logits is None
        assert model(MistralConfig)(**batch()).logits is not None
        assert_trains_alike(before, model(MistralConfig, sliding_window=None), batch())
        own = cce_patch(model(), impl="torch_compile", reduction="none")
        assert own(**batch()).loss.shape == (B, T - 1), "a model's own options come first"
    finally:
        assert cce_unpatch(LlamaForCausalLM) is LlamaForCausalLM
    assert LlamaForCausalLM.forward is forward
    assert before(**batch()).logits is not None
    with pytest.raises(ValueError, match="LlamaForCausalLM is not patched"):
        cce_unpatch("llama")
    of_type = before.config  # as with cut_cross_entropy, whose next arguments are impl and reduction
    assert cce_patch(of_type, "torch_compile", "sum") is LlamaForCausalLM
    try:
        loss = before(**batch()).loss
    finally:
        cce_unpatch(of_type)
    torch.testing.assert_close(loss, before(**batch()).loss * (LABELS[:, 1:] != -100).sum())


def test_unpatch_gives_back_the_model():
    found = model()
    assert cce_patch(found) is found
    cce_patch(found, impl="torch_compile")
    assert cce_unpatch(found) is found
    assert type(found) is LlamaForCausalLM
    assert type(found.lm_head) is torch.nn.Linear
    assert found(**batch()).logits is not None
    with pytest.raises(ValueError, match="is not patched"):
        cce_unpatch(found)


def test_copies_and_pickles_are_patched_and_saved_models_load_unpatched(tmp_path):
    found = patched()
    torch.save(found, tmp_path / "model")
    found.save_pretrained(tmp_path / "saved")
    expected = found(**batch()).loss
    loaded = torch.load(tmp_path / "model", weights_only=False)
    for other in (copy.deepcopy(found), pickle.loads(pickle.dumps(found)), loaded):
        assert type(other) is type(found)
        assert other.lm_head is not found.lm_head
        output = other(**batch())
        assert output.logits is None
        assert torch.equal(output.loss, expected)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "saved").train()
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    output = loaded(**batch())
    assert output.logits is not None
    torch.testing.assert_close(output.loss, expected)


def test_a_resized_head_stays_patched():
    found = patched()
    found.resize_token_embeddings(V + 6)
    output = found(**batch())
    assert output.logits is None
    torch.testing.assert_close(output.loss, cce_unpatch(found)(**batch()).loss)


@pytest.mark.parametrize("rows", [V - 7, V + 9])
def test_the_weight_says_how_many_columns_the_logits_have(rows):
    """Not out_features, which an assigned weight leaves as it was."""

    def own(logits, labels, **_):
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))

    plain = model()
    plain.lm_head.weight = torch.nn.Parameter(torch.linspace(-1, 1, rows * 32).view(rows, 32).sin())
    plain.loss_function = own
    inputs = {name: x.clamp(max=rows - 1) for name, x in batch().items()}
    expected, references = step(plain, **inputs)
    loss, gradients = step(cce_patch(plain, impl="torch_compile"), **inputs)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients, references)


def test_a_weight_that_zero3_has_not_gathered_is_named():
    found = patched()
    weight: Any = torch.nn.Parameter(torch.empty(0))
    weight.ds_shape = found.lm_head.weight.shape
    found.lm_head.weight = weight
    with pytest.raises(
        TypeError, match=r"^the weight of the head of shape \(0,\) .* \(97, 32\) that DeepSpeed's ZeRO 3"
    ):
        found(**batch())


@pytest.mark.parametrize("compiled", [False, True])
def test_the_loss_has_the_autocast_of_the_head(compiled):
    found, plain = (small_model(OwnForCausalLM.small(), OwnForCausalLM) for _ in range(2))
    cce_patch(found, impl="torch_compile")
    run = whole(found) if compiled else found
    with torch.autocast("cpu", torch.bfloat16):
        loss, expected = run(**batch()).loss, plain(**batch()).loss
        with_autocast = cce_patch(model(), impl="torch_compile")(**batch()).loss
    torch.testing.assert_close(loss, expected)
    assert (with_autocast - expected).abs() > 1e-4, "the head of other models is not in float32"
    summed = cce_patch(cce_unpatch(found), impl="torch_compile", reduction="sum")(**batch()).loss
    torch.testing.assert_close(summed, plain(**batch()).loss * (LABELS[:, 1:] != -100).sum())


class OwnForCausalLM(LlamaForCausalLM):
    """A forward that takes few arguments (no num_items_in_batch), and computes its logits in float32 always."""

    @staticmethod
    def small() -> LlamaConfig:
        return small_config(LlamaConfig, initializer_range=WIDE)

    def forward(self, input_ids, labels=None):  # type: ignore[override]
        h = self.model(input_ids).last_hidden_state
        with torch.autocast("cpu", enabled=False):
            logits = self.lm_head(input=h.float())
        return CausalLMOutput(loss=self.loss_function(logits, labels, self.config.vocab_size), logits=logits)


def test_outputs_inside_an_output_have_no_logits():
    class Outer(LlamaForCausalLM):
        def forward(self, input_ids, labels=None):  # type: ignore[override]
            inner = super().forward(input_ids)
            return BaseModelOutputWithPast(
                last_hidden_state=self.loss_function(inner.logits, labels, self.config.vocab_size),
                hidden_states=(inner, (inner.logits, inner.logits.shape)),  # type: ignore[arg-type]
            )

    loss, (inner, rest) = cce_patch(small_model(OwnForCausalLM.small(), Outer))(**batch()).to_tuple()
    assert loss.shape == ()
    assert inner.logits is None
    assert rest == (None, (B, T, V))


def test_threads_that_share_a_model():
    found, inputs = patched(), batch()
    compiled = whole(found)
    expected = compiled(**inputs).loss
    with ThreadPoolExecutor(4) as threads:
        for run in (found, compiled):
            for output in threads.map(lambda _, run=run: run(**inputs), range(8)):
                assert output.logits is None
                torch.testing.assert_close(output.loss, expected)


@pytest.mark.parametrize(
    "hook", [lambda *_: None, lambda *x: x[2], lambda *x: x[2].view_as(x[2]), lambda *x: x[2].clone()]
)
def test_hooks_on_the_head_run_once(hook):
    """One that returns nothing, the same, an alias or a copy."""
    found, plain, seen = patched(), model(), []
    for x in (found, plain):
        x.lm_head.register_forward_pre_hook(lambda _, given: (2 * given[0],))
    found.lm_head.register_forward_hook(lambda _, __, output: seen.append(output))
    found.lm_head.register_forward_hook(hook)
    assert_same_step(found, plain, **batch())
    assert [x.shape for x in seen] == [()]


def masked(z: torch.Tensor) -> torch.Tensor:
    return z.index_fill(-1, torch.tensor([1, 2]), -torch.inf)


@pytest.mark.parametrize("change", [lambda x: x * 0.5, lambda x: x.mul_(0.5), lambda x: (x,), lambda x: masked(x)])
def test_a_hook_that_changes_what_the_head_returns_is_refused(change):
    found = patched()
    found.lm_head.register_forward_hook(lambda _, __, output: change(output))
    with pytest.raises(ValueError, match=r"a forward hook on the head \(tests.test_transformers.<lambda>\) changed"):
        found(**batch())


def test_a_hook_that_changes_the_loss_is_refused_in_a_compiled_model():
    found = patched()
    found.lm_head.register_forward_hook(lambda _, __, output: output * 0.5)
    with pytest.raises(Unsupported, match="exception"):
        whole(found)(**batch())


def test_a_forward_that_is_replaced_gives_a_warning():
    """As TRL's trainers do, whose own forward computes the loss if they ask for it, and never calls the model's."""

    def fuse(x: Any) -> None:
        own = x.forward

        @functools.wraps(type(x).forward)
        def fused(self, *args, fused_lm_head=False, **kwargs):
            return "fused" if fused_lm_head else own(*args, **kwargs)

        x.forward = MethodType(fused, x)

    found = patched()
    with pytest.warns(UserWarning, match=r"no effect: the forward of this LlamaForCausalLM .* by .*fused") as warned:
        fuse(found)
    assert len(warned) == 1
    assert found(**batch(), fused_lm_head=True) == "fused"
    assert found(**batch()).logits is None, "this one calls what it replaced"
    plain = model()
    fuse(plain)
    with pytest.raises(ValueError, match=r"was replaced on the object itself, by tests.test_transformers.fused"):
        cce_patch(plain)
    cce_patch("llama", impl="torch_compile")
    try:
        with pytest.warns(UserWarning, match="no effect"):
            fuse(model())
    finally:
        cce_unpatch("llama")


def test_a_forward_of_trl_is_named(monkeypatch):
    """The advice to patch first would lead back: a model that was patched first gives the warning."""
    plain = model()
    plain.forward = lambda **_: None
    monkeypatch.setitem(globals(), "__name__", "trl.trainer.utils")
    with pytest.raises(ValueError, match=r"by trl\.trainer\.utils\.<lambda>: TRL's .* docs/hugging-face\.md") as raised:
        cce_patch(plain)
    assert "first" not in str(raised.value)


def test_a_patched_type_is_compiled_without_graph_breaks():
    """A model of its own: the steps below."""
    inputs = {**batch(), "num_items_in_batch": torch.tensor(5)}
    cce_patch("gemma2", impl="torch_compile")
    try:
        gemma2 = model(Gemma2Config, final_logit_softcapping=2.0, num_hidden_layers=1)
        output = whole(gemma2)(**inputs)
        assert output.logits is None
        output.loss.backward()
        gradients = {name: p.grad.clone() for name, p in gemma2.named_parameters()}
        loss, references = step(gemma2, **inputs)
    finally:
        cce_unpatch("gemma2")
    torch.testing.assert_close(output.loss.detach(), loss)
    torch.testing.assert_close(gradients, references)


def test_compiled_steps_in_a_fresh_process(monkeypatch):
    """Before any other forward: so as threads meet it, nothing is recorded yet. Evaluation comes between."""
    fresh = type(heads.recordings)()
    for module in (heads, forward):
        monkeypatch.setattr(module, "recordings", fresh)
    found, inputs = patched(), batch()
    compiled = whole(found)
    steps = [step(compiled, **inputs) for _ in range(2)]
    evaluated = compiled.eval()(**inputs).loss.detach()
    compiled.train()
    with ThreadPoolExecutor(1) as thread:
        steps += [step(compiled, **inputs), thread.submit(step, compiled, **inputs).result(), step(compiled, **inputs)]
    loss, gradients = step(model(), **inputs)
    torch.testing.assert_close(evaluated, loss)
    for found_loss, of_step in steps:
        torch.testing.assert_close(found_loss, loss)
        torch.testing.assert_close({name.removeprefix("_orig_mod."): x for name, x in of_step.items()}, gradients)


@pytest.mark.gpu
def test_bfloat16_model_on_a_gpu():
    inputs = {name: x.cuda() for name, x in batch().items()}
    loss, gradients = step(cce_patch(model().bfloat16().cuda(), impl="auto"), **inputs)
    reference, references = step(model().bfloat16().cuda(), **inputs)
    truth, truths = step(model().double().cuda(), **inputs)
    assert loss.dtype == torch.float32
    assert error(array(loss), array(truth)) <= 2 * error(array(reference), array(truth)) + roundoff("bfloat16")
    for name, x in gradients.items():
        assert x.dtype == torch.bfloat16
        assert_close(array(x), array(truths[name]), array(references[name]), name)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant):
    found = patched()
    found.gradient_checkpointing_enable({"use_reentrant": reentrant})
    found.enable_input_require_grads()
    assert_same_step(found, model(), **batch())
