"""Times to the first token with bursar and with transformers in f32, alternating on the same threads: a prompt of 743 new
tokens, and a picture of 448 x 448 with some text. Prints each wall time and the user and system CPU seconds, then the
minimum of each. On a machine with other load, all times are upper bounds, and only their order is meaningful.

    python3 compare.py BINARY FOLDER [THREADS] [ROUNDS]     # FOLDER of checkpoint.py
"""

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time

os.environ |= dict(OMP_WAIT_POLICY="passive", KMP_BLOCKTIME="0", TQDM_DISABLE="1")

import torch
from PIL import Image
from transformers import Qwen2_5_VLForConditionalGeneration

BINARY, FOLDER = sys.argv[1:3]
THREADS, ROUNDS = (int(number) for number in (sys.argv[3:] + ["2", "3"][len(sys.argv) - 3:])[:2])
WORDS = "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they".split()
LEAST = {}


def note(name, wall, cpu, tokens):
    print(f"{name}: {wall:.2f} s, {cpu:.2f} CPU s, {tokens} tokens", flush=True)
    least = LEAST.get(name, (wall, cpu))
    LEAST[name] = (min(least[0], wall), min(least[1], cpu))


def cpu_seconds(pid):
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Session:
    def __init__(self):
        knobs = ["--threads", str(THREADS), "--step-tokens", "1024", "--launch-patches", "1024"]
        self.process = subprocess.Popen(
            [BINARY, "chat", "--json", "--model", FOLDER, "--device", "host", "--capacity", "7GiB", "--profile-cache",
             "none", "--max-tokens", "1", "--temperature", "0", *knobs],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, name, lines):
        wall, cpu = time.perf_counter(), cpu_seconds(self.process.pid)
        self.process.stdin.write(lines + "\n")
        self.process.stdin.flush()
        for event in map(json.loads, self.process.stdout):
            if "error" in event:
                sys.exit(f"{name}: {event}")
            if event["type"] == "done":
                usage = event["usage"]
                new = usage["prompt_tokens"] - usage["cached_tokens"]
                return note(name, time.perf_counter() - wall, cpu_seconds(self.process.pid) - cpu, new)


def peer(model, name, ids, **inputs):
    seconds = lambda: sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    wall, cpu = time.perf_counter(), seconds()
    with torch.inference_mode():
        model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, **inputs)
    note(name, time.perf_counter() - wall, seconds() - cpu, ids.shape[1])


def text(words):
    return " ".join(random.choice(WORDS) for _ in range(words))


def main():
    torch.set_num_threads(THREADS)
    session = Session()
    session.ask("bursar, start and 20 tokens", "Hello")
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(FOLDER, dtype=torch.float32).eval()
    for _ in range(ROUNDS):
        session.ask("bursar, prompt", text(728))
        peer(model, "transformers, prompt", torch.randint(0, 150_000, (1, 743)))
        with tempfile.NamedTemporaryFile(suffix=".png") as file:
            Image.frombytes("RGB", (448, 448), random.randbytes(448 * 448 * 3)).save(file.name)
            session.ask("bursar, picture", f"/image {file.name}\n{text(7)}")
        ids = torch.randint(0, 150_000, (1, 283))
        ids[0, 5], ids[0, 6:262], ids[0, 262] = 151_652, 151_655, 151_653
        peer(model, "transformers, picture", ids, pixel_values=torch.randn(1024, 1176),
             image_grid_thw=torch.tensor([[1, 32, 32]]), mm_token_type_ids=(ids == 151_655).int())
    session.process.stdin.close()
    session.process.wait()
    for name, (wall, cpu) in sorted(LEAST.items()):
        print(f"least of {name}: {wall:.2f} s, {cpu:.2f} CPU s")


main()
