"""Chat room: text to token ids and back, conversations to XTML and back. Nothing here imports JAX.

:class:`Tokenizer` reads the tiktoken vocabulary that ships with a checkpoint. :func:`render` turns a
conversation into pieces, :func:`encode` pieces into ids. :func:`parse_ids`, :func:`parse_pieces` and
:func:`parse` turn a model's output into reasoning, content and tool calls, and :class:`StreamParser` does so
while it is being written. :func:`normalize_request` and :func:`normalize_messages` check requests and bring them
into one form. :func:`open_image`, :func:`prepare_image` and :func:`image_prompt` are the way of a picture into a
prompt.
"""

from moe28t_jax.chat.images import PreparedImage, image_prompt, open_image, prepare_image
from moe28t_jax.chat.messages import ChatRequest, image_parts, normalize_messages, normalize_request
from moe28t_jax.chat.parse import ParsedOutput, parse, parse_ids, parse_pieces
from moe28t_jax.chat.render import encode, render
from moe28t_jax.chat.stream import StreamEvent, StreamParser
from moe28t_jax.chat.tokenizer import StreamDecoder, Tokenizer

__all__ = [
    "ChatRequest",
    "ParsedOutput",
    "PreparedImage",
    "StreamDecoder",
    "StreamEvent",
    "StreamParser",
    "Tokenizer",
    "encode",
    "image_parts",
    "image_prompt",
    "normalize_messages",
    "normalize_request",
    "open_image",
    "parse",
    "parse_ids",
    "parse_pieces",
    "prepare_image",
    "render",
]
