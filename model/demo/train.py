"""Trains the embedded demo model on one GPU, over several calls that each continue from the state
of the previous call.

    python3 train.py --steps 20000 --state .carry/demo --out $OUT      # trains, leaves state files in $OUT
    python3 train.py --check                                           # this model = transformers', on the CPU
    python3 train.py --export model/demo/checkpoint --state .carry/demo

The learning rate warms up, stays constant, and decreases linearly over the last `--decay` steps
before `--steps`.
"""

import argparse
import json
import queue
import threading
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import feed
import tokenizer as tokenizers_here
from network import Network

IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)  # CLIP's values, as in Qwen2VLImageProcessor
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)
HELD_OUT_SEED = 900_001


def to_device(arrays: dict[str, np.ndarray], device) -> dict[str, torch.Tensor]:
    """The arrays of a slot on the device, where indices become 64-bit and pictures stay bytes."""
    batch = {name: torch.from_numpy(array).to(device, non_blocking=True) for name, array in arrays.items()}
    for name in ("answer_at", "answer", "turn", "thing", "colour", "unit"):
        batch[name] = batch[name].long()
    return batch


def normalised(patch: torch.Tensor) -> torch.Tensor:
    mean = torch.tensor(IMAGE_MEAN, device=patch.device).repeat_interleave(196)
    std = torch.tensor(IMAGE_STD, device=patch.device).repeat_interleave(196)
    return (patch.float() / 255 - mean) / std


def losses(network: Network, batch: dict[str, torch.Tensor]):
    """Cross entropy of the answers, and of the shape or digit and the color
    that cover each unit."""
    batch = {**batch, "patch": normalised(batch["patch"])}
    with torch.autocast(batch["patch"].device.type, torch.bfloat16):
        answers, taught = network(batch)
    answer = F.cross_entropy(answers.float(), batch["answer"], ignore_index=-100)
    taught = taught.float()
    # Most units lie on the background. They get a tenth of the weight, because the model would
    # otherwise need long to notice the digits.
    weight = torch.where(batch["thing"] > 0, 1.0, 0.1)
    thing = F.cross_entropy(taught[:, :15], batch["thing"], reduction="none")
    colour = F.cross_entropy(taught[:, 15:], batch["colour"], reduction="none")
    return answer, ((thing + colour) * weight).sum() / weight.sum()


def exact_answers(network: Network, slots) -> dict[str, tuple[int, int]]:
    """The numbers of right answers and of questions, per kind. Greedy decoding gives an answer
    exactly if each of its tokens is the most likely token after the previous right tokens, so one
    pass without generation is enough."""
    tally: dict[str, tuple[int, int]] = {}
    for slot in slots:
        batch = to_device(slot, "cuda")
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            answers, _ = network({**batch, "patch": normalised(batch["patch"])})
        wrong = (answers.argmax(-1) != batch["answer"]) & (batch["answer"] >= 0)
        misses = torch.zeros(feed.TURNS, device="cuda").index_add_(0, batch["turn"], wrong.float()).cpu()
        for kind, miss in zip(slot["turn_kind"].tolist(), misses.tolist()):
            if kind >= 0:
                right, asked = tally.get(feed.KIND_NAMES[kind], (0, 0))
                tally[feed.KIND_NAMES[kind]] = (right + (miss == 0), asked + 1)
    return tally


def report(tally: dict[str, tuple[int, int]]) -> str:
    right, asked = (sum(column) for column in zip(*tally.values()))
    kinds = " ".join(f"{kind} {r / n:.3f}" for kind, (r, n) in sorted(tally.items()))
    return f"exact {right / asked:.4f} of {asked} | {kinds}"


def held_out_slots(tokenizer, count: int):
    """Pictures from the evaluation stream with a separate seed."""
    slots, first = [], 0
    while first < count:
        slot = feed.slot_views(bytearray(feed.slot_bytes()))
        packer = feed.Packer(slot, tokenizer)
        first += feed.fill_held_out(packer, HELD_OUT_SEED, first)
        packer.close()
        slots.append(slot)
    return slots


def held_out_conversations(tokenizer):
    """Whole conversations about unseen pictures: later turns, two pictures, small talk."""
    slots = []
    for batch in range(2):
        slots.append(feed.slot_views(bytearray(feed.slot_bytes())))
        packer = feed.Packer(slots[-1], tokenizer)
        feed.fill(packer, HELD_OUT_SEED + 1, batch, (), "evaluate")
        packer.close()
    return slots


# ---- state -----------------------------------------------------------------------------------------------------------


class State:
    """State that training continues from: weights, Adam's moments, the running average of the
    weights, and the step."""

    def __init__(self, network: Network):
        self.network = network
        self.average = {name: value.detach().clone() for name, value in network.named_parameters()}
        decay = [p for p in network.parameters() if p.dim() >= 2]
        plain = [p for p in network.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), eps=1e-9, fused=True)
        self.step = self.pictures = 0
        self.seconds = 0.0

    def load(self, folder: Path) -> None:
        if not (folder / "progress.json").exists():
            return
        progress = json.loads((folder / "progress.json").read_text())
        self.step, self.pictures, self.seconds = progress["step"], progress["pictures"], progress["seconds"]
        weights, average = load_file(folder / "weights.safetensors"), load_file(folder / "average.safetensors")
        first, second = load_file(folder / "first.safetensors"), load_file(folder / "second.safetensors")
        with torch.no_grad():
            for name, parameter in self.network.named_parameters():
                parameter.copy_(weights[name])
                self.average[name].copy_(average[name])
                self.adam.state[parameter] = {
                    "step": torch.tensor(float(self.step), device=parameter.device),
                    "exp_avg": first[name].to(parameter),
                    "exp_avg_sq": second[name].to(parameter),
                }

    def save(self, folder: Path) -> None:
        """Saves four files, with the moments in bf16, which keeps the total below the size limit
        for files from the device machine."""
        folder.mkdir(parents=True, exist_ok=True)
        named = dict(self.network.named_parameters())
        moments = {name: self.adam.state[parameter] for name, parameter in named.items()}
        half = torch.bfloat16
        files = {
            "weights": {name: value.detach() for name, value in named.items()},
            "average": self.average,
            "first": {name: moment["exp_avg"].to(half) for name, moment in moments.items()},
            "second": {name: moment["exp_avg_sq"].to(half) for name, moment in moments.items()},
        }
        for name, tensors in files.items():
            save_file({key: value.cpu().contiguous() for key, value in tensors.items()}, folder / f"{name}.safetensors")
        progress = {"step": self.step, "pictures": self.pictures, "seconds": round(self.seconds, 1)}
        (folder / "progress.json").write_text(json.dumps(progress))

    def track_average(self, decay: float) -> None:
        average = [self.average[name] for name, _ in self.network.named_parameters()]
        torch._foreach_lerp_(average, [p.detach() for p in self.network.parameters()], 1 - decay)


def learning_rate(step: int, arguments) -> float:
    warm = min(1.0, (step + 1) / 500)
    cool = min(1.0, max(0.0, (arguments.steps - step) / max(1, arguments.decay)))
    return arguments.rate * warm * cool


# ---- the loop --------------------------------------------------------------------------------------------------------


def pin(memory) -> bool:
    """Lets the GPU read the workers' shared memory directly. Without this, copies still work but
    are slower."""
    address = np.frombuffer(memory, np.uint8).ctypes.data
    return torch.cuda.cudart().cudaHostRegister(address, len(memory), 0) == torch.cuda.cudart().cudaError.success


def copied_ahead(source: feed.Feed, ahead: int = 3):
    """Batches on the GPU, which a thread copies while the previous batch computes."""
    ready: queue.Queue = queue.Queue(ahead)
    stream = torch.cuda.Stream()

    def copy() -> None:
        while True:
            index, slot = source.take()
            drawn = slot["drawn"].copy()
            with torch.cuda.stream(stream):
                batch = to_device(slot, "cuda")
                done = stream.record_event()
            done.synchronize()
            source.give_back(index)
            ready.put((batch, drawn))

    threading.Thread(target=copy, daemon=True).start()
    while True:
        batch, drawn = ready.get()
        for tensor in batch.values():
            tensor.record_stream(torch.cuda.current_stream())
        yield batch, drawn


def train(arguments) -> None:
    started = time.time()
    tokenizer = tokenizers_here.build()
    fonts = tuple(sorted(str(path) for path in Path(arguments.fonts).glob("*.ttf"))) if arguments.fonts else ()
    progress = arguments.state / "progress.json"
    first_batch = json.loads(progress.read_text())["step"] if progress.exists() else 0
    source = feed.Feed(tokenizer, arguments.seed, first_batch, arguments.workers, fonts)
    held_out, talks = held_out_slots(tokenizer, arguments.held_out), held_out_conversations(tokenizer)
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    network = Network().cuda()
    state = State(network)
    state.load(arguments.state)
    print(f"pinned {pin(source.memory)}, {len(fonts)} fonts, step {state.step}, "
          f"{sum(v.numel() for v in network.released().values())} weights, ready after {time.time() - started:.1f} s", flush=True)  # fmt: skip
    judge = Network().cuda()
    compiled = torch.compile(losses) if not arguments.eager else losses
    batches = copied_ahead(source)
    since, waited, sums = time.time(), 0.0, torch.zeros(2, device="cuda")
    loop_started = time.time()
    while state.step < arguments.steps:
        before = time.time()
        batch, drawn = next(batches)
        waited += time.time() - before
        for group in state.adam.param_groups:
            group["lr"] = learning_rate(state.step, arguments)
        answer, taught = compiled(network, batch)
        (answer + arguments.teach * taught).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        state.adam.step()
        state.adam.zero_grad(set_to_none=True)
        state.step += 1
        state.pictures += int(drawn[0])
        state.track_average(min(0.999, state.step / (state.step + 100)))
        sums += torch.stack((answer.detach(), taught.detach()))
        out_of_time = time.time() - started > 60 * arguments.minutes
        if state.step in (1, 20) or state.step % 200 == 0 or out_of_time:
            mean = (sums / max(1, state.step % 200 or 200)).tolist()
            spent, since = time.time() - since, time.time()
            print(f"step {state.step} pictures {state.pictures} loss {mean[0]:.4f} teacher {mean[1]:.4f} "
                  f"lr {state.adam.param_groups[0]['lr']:.5f} {spent:.1f} s, waited {waited:.1f} s, at {since - started:.0f} s "
                  f"drawn {drawn.tolist()}", flush=True)  # fmt: skip
            sums.zero_()
            waited = 0.0
        if state.step % arguments.judge_every == 0 or out_of_time or state.step == arguments.steps:
            judge.load_state_dict(state.average, strict=True)
            print(f"step {state.step} {report(exact_answers(judge, held_out))}", flush=True)
            print(f"  conversations: {report(exact_answers(judge, talks))}", flush=True)
        if out_of_time:
            break
    state.seconds += time.time() - loop_started
    state.save(arguments.out)
    print(f"saved step {state.step} after {time.time() - started:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40_000)
    parser.add_argument("--decay", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--teach", type=float, default=0.3, help="weight of the per-unit loss")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop and save after this long")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--held-out", type=int, default=1000)
    parser.add_argument("--judge-every", type=int, default=1000)
    parser.add_argument("--fonts", type=str, default=None, help="folder of .ttf files to set some numbers in")
    parser.add_argument("--state", type=Path, default=Path(".carry/demo"))
    parser.add_argument("--out", type=Path, default=Path(".carry/demo"))
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--export", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.check or arguments.export:
        import export

        export.check(export.written(arguments.state, arguments.export)) if arguments.export else export.check_random()
    else:
        train(arguments)


if __name__ == "__main__":
    main()
