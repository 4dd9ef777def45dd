"""Ouro for vLLM with a LoopKV cache: L sandwich-norm layers applied T times, one cache cell per (loop, layer).

Names of parameters follow the checkpoint. The exit gate (``model.early_exit_gate``) is not loaded: all loops always run
and the last one is read out. Without a plan, the registered class builds vLLM's own Ouro.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm import envs
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CompilationMode
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.interfaces import SupportsLoRA
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

from loopkv.geometry import Cell, Geometry
from loopkv.models.checkpoint import refuse_unknown
from loopkv.models.config import parse_ouro_config
from loopkv.models.ouro import is_unused_tensor, ouro_tensors
from loopkv.vllm_plugin.cells import CellCache
from loopkv.vllm_plugin.model_graphs import make_model_graphs
from loopkv.vllm_plugin.served import get_served

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import VllmConfig

    from loopkv.kernels.norms import SandwichNorm


def rotary_base(config: PretrainedConfig) -> float:
    """Base of the plain RoPE (the config hook has refused any other kind)."""
    return parse_ouro_config(config.to_dict(), "model config").rope_base


class OuroMLP(nn.Module):
    """``down(silu(gate x) * up x)``."""

    def __init__(self, config: PretrainedConfig, prefix: str) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, [config.intermediate_size] * 2, bias=False, prefix=f"{prefix}.gate_up_proj"
        )
        self.down_proj = RowParallelLinear(
            config.intermediate_size, config.hidden_size, bias=False, prefix=f"{prefix}.down_proj"
        )
        self.activation = SiluAndMul()

    def forward(self, x: Tensor) -> Tensor:
        """[T, E] to [T, E]."""
        gate_up, _ = self.gate_up_proj(x)
        out: Tensor = self.down_proj(self.activation(gate_up))[0]
        return out


class ExactRotary(RotaryEmbedding):
    """Plain RoPE with angles in fp64.

    In fp32 an angle at position 2,000 is wrong by up to 1e-4 radians, more than everything else that a served key
    differs by from the one the plan was profiled with.
    """

    def _compute_cos_sin_cache(self) -> Tensor:
        frequency = self.base ** -(torch.arange(0, self.rotary_dim, 2, dtype=torch.float64) / self.rotary_dim)
        angles = torch.outer(torch.arange(self.max_position_embeddings, dtype=torch.float64), frequency)
        return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


class OuroAttention(nn.Module):
    """Projections and RoPE of one layer; its cells share the weights and differ in their cache."""

    def __init__(
        self, config: PretrainedConfig, geometry: Geometry, rotary: ExactRotary, layer: int, prefix: str
    ) -> None:
        super().__init__()
        ranks = get_tensor_model_parallel_world_size()
        self.head_dim = geometry.head_dim
        self.query_heads, self.kv_heads = geometry.query_heads // ranks, geometry.kv_heads // ranks
        self.cells = tuple(geometry.index(Cell("loop", loop, layer)) for loop in range(geometry.loops))
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            geometry.head_dim,
            geometry.query_heads,
            geometry.kv_heads,
            bias=False,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            geometry.query_heads * geometry.head_dim, config.hidden_size, bias=False, prefix=f"{prefix}.o_proj"
        )
        self.rotary_emb = rotary

    def forward(self, positions: Tensor, hidden: Tensor, loop: int) -> Tensor:
        """Attention of cell (loop, layer): [T, E] to [T, E]."""
        qkv, _ = self.qkv_proj(hidden)
        kv_size = self.kv_heads * self.head_dim
        q, k, v = qkv.split([self.query_heads * self.head_dim, kv_size, kv_size], dim=-1)
        q, k = self.rotary_emb(positions, q, k)
        if torch.compiler.is_compiling():  # k is a new tensor then, and tokens of v must lie as far apart as those of k
            v = v.contiguous()
        out = torch.empty_like(q)
        torch.ops.vllm.loopkv_attend(
            q.view(-1, self.query_heads, self.head_dim),
            k.view(-1, self.kv_heads, self.head_dim),
            v.reshape(-1, self.kv_heads, self.head_dim),
            out.view(-1, self.query_heads, self.head_dim),
            self.cells[loop],
        )
        projected: Tensor = self.o_proj(out)[0]
        return projected


class OuroDecoderLayer(nn.Module):
    """``x += norm2(attention(norm(x)))``, then the same around the MLP."""

    def __init__(
        self, config: PretrainedConfig, geometry: Geometry, rotary: ExactRotary, layer: int, prefix: str
    ) -> None:
        super().__init__()
        self.self_attn = OuroAttention(config, geometry, rotary, layer, f"{prefix}.self_attn")
        self.mlp = OuroMLP(config, f"{prefix}.mlp")
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm_2 = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm_2 = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        positions: Tensor,
        hidden: Tensor,
        residual: Tensor | None,
        loop: int,
        before: RMSNorm,
        launch: SandwichNorm | None,
    ) -> tuple[Tensor, Tensor]:
        """[T, E] and the residual stream that its norm still has to be added to.

        Args:
            positions: [T].
            hidden: [T, E] of the layer before, still to be normed by ``before`` and added to ``residual``; without
                one, what enters the loop.
            residual: [T, E] or None.
            loop: of the cell.
            before: last norm of the layer before.
            launch: both norms around a residual in one launch, where there is such a thing.
        """
        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden, residual = sandwich(before, self.input_layernorm, hidden, residual, launch)
        hidden = self.self_attn(positions, hidden, loop)
        hidden, residual = sandwich(self.input_layernorm_2, self.post_attention_layernorm, hidden, residual, launch)
        return self.mlp(hidden), residual


def sandwich(
    inner: RMSNorm, outer: RMSNorm, x: Tensor, residual: Tensor, launch: SandwichNorm | None
) -> tuple[Tensor, Tensor]:
    """``residual + inner(x)`` and its outer norm, the norm first: [T, E] each."""
    if launch is None:
        hidden, residual = outer(inner(x), residual)
        return hidden, residual
    weights = inner.weight, outer.weight
    return launch(x, residual, *weights, inner.variance_epsilon, outer.variance_epsilon), residual


def sandwich_norm(vllm_config: VllmConfig, channels: int) -> SandwichNorm | None:
    """Both norms in one launch, on a GPU and in its usual dtypes; a compiled model joins norms itself."""
    dtype = vllm_config.model_config.dtype
    assert isinstance(dtype, torch.dtype)
    if (
        vllm_config.device_config.device_type != "cuda"
        or dtype not in (torch.bfloat16, torch.float16)
        or vllm_config.compilation_config.mode not in (None, CompilationMode.NONE)
        or envs.VLLM_BATCH_INVARIANT
    ):
        return None
    from loopkv.kernels.norms import SandwichNorm

    launch = SandwichNorm(channels)
    return launch if launch.works(dtype, torch.device(vllm_config.device_config.device_type)) else None


@support_torch_compile(
    dynamic_arg_dims={"input_ids": 0, "positions": -1, "intermediate_tensors": 0, "inputs_embeds": 0}
)
class OuroModel(nn.Module):
    """Embedding, the looped block and the norm that closes every loop."""

    def __init__(self, *, vllm_config: VllmConfig, geometry: Geometry, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.loops = geometry.loops
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, prefix=f"{prefix}.embed_tokens"
        )
        rotary = ExactRotary(
            geometry.head_dim,
            geometry.head_dim,
            config.max_position_embeddings,
            rotary_base(config),
            is_neox_style=True,
            dtype=torch.get_default_dtype(),
        )
        self.layers = nn.ModuleList(
            OuroDecoderLayer(config, geometry, rotary, layer, f"{prefix}.layers.{layer}")
            for layer in range(geometry.layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.launch = sandwich_norm(vllm_config, config.hidden_size)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """[T] ids to [T, E]."""
        embedded: Tensor = self.embed_tokens(input_ids)
        return embedded

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Final hidden states [T, E]."""
        if inputs_embeds is None:
            assert input_ids is not None
            inputs_embeds = self.embed_input_ids(input_ids)
        hidden = inputs_embeds
        for loop in range(self.loops):
            residual: Any = None
            before: Any = self.norm
            for layer in self.layers:
                hidden, residual = layer(positions, hidden, residual, loop, before, self.launch)
                before = layer.post_attention_layernorm_2
            hidden, _ = sandwich(before, self.norm, hidden, residual, self.launch)
        return hidden


class OuroForCausalLM(nn.Module, SupportsLoRA):
    """What vLLM loads for ``OuroForCausalLM``; with a plan this class, without one vLLM's own."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_stacked={
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".gate_proj": (".gate_up_proj", 0),
            ".up_proj": (".gate_up_proj", 1),
        }
    )
    packed_modules_mapping = {  # noqa: RUF012 - vLLM declares it as a plain class attribute
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }

    def __new__(cls, *, vllm_config: VllmConfig, prefix: str = "") -> Any:
        """An instance of this class where a plan is served, of vLLM's own Ouro otherwise."""
        if get_served(vllm_config) is not None:
            return super().__new__(cls)
        from vllm.model_executor.models import ouro

        stock: Any = ouro.OuroForCausalLM
        return stock(vllm_config=vllm_config, prefix=prefix)

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        served = get_served(vllm_config)
        assert served is not None
        self.config = vllm_config.model_config.hf_config
        device = torch.device(vllm_config.device_config.device_type)
        self.cache = CellCache(served, vllm_config, device)
        self.model = OuroModel(
            vllm_config=vllm_config,
            geometry=served.plan.fingerprint.geometry,
            prefix=maybe_prefix(prefix, "model"),
        )
        if self.config.tie_word_embeddings:
            self.lm_head = self.model.embed_tokens
        else:
            self.lm_head = ParallelLMHead(
                self.config.vocab_size, self.config.hidden_size, prefix=maybe_prefix(prefix, "lm_head")
            )
        self.logits_processor = LogitsProcessor(self.config.vocab_size)
        self.graphs = make_model_graphs(self.model, self.cache, vllm_config)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """[T] ids to [T, E]."""
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Final hidden states [T, E]."""
        hidden: Tensor | None = None
        if self.graphs is not None and input_ids is not None and inputs_embeds is None:
            hidden = self.graphs.forward(input_ids, positions)
        if hidden is None:
            hidden = self.model(input_ids, positions, intermediate_tensors, inputs_embeds)
        return hidden

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Logits [T, V]."""
        logits: Tensor | None = self.logits_processor(self.lm_head, hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load a checkpoint; returns the parameters that were set.

        Raises:
            ModelFormatError: tensors that this model would leave out (vLLM's loader passes over unknown biases).
        """
        config = parse_ouro_config(self.config.to_dict(), "model config")
        known, unknown = frozenset(ouro_tensors(config)), []

        def known_ones() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if name in known:
                    yield name, tensor
                elif not is_unused_tensor(name, config.tie_word_embeddings):
                    unknown.append(name)

        loaded: set[str] = AutoWeightsLoader(self).load_weights(known_ones(), mapper=self.hf_to_vllm_mapper)
        refuse_unknown(unknown, "weights")
        return loaded
