"""Asks a checkpoint, through transformers' own code, about pictures that `draw.py` wrote, and
counts exact answers.

    python3 draw.py --seed 7 --count 1000 --out /tmp/pictures
    python3 evaluate.py --model checkpoint --pictures /tmp/pictures

The repository stores the weights compressed, so run `xz -dk checkpoint/model.safetensors.xz` before
the first run. `bursar` is evaluated with the same questions, so the two results can be compared
picture by picture.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor


def answer_of(model, processor, image: Image.Image, question: str) -> str:
    content = [{"type": "image"}, {"type": "text", "text": question}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    inputs = processor(text=[prompt], images=[image], return_tensors="pt").to(model.device)
    with torch.no_grad():
        tokens = model.generate(**inputs, max_new_tokens=48)
    return processor.tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path(__file__).parent / "checkpoint")
    parser.add_argument("--pictures", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=None)
    parser.add_argument("--type", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--answers", type=Path, default=None, help="write every answer here, one JSON line each")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kind = getattr(torch, arguments.type)
    model = AutoModelForImageTextToText.from_pretrained(arguments.model, dtype=kind).to(device).eval()
    processor = AutoProcessor.from_pretrained(arguments.model)
    lines = [json.loads(line) for line in open(arguments.pictures / "questions.jsonl")][: arguments.limit]
    tally: dict[str, list[bool]] = defaultdict(list)
    answers = open(arguments.answers, "w") if arguments.answers else None
    for line in lines:
        image = Image.open(arguments.pictures / line["image"]).convert("RGB")
        answer = answer_of(model, processor, image, line["question"])
        tally[line["kind"]].append(answer == line["answer"])
        if answers:
            answers.write(json.dumps({**line, "given": answer}) + "\n")
        if answer != line["answer"]:
            print(f"{line['image']} {line['question']} -> {answer} | right: {line['answer']}", flush=True)
    for name, right in sorted(tally.items()):
        print(f"{name:14} {sum(right):5} of {len(right):5}")
    right = sum(map(sum, tally.values()))
    print(f"exact {right} of {len(lines)} = {right / len(lines):.4f} ({arguments.type}, {device})")


if __name__ == "__main__":
    main()
