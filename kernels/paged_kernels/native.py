"""Calling compiled kernels from compiled code by their addresses.

Called by its name, a kernel is compiled anew into the one that calls it, which takes as long as compiling both. Called
by its address it stays as it is, and what calls many of them is compiled in a second.
"""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils

from paged_kernels.vector import Typed, define_intrinsic


def address_of(kernel: Any, *args: Any) -> int:
    """Where the code is that `kernel` runs on arguments of these types, compiled now unless it was before."""
    signature = tuple(map(numba.typeof, args))
    kernel.compile(signature)
    compiled = kernel.overloads[signature]
    address: int = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    return address


@define_intrinsic
def call(typing_context: Any, address: Any, args: Any) -> Typed:
    """Call the code at an `address_of` a kernel that returns nothing. The arguments are a tuple, of the very types that
    the address was asked for."""

    def emit(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        given = [types.unliteral(kind) for kind in signature.args[1]]
        passed = [
            context.cast(builder, value, kind, plain)
            for value, kind, plain in zip(
                cgutils.unpack_tuple(builder, values[1]), signature.args[1], given, strict=True
            )
        ]
        kernel_type = context.call_conv.get_function_type(types.none, given)
        kernel = builder.inttoptr(values[0], ir.PointerType(kernel_type))
        status, _ = context.call_conv.call_function(builder, kernel, types.none, given, passed)
        with cgutils.if_unlikely(builder, status.is_error):
            context.call_conv.return_status_propagate(builder, status)
        return context.get_dummy_value()

    return types.none(types.int64, args), emit
