"""Which flag of which engine to change; the only place that names them."""

from kvatlas.doctor.facts import EngineKind

EVENTS = {
    EngineKind.vllm: """--kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq", """
    """"endpoint": "nats://HOST:4222"}' with kvatlas installed beside vLLM, """
    "or a tcp:// endpoint and `kvatlas bridge`",
    EngineKind.sglang: """--kv-events-config '{"publisher": "nats", "endpoint": """
    """"nats://HOST:4222"}' with kvatlas installed beside SGLang, """
    "or publisher zmq and `kvatlas bridge`",
    EngineKind.other: "the engine's KV events and `kvatlas bridge`",
}
PREFIX_CACHING = {
    EngineKind.vllm: "--enable-prefix-caching",
    EngineKind.sglang: "no --disable-radix-cache",
    EngineKind.other: "the engine's prefix caching",
}
BLOCK_TOKENS = {
    EngineKind.vllm: "--block-size of vLLM, or --block-tokens of the bridge or sidecar",
    EngineKind.sglang: "--page-size of SGLang, or --block-tokens of the bridge or sidecar",
    EngineKind.other: "--block-tokens of the bridge or sidecar",
}
CACHED_TOKENS = {
    EngineKind.vllm: "--enable-prompt-tokens-details",
    EngineKind.sglang: "--enable-cache-report",
    EngineKind.other: "the engine's report of usage.prompt_tokens_details.cached_tokens",
}
MODEL = {
    EngineKind.vllm: "--served-model-name of vLLM, or --model of the bridge",
    EngineKind.sglang: "--served-model-name of SGLang, or --model of the bridge",
    EngineKind.other: "--model of the bridge",
}
ADAPTERS = {
    EngineKind.vllm: "--lora-modules of vLLM, or adapters=NAME,... in the plugin's endpoint",
    EngineKind.sglang: "--lora-paths of SGLang, or adapters=NAME,... in the plugin's endpoint",
    EngineKind.other: "the adapters that the worker is said to have",
}
_FLEET_KEY = "fleet.key, which has to be the same at the router and beside every engine"
SALT = {
    EngineKind.vllm: _FLEET_KEY,
    EngineKind.sglang: f"SGLang 0.5.20 or newer, whose events name salts; or {_FLEET_KEY}",
    EngineKind.other: _FLEET_KEY,
}
NAMES = (
    "fleet.block_hash, the same at every member; --block-tokens and --lookahead-tokens of bridges "
    "and sidecars, as their engines have them"
)
UNREUSABLE = {
    EngineKind.vllm: "--unreusable-blocks {0} of the bridge or sidecar (drafting of the EAGLE "
    "family without lookahead hashes), or unreusable_blocks={0} in the plugin's endpoint",
    EngineKind.sglang: "--unreusable-blocks {0} of the bridge or sidecar, or unreusable_blocks={0} "
    "in the plugin's endpoint",
    EngineKind.other: "--unreusable-blocks {0} of the bridge or sidecar",
}
TOKENIZER = "--tokenizer: the files that the engine has loaded (its --tokenizer, --chat-template)"
WORKER = "--worker of the doctor, or the worker's name beside the engine"
BASE_URL = "--base-url of the bridge or sidecar, or --engine-url of the doctor"
NONE_HASH = "PYTHONHASHSEED, the same at every engine whose own hashes are to agree"
