"""Chat room: text to token ids and back. Nothing here imports JAX.

The tokenizer reads the tiktoken vocabulary that ships with a checkpoint; see :class:`Tokenizer`.
"""

from moe28t_jax.chat.tokenizer import StreamDecoder, Tokenizer

__all__ = ["StreamDecoder", "Tokenizer"]
