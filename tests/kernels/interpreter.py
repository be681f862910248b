"""Import before any kernel, in a process of its own: Triton's CPU interpreter, usable with any numpy.

The interpreter turns a loop bound into a number with int(array of one element), which newer numpy refuses.
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
