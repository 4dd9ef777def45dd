"""The KIVI code: the logical (codes, scale, zero) of a page, and its packing into bytes."""

from loopkv.codec.kivi import CodedKeys, CodedValues, decode_keys, decode_values, encode_keys, encode_values, sanitize

__all__ = ["CodedKeys", "CodedValues", "decode_keys", "decode_values", "encode_keys", "encode_values", "sanitize"]
