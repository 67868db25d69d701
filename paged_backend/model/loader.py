"""A hub id, a folder, a GGUF file or a loaded model becomes a model that is ready to run."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from paged_backend.config import EngineConfig
from paged_backend.errors import ConfigError, InvalidRequestError, ModelError
from paged_backend.model import kept_packed, package_weights
from paged_backend.model.classifier import classification_support, is_classifier
from paged_backend.model.conversion import AVAILABLE, conversion_of
from paged_backend.model.demo import demo_folder
from paged_backend.model.encoder import embedding_support, is_encoder, max_seq_length
from paged_backend.model.gguf import gguf_folder
from paged_backend.model.linear import can_stay_narrow, cpu_computes
from paged_backend.model.mapped_files import trim_heap
from paged_backend.model.quantize import quantize_linears
from paged_backend.model.rank_process import RankSetup
from paged_backend.model.remote_tokenizers import IM_END, qwen_tokenizer
from paged_backend.model.rope import length_limits
from paged_backend.model.shards import check_can_be_sharded, plan_for
from paged_backend.model.tensor_files import problem_of
from paged_backend.model.tiers.step_cache import keeps_state
from paged_backend.pooling_params import ClassificationSupport, EmbeddingSupport
from paged_backend.sampling_params import SamplingParams

if TYPE_CHECKING:
    from paged_backend.model.ranks import Ranks

logger = logging.getLogger(__name__)

DEMO = "demo"
DEFAULT_MAX_MODEL_LEN = 2048
"""For models that state no limit, such as those with ALiBi."""

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_LENGTH_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
_NO_TOKENIZER_LIMIT = 10**9  # transformers writes 10**30 for "none"
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
_UNUSED_WEIGHTS = "pooler."  # encoders' classes have it, their checkpoints often do not, and nothing reads it
# generation_config.json's names and ours.
_SAMPLING_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A causal language model, or an encoder, in evaluation mode, with what must be known of it to serve it."""

    model: PreTrainedModel
    name: str
    """What the user called it, for logs and metrics."""
    max_model_len: int
    """Most tokens of a prompt and its output together."""
    owns_weights: bool
    """False for a model that the user passed: nothing of it may be changed."""
    tokenizer: PreTrainedTokenizerBase | None = None
    """Never changed, since it may be the user's. None: only token ids can be sent."""
    chat_template: str | None = None
    """Instead of the tokenizer's own."""
    eos_token_ids: frozenset[int] = frozenset()
    """End tokens, as `generate` would take them: from the generation config, else the config, else the tokenizer."""
    embedding: EmbeddingSupport | None
    """What vectors it gives; None for a classifier."""
    classification: ClassificationSupport | None = None
    """What it says of texts, if it has a head for that; it does nothing else then."""
    is_quantized: bool = False
    """Whether its layers are those of a package, which compute with packed weights and may round activations too."""
    is_encoder: bool = False
    """True: its tokens see what follows them, so that it gives vectors only."""
    ranks: Ranks | None = None
    """The other ranks, if the model is in shards and this one is rank 0's."""
    default_sampling: dict[str, Any] = field(default_factory=dict)
    """What generation_config.json sets, in SamplingParams' names; values that SamplingParams refuses are left out."""

    @property
    def generates(self) -> bool:
        """Whether it has a KV cache, and not padded batches of whole texts."""
        return not self.is_encoder and self.classification is None


def load(
    model: str | os.PathLike[str] | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | str | None,
    config: EngineConfig,
    ranks: Ranks | None = None,
) -> LoadedModel:
    """Load `model`: "demo", a folder, a .gguf file, a hub id, or a model that is loaded already.

    `tokenizer` is one, its folder or hub id, or None for the model's own. `ranks`, not started yet, load the other
    shards if `tensor_parallel_size` asks for them. Raises ModelError if there is no such model
    or it cannot generate text, ConfigError if it cannot be served as `config` asks, MissingExtraError.
    """
    chat_template = _chat_template(config.chat_template)
    with _quiet():
        if isinstance(model, PreTrainedModel):
            _check_passed(model, config)
            source, loaded = None, model
            name = model.name_or_path or type(model).__name__
        elif isinstance(model, (str, os.PathLike)):
            name = os.fspath(model)
            source = _find(name, config)
            loaded = _load_weights(source, name, config, ranks)
            if config.quantization in ("int8", "int4"):
                quantize_linears(loaded, config.quantization, name)
        else:
            raise ModelError(f"model must be a name, a path or a PreTrainedModel, not a {type(model).__name__}")
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            tokenizer = _load_tokenizer(tokenizer, source, config)
        path, options = (source.path, source.options(config)) if source else (None, dict[str, Any]())
        classifies = is_classifier(loaded.config, loaded)
        embedding = None if classifies else embedding_support(loaded, path, options, name)
        length = max_seq_length(path, options) if is_encoder(loaded.config) else None
    trim_heap()  # reading a tokenizer leaves twice its size
    return LoadedModel(
        model=loaded,
        name=name,
        max_model_len=_max_model_len(loaded.config, tokenizer, config, length),
        embedding=embedding,
        classification=classification_support(loaded.config) if classifies else None,
        is_encoder=is_encoder(loaded.config),
        is_quantized=getattr(loaded, "hf_quantizer", None) is not None,
        owns_weights=source is not None,
        ranks=ranks,
        tokenizer=tokenizer,
        chat_template=chat_template,
        eos_token_ids=_eos_token_ids(loaded, tokenizer),
        default_sampling=_default_sampling(loaded) if config.generation_config == "auto" else {},
    )


@dataclass(frozen=True, slots=True)
class _Source:
    """What `from_pretrained` is given."""

    path: str
    """A folder or a hub id."""
    is_folder: bool

    def options(self, config: EngineConfig) -> dict[str, Any]:
        where = {"local_files_only": True} if self.is_folder else {"revision": config.revision or "main"}
        return {"trust_remote_code": config.trust_remote_code, **where}


def _find(name: str, config: EngineConfig) -> _Source:
    path = Path(os.path.expanduser(name))
    if name == DEMO:
        return _Source(str(demo_folder(config.cache_folder)), is_folder=True)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"model={name!r}: there is no such file")
        dtype = "bfloat16" if config.dtype == "auto" else config.dtype
        folder = gguf_folder(path, dtype, config.cache_folder, keep_packed=_keeps_packed(config))
        return _Source(str(folder), is_folder=True)
    if path.is_dir():
        _check_folder(path, name)
        return _Source(str(path), is_folder=True)
    if difflib.get_close_matches(
        name, [DEMO], cutoff=0.75
    ):  # asking the hub for it would take long where there is none
        raise ModelError(f"model={name!r}: there is no such folder; did you mean {DEMO!r}?")
    if not _HUB_ID.fullmatch(name):
        raise ModelError(f"model={name!r}: there is no such folder, and this is no hub id ('owner/name') either")
    return _Source(name, is_folder=False)


def _check_folder(path: Path, name: str) -> None:
    if (path / "config.json").is_file():
        return
    gguf_files = sorted(path.glob("*.gguf"))
    hint = f"; to load a GGUF file, name the file: {str(gguf_files[0])!r}" if gguf_files else ""
    raise ModelError(f"model={name!r}: the folder has no config.json, so it holds no transformers model{hint}")


def _load_weights(source: _Source, name: str, config: EngineConfig, ranks: Ranks | None) -> PreTrainedModel:
    device = _device(config.device)
    options = source.options(config)
    try:
        conversion = conversion_of(source.path, options, name, device, unpacks=config.quantization is not None)
        model_config = AutoConfig.from_pretrained(source.path, **options) if conversion is None else conversion.config
    except ModelError:
        raise
    except Exception as error:  # whatever the hub, the file system or remote code raise
        if source.is_folder:
            raise ModelError(f"model={name!r} has a config that cannot be read: {error}") from error
        raise ModelError(
            f"model={name!r} is neither a folder nor a .gguf file here, and the hub did not provide it: {error}"
        ) from error
    _check_architecture(model_config, name)
    is_quantized = getattr(model_config, "quantization_config", None) is not None and conversion is None
    hint = f"; quantised checkpoints that can be loaded: {AVAILABLE}" if is_quantized else ""
    method = package_weights.method_of(model_config) if is_quantized else ""
    if is_quantized and config.quantization is not None:
        package_weights.ask_to_unpack(model_config)
    dtype = _dtype(model_config, config, device)
    if ranks is not None:
        _check_sharding(model_config, name, config, device, is_converted=conversion is not None or is_quantized)
        ranks.start(RankSetup(0, ranks.num_ranks, 0, device, source.path, options, dtype, name, config))
    wanted = torch.bfloat16 if isinstance(dtype, str) else dtype
    try:
        if conversion is not None:
            model, report = conversion.load(source.path, options, wanted, name, keep_packed=_keeps_packed(config))
        elif source.is_folder and kept_packed.is_kept_packed(Path(source.path)):
            model, report = kept_packed.load(Path(source.path), model_config, wanted)
        else:
            auto_class = _auto_class(model_config)
            placed = {"device_map": str(device)} if is_quantized and importlib.util.find_spec("accelerate") else {}
            placed |= {} if ranks is None else {"distributed_config": plan_for(ranks.num_ranks)}
            model, report = auto_class.from_pretrained(
                source.path, config=model_config, dtype=dtype, output_loading_info=True, **placed, **options
            )
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"model={name!r} cannot be loaded: {problem_of(error)}{hint}") from error
    missing = [key for key in report["missing_keys"] if not key.startswith(_UNUSED_WEIGHTS)]
    if missing:
        some = ", ".join(sorted(missing)[:3])
        raise ModelError(f"model={name!r} lacks weights of a {type(model).__name__}, among them {some}{hint}")
    if is_quantized and config.quantization is not None:
        package_weights.unpack(model, method, config.quantization, name)
    elif is_quantized:
        model.requires_grad_(False)
        return model
    if ranks is not None:
        ranks.gather()
    return _settled(model, config, device)


def load_shard(
    path: str, options: dict[str, Any], dtype: torch.dtype | str, config: EngineConfig, device: torch.device
) -> PreTrainedModel:
    """This rank's, of a model of which rank 0 knows that it can be loaded so."""
    with _quiet():
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, distributed_config=plan_for(config.tensor_parallel_size), **options
        )
    return _settled(model, config, device)


def _settled(model: PreTrainedModel, config: EngineConfig, device: torch.device) -> PreTrainedModel:
    """In the dtype and on the device to compute with."""
    if config.dtype == "auto" and device.type == "cpu" and not (cpu_computes(model.dtype) or can_stay_narrow(model)):
        model = model.float()
    if device.type != "cpu":
        model = model.to(device)
    model.requires_grad_(False)
    return model


def _check_sharding(
    model_config: PreTrainedConfig, name: str, config: EngineConfig, device: torch.device, *, is_converted: bool
) -> None:
    asked = f"tensor_parallel_size={config.tensor_parallel_size}"
    if is_encoder(model_config) or is_classifier(model_config):
        raise ConfigError(f"{asked} is for models that generate text, and {name} does not; leave it at 1")
    if is_converted:
        raise ConfigError(f"{asked} is not available for {name}, whose files are quantised or converted; leave it at 1")
    if keeps_state(model_config):
        raise ConfigError(f"{asked} is not available for {name}, whose layers keep states; leave it at 1")
    check_can_be_sharded(model_config, name, config.tensor_parallel_size, device)


def _keeps_packed(config: EngineConfig) -> bool:
    """Whether there are kernels for weights that a checkpoint has in few bits, and nobody wants them unpacked."""
    return config.quantization is None and config.tensor_parallel_size == 1 and _device(config.device).type == "cpu"


def _auto_class(config: PreTrainedConfig) -> Any:
    if is_classifier(config):
        return AutoModelForSequenceClassification
    return AutoModel if is_encoder(config) else AutoModelForCausalLM


def _dtype(model_config: PreTrainedConfig, config: EngineConfig, device: torch.device) -> torch.dtype | str:
    """What to load in; "auto": what the files are in, which the config does not say."""
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    own: torch.dtype | None = getattr(model_config.get_text_config(decoder=True), "dtype", None)
    if own is None:
        return "auto"
    if device.type != "cpu" or cpu_computes(own):
        return own
    return own if own == torch.bfloat16 and _can_stay_narrow(model_config) else torch.float32


def _can_stay_narrow(model_config: PreTrainedConfig) -> bool:
    """Of a model that is not loaded yet."""
    is_known = type(model_config) in MODEL_FOR_CAUSAL_LM_MAPPING and not hasattr(model_config, "auto_map")
    if not is_known or is_classifier(model_config) or hasattr(model_config, "quantization_config"):
        return False
    with torch.device("meta"):
        return can_stay_narrow(AutoModelForCausalLM.from_config(model_config, dtype=torch.bfloat16))


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device={name!r} is none that torch knows: use 'auto', 'cpu', 'cuda' or 'mps'") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device={name!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"device={name!r} is not there: torch sees no Apple GPU; use 'auto' or 'cpu'")
    if device.type not in ("cpu", "cuda", "mps"):
        raise ConfigError(f"device={name!r} is not supported: use 'auto', 'cpu', 'cuda' or 'mps'")
    return device


def _check_architecture(config: PreTrainedConfig, name: str) -> None:
    """Refuse what AutoModelForCausalLM would load without a word, but which was trained as something else."""
    kind = (config.architectures or [config.model_type])[0]
    if config.is_encoder_decoder:
        raise ModelError(f"model={name!r} is an encoder-decoder ({kind}); only decoder-only models can be served")
    if kind.endswith(("ForMaskedLM", "ForPreTraining")) and not is_encoder(config):
        raise ModelError(f"model={name!r} is no causal language model but a {kind}: it sees the tokens to come")


def _check_passed(model: PreTrainedModel, config: EngineConfig) -> None:
    """A passed model is served as it is; what would change it is refused."""
    kind = type(model).__name__
    _check_architecture(model.config, model.name_or_path or kind)
    if not model.can_generate() and not is_encoder(model.config) and not is_classifier(model.config, model):
        raise ModelError(f"a {kind} cannot generate text; load it with AutoModelForCausalLM")
    if model.dtype not in _DTYPES.values():
        raise ModelError(f"the {kind} is in {model.dtype}; call model.to() with one of {', '.join(_DTYPES)}")
    if model.training:
        raise ModelError(f"the {kind} is in training mode; call model.eval() first")
    devices = {parameter.device.type for parameter in model.parameters()}
    if len(devices) > 1 or "meta" in devices:
        raise ModelError(f"the {kind} must be on one device but is on {', '.join(sorted(devices))}")
    if config.dtype not in ("auto", str(model.dtype).removeprefix("torch.")):
        raise ConfigError(f"dtype={config.dtype!r} but the model passed is in {model.dtype}; call model.to() first")
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            f"tensor_parallel_size={config.tensor_parallel_size} cannot cut the {kind} that was passed, which is whole "
            "in this process; pass the name of the model or its folder"
        )
    is_packed = getattr(model, "hf_quantizer", None) is not None
    if config.quantization in ("int8", "int4") or (config.quantization is not None and is_packed):
        raise ConfigError(
            f"quantization={config.quantization!r} would change the {kind} that was passed; pass the name of the model "
            "or its folder, so that the engine loads its own"
        )
    if config.device != "auto" and _device(config.device).type != model.device.type:
        raise ConfigError(f"device={config.device!r} but the model passed is on {model.device}; call model.to() first")


def _load_tokenizer(name: str | None, source: _Source | None, config: EngineConfig) -> PreTrainedTokenizerBase | None:
    """The tokenizer called `name`, else the one that comes with the model; None if none does."""
    if name is not None:
        path = Path(os.path.expanduser(name))
        source = _Source(str(path), is_folder=True) if path.is_dir() else _Source(name, is_folder=False)
        config = replace(config, revision=None)  # which is the model's
    elif source is None or (source.is_folder and not _has_tokenizer(Path(source.path))):
        return None
    options = source.options(config)
    try:
        return AutoTokenizer.from_pretrained(source.path, **options)
    except Exception as error:
        if not config.trust_remote_code and (own := qwen_tokenizer(source.path, options)) is not None:
            return own
        raise ModelError(
            f"the tokenizer of {source.path!r} cannot be loaded: {error}; tokenizer=... names another one"
        ) from error


def _has_tokenizer(folder: Path) -> bool:
    """Asked first, since AutoTokenizer makes up an empty tokenizer for a folder without one."""
    return any(any(folder.glob(pattern)) for pattern in _TOKENIZER_FILES)


def _chat_template(template: str | None) -> str | None:
    """The text of a template given as text or as a path: text has braces or several lines, or is no path."""
    if template is None or "{" in template or "\n" in template:
        return template
    try:
        return Path(os.path.expanduser(template)).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"chat_template={template!r} is neither a Jinja template nor a readable file") from error


def _max_model_len(
    model_config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    config: EngineConfig,
    trained: int | None = None,
) -> int:
    """`max_model_len`, else `trained`, the length that an encoder was trained with, else the model's limit."""
    limit, most = _length_limits(model_config.get_text_config(decoder=True))
    if is_encoder(model_config) or is_classifier(model_config):
        # Whose tables of positions may have room that no token can have.
        limit = most = min(filter(None, (limit, _tokenizer_limit(tokenizer))), default=None)
    wanted = config.max_model_len or (min(trained, limit or trained) if trained else None)
    if limit is None or most is None:
        return wanted or _tokenizer_limit(tokenizer) or DEFAULT_MAX_MODEL_LEN
    if wanted is not None and wanted > most:
        raise ConfigError(f"max_model_len={wanted} is more than the model's own limit of {most} tokens; lower it")
    return wanted or limit


def _length_limits(config: PreTrainedConfig) -> tuple[int | None, int | None]:
    """What the model takes by default, and at most."""
    lengths = (getattr(config, name, None) for name in _LENGTH_NAMES)
    limit = next((length for length in lengths if isinstance(length, int) and length > 0), None)
    return (None, None) if limit is None else length_limits(getattr(config, "rope_parameters", None) or {}, limit)


def _tokenizer_limit(tokenizer: PreTrainedTokenizerBase | None) -> int | None:
    if tokenizer is None or tokenizer.model_max_length >= _NO_TOKENIZER_LIMIT:
        return None
    return int(tokenizer.model_max_length)


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    text_config = model.config.get_text_config(decoder=True)
    for source in (getattr(model, "generation_config", None), model.config, text_config, tokenizer):
        token_ids = getattr(source, "eos_token_id", None)
        if token_ids is not None:
            own = frozenset([token_ids] if isinstance(token_ids, int) else token_ids)
            return own | _chat_end(model, tokenizer)
    return frozenset()


def _chat_end(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Where Qwen 1's own code ends a chat, which its files do not say."""
    settings = getattr(model, "generation_config", None)
    if tokenizer is None or getattr(settings, "chat_format", None) != "chatml":
        return frozenset()
    return frozenset([tokenizer.convert_tokens_to_ids(IM_END)])


def _default_sampling(model: PreTrainedModel) -> dict[str, Any]:
    """`do_sample: false`, if it is written there, means temperature 0, as it does in `generate`."""
    settings = getattr(model, "generation_config", None)
    if settings is None:  # an encoder
        return {}
    given = {ours: getattr(settings, theirs, None) for theirs, ours in _SAMPLING_NAMES.items()}
    if settings.do_sample is False:
        given["temperature"] = 0.0
    return {name: value for name, value in given.items() if value is not None and _is_accepted(name, value)}


def _is_accepted(name: str, value: Any) -> bool:
    try:
        SamplingParams(**{name: value})
    except InvalidRequestError as error:
        logger.warning("ignored in the model's generation_config: %s", error)
        return False
    return True


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No warnings from transformers in this block, and no progress bars unless there is a terminal; downloads keep
    their bars."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    hub_bars = not are_progress_bars_disabled()
    transformers_logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()  # and the hub's
    _show_hub_bars(hub_bars)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
        _show_hub_bars(hub_bars)


def _show_hub_bars(wanted: bool) -> None:
    if wanted and are_progress_bars_disabled():
        enable_progress_bars()
    elif not wanted:
        disable_progress_bars()
