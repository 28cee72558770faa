"""Wire 101, frozen: what readers and writers of that minor are. See README.md."""

from wire_101.codec import decode, decode_control, encode
from wire_101.messages import WIRE_VERSION

__all__ = ["WIRE_VERSION", "decode", "decode_control", "encode"]
