"""LoopKV: loop-aware KV cache compression for serving looped transformers.

``model --profile--> Profile --plan--> Plan --lay_out--> Layout --serve--> tokens``: each arrow is one function with one
immutable record in and one out. Importing this package imports neither torch nor vLLM.
"""

from __future__ import annotations

__version__ = "0.1.0"
