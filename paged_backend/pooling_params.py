"""How the hidden states of a prompt become one vector."""

from __future__ import annotations

import dataclasses
from typing import Any

from paged_backend.errors import InvalidRequestError
from paged_backend.fields import Checker, rejects_unknown_arguments

POOLINGS = ("last", "mean", "cls")


@rejects_unknown_arguments(InvalidRequestError)
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Frozen, and checked once, here. Raises `InvalidRequestError` that names the field, its value and its limit."""

    pooling: str
    """`last`: the last token's hidden state; `mean`: the average over all tokens; `cls`: the first token's, for models
    whose tokens see what follows them."""
    normalize: bool = True
    """Scale the vector to length 1."""
    dimensions: int | None = None
    """Keep only the first so many components, before the vector is scaled; for models trained to be cut."""

    def __post_init__(self) -> None:
        check = Checker(InvalidRequestError, self)
        check.choice("pooling", POOLINGS)
        check.flag("normalize")
        check.integer("dimensions", 1, optional=True)

    @property
    def needs_every_token(self) -> bool:
        """Whether tokens found in the prefix cache would be missed: it has their keys and values only."""
        return self.pooling == "mean"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSupport:
    """What a model offers to those who want vectors."""

    size: int
    """Components of a vector."""
    poolings: tuple[str, ...] = ("last", "mean")
    default_pooling: str = "last"
    """What the model was trained with, as far as its files say so."""
    default_normalize: bool = True

    def params(self, pooling: str | None, normalize: bool | None, dimensions: int | None) -> PoolingParams:
        """What was asked for, with the model's own choices for None; raises InvalidRequestError."""
        chosen: dict[str, Any] = {
            "pooling": self.default_pooling if pooling is None else pooling,
            "normalize": self.default_normalize if normalize is None else normalize,
        }
        params = PoolingParams(**chosen, dimensions=dimensions)
        if params.pooling not in self.poolings:
            raise InvalidRequestError(
                f"pooling={params.pooling!r} does not fit this model, whose first token sees nothing but itself; "
                f"use one of {', '.join(map(repr, self.poolings))}",
                field="pooling",
            )
        if dimensions is not None and dimensions > self.size:
            message = f"dimensions={dimensions} is more than the {self.size} that this model has"
            raise InvalidRequestError(message, field="dimensions")
        return params


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationSupport:
    """What a model offers that says how well a text, or a pair of texts, fits each of its labels."""

    labels: tuple[str, ...]
    activation: str = "sigmoid"
    """What makes scores of the head's numbers: `sigmoid` (each for itself), `softmax` (they add up to 1) or `none`."""
