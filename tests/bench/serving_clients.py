"""The clients of the benchmark of answers over HTTP: plain sockets, in a process without torch.

python -m bench.serving_clients PORT true|false CLIENTS TOKENS        whether the answers are streams; how many ask at a time, for how many tokens
"""

import asyncio
import json
import re
import sys

PATIENCE_S = 600.0


def prompt_of(client: int) -> list[int]:
    """Eight token ids that every model has; those of the first thousand clients differ."""
    return [3 + (client // 10 ** (i % 3) + i) % 10 for i in range(8)]


def _request(client: int, streams: bool, tokens: int) -> bytes:
    fields = {"prompt": prompt_of(client), "max_tokens": tokens, "seed": client, "ignore_eos": True, "stream": streams}
    body = json.dumps({**fields, "return_token_ids": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def _ask_all(port: int, streams: bool, num_clients: int, tokens: int) -> None:
    """Each client has a connection of its own. When all are open, all requests are sent; then the tokens of the answers are counted."""
    opened = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", port) for _ in range(num_clients)))
    for client, (_, writer) in enumerate(opened):
        writer.write(_request(client, streams, tokens))
    for reader, writer in opened:
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200"), answer
        counted = sum(versions.count(b"0") for versions in re.findall(rb'"weight_version":\[([0,]*)\]', answer))
        assert counted == tokens, answer


if __name__ == "__main__":
    asyncio.run(_ask_all(int(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])))
