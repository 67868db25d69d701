"""Enabling and disabling a model: nothing of it changes, its weights are shared, and changed weights are noticed."""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, T5Config, T5ForConditionalGeneration

import transformers_paged
from helpers import in_threads
from helpers_models import make_model, make_tokenizer
from helpers_transformers import ENGINE, cases, encoded, engine_of, on_engine, own_generate, same
from paged_backend import LLM, ConfigError, EngineDeadError, ModelError, SamplingParams
from transformers_paged.model import enabled

GREEDY: dict[str, Any] = encoded() | {"max_new_tokens": 8, "do_sample": False}


def trainable() -> PreTrainedModel:
    return make_model("llama").requires_grad_(True)


def train_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> float:
    model.train()
    ids = encoded()["input_ids"]
    loss = model(input_ids=ids, labels=ids).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    model.eval()
    return loss.item()


def traces(model: PreTrainedModel) -> dict[str, Any]:
    """All that could have been left behind in a model."""
    stream = io.BytesIO()
    pickle.dump(model, stream)
    return {
        "attributes": sorted(model.__dict__),
        "generate": model.generate,
        "config": model.config.to_json_string(use_diff=False),
        "attention": model.config._attn_implementation,
        "generation_config": model.generation_config.to_json_string(),
        "modules": [(name, id(module), module.training) for name, module in model.named_modules()],
        "state": [(name, id(value), value._version) for name, value in model.state_dict(keep_vars=True).items()],
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "pickled": stream.getvalue(),
    }


def test_disable_leaves_no_trace() -> None:
    model = trainable()
    own_generate(model, **GREEDY)
    before = traces(model)
    logits = model(**encoded()).logits
    for _ in range(2):
        transformers_paged.enable(model, make_tokenizer(), **ENGINE)
        transformers_paged.enable(model, make_tokenizer(), **ENGINE)
        model.generate(**GREEDY)
        transformers_paged.disable(model)
        transformers_paged.disable(model)
    assert traces(model) == before
    assert same(model(**encoded()).logits, logits)


def test_batch_after_batch_comes_back_whole_and_the_model_computes_and_trains_as_before() -> None:
    """transformers#45943"""
    model, twin = trainable(), trainable()
    optimizers = [torch.optim.AdamW(one.parameters(), lr=0.01) for one in (model, twin)]
    five = encoded(["one", "two", "three", "four", "five"]) | {"max_new_tokens": 8, "do_sample": False}
    with on_engine(model):
        for _ in range(2):
            assert same(model.generate(**five), own_generate(twin, **five))
            assert same(model(**encoded()).logits, twin(**encoded()).logits)
            assert train_step(model, optimizers[0]) == train_step(twin, optimizers[1])
    assert all(map(same, model.state_dict().values(), twin.state_dict().values()))


@pytest.mark.slow
def test_weights_are_not_copied() -> None:
    model = make_model("llama")
    with on_engine(model):
        with torch.no_grad():
            model.lm_head.weight.zero_()
            model.lm_head.weight[65] = 1e-3
            model.lm_head.weight[66] = -1e-3
        output = model.generate(**encoded(), max_new_tokens=4, do_sample=False)
    assert set(output[:, -4:].flatten().tolist()) <= {65, 66}


OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True),
}


@pytest.mark.parametrize("optimizer", cases(OPTIMIZERS, everyday="fused"))
def test_no_stale_prefix_is_used_after_an_optimizers_step(optimizer: str) -> None:
    model = trainable()
    steps = OPTIMIZERS[optimizer](model.parameters())
    long = encoded(["The same long prompt, asked for again and again."]) | {"max_new_tokens": 8, "do_sample": False}
    with on_engine(model):
        outputs = []
        for _ in range(3):
            outputs.append(model.generate(**long))
            assert same(outputs[-1], own_generate(model, **long))
            assert same(model.generate(**long), outputs[-1]), "and from the cache"
            train_step(model, steps)
    assert not same(outputs[0], outputs[-1]), "training must make a difference"


def change_by_load_state_dict(model: PreTrainedModel) -> None:
    model.load_state_dict(make_model("llama", seed=1).state_dict())


def change_by_assigning_a_parameter(model: PreTrainedModel) -> None:
    model.lm_head.weight = torch.nn.Parameter(torch.flip(model.lm_head.weight.detach(), [0]))


def change_by_assigning_data(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.3


def change_by_writing_through_data(model: PreTrainedModel) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.3)


def change_by_replacing_a_module(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp = make_model("llama", seed=2).model.layers[1].mlp


def change_by_a_hook(model: PreTrainedModel) -> None:
    model.model.norm.register_forward_hook(lambda module, inputs, output: -output)


def change_of_type(model: PreTrainedModel) -> None:
    model.to(torch.bfloat16).to(torch.float32)
    change_by_load_state_dict(model)


CHANGES = [
    change_by_load_state_dict,
    change_by_assigning_a_parameter,
    change_by_assigning_data,
    change_by_writing_through_data,
    change_by_replacing_a_module,
    change_by_a_hook,
    change_of_type,
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.slow
def test_changed_weights_are_noticed(change: Any) -> None:
    model = make_model("llama")
    with on_engine(model):
        before = model.generate(**GREEDY)
        change(model)
        after = model.generate(**GREEDY)
        assert same(after, own_generate(model, **GREEDY))
        assert not same(after, before)


@pytest.mark.slow
def test_another_type_makes_another_engine() -> None:
    model = make_model("llama")
    with on_engine(model):
        model.generate(**GREEDY)
        first = engine_of(model)
        assert engine_of(model) is first
        model.to(torch.bfloat16)
        model.generate(**GREEDY)
        assert first.is_closed and not engine_of(model).is_closed


@pytest.mark.slow
def test_a_type_the_engine_does_not_know_is_handed_over(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("llama")
    with on_engine(model, on_unsupported="fallback"):
        model.to(torch.float64)
        assert same(model.generate(**GREEDY), own_generate(model, **GREEDY))
    assert "float64" in caplog.text


@pytest.mark.slow
def test_a_model_in_training_mode_is_handed_over_and_back() -> None:
    model = make_model("llama")
    with on_engine(model):
        model.train()
        with pytest.raises(NotImplementedError, match="eval"):
            model.generate(**GREEDY)
        model.eval()
        assert same(model.generate(**GREEDY), own_generate(model, **GREEDY))


def test_copies_of_an_enabled_model_are_not_enabled(tmp_path: Path) -> None:
    model = make_model("llama")
    with on_engine(model):
        right = own_generate(model, **GREEDY)
        for one in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model))):
            if one.__dict__ is not model.__dict__ and not isinstance(one, type(None)):
                assert same(one.generate(**GREEDY), right)
        deep = copy.deepcopy(model)
        assert enabled(deep) is None and deep.generate.__self__ is deep
        again = copy.deepcopy(pickle.loads(pickle.dumps(deep)))
        assert again.generate.__self__ is again
        assert list(model.state_dict()) == list(deep.state_dict())
        model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert same(loaded.generate(**GREEDY), right)


@pytest.mark.slow
def test_a_generate_of_the_instances_own_comes_back() -> None:
    model = make_model("llama")

    def own(*args: Any, **kwargs: Any) -> str:
        return "own"

    model.generate = own
    with on_engine(model, on_unsupported="fallback"):
        assert same(model.generate(**GREEDY), own_generate(model, **GREEDY))
        assert model.generate(**GREEDY, num_beams=2, output_attentions=True) == "own"
        assert copy.deepcopy(model).generate() == "own"
    assert model.generate is own


@pytest.mark.slow
def test_enabling_again_with_other_settings_replaces_them() -> None:
    model = make_model("llama")
    first = transformers_paged.enable(model, **ENGINE)
    assert transformers_paged.enable(model, **ENGINE).llm is first.llm
    llm = first.llm
    second = transformers_paged.enable(model, **ENGINE | {"block_size": 8})
    assert llm.is_closed and second.llm.config.block_size == 8
    assert same(model.generate(**GREEDY), own_generate(model, **GREEDY))
    transformers_paged.disable(model)
    assert "generate" not in model.__dict__


@pytest.mark.slow
def test_frameworks_on_one_model_object_share_its_engine() -> None:
    model, tokenizer = make_model("llama"), make_tokenizer()
    llm = LLM.shared(model, tokenizer, **ENGINE)
    with transformers_paged.enable(model, tokenizer, **ENGINE) as same_model:
        assert same_model is model
        assert engine_of(model) is llm
    assert llm.is_closed
    assert LLM.shared(model, tokenizer, **ENGINE).generate("a", SamplingParams(max_tokens=1))[0].finished
    LLM.shared(model, tokenizer, **ENGINE).close()


@pytest.mark.slow
def test_disable_lets_others_finish() -> None:
    model = make_model("llama")
    paged = transformers_paged.enable(model, **ENGINE)
    llm = paged.llm
    handle = llm.submit([65, 66], SamplingParams(max_tokens=200, ignore_eos=True))
    next(handle)
    transformers_paged.disable(model)
    assert len(handle.result(timeout=30).outputs[0].token_ids) == 200
    llm.close()


def test_a_disabled_model_is_freed() -> None:
    model = make_model("llama")
    transformers_paged.enable(model, **ENGINE)
    model.generate(**GREEDY)
    transformers_paged.disable(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_what_cannot_be_enabled_says_why() -> None:
    with pytest.raises(TypeError, match="Linear"):
        transformers_paged.enable(torch.nn.Linear(2, 2))
    with pytest.raises(ModelError, match="eval"):
        transformers_paged.enable(make_model("llama").train())
    with pytest.raises(ConfigError, match="on_unsupported='ignore'"):
        transformers_paged.enable(make_model("llama"), on_unsupported="ignore")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="block_sizes"):
        transformers_paged.enable(make_model("llama"), block_sizes=4)
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)).eval()
    with pytest.raises(ModelError, match="encoder-decoder"):
        transformers_paged.enable(t5)
    assert "generate" not in t5.__dict__


@pytest.mark.slow
def test_weights_that_change_between_the_calls_of_threads_do_no_harm() -> None:
    model = make_model("llama")
    with on_engine(model):

        def work() -> None:
            for _ in range(4):
                with torch.no_grad():
                    model.lm_head.weight.mul_(1.0)
                assert same(model.generate(**GREEDY), right)

        right = own_generate(model, **GREEDY)
        in_threads(*[work] * 4)


def test_a_disabled_model_has_no_engine() -> None:
    paged = transformers_paged.enable(make_model("llama"), **ENGINE)
    with paged:
        assert not paged.llm.is_closed
    with pytest.raises(EngineDeadError, match="disabled"):
        _ = paged.llm


def test_one_warning_for_each_reason(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("llama")
    with on_engine(model, on_unsupported="fallback"), caplog.at_level(logging.WARNING, "transformers_paged"):
        for _ in range(2):
            for more in ({"guidance_scale": 1.5}, {"output_attentions": True}):
                model.generate(**GREEDY, **more, return_dict_in_generate=True)
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("transformers_paged")]
    assert [message.partition(": ")[2] for message in messages] == [
        "guidance_scale=1.5 is not available on the engine",
        "output_attentions=True is not available on the engine",
    ]
