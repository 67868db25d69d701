"""Models in shards, one per rank, by transformers' own plans; and the group in which the ranks compute."""

from __future__ import annotations

import contextlib
import copy
import os
import socket
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from paged_backend.errors import ConfigError
from paged_backend.model.attention import AttentionLayers
from paged_backend.model.model_call import ModelCall

_LOOPBACK = "127.0.0.1"
_JOIN_TIMEOUT = timedelta(minutes=5)
_COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""The last resort only: `ranks.py` ends ranks that are late, which ends what waits for them."""
_HEADS = {
    "num_attention_heads": "attention heads",
    "num_key_value_heads": "key and value heads",
    "num_global_key_value_heads": "key and value heads in its global layers",
}
_MISLOADED = ("hrm_text",)
"""Whose fused weights transformers (5.24) cuts into shards before it has split them; what comes of it is another model,
which no run of it can tell."""
_HEAD_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value")


def check_can_be_sharded(config: PreTrainedConfig, name: str, num_ranks: int, device: torch.device) -> None:
    """Raises ConfigError, with the reason and the way out, for what can be known before processes are started."""
    asked = f"tensor_parallel_size={num_ranks}"
    text_config = config.get_text_config(decoder=True)
    plan = getattr(text_config, "base_model_tp_plan", None)
    kind = f"{name} ({text_config.model_type})"
    if not plan:
        raise ConfigError(f"{asked}: transformers has no plan for cutting {kind} into shards; leave it at 1")
    if text_config.model_type in _MISLOADED:
        raise ConfigError(f"{asked}: transformers loads the shards of {kind} wrong; leave it at 1")
    if any(style == "colwise" and key.rsplit(".", 1)[-1] in _HEAD_PROJECTIONS for key, style in plan.items()):
        for field, what in _HEADS.items():
            _check_divides(getattr(text_config, field, None), what, name, num_ranks)
    _check_devices(asked, num_ranks, device)


def _check_divides(value: Any, what: str, name: str, num_ranks: int) -> None:
    for number in value if isinstance(value, (list, tuple)) else [value]:
        if isinstance(number, int) and number % num_ranks:
            sizes = ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
            raise ConfigError(
                f"tensor_parallel_size={num_ranks}: the {number} {what} of {name} cannot be shared out evenly; "
                f"sizes that divide them: {sizes}"
            )


def _check_devices(asked: str, num_ranks: int, device: torch.device) -> None:
    if device.index is not None:
        raise ConfigError(
            f"{asked} takes devices 0 to {num_ranks - 1}, and device='{device}' is one of them; name no number"
        )
    # transformers takes whatever accelerator this finds, and nothing else.
    accelerator = torch._C._get_accelerator().type
    if device.type != accelerator:
        raise ConfigError(
            f"{asked} runs on {device.type} only where torch sees no other device, and it sees {accelerator}; hide it "
            "(for CUDA, by CUDA_VISIBLE_DEVICES='' in the environment) or leave tensor_parallel_size at 1"
        )
    if device.type == "cuda" and num_ranks > torch.cuda.device_count():
        raise ConfigError(f"{asked} needs as many CUDA devices, and torch sees {torch.cuda.device_count()}; lower it")


def plan_for(num_ranks: int) -> DistributedConfig:
    """What makes `from_pretrained` load this rank's shard."""
    return DistributedConfig(tp_size=num_ranks)


def listen() -> socket.socket:
    """Where the ranks find each other; only processes of this machine can reach it."""
    listener = socket.socket()
    listener.bind((_LOOPBACK, 0))
    listener.listen()
    return listener


def join(rank: int, num_ranks: int, device: torch.device, place: socket.socket | int) -> None:
    """Make this process one of the ranks; returns when all are there. torch has one such group per process.

    `place` is what `listen` returned, in rank 0, and its port in the others. Raises ConfigError if this process is in a
    group already.
    """
    check_is_free()
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    with _environment(GLOO_SOCKET_IFNAME=_loopback_interface(), TORCH_NCCL_ASYNC_ERROR_HANDLING="0"):
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=_store(place),
            rank=rank,
            world_size=num_ranks,
            timeout=_COLLECTIVE_TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )


def _store(place: socket.socket | int) -> Any:
    port, of_rank = (place, {}) if isinstance(place, int) else (place.getsockname()[1], _of_rank_0(place))
    return dist.TCPStore(_LOOPBACK, port, timeout=_JOIN_TIMEOUT, **of_rank)  # type: ignore[attr-defined]


def _of_rank_0(listener: socket.socket) -> dict[str, Any]:
    return {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}


def check_is_free() -> None:
    """Raises ConfigError if this process cannot be in a group."""
    if not dist.is_available():
        raise ConfigError("tensor_parallel_size > 1 needs torch.distributed, which this build of torch lacks")
    if dist.is_initialized():
        raise ConfigError(
            "tensor_parallel_size > 1 needs torch.distributed, which is in use in this process, by another LLM with "
            "tensor parallelism or by other code; close that first, or use another process"
        )


def leave() -> None:
    """Safe to call when the others are gone."""
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            if dist.get_backend() == dist.Backend.NCCL:
                dist.distributed_c10d._abort_process_group()  # destroying waits for what will never come
            else:
                dist.destroy_process_group()


def least_of_all(number: int, device: torch.device) -> int:
    """The smallest of the numbers that the ranks call this with."""
    numbers = torch.tensor(number, dtype=torch.int64, device=device)
    dist.all_reduce(numbers, dist.ReduceOp.MIN)
    return int(numbers)


def run_whole(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """Logits [T, V] of one sequence [T] as the model in one piece would give them: what a plan of transformers, which
    may cut through a sum or a norm, has to be compared with.

    Each rank computes all of it, with the weights of one layer at a time, besides those that are in none, gathered from
    the shards of all.
    """
    with torch.device("meta"):
        whole = type(model)(copy.deepcopy(model.config)).eval()
    for name, buffer in model.named_buffers():
        parent, _, last = name.rpartition(".")
        whole.get_submodule(parent)._buffers[last] = buffer
    names = [name for name, _ in whole.named_modules()]
    layers = _layers(whole)
    for layer in layers:
        _gather_for(whole.get_submodule(layer), _pairs(whole, model, [name for name in names if _is_in(name, [layer])]))
    _gather_for(whole, _pairs(whole, model, [name for name in names if not _is_in(name, layers)]))
    return ModelCall(whole).plain(input_ids)


def _layers(model: nn.Module) -> list[str]:
    """Their names: the outermost of what is in lists."""
    names: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not _is_in(name, names):
            names += [f"{name}.{index}" for index in range(len(module))]
    return names


def _is_in(name: str, outer: Iterable[str]) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other in outer)


def _pairs(whole: nn.Module, model: nn.Module, names: Iterable[str]) -> list[tuple[nn.Module, nn.Module]]:
    return [(whole.get_submodule(name), model.get_submodule(name)) for name in names]


def _gather_for(whole: nn.Module, pairs: list[tuple[nn.Module, nn.Module]]) -> None:
    """When `whole` is called, give the first of each pair the weights that the second has a shard of, and take them
    back when it has returned."""
    empty = [dict(module._parameters) for module, _ in pairs]

    def gather(*_: Any) -> None:
        for module, shard in pairs:
            for name, weight in shard._parameters.items():
                module._parameters[name] = None if weight is None else nn.Parameter(_full(weight), requires_grad=False)

    def let_go(*_: Any) -> None:
        for (module, _shard), parameters in zip(pairs, empty, strict=True):
            module._parameters.update(parameters)

    whole.register_forward_pre_hook(gather)
    whole.register_forward_hook(let_go)


def _full(weight: Tensor) -> Tensor:
    gather = getattr(weight, "full_tensor", None)  # of a DTensor
    return weight if gather is None else arrived(gather())


def arrived(tensor: Tensor) -> Tensor:
    """What a collective will return as a plain tensor, whose memory a kernel may read."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor  # not there in each build of torch

    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


class ArrivedLayers:
    """Attention layers whose inputs may be what a collective will return."""

    def __init__(self, layers: AttentionLayers) -> None:
        self._layers = layers

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        return self._layers.attend(module, arrived(query), arrived(key), arrived(value), **options)

    def update(self, layer_idx: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self._layers.update(layer_idx, arrived(key), arrived(value))


def _loopback_interface() -> str:
    """Where gloo listens, without asking who calls: the network must not reach it."""
    for interface, addresses in psutil.net_if_addrs().items():
        if any(address.address == _LOOPBACK for address in addresses):
            return str(interface)
    raise ConfigError(f"tensor_parallel_size > 1 needs a network interface with the address {_LOOPBACK}; there is none")


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """What torch reads while it makes a group."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
