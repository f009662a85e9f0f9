#!/usr/bin/env python3
"""Compares replies of `bursar serve` with and without drafts of the model's draft head: tokens per second of a stream,
and accepted drafts by position. The last configuration uses an output projection in 4 bits.

    python3 tools/cpu/drafts.py BURSAR FOLDER [ROUNDS]

FOLDER is a checkpoint with a draft head, such as the unpacked hybrid demo. The chats are greedy and show the bundled
pictures. Replies must be equal, and the script fails if they are not."""

import base64
import json
import pathlib
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request

PORT = 18080
URL = f"http://127.0.0.1:{PORT}"
PICTURES = sorted((pathlib.Path(__file__).parents[2] / "model/demo/pictures").glob("*.png"))


def chat(picture, tokens):
    """Tokens after the first, the seconds that they took, and the text."""
    shown = "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()
    content = [{"type": "image_url", "image_url": {"url": shown}}, {"type": "text", "text": "Describe the picture."}]
    body = {
        "model": "m", "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": tokens,
        "stream": True, "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        f"{URL}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    times, count, text = [], 0, ""
    with urllib.request.urlopen(request) as stream:
        for line in stream:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[len("data: "):])
            count = (chunk.get("usage") or {}).get("completion_tokens", count)
            for choice in chunk["choices"]:
                if piece := choice["delta"].get("content"):
                    times.append(time.perf_counter())
                    text += piece
    return count - 1, times[-1] - times[0], text


def measure(binary, folder, flags, rounds):
    server = subprocess.Popen(
        [binary, "serve", folder, "--port", str(PORT), "--served-model-name", "m", *flags],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(300):
            try:
                chat(PICTURES[0], 8)
                break
            except (urllib.error.URLError, ConnectionError):
                if server.poll() is not None:
                    sys.exit(f"the server ended with {server.returncode}; start it by hand to see why")
                time.sleep(0.2)
        else:
            sys.exit("the server did not become ready within a minute")
        replies = [chat(picture, 40) for _ in range(rounds) for picture in PICTURES]
        metrics = urllib.request.urlopen(f"{URL}/metrics").read().decode()
    finally:
        server.terminate()
        server.wait()
    accepted = re.findall(r'bursar_draft_tokens_accepted_total\{.*position="(\d+)"\} (\d+)', metrics)
    accepted = [int(count) for _, count in sorted(accepted, key=lambda pair: int(pair[0])) if int(count)]
    rate = sum(count for count, _, _ in replies) / sum(seconds for _, seconds, _ in replies)
    return rate, accepted, [text for _, _, text in replies]


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    binary, folder, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 20
    expected = None
    for drafts, projection in [(0, "none"), (1, "none"), (3, "none"), (3, "int4")] * 2:
        config = json.dumps({"method": "mtp", "num_speculative_tokens": drafts, "quantization": projection})
        flags = ["--draft-fixed", "--speculative-config", config] if drafts else []
        rate, accepted, texts = measure(binary, folder, flags, rounds)
        expected = expected or texts
        if texts != expected:
            sys.exit(f"with {drafts} drafts, replies differ")
        of = f", projection in {projection}" if drafts else ""
        print(f"{drafts} drafts{of}: {rate:.0f} tokens per second, accepted by position: {accepted}", flush=True)


if __name__ == "__main__":
    main()
