"""Array annotations: those of jaxtyping where it is installed, plain `jax.Array` elsewhere.

The kernels depend on jax alone, so jaxtyping stays optional: with it the shapes in the annotations can be
checked at run time (the tests do), without it they are documentation.
"""

from typing import TYPE_CHECKING, Any

from jax import Array

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
else:
    try:
        from jaxtyping import Bool, Float, Int
    except ModuleNotFoundError:

        class _Unchecked:
            def __class_getitem__(cls, item: Any) -> Any:
                return item[0]

        Bool = Float = Int = _Unchecked

__all__ = ["Array", "Bool", "Float", "Int"]
