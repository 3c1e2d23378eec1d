"""The adapters (LoRA) in use as vLLM's metric."""

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.registry import Collector

from headrace.ipc.adapter_registry import AdapterRegistry
from headrace.metrics.family_builder import Families


class LoraCollector(Collector):
    """vLLM's `lora_requests_info`: labels name adapters, the value is when they were noted."""

    def __init__(self, registry: AdapterRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        """Yield the family, once an adapter has been in use."""
        usage = self._registry.usage
        if usage is not None:
            labels = {
                "max_lora": str(usage.max_loras),
                "waiting_lora_adapters": ",".join(usage.waiting),
                "running_lora_adapters": ",".join(usage.running),
            }
            help = "Adapters in use"
            yield Families("vllm:", {}).gauge("lora_requests_info", help, [(labels, usage.at)])
