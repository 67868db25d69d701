"""Seconds of each decode step of vLLM's own scheduler, as JSON; overhead.py runs this in vLLM's environment.

python benchmarks/overhead_vllm.py MODEL_FOLDER NUM_SEQUENCES ...
"""

from __future__ import annotations

import json
import random
import sys
import time

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_SIZE = 16
NUM_STEPS = 64


def make_scheduler(folder: str, num_sequences: int) -> Scheduler:
    cache = CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=True)
    cache.num_gpu_blocks = num_sequences * 32
    config = VllmConfig(
        model_config=ModelConfig(model=folder, dtype="bfloat16", max_model_len=4096),
        scheduler_config=SchedulerConfig(
            max_model_len=4096,
            is_encoder_decoder=False,
            max_num_seqs=num_sequences,
            max_num_batched_tokens=max(8192, num_sequences * 200),
            async_scheduling=False,
        ),
        cache_config=cache,
    )
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=cache.num_gpu_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK_SIZE,
        log_stats=False,
    )


def run(folder: str, num_sequences: int) -> list[float]:
    scheduler = make_scheduler(folder, num_sequences)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    tokens = random.Random(0)
    params = SamplingParams(max_tokens=NUM_STEPS, ignore_eos=True, temperature=0)
    for index in range(num_sequences):
        prompt = [tokens.randrange(1000) for _ in range(200)]
        request = Request(
            request_id=str(index),
            prompt_token_ids=prompt,
            sampling_params=params,
            pooling_params=None,
            block_hasher=hasher,
        )
        scheduler.add_request(request)
    seconds: list[float] = []
    for _ in range(NUM_STEPS - 1):
        start = time.perf_counter()
        output = scheduler.schedule()
        scheduled = time.perf_counter()
        ids = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=[[5] for _ in ids],
        )
        sampled = time.perf_counter()
        scheduler.update_from_output(output, result)
        seconds.append(scheduled - start + time.perf_counter() - sampled)
        assert len(ids) == num_sequences
    return seconds[1:]


def main() -> None:
    init_none_hash(sha256)
    folder, *nums = sys.argv[1:]
    print(json.dumps({num: run(folder, int(num)) for num in nums}))


if __name__ == "__main__":
    main()
