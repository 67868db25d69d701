"""LoRA: a request with an adapter gets what a model with the adapter merged into its weights would give."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from helpers_lora import TARGETS, greedy, merged, save_adapter
from helpers_models import make_model, save_model
from paged_backend import LLM, BeamSearchParams, ConfigError, InvalidRequestError, LoRARequest, SamplingParams

PROMPTS = [list(range(40, 75)), [7, 9], list(range(3, 20)) * 2, [200, 3, 77, 8]]
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


class Adapted:
    """An engine with two adapters, and what each should give."""

    def __init__(self, folder: Path, architecture: str, targets: tuple[str, ...], **config: Any) -> None:
        self.model = make_model(architecture)
        self.folders = {
            name: save_adapter(folder / name, self.model, targets=targets, seed=seed, rank=rank)
            for seed, (name, rank) in enumerate([("small", 2), ("large", 8)])
        }
        self.requests: dict[str | None, LoRARequest | None] = {None: None}
        self.requests |= {name: LoRARequest(name, path) for name, path in self.folders.items()}
        self.models: dict[str | None, PreTrainedModel] = {None: self.model}
        self.models |= {name: merged(self.model, path) for name, path in self.folders.items()}
        options = {"dtype": "float32", "kv_cache_memory": "4MiB", "block_size": 4, "enable_lora": True}
        self.llm = LLM(save_model(folder / "model", model=self.model), **options | config)
        self._expected: dict[Any, list[int]] = {}

    def expected(self, name: str | None, prompt: list[int]) -> list[int]:
        key = (name, tuple(prompt))
        if key not in self._expected:
            self._expected[key] = greedy(self.models[name], prompt, NUM_TOKENS)
        return self._expected[key]

    def check(self, *wanted: tuple[str | None, list[int]]) -> None:
        outputs = self.llm.generate(
            [prompt for _, prompt in wanted], GREEDY, lora_request=[self.requests[name] for name, _ in wanted]
        )
        for (name, prompt), output in zip(wanted, outputs, strict=True):
            assert output.outputs[0].token_ids == self.expected(name, prompt), name


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    adapted = Adapted(tmp_path_factory.mktemp("llama"), "llama", (*TARGETS, "lm_head"))
    yield adapted
    adapted.llm.close()


def test_adapters_change_what_is_generated(llama: Adapted) -> None:
    assert len({tuple(llama.expected(name, PROMPTS[0])) for name in (None, "small", "large")}) == 3


@pytest.mark.parametrize("name", [None, "small", "large"])
def test_an_adapter_alone_gives_what_merged_weights_give(llama: Adapted, name: str | None) -> None:
    llama.check(*((name, prompt) for prompt in PROMPTS))


def test_a_batch_may_mix_adapters_and_none(llama: Adapted) -> None:
    llama.check(*((name, prompt) for prompt in PROMPTS for name in (None, "small", "large")))


@pytest.mark.parametrize(
    ("architecture", "targets"),
    [
        ("qwen2", ("q_proj", "v_proj")),
        ("gemma2", TARGETS),
        ("gpt2", ("c_attn", "attn.c_proj", "c_fc")),
        ("gpt_neox", ("query_key_value", "dense_h_to_4h", "embed_out")),
        ("phi3", ("qkv_proj", "gate_up_proj", "down_proj")),
    ],
)
def test_every_way_to_run_a_model_takes_adapters(architecture: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    adapted = Adapted(tmp_path, architecture, targets, max_num_batched_tokens=16)
    with adapted.llm:
        adapted.check(("small", PROMPTS[0]), (None, PROMPTS[1]), ("large", PROMPTS[2]), ("small", PROMPTS[3]))


def test_a_loaded_model_takes_adapters_and_stays_as_it_is(tmp_path: Path) -> None:
    model = make_model("llama")
    folder = save_adapter(tmp_path, model)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with LLM(model, kv_cache_memory="4MiB", enable_lora=True) as llm:
        (output,) = llm.generate(PROMPTS[0], GREEDY, lora_request=LoRARequest("one", folder))
        assert output.outputs[0].token_ids == greedy(merged(model, folder), PROMPTS[0], NUM_TOKENS)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_preemption_changes_nothing(tmp_path: Path) -> None:
    adapted = Adapted(tmp_path, "llama", TARGETS, num_gpu_blocks_override=20, kv_cache_memory=None)
    with adapted.llm:
        adapted.check(*((name, prompt) for prompt in PROMPTS for name in ("small", None, "large")))
        assert adapted.llm.stats().num_preemptions > 0


def test_guesses_at_coming_tokens_are_checked_with_the_adapter(tmp_path: Path) -> None:
    adapted = Adapted(tmp_path, "llama", (*TARGETS, "lm_head"), speculative_config={"method": "ngram"})
    with adapted.llm:
        adapted.check(*((name, prompt) for prompt in PROMPTS for name in ("large", None)))
        assert adapted.llm.stats().num_draft_tokens > 0


def test_prefixes_are_shared_within_an_adapter_only(llama: Adapted) -> None:
    llama.llm.reset_prefix_cache()
    prompt = list(range(100, 140))
    hits = []
    for name in ("small", "small", "large", None, None):
        (output,) = llama.llm.generate(prompt, GREEDY, lora_request=llama.requests[name])
        hits.append(output.num_cached_tokens > 0)
        assert output.outputs[0].token_ids == llama.expected(name, prompt)
    assert hits == [False, True, False, False, True]


def test_more_adapters_than_a_step_takes_wait_for_each_other(tmp_path: Path) -> None:
    adapted = Adapted(tmp_path, "llama", TARGETS, max_loras=1)
    with adapted.llm:
        adapted.check(*((name, prompt) for prompt in PROMPTS for name in ("small", "large", None)))
        assert adapted.llm.list_loras() == ["large"]


def test_the_adapter_used_least_lately_makes_room(llama: Adapted, tmp_path: Path) -> None:
    with LLM(llama.model, kv_cache_memory="4MiB", enable_lora=True, max_loras=1, max_cpu_loras=2) as llm:
        for name in ("a", "b", "a", "c"):
            llm.add_lora(LoRARequest(name, llama.folders["small"]))
        assert llm.list_loras() == ["a", "c"]


def test_adapters_may_go_while_they_are_used_and_come_back_changed(llama: Adapted, tmp_path: Path) -> None:
    folder = tmp_path / "changing"
    shutil.copytree(llama.folders["small"], folder)
    request = LoRARequest("changing", folder)
    handle = llama.llm.submit(PROMPTS[0], GREEDY, lora_request=request)
    assert llama.llm.remove_lora("changing")
    assert not llama.llm.remove_lora("changing")
    assert handle.result(timeout=60).outputs[0].token_ids == llama.expected("small", PROMPTS[0])
    shutil.rmtree(folder)
    shutil.copytree(llama.folders["large"], folder)
    (output,) = llama.llm.generate(PROMPTS[0], GREEDY, lora_request=request)
    assert output.outputs[0].token_ids == llama.expected("large", PROMPTS[0])


def test_chats_beams_scores_and_vectors_take_adapters(llama: Adapted) -> None:
    small = llama.requests["small"]
    chat = [{"role": "user", "content": "Hello"}]
    ids = llama.llm.encode_chat(chat)
    (answer,) = llama.llm.chat(chat, GREEDY, lora_request=small)
    assert answer.outputs[0].token_ids == llama.expected("small", ids)
    (found,) = llama.llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=1, max_tokens=4), lora_request=small)
    assert found.outputs[0].token_ids == llama.expected("small", PROMPTS[0])[:4]
    best = llama.expected("small", PROMPTS[1])[:3]
    ((scored,),) = llama.llm.score(PROMPTS[1], best, lora_request=small)
    assert scored.is_greedy
    (vector,) = llama.llm.embed(PROMPTS[0], normalize=False, lora_request=small)
    token_ids = torch.tensor([PROMPTS[0]])
    right = llama.models["small"].model(token_ids).last_hidden_state[0, -1]
    torch.testing.assert_close(torch.tensor(vector.outputs.embedding), right, rtol=1e-3, atol=1e-3)


def test_vectors_beside_tokens_get_their_own_adapter(llama: Adapted) -> None:
    """A step that pools takes other rows than one that does not."""
    names = ("large", None, "small")
    handles = [llama.llm.submit(prompt, GREEDY, lora_request=llama.requests["small"]) for prompt in PROMPTS]
    outputs = llama.llm.embed(
        [PROMPTS[2]] * 3, pooling="mean", normalize=False, lora_request=[llama.requests[name] for name in names]
    )
    for name, output in zip(names, outputs, strict=True):
        right = llama.models[name].model(torch.tensor([PROMPTS[2]])).last_hidden_state[0].mean(dim=0)
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), right, rtol=1e-3, atol=1e-3)
    for prompt, handle in zip(PROMPTS, handles, strict=True):
        assert handle.result(timeout=60).outputs[0].token_ids == llama.expected("small", prompt)


# --- PEFT's files ---


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT uses what transformers is about to drop
def test_what_peft_writes_is_what_peft_computes(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=True,
        target_modules=["q_proj", "v_proj", "down_proj"],
        rank_pattern={"v_proj": 2, "layers.1.mlp.down_proj": 6},
        alpha_pattern={"layers.0.self_attn.q_proj": 20},
        init_lora_weights=False,
    )
    model = make_model("llama")
    adapted = peft.get_peft_model(make_model("llama"), config)
    adapted.save_pretrained(tmp_path / "safe")
    right = greedy(adapted.merge_and_unload(), PROMPTS[0], NUM_TOKENS)
    with LLM(model, kv_cache_memory="4MiB", enable_lora=True) as llm:
        (output,) = llm.generate(PROMPTS[0], GREEDY, lora_request=LoRARequest("peft", tmp_path / "safe"))
    assert output.outputs[0].token_ids == right != greedy(model, PROMPTS[0], NUM_TOKENS)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"use_dora": True}, "use_dora.*merge_and_unload"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"peft_type": "IA3"}, "'IA3'.*only 'LORA'"),
    ],
)
def test_what_is_no_plain_adapter_is_refused(
    llama: Adapted, tmp_path: Path, config: dict[str, Any], match: str
) -> None:
    folder = save_adapter(tmp_path, llama.model, **config)
    with pytest.raises(InvalidRequestError, match=match):
        llama.llm.generate(PROMPTS, GREEDY, lora_request=LoRARequest("odd", folder))


def test_what_does_not_fit_is_refused(llama: Adapted, tmp_path: Path) -> None:
    other = save_adapter(tmp_path / "other", make_model("llama", intermediate_size=96), targets=("up_proj",))
    wide = save_adapter(tmp_path / "wide", llama.model, rank=65)
    strange = save_adapter(tmp_path / "strange", make_model("gpt2"), targets=("c_fc",))
    embeds = save_adapter(
        tmp_path / "embeds",
        llama.model,
        more={"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 9)},
    )
    (tmp_path / "empty").mkdir()
    for folder, match in [
        (other, r"from 64 to 96.*from 64 to 128"),
        (wide, r"rank 65.*max_lora_rank is 64"),
        (strange, "'transformer.h.0.mlp.c_fc'"),
        (embeds, "embed_tokens"),
        (tmp_path / "empty", "adapter_config.json"),
    ]:
        with pytest.raises(InvalidRequestError, match=match):
            llama.llm.add_lora(LoRARequest("bad", folder))


def test_pickled_weights_run_no_code(llama: Adapted, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = save_adapter(tmp_path, llama.model, seed=0, rank=2)
    tensors = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    torch.save(tensors, folder / "adapter_model.bin")
    llama.llm.add_lora(LoRARequest("pickled", folder))
    torch.save({"x": Path()}, folder / "adapter_model.bin")
    with pytest.raises(InvalidRequestError, match=r"more than tensors.*save it as safetensors"):
        llama.llm.add_lora(LoRARequest("pickled", folder))


def test_a_request_for_an_adapter_needs_an_engine_for_adapters(tmp_path: Path) -> None:
    model = make_model("llama")
    with LLM(model, kv_cache_memory="4MiB") as llm:
        with pytest.raises(InvalidRequestError, match="enable_lora=True"):
            llm.generate(PROMPTS, GREEDY, lora_request=LoRARequest("a", tmp_path))
        with pytest.raises(InvalidRequestError, match="enable_lora=True"):
            llm.list_loras()


def test_a_list_of_adapters_has_one_for_each_prompt(llama: Adapted) -> None:
    with pytest.raises(InvalidRequestError, match="2 lora_requests for 4 prompts"):
        llama.llm.generate(PROMPTS, GREEDY, lora_request=[llama.requests["small"]] * 2)
    with pytest.raises(InvalidRequestError, match="must be a LoRARequest"):
        llama.llm.generate(PROMPTS, GREEDY, lora_request="small")


def test_a_request_for_an_adapter_is_written_as_in_vllm() -> None:
    assert LoRARequest("sql", 3, "folder") == LoRARequest("sql", lora_path="folder", lora_int_id=3)
    assert LoRARequest("sql", Path("folder")) == LoRARequest("sql", lora_path="folder")
    for arguments in [("",), ("sql",), ("sql", "a", "b"), ("sql", True, "a"), (3, "a")]:
        with pytest.raises(InvalidRequestError):
            LoRARequest(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "config", [{"max_loras": 0}, {"max_lora_rank": 0}, {"max_cpu_loras": 1, "max_loras": 2}, {"enable_lora": 1}]
)
def test_impossible_settings_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(config))):
        LLM("demo", **config)
