"""Array annotations: those of jaxtyping where it is installed, plain `jax.Array` elsewhere.

The kernels depend on jax alone, so jaxtyping stays optional: with it the shapes in the annotations can be
checked at run time (the tests do), without it they are documentation.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from jax import Array

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Integer
else:
    try:
        from jaxtyping import Bool, Float, Int, Integer
    except ModuleNotFoundError:

        class _Unchecked:
            def __class_getitem__(cls, item: Any) -> Any:
                return item[0]

        Bool = Float = Int = Integer = _Unchecked

AnyArray = Array | np.ndarray
"""What public functions take; `dispatch` hands implementations JAX arrays."""

__all__ = ["AnyArray", "Array", "Bool", "Float", "Int", "Integer"]
