"""The clients of the benchmark of `headrace serve`: plain sockets, in a process without torch.

python -m bench.serving_clients PORT true|false        whether the answers are streams
"""

import asyncio
import json
import sys

CLIENTS, TOKENS = 64, 16
PATIENCE_S = 600.0


def prompt_of(client: int) -> list[int]:
    """Token ids that every model has."""
    return [3 + (client * 37 + i * 11) % 200 for i in range(8)]


async def _ask(port: int, client: int, streams: bool) -> None:
    """One client: a request over a socket of its own; counts the tokens of the answer."""
    fields = {"prompt": prompt_of(client), "max_tokens": TOKENS, "seed": client, "ignore_eos": True, "stream": streams}
    body = json.dumps({**fields, "return_token_ids": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200"), answer
    counted = answer.count(b'"weight_version":[0') if streams else answer.count(b",0") + 1
    assert counted >= TOKENS, answer


async def _ask_all(port: int, streams: bool) -> None:
    await asyncio.gather(*(_ask(port, client, streams) for client in range(CLIENTS)))


if __name__ == "__main__":
    asyncio.run(_ask_all(int(sys.argv[1]), json.loads(sys.argv[2])))
