"""vLLM's scheduler, with prefix-cache hits that end before the first scored row.

What comes out of the prefix cache is not computed, and so has no hidden state. Row 0 needs the one of position P − 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.v1.core.sched.scheduler import Scheduler

from services.teacher.vllm_rows import first_row

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request


class RowScheduler(Scheduler):
    """Positions 0 … P − 2 may come from the cache, all others are computed."""

    def _get_local_prefix_cache_hit(self, request: Request) -> tuple[KVCacheBlocks, int, int, bool]:
        first = first_row(request.sampling_params)
        manager = self.kv_cache_manager
        if first is None or not manager.prefix_cache_lookup_enabled(request):
            return super()._get_local_prefix_cache_hit(request)
        # A lookup of its own, not vLLM's cut short: sliding-window layers keep other blocks for a shorter hit.
        blocks, num_cached, num_uncached = manager.coordinator.find_longest_cache_hit(request.block_hashes, first - 1)
        boundary = num_cached + num_uncached if num_uncached else 0
        return manager.create_kv_cache_blocks(blocks), num_cached, boundary, False
