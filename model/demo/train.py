"""Trains the embedded demo model on one GPU, over several calls that each continue from the state
of the previous call.

    python3 train.py --steps 20000 --state .carry/demo --out $OUT      # trains, leaves state files in $OUT
    python3 train.py --check                                           # compares with transformers on the CPU
    python3 train.py --export model/demo/checkpoint --state .carry/demo

`--hybrid` trains the Qwen3.5 architecture (`hybrid.py`) instead of Qwen2.5-VL's (`network.py`).

The learning rate warms up, stays constant, and decreases linearly over the last `--decay` steps
before `--steps`. Without `--steps`, it decreases over the last `--cool` of `--minutes`.
"""

import argparse
import concurrent.futures
import functools
import json
import multiprocessing
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
from hybrid import HybridNetwork
from network import Network

IMAGE_MEAN = (0.48145466, 0.4578275, 0.40821073)  # CLIP's values, as in Qwen2VLImageProcessor
IMAGE_STD = (0.26862954, 0.26130258, 0.27577711)
HELD_OUT_SEED = 900_001


def to_device(arrays: dict[str, np.ndarray], device) -> dict[str, torch.Tensor]:
    """Copies the arrays of a slot to the device. Some integers become 64-bit, as PyTorch requires for
    indices and classes. Pictures stay bytes."""
    batch = {name: torch.from_numpy(array).to(device, non_blocking=True) for name, array in arrays.items()}
    for name in ("answer_at", "answer", "turn", "thing", "colour", "unit"):
        batch[name] = batch[name].long()
    return batch


@functools.cache
def per_element(values: tuple[float, ...], device) -> torch.Tensor:
    """The values of three channels, for each element of a patch."""
    return torch.tensor(values, device=device).repeat_interleave(196)


def normalised(patch: torch.Tensor) -> torch.Tensor:
    mean, std = per_element(IMAGE_MEAN, patch.device), per_element(IMAGE_STD, patch.device)
    return (patch.float() / 255 - mean) / std


def outputs(network: Network, batch: dict[str, torch.Tensor]):
    with torch.autocast(batch["patch"].device.type, torch.bfloat16):
        return network({**batch, "patch": normalised(batch["patch"])})


def second_answers(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The token after each token of an answer, which a draft head predicts. -100 after the last
    token of an answer."""
    same = batch["turn"][1:] == batch["turn"][:-1]
    following = torch.where(same & (batch["answer"][:-1] >= 0), batch["answer"][1:], -100)
    return F.pad(following, (0, 1), value=-100)


def losses(network: Network, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross entropy of the answers, of the shape or digit and the color that cover each unit, and of
    the drafts (0 without a draft head)."""
    answers, taught, drafts = outputs(network, batch)
    answer = F.cross_entropy(answers.float(), batch["answer"], ignore_index=-100)
    taught = taught.float()
    # Most units show the background. They get a tenth of the weight, because the model would
    # otherwise take a long time to learn the digits.
    weight = torch.where(batch["thing"] > 0, 1.0, 0.1)
    thing = F.cross_entropy(taught[:, :15], batch["thing"], reduction="none")
    colour = F.cross_entropy(taught[:, 15:], batch["colour"], reduction="none")
    unit = ((thing + colour) * weight).sum() / weight.sum()
    draft = answer.new_zeros(()) if drafts is None else F.cross_entropy(drafts.float(), second_answers(batch))
    return torch.stack((answer, unit, draft))


def exact_answers(network: Network, slots, device) -> dict[str, tuple[int, int]]:
    """The numbers of correct answers and of questions, per kind. Greedy decoding gives the correct
    answer exactly when each of its tokens is the most likely token after the previous correct
    tokens, so one pass without generation is enough. The kind "drafts" counts draft tokens after
    correct tokens, and how many of them equal the greedy token."""
    tally: dict[str, tuple[int, int]] = {}

    def count(kind: str, right: int, asked: int) -> None:
        before = tally.get(kind, (0, 0))
        tally[kind] = (before[0] + right, before[1] + asked)

    for slot in slots:
        batch = to_device(slot, device)
        with torch.no_grad():
            answers, _, drafts = outputs(network, batch)
        greedy = answers.argmax(-1)
        wrong = (greedy != batch["answer"]) & (batch["answer"] >= 0)
        misses = torch.zeros(len(slot["turn_kind"]), device=device).index_add_(0, batch["turn"], wrong.float()).cpu()
        for kind, miss in zip(slot["turn_kind"].tolist(), misses.tolist()):
            if kind >= 0:
                count(feed.KIND_NAMES[kind], miss == 0, 1)
        if drafts is not None:
            drafted = second_answers(batch) >= 0
            count("drafts", int((drafts.argmax(-1)[:-1] == greedy[1:])[drafted[:-1]].sum()), int(drafted.sum()))
    return tally


def report(tally: dict[str, tuple[int, int]]) -> str:
    kinds = " ".join(f"{kind} {r / n:.3f}" for kind, (r, n) in sorted(tally.items()))
    right, asked = (sum(column) for column in zip(*(counts for kind, counts in tally.items() if kind != "drafts")))
    return f"exact {right / asked:.4f} of {asked} | {kinds}"


def held_out_slots(capacity: feed.Capacity, count: int):
    """Pictures from the evaluation stream with a separate seed, and whole conversations about other
    unseen pictures: later turns, two pictures, small talk."""
    tokenizer = tokenizers_here.build()
    slots, first = [], 0
    while first < count:
        slots.append(feed.empty_slot(capacity))
        packer = feed.Packer(slots[-1], tokenizer, capacity)
        first += feed.fill_held_out(packer, HELD_OUT_SEED, first, count)
        packer.close()
    talks, turns = [], 0
    while turns < count:
        talks.append(feed.empty_slot(capacity))
        packer = feed.Packer(talks[-1], tokenizer, capacity)
        feed.fill(packer, HELD_OUT_SEED + 1, len(talks) - 1, (), "evaluate")
        packer.close()
        turns += packer.turns
    return slots, talks


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
        """Saves four files of tensors and `progress.json`. The moments are saved in bf16, which keeps the
        total below the size limit for files that are copied from the GPU machine."""
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


def learning_rate(step: int, time_left: float, arguments) -> float:
    """`time_left` is the remaining fraction of `--minutes`."""
    warm = min(1.0, (step + 1) / 500)
    left = (arguments.steps - step) / max(1, arguments.decay) if arguments.steps else time_left / arguments.cool
    return arguments.rate * warm * min(1.0, max(0.0, left))


# ---- the loop --------------------------------------------------------------------------------------------------------


def pin(memory) -> bool:
    """Lets the GPU read the workers' shared memory directly. Without this, copies still work but
    are slower."""
    address = np.frombuffer(memory, np.uint8).ctypes.data
    return torch.cuda.cudart().cudaHostRegister(address, len(memory), 0) == torch.cuda.cudart().cudaError.success


def batches_of(source: feed.Feed, device, ahead: int = 3):
    """Batches on the device. A thread copies them to a GPU while the previous batch computes."""
    if device.type == "cpu":
        while True:
            index, slot = source.take()
            batch, drawn = to_device({name: array.copy() for name, array in slot.items()}, device), slot["drawn"].copy()
            source.give_back(index)
            yield batch, drawn
    ready: queue.Queue = queue.Queue(ahead)
    stream = torch.cuda.Stream()

    def copy() -> None:
        while True:
            index, slot = source.take()
            drawn = slot["drawn"].copy()
            with torch.cuda.stream(stream):
                batch = to_device(slot, device)
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
    device = torch.device(arguments.device)
    capacity = feed.Capacity().part(arguments.parts)
    tokenizer = tokenizers_here.build()
    fonts = tuple(sorted(str(path) for path in Path(arguments.fonts).glob("*.ttf"))) if arguments.fonts else ()
    progress = arguments.state / "progress.json"
    first_batch = json.loads(progress.read_text())["step"] if progress.exists() else 0
    source = feed.Feed(tokenizer, arguments.seed, first_batch, arguments.workers, fonts, capacity, arguments.depth)
    drawing = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("fork"))
    unseen = drawing.submit(held_out_slots, capacity, arguments.held_out)
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")
    kind = HybridNetwork if arguments.hybrid else Network
    network, judge = kind().to(device), kind().to(device)
    state = State(network)
    state.load(arguments.state)
    pinned = device.type == "cuda" and pin(source.memory)
    print(f"pinned {pinned}, {len(fonts)} fonts, step {state.step}, "
          f"{sum(v.numel() for v in network.released().values())} weights, ready after {time.time() - started:.1f} s", flush=True)  # fmt: skip
    if not arguments.eager:
        torch._dynamo.config.suppress_errors = True  # a module that fails to compile runs eagerly
        for module in network.repeated():
            module.compile(dynamic=False)
    # A draft head does not influence the rest of the network, so its gradients are clipped
    # separately.
    heads = [parameter for name, parameter in network.named_parameters() if name.startswith("mtp.")]
    rest = [parameter for name, parameter in network.named_parameters() if not name.startswith("mtp.")]
    batches = batches_of(source, device)
    since, waited, sums, summed = time.time(), 0.0, torch.zeros(3, device=device), 0
    loop_started = time.time()
    done = False
    while not done:
        before = time.time()
        batch, drawn = next(batches)
        waited += time.time() - before
        time_left = 1 - (time.time() - started) / (60 * arguments.minutes)
        for group in state.adam.param_groups:
            group["lr"] = learning_rate(state.step, time_left, arguments)
        parts = losses(network, batch)
        (parts[0] + arguments.teach * parts[1] + parts[2]).backward()
        for parameters in (heads, rest):
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        state.adam.step()
        state.adam.zero_grad(set_to_none=True)
        state.step += 1
        state.pictures += int(drawn[0])
        state.track_average(min(0.999, state.step / (state.step + 100)))
        sums += parts.detach()
        summed += 1
        done = time_left <= 0 or state.step == arguments.steps
        if state.step in (1, 20) or state.step % 200 == 0 or done:
            mean = (sums / summed).tolist()
            spent, since = time.time() - since, time.time()
            print(f"step {state.step} pictures {state.pictures} loss {mean[0]:.4f} teacher {mean[1]:.4f} drafts {mean[2]:.4f} "
                  f"lr {state.adam.param_groups[0]['lr']:.5f} {spent:.1f} s, waited {waited:.1f} s, at {since - started:.0f} s "
                  f"drawn {drawn.tolist()}", flush=True)  # fmt: skip
            sums.zero_()
            waited, summed = 0.0, 0
        if state.step % arguments.judge_every == 0 or done:
            # The checkpoint has bf16 weights.
            judge.load_state_dict({name: value.bfloat16().float() for name, value in state.average.items()}, strict=True)
            for name, slots in zip(("pictures", "conversations"), unseen.result()):
                print(f"step {state.step} {name}: {report(exact_answers(judge, slots, device))}", flush=True)
    state.seconds += time.time() - loop_started
    state.save(arguments.out)
    print(f"saved step {state.step} after {time.time() - started:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hybrid", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=None, help="total number of steps; by default, train for --minutes")
    parser.add_argument("--decay", type=int, default=10_000)
    parser.add_argument("--cool", type=float, default=0.4, help="fraction of --minutes over which the learning rate decreases")
    parser.add_argument("--parts", type=int, default=1, help="divide the size of a batch by this")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--teach", type=float, default=0.3, help="weight of the per-unit loss")
    parser.add_argument("--minutes", type=float, default=9.0, help="stop and save after this many minutes")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--depth", type=int, default=3, help="batches that each worker draws ahead")
    parser.add_argument("--held-out", type=int, default=1000)
    parser.add_argument("--judge-every", type=int, default=1000)
    parser.add_argument("--fonts", type=str, default=None, help="folder of .ttf fonts in which some numbers are drawn")
    parser.add_argument("--state", type=Path, default=Path(".carry/demo"))
    parser.add_argument("--out", type=Path, default=Path(".carry/demo"))
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--export", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.check or arguments.export:
        import export

        torch.manual_seed(arguments.seed)
        network = HybridNetwork() if arguments.hybrid else Network()
        if arguments.export:
            export.written(network, arguments.state, arguments.export)
            export.check(network, arguments.export)
        else:
            export.check_random(network)
    else:
        train(arguments)


if __name__ == "__main__":
    main()
