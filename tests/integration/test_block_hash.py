"""`fleet.block_hash` from one flag to engine, sidecar, index and router as processes (ADR-0025)."""

from typing import Any

import aiohttp

from kvatlas.schemas.hashing import BlockHasher, HashAlgorithm, Namespace
from testkit.commands import running
from testkit.waiting import until_told

MODEL = "reference"
TOKENS = list(range(1, 41))
SHA = Namespace(MODEL, 16, HashAlgorithm.sha256_128)


async def asked(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Any:
    async with session.post(url, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def test_a_fleet_that_names_blocks_by_sha256_reuses_and_tells_who_does_not() -> None:
    sha = ("--set", "fleet.block_hash=sha256")
    serving = running("serve", "--json", "--port", "0", "--workers", "1", *sha)
    async with serving as urls, aiohttp.ClientSession() as session:
        router, nats = urls["router"], urls["nats"]

        async def workers() -> dict[str, Any]:
            async with session.get(f"{router}/v1/workers") as response:
                return {each["worker"]: each for each in (await response.json())["workers"]}

        (served,) = (await workers()).values()
        assert served["hash_algorithm"] == "sha256_128"
        prompt = {"model": MODEL, "prompt": TOKENS, "max_tokens": 1}
        await asked(session, f"{served['base_url']}/v1/completions", prompt)
        by_tokens = {"model": MODEL, "token_ids": TOKENS}
        chain = BlockHasher(SHA).chain(TOKENS)
        hashes = [chain[at : at + 16].hex() for at in range(0, len(chain), 16)]
        by_hashes = {"model": MODEL, "block_hashes": hashes, "algorithm": "sha256_128"}

        async def matched(body: dict[str, Any], worker: str) -> int:
            answer = await asked(session, f"{router}/v1/score", body)
            found = {each["worker"]: each["match_tokens"] for each in answer["candidates"]}
            return int(found.get(worker, -1))

        async def has_matched(worker: str, tokens: int) -> bool:
            return await matched(by_tokens, worker) == tokens

        await until_told(lambda: has_matched(served["worker"], 32))
        assert await matched(by_hashes, served["worker"]) == 32
        assert served["names_differ"] == []

        async with running("worker", "--name", "other", "--nats", nats) as _:
            await until_told(lambda: has_matched("other", 0))
            both = await workers()
            assert both["other"]["hash_algorithm"] == "xxh3_128"
            assert both["other"]["names_differ"] == [f"{served['worker']}/0: 16 tokens, sha256_128"]
            assert both[served["worker"]]["names_differ"] == ["other/0: 16 tokens, xxh3_128"]
