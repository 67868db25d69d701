"""The bfloat16 weights of a model, packed where our kernel multiplies packed ones faster, and still held once."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor, nn

from paged_backend.model.linear import READ_AS_A_MATRIX, PackedLinear
from paged_backend.model.mapped_files import MappedFiles
from paged_kernels import PackedWeight, pack
from paged_kernels.packing import LANES, LEAST_COLUMNS, packs_bfloat16

_BITS = 16


@torch.inference_mode()
def pack_linears(model: nn.Module, *, alike: bool = False) -> None:
    """Replace the bfloat16 linear layers of a model on a CPU by packed ones, where that is faster.

    If `alike`, those of one module all or none, so that they can be merged. Embeddings that share a layer's weights
    take their rows from the packed ones.
    """
    if not packs_bfloat16():
        return
    files, users = MappedFiles(), _users_of_weights(model)
    files.let_go(model.parameters())  # each is read again, and let go of, in its turn
    for parent in list(model.modules()):
        linears = {name: child for name, child in parent.named_children() if type(child) is nn.Linear}
        can_be_packed = {name: linear for name, linear in linears.items() if _can_be_packed(name, linear)}
        if alike and len(can_be_packed) < len(linears):
            continue
        for name, linear in can_be_packed.items():
            weight = linear.weight
            others = [user for user in users[id(weight)] if user != (parent, name)]
            if all(isinstance(getattr(*other), nn.Embedding) for other in others):
                packed = pack(weight, _BITS)
                setattr(parent, name, PackedLinear(packed, linear.bias, weight.dtype))
                for module, embedding in others:
                    setattr(module, embedding, PackedEmbedding(getattr(module, embedding), packed))
                files.let_go([weight])


@torch.inference_mode()
def unpack_what_was_read(model: nn.Module) -> None:
    """Make those of `pack_linears` plain again whose weights are read at each call, be it for their dtype alone."""
    for parent in list(model.modules()):
        for name, linear in list(parent.named_children()):
            if isinstance(linear, PackedLinear) and linear.was_read and linear.packed.bits == _BITS:
                plain = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
                plain.weight = nn.Parameter(linear.weight, requires_grad=False)
                if linear.bias is not None:
                    plain.bias = linear.bias
                setattr(parent, name, plain)
                _share(model, linear.packed, plain.weight)


def _share(model: nn.Module, packed: PackedWeight, weight: nn.Parameter) -> None:
    """Embeddings that took their rows from packed weights are as they were."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, PackedEmbedding) and child.packed is packed:
                child.embedding.weight = weight
                setattr(parent, name, child.embedding)


def _users_of_weights(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """By a weight's id, the modules that have it, each as its parent and its name there."""
    users = defaultdict(list)
    for parent in model.modules():
        for name, child in parent.named_children():
            for parameter_name, weight in child.named_parameters(recurse=False):
                if parameter_name == "weight":
                    users[id(weight)].append((parent, name))
    return users


def _can_be_packed(name: str, linear: nn.Linear) -> bool:
    num_columns = linear.out_features
    return (
        linear.weight.dtype == torch.bfloat16
        and linear.weight.device.type == "cpu"
        and num_columns % LANES == 0
        and num_columns >= LEAST_COLUMNS
        and name != READ_AS_A_MATRIX
    )


class PackedEmbedding(nn.Module):
    """Takes the place of an `nn.Embedding`, or of one of a model's own kind, with the weights of a packed layer."""

    def __init__(self, embedding: nn.Embedding, packed: PackedWeight) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = packed.shape
        self.packed = packed
        embedding.weight = nn.Parameter(torch.empty(0, dtype=torch.bfloat16), requires_grad=False)
        embedding.padding_idx = None  # which is for training, and has to be below the number of rows
        self.embedding = embedding
        """What it takes the place of, with no weights."""

    @property
    def weight(self) -> Tensor:
        """The weights as an `nn.Embedding` has them, made anew for code that reads them."""
        return self.packed.unpack().bfloat16()

    def forward(self, input_ids: Tensor) -> Tensor:
        """[...] -> [..., E]"""
        rows = self.packed.rows(input_ids.reshape(-1))
        indices = torch.arange(len(rows), device=rows.device).view(input_ids.shape)
        embedded: Tensor = torch.func.functional_call(self.embedding, {"weight": rows}, (indices,))
        return embedded
