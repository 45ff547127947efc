"""What each GPU's memory holds: weights, the KV pool taken whole, activations, and a leak on demand."""

from .config import EngineConfig


class GpuMemory:
    """Bytes used on each GPU (all alike) by the engine's processes."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._largest_step = 0  # tokens
        self._leaked = 0.0  # bytes, until _since
        self._rate = 0.0
        self._since = 0.0

    def hold_step(self, tokens: int) -> None:
        """PyTorch's allocator keeps what the largest step so far needed."""
        self._largest_step = max(self._largest_step, tokens)

    def leak(self, bytes_per_second: float, now: float) -> None:
        """Change the rate; what was lost stays lost."""
        self._leaked += self._rate * (now - self._since)
        self._rate, self._since = bytes_per_second, now

    def used(self, now: float) -> int:
        """At most what the card has."""
        config = self._config
        activations = config.activation_bytes * self._largest_step / config.max_batched_tokens
        leaked = self._leaked + self._rate * (now - self._since)
        return min(int(config.idle_memory_bytes + activations + leaked), config.gpu_memory_bytes)

    def full(self, now: float) -> bool:
        return self.used(now) >= self._config.gpu_memory_bytes
