"""cce_patch with what trains models: Trainer, accelerate and PEFT."""

import copy

import pytest
import torch
from transformers import LlamaConfig, Trainer, TrainerCallback, TrainingArguments

from cce_torch.transformers import cce_patch, cce_unpatch
from tests.causal_models import (
    T,
    V,
    assert_same_step,
    batch,
    small_config,
    small_model,
    step,
    uncompiled,  # noqa: F401  # for all tests of this file
)

peft = pytest.importorskip("peft")
accelerate = pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def no_accelerator():
    """Each test has an Accelerator of its own settings; a process has one."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def model(**changes):
    return small_model(small_config(LlamaConfig, initializer_range=0.3, **changes))


def patch(x, **options):
    return cce_patch(x, impl="torch_compile", **options)


class _Losses(TrainerCallback):
    def __init__(self):
        self.found = []

    def on_log(self, args, state, control, logs=None, **_):
        self.found += [x for name, x in (logs or {}).items() if name in ("loss", "eval_loss")]


def trained(x, folder, with_metrics=True, **options):
    """The losses, and the parameters, after three steps of Trainer that accumulate batches with unequal counts."""
    whole = batch(12)
    rows = [{name: values[i] for name, values in whole.items()} for i in range(12)]
    losses = _Losses()
    arguments = TrainingArguments(
        str(folder),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        logging_steps=1,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        eval_strategy="steps",
        eval_steps=1,
        seed=3,
        save_strategy="no",
        max_grad_norm=0.0,
        optim="sgd",
        **options,
    )
    shapes = []

    def metrics(prediction):
        shapes.append(prediction.predictions.shape)
        return {}

    trainer = Trainer(
        x,
        arguments,
        train_dataset=rows,
        eval_dataset=rows[:2],
        callbacks=[losses],
        compute_metrics=metrics if with_metrics else None,
    )
    assert trainer.model_accepts_loss_kwargs
    trainer.train()
    assert shapes == 3 * with_metrics * [(2, T, V)], "evaluation has logits"
    return torch.tensor(losses.found), {name: p.detach() for name, p in x.named_parameters()}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return trained(model(), tmp_path_factory.mktemp("expected"))


@pytest.mark.parametrize("how", ["logits", "loss", "compiled"])
def test_trainer(tmp_path, how, expected):
    """Evaluation comes between the steps."""
    torch._dynamo.reset()
    options = {"torch_compile": True, "torch_compile_backend": "eager"} if how == "compiled" else {}
    found = patch(model(), evaluation="logits" if how == "logits" else "loss")
    losses, parameters = trained(found, tmp_path, how == "logits", **options)
    assert len(losses) == 6
    torch.testing.assert_close(losses, expected[0], rtol=1e-4, atol=0.0)  # Trainer rounds what it logs
    torch.testing.assert_close(parameters, expected[1])


@pytest.mark.filterwarnings("error:cce_patch may have no effect")
def test_accelerate():
    def gradients(x):
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        prepared = accelerator.prepare(x)
        loss = prepared(**batch())[0]
        accelerator.backward(loss)
        return loss.detach(), {name: p.grad for name, p in accelerator.unwrap_model(prepared).named_parameters()}

    loss, found = gradients(patch(model()))
    expected, references = gradients(model())
    truth, truths = step(model(), **batch())
    assert loss.dtype == torch.float32
    assert (loss - truth).abs() <= 2 * (expected - truth).abs() + 2**-8
    for name, x in found.items():
        unit = truths[name].norm()
        assert (x - truths[name]).norm() <= 2 * (references[name] - truths[name]).norm() + 2**-8 * unit, name


def test_a_model_that_accelerate_has_prepared_is_unwrapped_and_unpatched():
    def prepared(x):
        return accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(x)

    with pytest.raises(ValueError, match="call cce_patch first"):
        patch(prepared(model()))
    found = cce_unpatch(prepared(patch(model())))(**batch()).logits
    assert found.dtype == torch.float32, "accelerate's wrapper"
    torch.testing.assert_close(found, prepared(model())(**batch()).logits, rtol=0.0, atol=0.0)
    assert patch(cce_unpatch(prepared(patch(model()))))(**batch()).logits is None, "patched again"
    cce_patch("llama")
    of_type = prepared(model())
    cce_unpatch("llama")
    assert of_type(**batch()).logits is not None
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    found = accelerator.unwrap_model(accelerator.prepare(patch(model())), keep_fp32_wrapper=False)
    output = found(**batch())
    assert output.logits is None
    torch.testing.assert_close(output.loss, model()(**batch()).loss)
    assert cce_unpatch(found)(**batch()).logits is not None


@pytest.mark.filterwarnings("error:cce_patch may have no effect")
def test_hooks_of_accelerate():
    x = model()
    accelerate.dispatch_model(x, {"": "cpu"}, force_hooks=True)
    assert "forward" in x.__dict__
    assert_same_step(patch(x), model(), **batch())
    assert x(**batch()).logits is None
    assert cce_unpatch(x)(**batch()).logits is not None


def adapted(x, **options):
    """x with adapters of LoRA that are not 0."""
    torch.manual_seed(4)
    options = {"target_modules": ["q_proj", "v_proj"], "r": 4, **options}
    found = peft.get_peft_model(x, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options))
    return found.train()


SAVED = {
    "lora": {},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "tied": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "tokens": {"trainable_token_indices": {"lm_head": [3, 5, 9]}},
    "tied tokens": {"trainable_token_indices": [3, 5, 9]},
}


@pytest.mark.parametrize("saved", SAVED)
@pytest.mark.parametrize("first", ["patch", "peft"])
def test_peft(first, saved):
    options, tied = SAVED[saved], saved.startswith("tied")

    def made():
        return model(tie_word_embeddings=tied)

    found, plain = adapted(patch(made()) if first == "patch" else made(), **options), adapted(made(), **options)
    found = found if first == "patch" else patch(found)
    with torch.no_grad():
        for p in (*found.parameters(), *plain.parameters()):
            p.mul_(1.0 + 0.5 * p.requires_grad)  # no longer what the head had before
    assert found(**batch()).logits is None
    gradients = assert_same_step(found, plain, **batch())
    assert any("lm_head" in name or "embed_tokens" in name for name in gradients) == bool(options)
    with found.disable_adapter():
        torch.testing.assert_close(found(**batch()).loss, made()(**batch()).loss)
    for x in (found, plain):
        x.merge_adapter()
    torch.testing.assert_close(found(**batch()).loss, plain(**batch()).loss)


def test_an_adapter_on_the_head_needs_the_option():
    with pytest.raises(ValueError, match="head_adapter=True"):
        patch(adapted(model(), target_modules=["lm_head"]))
    found = adapted(patch(model()), target_modules=["lm_head"])
    with pytest.raises(ValueError, match="head_adapter=True"):
        found(**batch())
    assert found(batch()["input_ids"]).logits is not None
    with pytest.raises(ValueError, match="DoRA"):
        patch(adapted(model(), target_modules=["lm_head"], use_dora=True), head_adapter=True)


@pytest.mark.parametrize("options", [{}, {"lora_dropout": 0.5}], ids=["", "dropout"])
@pytest.mark.parametrize("first", ["patch", "peft"])
def test_an_adapter_on_the_head(first, options):
    options = {"target_modules": ["lm_head", "q_proj"], **options}
    plain = adapted(model(), **options)
    if first == "patch":
        found = adapted(patch(model(), head_adapter=True), **options)
    else:
        found = patch(adapted(model(), **options), head_adapter=True)
    assert found(**batch()).logits is None
    gradients = assert_same_step(found, plain, **batch())
    assert any("lm_head" in name for name in gradients)
    with found.disable_adapter():
        torch.testing.assert_close(found(**batch()).loss, model()(**batch()).loss)
    assert copy.deepcopy(found)(**batch()).logits is None
    found.merge_adapter()
    torch.testing.assert_close(found(**batch()).loss, plain.eval()(**batch()).loss)
    with found.disable_adapter():
        torch.testing.assert_close(found(**batch()).loss, model()(**batch()).loss)
