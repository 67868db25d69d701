"""GGUF files that were split into parts, and what is in a file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from paged_backend.errors import ModelError

_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
PLAIN = {"F32", "F16", "BF16"}
"""Types that are not quantised."""
_EMBEDDINGS = "token_embd.weight"
_DROPPED = ("GGUF.", "split.", "general.architecture")
"""Metadata that the writer writes itself, or that is no longer true of the whole."""


def parts_of(path: Path) -> list[Path]:
    """All parts of the model that `path` is one of, in order; `[path]` if it is whole. Raises ModelError."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    parts = [path.with_name(f"{match['name']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelError(f"model={str(path)!r} is one of {count} parts, and {', '.join(missing[:3])} is not beside it")
    return parts


def join(parts: list[Path], target: Path) -> None:
    """Write the parts as one file, tensor by tensor, as packed as they are."""
    import gguf

    readers = [gguf.GGUFReader(part) for part in parts]
    writer = gguf.GGUFWriter(target, str(readers[0].fields["general.architecture"].contents()))
    for field in readers[0].fields.values():
        if not field.name.startswith(_DROPPED):
            value_type, *more = field.types
            writer.add_key_value(field.name, field.contents(), value_type, more[-1] if more else None)
    tensors = [tensor for reader in readers for tensor in reader.tensors]
    for tensor in tensors:
        writer.add_tensor_info(
            tensor.name, tensor.data.shape, tensor.data.dtype, tensor.data.nbytes, raw_dtype=tensor.tensor_type
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(tensor.data)
    writer.close()


def types_of(path: Path, layers: Iterable[str], *, is_tied: bool) -> dict[str, str]:
    """The types of the weights of layers, by the names that transformers has for them; those the file has no weight
    for are left out. `is_tied`: a head that is not there is the embeddings."""
    import gguf

    reader = gguf.GGUFReader(path)
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    architecture = str(reader.fields["general.architecture"].contents())
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, int(reader.fields[f"{architecture}.block_count"].contents()))
    found = {layer: f"{names.get_name(layer)}.weight" for layer in layers}
    if is_tied and "output.weight" not in types:
        found = {layer: _EMBEDDINGS if name == "output.weight" else name for layer, name in found.items()}
    return {layer: types[name] for layer, name in found.items() if name in types}


def packed_types(path: Path) -> dict[str, int]:
    """How many weights there are in each quantised type, most first. Raises ModelError for those nobody can unpack."""
    import gguf
    from gguf.quants import _type_traits

    counts: Counter[str] = Counter()
    unknown: Any = set()
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.tensor_type.name not in PLAIN:
            counts[tensor.tensor_type.name] += int(tensor.n_elements)
            if tensor.tensor_type not in _type_traits:
                unknown.add(tensor.tensor_type.name)
    if unknown:
        raise ModelError(
            f"the GGUF file {path.name} has weights of type {', '.join(sorted(unknown))}, which the installed gguf "
            "package cannot unpack; try a newer one, or quantise the model to another type, such as Q8_0 or Q4_K_M"
        )
    return dict(counts.most_common())
