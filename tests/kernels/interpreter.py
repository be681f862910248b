"""Import before any kernel, in a process of its own: Triton's CPU interpreter, usable with any numpy.

The interpreter turns a loop bound into a number with int(array of one element), which newer numpy refuses. It makes
int32 of a comparison of scalars that is spread over a block, which its own loads and stores refuse as a mask (3.9).
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

from triton.runtime import interpreter  # noqa: E402


class Scope:
    """The interpreter's patch scope, with another conversion to an index."""

    def __init__(self, scope: object):
        self.scope = scope

    def set_attr(self, owner: object, name: str, value: object) -> None:
        if name == "__index__":
            value = lambda tensor: int(tensor.handle.data.item())  # noqa: E731
        self.scope.set_attr(owner, name, value)


_patch = interpreter._patch_lang_tensor
interpreter._patch_lang_tensor = lambda tensor, scope: _patch(tensor, Scope(scope))


def truths(mask):
    return interpreter.TensorHandle(mask.data.astype(bool), mask.dtype)


_builder = interpreter.InterpreterBuilder
_load, _store = _builder.create_masked_load, _builder.create_masked_store
_builder.create_masked_load = lambda self, at, mask, *a, **k: _load(self, at, truths(mask), *a, **k)
_builder.create_masked_store = lambda self, at, v, mask, *a, **k: _store(self, at, v, truths(mask), *a, **k)
