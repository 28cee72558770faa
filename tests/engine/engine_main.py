"""A vLLM engine in a process of its own, which a test drives line by line.

Reads one JSON object a line: {"do": "generate" | "first" | "reset" | "held" | "metrics", ...};
answers one a line on the descriptor that was its standard output. What the engine prints goes to
standard error.
"""

import json
import os
import sys
import time
from typing import Any

ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def start(options: dict[str, Any]) -> Any:
    """Start the engine, with its publisher."""
    from vllm import LLM

    return LLM(
        model=options["model"],
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=options.get("max_model_len", 256),
        max_num_seqs=4,
        block_size=32,
        num_gpu_blocks_override=options["num_blocks"],
        enable_prefix_caching=True,
        distributed_executor_backend=options.get("executor", "uni"),
        enable_lora=bool(options.get("lora")),
        kv_events_config={
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            **options["kv_events"],
        },
        kv_transfer_config=options.get("kv_transfer"),
        disable_log_stats=False,
    )


def generate(llm: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Run prompts at once; say what was cached of each, what came out, and how long it took."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    salt, lora, transfer = asked.get("salt"), asked.get("lora"), asked.get("transfer")
    batch = [
        {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt else {})
        for prompt in asked["prompts"]
    ]
    params = SamplingParams(
        max_tokens=asked["num"],
        temperature=0,
        ignore_eos=True,
        extra_args={"kv_transfer_params": transfer} if transfer else None,
    )
    request = LoRARequest("adapter", 1, lora) if lora else None
    began = time.perf_counter()
    done = llm.generate(batch, params, use_tqdm=False, lora_request=request)
    return {
        "cached": [one.num_cached_tokens for one in done],
        "output": [list(one.outputs[0].token_ids) for one in done],
        "seconds": time.perf_counter() - began,
    }


def first(llm: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Run a prompt up to its first token, stepping as a server's engine core does.

    `LLM.generate` steps without a pause while a request only waits for its blocks, and so keeps the
    interpreter's lock from the thread that brings them; the core sleeps for a millisecond then.
    """
    from vllm import SamplingParams

    transfer = asked.get("transfer")
    params = SamplingParams(
        max_tokens=1,
        temperature=0,
        extra_args={"kv_transfer_params": transfer} if transfer else None,
    )
    engine = llm.llm_engine
    began = time.perf_counter()
    engine.add_request(str(time.time_ns()), {"prompt_token_ids": asked["prompt"]}, params)
    while not (done := engine.step()):
        time.sleep(0.001)
    seconds = time.perf_counter() - began
    [one] = done
    return {
        "cached": one.num_cached_tokens,
        "output": list(one.outputs[0].token_ids),
        "seconds": seconds,
    }


def held(llm: Any) -> dict[str, Any]:
    """Return the hashes in the engine's own block pool, by group."""
    from vllm.v1.core.kv_cache_utils import (
        get_block_hash,
        get_group_id,
        maybe_convert_block_hash,
    )

    core = llm.llm_engine.engine_core.engine_core
    pool = core.scheduler.kv_cache_manager.block_pool
    groups: dict[int, list[int | str]] = {}
    for key in pool.cached_block_hash_to_block._cache:
        told = maybe_convert_block_hash(get_block_hash(key))
        hashes = groups.setdefault(get_group_id(key), [])
        hashes.append(told.hex() if isinstance(told, bytes) else told)
    return {"groups": groups}


def metrics(llm: Any, prefix: str) -> list[list[Any]]:
    """Return the engine's counters of this prefix: name, labels, value."""
    return [
        [metric.name, dict(metric.labels), metric.value]
        for metric in llm.get_metrics()
        if metric.name.startswith(prefix)
    ]


def main() -> None:
    """Serve until the input ends."""
    options = json.loads(sys.argv[1])
    # with none named, vLLM loads none: the unmodified engine that a bridge listens to
    os.environ["VLLM_PLUGINS"] = options.get("plugins", "")
    llm = start(options)
    print(json.dumps({"ready": True}), file=ANSWERS)
    for line in sys.stdin:
        asked = json.loads(line)
        match asked["do"]:
            case "generate":
                answer = generate(llm, asked)
            case "first":
                answer = first(llm, asked)
            case "reset":
                is_reset = llm.reset_prefix_cache(reset_connector=asked.get("connector", False))
                answer = {"is_reset": is_reset}
            case "held":
                answer = held(llm)
            case "metrics":
                answer = {"metrics": metrics(llm, asked["prefix"])}
            case other:
                answer = {"unknown": other}
        print(json.dumps(answer), file=ANSWERS)


if __name__ == "__main__":
    main()
