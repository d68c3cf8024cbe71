"""Tells a pool that a machine will be taken away: speaks NATS, and knows nothing of Resile but two documents.

    python spot_reclaim.py publisher.json host-2 --seconds 90

docs/events.md describes the envelope, docs/schemas/HostDrain.json the body. Needs only `pip install nats-py`.
"""

import argparse
import asyncio
import json
import sys
import uuid

import nats


async def announce(account: dict[str, str], host: str, seconds: float) -> dict[str, str]:
    bus = await nats.connect(
        account["url"],
        user=account["user"],
        password=account["password"],
        inbox_prefix=f"_INBOX_{account['user']}".encode(),
    )
    headers = {
        "ce-specversion": "1.0",
        "ce-id": str(uuid.uuid4()),
        "ce-source": "spot-watcher",
        "ce-type": "resile.HostDrain",
        "content-type": "application/json",
    }
    body = json.dumps({"host_id": host, "deadline_seconds": seconds}).encode()
    try:
        answer = await bus.request("resile.command.host.drain", body, timeout=30, headers=headers)
        said: dict[str, str] = json.loads(answer.data)
        return said
    finally:
        await bus.close()


parser = argparse.ArgumentParser()
parser.add_argument("account", help="a copy of bus/credentials/publisher.json in the home of the pool")
parser.add_argument("host")
parser.add_argument("--seconds", type=float, default=90.0, help="until the machine is gone")
options = parser.parse_args()
with open(options.account) as file:
    answer = asyncio.run(announce(json.load(file), options.host, options.seconds))
if answer["kind"] == "refused":
    sys.exit(answer["reason"])
print(f"{options.host} drains within {options.seconds:g} s")
