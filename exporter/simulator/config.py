"""What the simulated server is: its model, its limits, its speed and its memory.

Times are seconds, sizes bytes, and every memory figure is per GPU.  The time of a step is

    step_base + step_per_decode x decoding requests + step_per_prefill_token x prefill tokens

times a uniform noise of +-step_noise_ratio.  So a step grows with its batch, and with decodes alone it
stops growing at `max_running_requests`: beyond that only the queue grows.
"""

from dataclasses import dataclass
from typing import Any

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One server.  Raises ValueError where vLLM would refuse to start."""

    model: str
    architecture: str
    tensor_parallel: int = 1
    experts: int = 0  # routed experts in all; 0 is a dense model
    expert_parallel: bool = False
    dtype: str = "bfloat16"
    version: str = "0.32.0"

    max_running_requests: int
    max_batched_tokens: int
    max_model_len: int
    max_queued_requests: int | None = None  # None: no limit, as vLLM's default
    block_size: int = 16  # tokens
    kv_blocks: int  # of which one can never be used, as in vLLM

    step_base_seconds: float
    step_per_decode_seconds: float
    step_per_prefill_token_seconds: float
    step_noise_ratio: float = 0.05
    execute_timeout_seconds: float = 300.0  # VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS: a hang ends here

    gpu_memory_bytes: int
    gpu_memory_utilization: float = 0.92
    weights_bytes: int
    kv_bytes_per_token: int
    runtime_bytes: int  # CUDA context, communicators, graphs
    activation_bytes: int  # at a full batch

    def __post_init__(self) -> None:
        if (self.kv_blocks - 1) * self.block_size < self.max_model_len:
            raise ValueError(f"{self.kv_blocks} KV blocks do not hold one request of {self.max_model_len} tokens")
        if self.idle_memory_bytes + self.activation_bytes > self.gpu_memory_bytes:
            raise ValueError("weights, KV cache and activations do not fit the GPU")

    @property
    def gpus(self) -> int:
        return self.tensor_parallel

    @property
    def split_experts(self) -> bool:
        """Each GPU holds some of the experts whole, instead of a slice of every one."""
        return self.expert_parallel and self.experts > 0 and self.gpus > 1

    @property
    def kv_tokens(self) -> int:
        return self.kv_blocks * self.block_size

    @property
    def kv_bytes(self) -> int:
        """The pool, taken whole at start."""
        return self.kv_tokens * self.kv_bytes_per_token

    @property
    def idle_memory_bytes(self) -> int:
        """What the device shows as used before the first request."""
        return self.weights_bytes + self.kv_bytes + self.runtime_bytes

    @classmethod
    def hy3_h20(cls, **changes: Any) -> "EngineConfig":
        """Hy3 in bfloat16 on eight H20 (96 GB, 4 TB/s, 148 TFLOPS): 64 requests at a time.

        295 B parameters, 21 B active; 80 layers; 192 experts, 8 per token; 8 KV heads of 128 (model card).
        Weights: 590 GB / 8.  KV cache: 2 x 80 x 8 x 128 x 2 bytes = 320 KiB a token, 40 KiB on each GPU;
        0.92 of the card less weights, graphs and activations leaves 15 GiB: 399 360 tokens.

        Step: one request reads the active weights, 5 GB a GPU (1.3 ms), but 80 layers of launches with two
        all-reduces each keep a step near 25 ms.  64 requests hit 93 % of all experts, 69 GB a GPU (17 ms),
        and the all-to-all grows with them: 60 ms.  Prefill: 42 GFLOP a token at 35 % of 8 x 148 TFLOPS is
        0.1 ms, so a full chunk of 2048 tokens holds the decodes up for 0.2 s.  Computed, not measured.
        """
        hy3: dict[str, Any] = {
            "model": "hy3",
            "architecture": "HYV3ForCausalLM",
            "tensor_parallel": 8,
            "experts": 192,
            "expert_parallel": True,
            "max_running_requests": 64,
            "max_batched_tokens": 2048,
            "max_model_len": 32_768,
            "kv_blocks": 24_960,
            "step_base_seconds": 0.0245,
            "step_per_decode_seconds": 0.00055,
            "step_per_prefill_token_seconds": 0.0001,
            "gpu_memory_bytes": 97_871 * 2**20,
            "weights_bytes": 73_750_000_000,
            "kv_bytes_per_token": 40_960,
            "runtime_bytes": int(2.5 * GIB),
            "activation_bytes": int(1.5 * GIB),
        }
        return cls(**(hy3 | changes))

    @classmethod
    def tiny(cls, **changes: Any) -> "EngineConfig":
        """A toy on one small GPU: 8 requests at a time, steps of a few milliseconds, a KV cache soon full.

        The speed of a random-weight model that a real vLLM serves on two CPU cores: 5 ms a step, 8 at once.
        """
        tiny: dict[str, Any] = {
            "model": "tiny",
            "architecture": "LlamaForCausalLM",
            "max_running_requests": 8,
            "max_batched_tokens": 512,
            "max_model_len": 512,
            "kv_blocks": 65,
            "step_base_seconds": 0.004,
            "step_per_decode_seconds": 0.0002,
            "step_per_prefill_token_seconds": 0.00005,
            "gpu_memory_bytes": 8 * GIB,
            "weights_bytes": 2 * GIB,
            "kv_bytes_per_token": 4 * 2**20,
            "runtime_bytes": GIB // 2,
            "activation_bytes": GIB // 4,
        }
        return cls(**(tiny | changes))
