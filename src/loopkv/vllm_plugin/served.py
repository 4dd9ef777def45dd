"""A plan as an engine runs it: checked once before the weights load, then carried to every process in the config."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict

from loopkv.artifacts import Plan
from loopkv.layout import Layout, lay_out
from loopkv.vllm_plugin.settings import SERVED_KEY

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


class ServedPlan(BaseModel):
    """What workers and scheduler need to know. It lies in ``additional_config``, so it also enters vLLM's config hash.

    Args:
        plan: the plan itself, so that no process reads the file a second time.
        prefill, seed (the seed mode): see ``ServeSettings``.
        chunk_tokens: most new tokens one request can get in a step.
        prefill_graphs: see ``ServeSettings``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    plan: Plan
    prefill: Literal["exact", "fast"]
    seed: Literal["sink", "timed", "none"]
    chunk_tokens: int
    prefill_graphs: bool = True

    @property
    def describe_prefill(self) -> str:
        """Prefill mode in a few words, for the start-up line."""
        if self.prefill == "exact":
            return f"exact, at most {self.chunk_tokens} tokens of a request a step"
        if self.plan.shares:
            return "fast: shared cells read their own exact KV inside a chunk, so output depends on chunking"
        return "fast"


def put_served(vllm_config: VllmConfig, served: ServedPlan) -> None:
    """Attach ``served`` to the config that travels to engine core and workers."""
    config: dict[str, Any] = vllm_config.additional_config if isinstance(vllm_config.additional_config, dict) else {}
    config = {**config, SERVED_KEY: served.model_dump(mode="json")}
    vllm_config.additional_config = config


def get_served(vllm_config: VllmConfig) -> ServedPlan | None:
    """What ``put_served`` attached, or None for an engine without a plan."""
    config = vllm_config.additional_config
    if not isinstance(config, dict) or SERVED_KEY not in config:
        return None
    return ServedPlan.model_validate_json(json.dumps(config[SERVED_KEY]))


def lay_out_for_worker(plan: Plan, tensor_parallel: int, dtype: torch.dtype) -> Layout:
    """The layout of one worker's heads; every worker gets the same block sizes in tokens."""
    geometry = plan.fingerprint.geometry
    if tensor_parallel > 1:
        geometry = geometry.model_copy(
            update={
                "query_heads": geometry.query_heads // tensor_parallel,
                "kv_heads": geometry.kv_heads // tensor_parallel,
            }
        )
        plan = plan.model_copy(update={"fingerprint": plan.fingerprint.model_copy(update={"geometry": geometry})})
    return lay_out(plan, exact_itemsize=dtype.itemsize)
