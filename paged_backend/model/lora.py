"""LoRA adapters beside a model: loaded and forgotten while it runs, and added to the rows of those who want them.

Nothing of the model changes. In a step with adapters, what they add goes into the outputs of its linear layers, each
row with its own adapter; in a step without, the layers run as if there were no adapters at all.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from paged_backend.config import EngineConfig
from paged_backend.errors import InvalidRequestError
from paged_backend.lora import LoRARequest
from paged_backend.model import peft_checkpoint
from paged_backend.model.adaptable import linear_layers
from paged_backend.model.decoder import Apply, FusedDecoder
from paged_kernels import add_low_rank
from paged_kernels.adapters import ExchangeableAdapters, Extent, LowRankAdapters, Piece, RowIndex

TOKENS, KEPT, LOGITS = range(3)
"""What rows a layer sees: those of all tokens of the step, of the tokens that are kept, or of those with logits."""


class LoadedAdapter:
    """An adapter that fits the model.

    Its weights become the model's type and go to its device in the first step that has it: where callers' threads
    compute, OpenMP keeps workers for each of them, which slows the engine's own down.
    """

    def __init__(self, adapter_id: int, name: str, low_ranks: dict[str, peft_checkpoint.LowRank]) -> None:
        self.adapter_id = adapter_id
        self.name = name
        self.modules = tuple(low_ranks)
        self.rank = max((low_rank.rank for low_rank in low_ranks.values()), default=0)
        self._low_ranks = low_ranks
        self._pairs: dict[str, tuple[Tensor, Tensor]] = {}

    def place(self, dtype: torch.dtype, device: torch.device) -> None:
        """Make it ready for a step."""
        for module, low_rank in self._low_ranks.items():
            shrink, expand = low_rank.shrink.float(), low_rank.expand.float().T * low_rank.scale
            self._pairs[module] = (shrink.to(device, dtype).contiguous(), expand.to(device, dtype).contiguous())
        self._low_ranks = {}

    def pieces_of(self, modules: Sequence[str], firsts: Sequence[int]) -> list[Piece]:
        """What it adds to a layer of these modules, whose outputs begin at the columns `firsts`."""
        places = zip(modules, firsts, strict=True)
        return [Piece(first, *self._pairs[module]) for module, first in places if module in self._pairs]


class AdapterStore:
    """The adapters of one model, by name and files; the one that was used least lately makes room.

    Called from any thread. An adapter that is let go stays with the requests that have it.
    """

    def __init__(self, model: nn.Module, config: EngineConfig, unlike: Set[str] = frozenset()) -> None:
        """`unlike`: linear layers that do not get a row for each token."""
        self._shapes = linear_layers(model)
        self._unlike = unlike
        self._most_loaded = config.max_cpu_loras or config.max_loras
        self._max_rank = config.max_lora_rank
        self._loaded: OrderedDict[Any, LoadedAdapter] = OrderedDict()
        self._ids: dict[Any, int] = {}
        """Of all that were ever loaded: files that have not changed keep theirs."""
        self._lock = threading.Lock()

    def get(self, wanted: LoRARequest) -> LoadedAdapter:
        """Load it if it is not loaded; raises InvalidRequestError for what cannot be loaded, or does not fit."""
        folder = Path(os.path.expanduser(wanted.lora_path))
        files = peft_checkpoint.fingerprint(folder)
        key = (wanted.lora_name, files)
        with self._lock:
            if key not in self._loaded:
                low_ranks = self._read(folder)
                number = self._ids.setdefault(files, len(self._ids))
                self._loaded[key] = LoadedAdapter(number, wanted.lora_name, low_ranks)
            self._loaded.move_to_end(key)
            while len(self._loaded) > self._most_loaded:
                self._loaded.popitem(last=False)
            return self._loaded[key]

    def remove(self, name: str) -> bool:
        with self._lock:
            keys = [key for key, adapter in self._loaded.items() if adapter.name == name]
            for key in keys:
                del self._loaded[key]
        return bool(keys)

    def names(self) -> list[str]:
        with self._lock:
            return [adapter.name for adapter in self._loaded.values()]

    def _read(self, folder: Path) -> dict[str, peft_checkpoint.LowRank]:
        low_ranks = peft_checkpoint.read(folder)
        for module, low_rank in sorted(low_ranks.items()):
            self._check(module, low_rank, folder)
        return low_ranks

    def _check(self, module: str, low_rank: peft_checkpoint.LowRank, folder: Path) -> None:
        where = f"the LoRA adapter in {str(folder)!r}"
        if low_rank.rank > self._max_rank:
            raise InvalidRequestError(
                f"{where} has rank {low_rank.rank}, but max_lora_rank is {self._max_rank}; raise max_lora_rank"
            )
        shape = self._shapes.get(module)
        if shape is None:
            raise InvalidRequestError(
                f"{where} changes {module!r}, which is no linear layer of this model; was it trained for another one?"
            )
        if module in self._unlike:
            raise InvalidRequestError(
                f"{where} changes {module!r}, which this model does not run on each token as a layer, so that nothing "
                "can be added to it; train it without, or merge it into the model with PEFT's merge_and_unload()"
            )
        own = (low_rank.shrink.shape[1], low_rank.expand.shape[0])
        if own != shape:
            raise InvalidRequestError(
                f"{where} is for a {module} from {own[0]} to {own[1]}, but this model's is from {shape[0]} to "
                f"{shape[1]}; was it trained for another one?"
            )


class StepAdapters:
    """The adapters of the step that runs now, and which rows are whose."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._adapters: list[LoadedAdapter] = []
        self._rows: list[RowIndex] = []
        """By what rows a layer sees."""
        self._layers: dict[str, LowRankAdapters] = {}
        """Of the adapters of this step, or of the last one that had any, by the first module of a layer."""

    @contextlib.contextmanager
    def of(
        self,
        parts: Sequence[tuple[LoadedAdapter | None, int]],
        keep: np.ndarray,
        num_logits: int,
        hooked: nn.Module | None,
        *,
        beside: Iterable[LoadedAdapter] = (),
    ) -> Iterator[None]:
        """In this block the layers add the adapters of a call whose tokens are `parts`: so many with each adapter.

        Of its rows `keep` are kept, and the first `num_logits` of these have logits. The layers of `hooked`, if it is
        given, add without knowing it. `beside` has the adapters of other calls of the same step.
        """
        adapters = {adapter for adapter, _ in parts if adapter is not None}.union(beside)
        self._begin(sorted(adapters, key=lambda adapter: adapter.adapter_id), parts, keep, num_logits)
        with contextlib.ExitStack() as hooks:
            if hooked is not None:
                self._hook(hooked, hooks)
            yield

    def add(self, modules: Sequence[str], firsts: Sequence[int], rows: int, out: Tensor, x: Tensor) -> None:
        """Add to the output [T, out] of a layer what the adapters make of its input [T, in]."""
        layer = self._layers.get(modules[0])
        if layer is None:
            layer = LowRankAdapters([adapter.pieces_of(modules, firsts) for adapter in self._adapters])
            self._layers[modules[0]] = layer
        if not layer.is_empty:
            index = self._rows[rows]
            assert len(index) == x.shape[0], f"{modules[0]} sees {x.shape[0]} rows in a step of {len(index)}"
            add_low_rank(out, x, layer, index)

    def _begin(
        self,
        adapters: list[LoadedAdapter],
        parts: Sequence[tuple[LoadedAdapter | None, int]],
        keep: np.ndarray,
        num_logits: int,
    ) -> None:
        if adapters != self._adapters:
            for adapter in adapters:
                adapter.place(self._dtype, self._device)
            self._adapters = adapters
            self._layers.clear()
        numbers: dict[LoadedAdapter | None, int] = {adapter: number for number, adapter in enumerate(adapters)}
        numbers[None] = -1
        numbers_of = np.array([numbers[adapter] for adapter, _ in parts], np.int32)
        tokens = np.repeat(numbers_of, [num_tokens for _, num_tokens in parts])
        kept = tokens[keep]
        self._rows = [RowIndex(index, len(adapters)) for index in (tokens, kept, kept[:num_logits])]

    def _hook(self, model: nn.Module, hooks: contextlib.ExitStack) -> None:
        head = model.get_output_embeddings()  # type: ignore[operator]
        names = {name for adapter in self._adapters for name in adapter.modules}
        for name in names:
            module = model.get_submodule(name)
            hook = self._hook_of(name, is_head=module is head)
            hooks.callback(module.register_forward_hook(hook).remove)

    def _hook_of(self, name: str, *, is_head: bool) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
        def add(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
            x = arguments[0].reshape(-1, arguments[0].shape[-1]).contiguous()
            out = output.reshape(-1, output.shape[-1]).contiguous()
            # Some models compute the logits of all tokens, whatever is wanted.
            rows = LOGITS if is_head and len(x) == len(self._rows[LOGITS]) else TOKENS
            self.add((name,), (0,), rows, out, x)
            return out.view(output.shape)

        return add


class AdapterSlots:
    """Adapters of captured steps: each in a slot, in tables whose memory stays where it is.

    What is launched follows from the `layout`, a number for which modules some adapter has changed so far and the
    largest rank of one: it rises when an adapter needs more of that.
    """

    def __init__(self, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        self._slots: list[LoadedAdapter | None] = [None] * num_slots
        self._modules: set[str] = set()
        self._rank = 0
        self.layout = 0
        self._rows: RowIndex | None = None
        self._tiles: dict[int, dict[tuple[torch.device, int], Tensor]] = {}
        """By the number of rows."""
        self._layers: dict[tuple[str, ...], tuple[Sequence[int], ExchangeableAdapters]] = {}
        """By the modules of a layer: where their outputs begin, and what the slots' adapters have for it."""

    def begin(self, adapters: Sequence[LoadedAdapter | None], num_rows: int) -> None:
        """A step of so many rows: the first ones have these adapters, as many as there are slots at most."""
        self._place(dict.fromkeys(one for one in adapters if one is not None))
        numbers = {adapter: number for number, adapter in enumerate(self._slots) if adapter is not None}
        index = np.full(num_rows, -1, np.int32)
        index[: len(adapters)] = [-1 if one is None else numbers[one] for one in adapters]
        self._rows = RowIndex(index, len(self._slots), self._tiles.setdefault(num_rows, {}))

    def add(self, modules: Sequence[str], firsts: Sequence[int], rows: int, out: Tensor, x: Tensor) -> None:
        """As StepAdapters; all rows are kept, and have logits."""
        names = tuple(modules)
        changed = [number for number, module in enumerate(names) if module in self._modules]
        if not changed:
            return
        if names not in self._layers:
            ends = [*firsts[1:], out.shape[1]]
            widths = [ends[number] - firsts[number] for number in changed]
            is_aligned = not any(number % 16 for number in (*widths, *(firsts[number] for number in changed)))
            room = Extent(len(changed), self._rank, max(widths), is_aligned)
            layer = ExchangeableAdapters(len(self._slots), room, self._dtype, self._device)
            self._layers[names] = (firsts, layer)
            layer.exchange(self._pieces_of(names, firsts))
        assert self._rows is not None
        add_low_rank(out, x, self._layers[names][1], self._rows)

    def _place(self, wanted: dict[LoadedAdapter, None]) -> None:
        """Give each of these a slot."""
        missing = [adapter for adapter in wanted if adapter not in self._slots]
        if not missing:
            return
        replaceable = [number for number, adapter in enumerate(self._slots) if adapter not in wanted]
        replaceable.sort(key=lambda number: self._slots[number] is not None)  # those that nobody has first
        for adapter, number in zip(missing, replaceable, strict=False):
            adapter.place(self._dtype, self._device)
            self._slots[number] = adapter
        modules = self._modules.union(*(adapter.modules for adapter in missing))
        rank = max(self._rank, *(adapter.rank for adapter in missing))
        if modules != self._modules or rank > self._rank:
            self._modules, self._rank = modules, rank
            self.layout += 1
            self._layers.clear()
        for names, (firsts, layer) in self._layers.items():
            layer.exchange(self._pieces_of(names, firsts))

    def _pieces_of(self, modules: Sequence[str], firsts: Sequence[int]) -> list[list[Piece]]:
        return [[] if adapter is None else adapter.pieces_of(modules, firsts) for adapter in self._slots]


def adapted(decoder: FusedDecoder, model: nn.Module, step: StepAdapters | AdapterSlots) -> FusedDecoder:
    """A fused decoder like this one, which was made of `model`, whose linear layers add the adapters of the step."""

    def replacement(linear: Apply, names: list[str], sees_kept: bool) -> Apply:
        sizes = {name: int(model.get_submodule(name).out_features) for name in names}  # type: ignore[arg-type]
        rows = LOGITS if names == ["lm_head"] else KEPT if sees_kept else TOKENS
        return AdaptedLinear(linear, sizes, rows, step)

    return decoder.with_linears(replacement)


class AdaptedLinear:
    """A linear layer of merged modules, and what the step's adapters add to each of them."""

    def __init__(self, linear: Apply, modules: dict[str, int], rows: int, step: StepAdapters | AdapterSlots) -> None:
        """`modules` has the number of outputs of each module, in the order of the layer's."""
        self._linear, self._rows, self._step = linear, rows, step
        self._modules = tuple(modules)
        self._firsts = tuple(itertools.accumulate(modules.values(), initial=0))[:-1]

    def __call__(self, x: Tensor) -> Tensor:
        y = self._linear(x)
        self._step.add(self._modules, self._firsts, self._rows, y, x)
        return y
