"""Converts scenes to conversations and conversations to packed batches, in worker processes.

A batch is a slot of shared memory with a fixed offset for every array. Each picture is resized and
cut into patches as the image processor does, but the patches stay bytes, which the GPU normalizes.
Several conversations share one picture, because drawing a picture is the most expensive part. Batch
b comes from worker (b - first_batch) % workers. Its content depends only on the seed and b.
"""

import functools
import math
import mmap
import multiprocessing
import os
from dataclasses import asdict, dataclass

import numpy as np
from PIL import Image

import draw
import questions
import talk

MIN_PIXELS, MAX_PIXELS = 64 * 28 * 28, 256 * 28 * 28

TOKENS_OF_ONE = 1024  # maximum length of a conversation


@dataclass(frozen=True)
class Capacity:
    """The sizes of a batch."""

    patches: int = 49152
    tokens: int = 65536
    windows: int = 3072
    pictures: int = 1024
    conversations: int = 1536
    answers: int = 8192
    turns: int = 2048

    def part(self, parts: int) -> "Capacity":
        """Returns these sizes divided by `parts`."""
        return Capacity(**{name: size // parts for name, size in asdict(self).items()})

    def fields(self) -> dict[str, tuple[tuple[int, ...], type]]:
        """The shape and type of each array of a batch."""
        return {
            "patch": ((self.patches, 588), np.uint8),
            "patch_position": ((self.patches, 2), np.int16),
            "cu_window": ((self.windows + 1,), np.int32),
            "cu_picture": ((self.pictures + 1,), np.int32),
            "thing": ((self.patches // 4,), np.uint8),  # 0 nothing, 1-4 a shape, 5-14 a digit
            "colour": ((self.patches // 4,), np.uint8),  # 0 none, 1-8
            "token": ((self.tokens,), np.int32),
            "position": ((3, self.tokens), np.int16),
            "unit": ((self.tokens,), np.int32),
            "cu_conversation": ((self.conversations + 1,), np.int32),
            "answer_at": ((self.answers,), np.int32),
            "answer": ((self.answers,), np.int32),  # -100 if there is none
            "turn": ((self.answers,), np.int32),  # turn that a token of an answer belongs to
            "turn_kind": ((self.turns,), np.int16),  # -1 unused
            "drawn": ((2,), np.int32),  # numbers of pictures and conversations
        }


KIND_NAMES = [*questions.ASK, "talk", "two_pictures"]


def smart_resize(height: int, width: int) -> tuple[int, int]:
    """Hugging Face's function: both sides become multiples of 28 and the area is within the limits,
    with the aspect ratio kept as closely as possible."""
    rows, columns = round(height / 28) * 28, round(width / 28) * 28
    if rows * columns > MAX_PIXELS:
        beta = math.sqrt(height * width / MAX_PIXELS)
        rows, columns = (max(28, math.floor(side / beta / 28) * 28) for side in (height, width))
    elif rows * columns < MIN_PIXELS:
        beta = math.sqrt(MIN_PIXELS / (height * width))
        rows, columns = (math.ceil(side * beta / 28) * 28 for side in (height, width))
    return rows, columns


@functools.lru_cache(maxsize=4096)
def layout(rows: int, columns: int):
    """Window order, its inverse, patch positions and window lengths in patches, for a grid of rows
    x columns units."""
    row, column = (axis.ravel() for axis in np.divmod(np.arange(rows * columns).reshape(rows, columns), columns))
    window = (row // 4) * (-(-columns // 4)) + column // 4
    order = np.argsort(window, kind="stable")
    inverse = np.argsort(order)
    inner = np.array([(0, 0), (0, 1), (1, 0), (1, 1)])
    corners = np.stack((row, column), axis=1)[order] * 2
    positions = (corners[:, None] + inner[None]).reshape(-1, 2).astype(np.int16)
    lengths = np.bincount(window) * 4
    return order, inverse, positions, lengths[lengths > 0]


def cut(image: Image.Image):
    """Resizes a picture. Returns (patches in window order as bytes, rows of units, columns of
    units)."""
    height, width = smart_resize(image.height, image.width)
    if (width, height) != image.size:
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    rows, columns = height // 28, width // 28
    pixels = np.asarray(image).reshape(rows, 2, 14, columns, 2, 14, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    units = pixels.reshape(rows * columns, 4 * 588)[layout(rows, columns)[0]]
    return units.reshape(-1, 588), rows, columns


def what_covers(scene: draw.Scene, rows: int, columns: int):
    """The shape or digit (`thing`) and the color of each unit, row by row. A shape or digit belongs
    to a unit if it covers the unit's center, or if its own center is in the unit. For this purpose, a
    shape is a circle of 0.7 times its radius."""
    unit_x, unit_y = scene.width / columns, scene.height / rows
    x = (np.arange(columns) + 0.5)[None, :] * unit_x
    y = (np.arange(rows) + 0.5)[:, None] * unit_y
    thing, colour = np.zeros((rows, columns), np.uint8), np.zeros((rows, columns), np.uint8)
    for shape in scene.shapes:
        inside = np.hypot(x - shape.x, y - shape.y) < shape.radius * 0.7
        inside |= (abs(x - shape.x) < unit_x / 2) & (abs(y - shape.y) < unit_y / 2)
        thing[inside] = 1 + draw.KINDS.index(shape.kind)
        colour[inside] = 1 + list(draw.COLOURS).index(shape.colour)
    if scene.number is not None:
        for digit, (at_x, at_y, half_width, half_height) in zip(scene.number.text, scene.number.digits):
            inside = (abs(x - at_x) < max(half_width, unit_x / 2)) & (abs(y - at_y) < max(half_height, unit_y / 2))
            thing[inside] = 5 + int(digit)
    return thing.ravel(), colour.ravel()


class Packer:
    """Fills one slot of shared memory."""

    def __init__(self, slot: dict[str, np.ndarray], tokenizer, capacity: Capacity):
        self.capacity = capacity
        self.id_of = tokenizer.token_to_id
        self.encode = functools.lru_cache(maxsize=65536)(lambda text: tokenizer.encode(text).ids)
        self.open(slot)

    def open(self, slot: dict[str, np.ndarray]) -> None:
        self.slot = slot
        self.patches = self.tokens = self.answers = self.turns = 0
        self.windows, self.pictures, self.conversations = [0], [], [0]
        self.slot["unit"].fill(-1)
        self.slot["answer"].fill(-100)
        self.slot["turn_kind"].fill(-1)
        for name in ("token", "position", "answer_at", "turn", "patch_position", "thing", "colour"):
            self.slot[name].fill(0)

    def add_picture(self, scene: draw.Scene, image: Image.Image) -> int | None:
        """Returns the picture's index in the batch, or None if the picture does not fit."""
        patches, rows, columns = cut(image)
        end = self.patches + len(patches)
        order, inverse, positions, lengths = layout(rows, columns)
        limit = self.capacity
        too_many_windows = len(self.windows) + len(lengths) > limit.windows - limit.windows // 48
        if end > limit.patches - 64 or too_many_windows or len(self.pictures) > limit.pictures - limit.pictures // 16:
            return None
        self.slot["patch"][self.patches : end] = patches
        self.slot["patch_position"][self.patches : end] = positions
        thing, colour = what_covers(scene, rows, columns)
        self.slot["thing"][self.patches // 4 : end // 4] = thing[order]
        self.slot["colour"][self.patches // 4 : end // 4] = colour[order]
        self.windows += (self.windows[-1] + np.cumsum(lengths)).tolist()
        self.pictures.append((self.patches // 4 + inverse, rows, columns, end))
        self.patches = end
        return len(self.pictures) - 1

    def add_conversation(self, system: str | None, turns) -> bool:
        """Turns are (user's parts, answer, kind name). A part is text or a picture's index. Returns
        False if the conversation does not fit."""
        ids, units, position, learnt = [], [], [], []
        start, end = self.id_of("<|im_start|>"), self.id_of("<|im_end|>")
        here = 0

        def say(pieces) -> None:
            nonlocal here
            ids.extend(pieces)
            units.append(np.full(len(pieces), -1))
            position.append(np.broadcast_to(np.arange(here, here + len(pieces)), (3, len(pieces))))
            here += len(pieces)

        def show(picture: int) -> None:
            nonlocal here
            unit, rows, columns, _ = self.pictures[picture]
            say([self.id_of("<|vision_start|>")])
            ids.extend([self.id_of("<|image_pad|>")] * (rows * columns))
            units.append(unit)
            row, column = np.divmod(np.arange(rows * columns), columns)
            position.append(here + np.stack((np.zeros_like(row), row, column)))
            here += max(rows, columns)
            say([self.id_of("<|vision_end|>")])

        if system is not None:
            say([start, *self.encode("system\n" + system), end, *self.encode("\n")])
        for parts, answer, kind in turns:
            say([start, *self.encode("user\n")])
            for part in parts:
                show(part) if isinstance(part, int) else say(self.encode(part))
            say([end, *self.encode("\n"), start, *self.encode("assistant\n")])
            reply = [*self.encode(answer), end]
            learnt.append([(len(ids) + i - 1, token) for i, token in enumerate(reply)])
            say([*reply, *self.encode("\n")])
        return self.write_conversation(ids, units, position, learnt, turns)

    def write_conversation(self, ids, units, position, learnt, turns) -> bool:
        end, limit = self.tokens + len(ids), self.capacity
        fits = (
            len(ids) <= TOKENS_OF_ONE
            and end <= limit.tokens - TOKENS_OF_ONE
            and self.answers + sum(map(len, learnt)) <= limit.answers
            and self.turns + len(turns) <= limit.turns
            and len(self.conversations) < limit.conversations - limit.conversations // 12
        )
        if not fits:
            return False
        slot = self.slot
        slot["token"][self.tokens : end] = ids
        slot["unit"][self.tokens : end] = np.concatenate(units)
        slot["position"][:, self.tokens : end] = np.concatenate(position, axis=1)
        for (_, _, kind), reply in zip(turns, learnt):
            slot["turn_kind"][self.turns] = KIND_NAMES.index(kind)
            for at, token in reply:
                slot["answer_at"][self.answers] = self.tokens + at
                slot["answer"][self.answers] = token
                slot["turn"][self.answers] = self.turns
                self.answers += 1
            self.turns += 1
        self.tokens = end
        self.conversations.append(end)
        return True

    def close(self) -> None:
        """Divides the unused rest of the slot into short segments, because attention must compute
        every row."""
        slot, limit = self.slot, self.capacity
        slot["patch"][self.patches :] = 0
        for name, starts, total, step in (
            ("cu_window", self.windows, limit.patches, 64),
            ("cu_picture", [0] + [picture[3] for picture in self.pictures], limit.patches, 1024),
            ("cu_conversation", self.conversations, limit.tokens, 1024),
        ):
            starts = starts + list(range(starts[-1] + step, total, step))
            slot[name].fill(total)
            slot[name][: len(starts)] = starts
        slot["drawn"][:] = len(self.pictures), len(self.conversations) - 1


# ---- conversations ---------------------------------------------------------------------------------------------------


def with_picture(rng, question: str, pictures: list[int]):
    """The user's parts, in most cases with pictures first."""
    return [question, *pictures] if rng.random() < 0.06 else [*pictures, question]


def about_one(rng, scene: draw.Scene, picture: int):
    """Up to four turns about one picture, sometimes with small talk before or between them."""
    length = draw.pick(rng, (1, 1, 1, 2, 2, 3, 4))
    turns, asked, shown = [], set(), False
    if rng.random() < 0.04:
        question, answer = talk.one_turn(rng, has_picture=False)
        turns.append(([question], answer, "talk"))
    for _ in range(length):
        if turns and rng.random() < 0.06:
            question, answer = talk.one_turn(rng, has_picture=True)
            kind = "talk"
        else:
            kind, question, answer = questions.one_question(rng, scene, training=True)
        if question in asked:
            continue
        asked.add(question)
        turns.append(([question] if shown else with_picture(rng, question, [picture]), answer, kind))
        shown = True
    return turns


def about_two(rng, scenes: list[draw.Scene], pictures: list[int]):
    """Conversations about two pictures. Both pictures come in one turn, or each comes in a separate
    turn with a question about it. Then the user asks about the first or the second picture."""
    turns = []
    if rng.random() < 0.5:
        parts = list(pictures)
    else:
        _, question, answer = questions.one_question(rng, scenes[0], training=True)
        turns.append((with_picture(rng, question, pictures[:1]), answer, "two_pictures"))
        _, question, answer = questions.one_question(rng, scenes[1], training=True)
        turns.append((with_picture(rng, question, pictures[1:]), answer, "two_pictures"))
        parts = []
    for _ in range(draw.pick(rng, (1, 2))):
        _, question, answer = questions.one_ordinal_question(rng, scenes)
        turns.append(([*parts, question], answer, "two_pictures"))
        parts = []
    return turns


def about_nothing(rng):
    return [
        ([question], answer, "talk")
        for question, answer in (talk.one_turn(rng, has_picture=False) for _ in range(draw.pick(rng, (1, 1, 2, 3))))
    ]


def system_of(rng) -> str | None:
    """The template's own system prompt in most cases, and sometimes another prompt or none, because
    an application may set its own."""
    chance = rng.random()
    return talk.SYSTEM if chance < 0.9 else None if chance < 0.93 else draw.pick(rng, talk.OTHER_SYSTEMS)


def fill(packer: Packer, seed: int, batch: int, fonts, stream: str = "train") -> None:
    """A training batch: pictures until the slot is full. Each picture has three conversations, and
    some have one more about two pictures or about none. A conversation that does not fit is left
    out."""
    before = None
    for place in range(1 << 16):
        rng = draw.random_of(stream, seed, batch * (1 << 16) + place)
        scene, image = draw.draw_scene(rng, fonts, wide=True)
        picture = packer.add_picture(scene, image)
        if picture is None:
            return
        for _ in range(3):
            packer.add_conversation(system_of(rng), about_one(rng, scene, picture))
        if before is not None and rng.random() < 0.25:
            packer.add_conversation(system_of(rng), about_two(rng, [before[0], scene], [before[1], picture]))
        if rng.random() < 0.25:
            packer.add_conversation(system_of(rng), about_nothing(rng))
        before = (scene, picture)


def fill_held_out(packer: Packer, seed: int, first: int, end: int) -> int:
    """Unseen pictures with one question each, as `draw.py` writes them. Returns the number that
    fit."""
    for index in range(first, end):
        rng = draw.random_of("evaluate", seed, index)
        scene, image = draw.draw_scene(rng)
        kind, question, answer = questions.one_question(rng, scene)
        picture = packer.add_picture(scene, image)
        if picture is None or not packer.add_conversation(talk.SYSTEM, [([picture, question], answer, kind)]):
            return index - first
    return end - first


# ---- shared memory ---------------------------------------------------------------------------------------------------


def slot_bytes(capacity: Capacity) -> int:
    return sum(math.ceil(np.dtype(t).itemsize * math.prod(s) / 4096) * 4096 for s, t in capacity.fields().values())


def slot_views(buffer, capacity: Capacity, offset: int = 0) -> dict[str, np.ndarray]:
    views = {}
    for name, (shape, kind) in capacity.fields().items():
        count = math.prod(shape)
        views[name] = np.frombuffer(buffer, kind, count, offset).reshape(shape)
        offset += math.ceil(np.dtype(kind).itemsize * count / 4096) * 4096
    return views


def empty_slot(capacity: Capacity) -> dict[str, np.ndarray]:
    """A slot in memory of this process."""
    return slot_views(bytearray(slot_bytes(capacity)), capacity)


class Feed:
    """Workers that fill slots ahead of the trainer. The constructor forks them, so call it before CUDA
    starts."""

    def __init__(self, tokenizer, seed: int, first_batch: int, workers: int, fonts, capacity: Capacity, depth: int):
        self.capacity = capacity
        size = slot_bytes(capacity)
        self.memory = mmap.mmap(-1, size * workers * depth)
        self.slots = [slot_views(self.memory, capacity, size * i) for i in range(workers * depth)]
        context = multiprocessing.get_context("fork")
        self.free = [context.SimpleQueue() for _ in range(workers)]
        self.full = [context.SimpleQueue() for _ in range(workers)]
        self.workers, self.next = workers, 0
        for worker in range(workers):
            for i in range(depth):
                self.free[worker].put(worker * depth + i)
            batches = range(first_batch + worker, 1 << 40, workers)
            arguments = (tokenizer, seed, batches, worker, fonts)
            context.Process(target=self.work, args=arguments, daemon=True).start()

    def work(self, tokenizer, seed, batches, worker, fonts) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        packer = None
        for batch in batches:
            index = self.free[worker].get()
            if packer is None:
                packer = Packer(self.slots[index], tokenizer, self.capacity)
            packer.open(self.slots[index])
            fill(packer, seed, batch, fonts)
            packer.close()
            self.full[worker].put(index)

    def take(self) -> tuple[int, dict[str, np.ndarray]]:
        """The next batch in order, with the index of its slot. Pass the index to `give_back` when the
        batch has been copied."""
        index = self.full[self.next % self.workers].get()
        self.next += 1
        return index, self.slots[index]

    def give_back(self, index: int) -> None:
        self.free[index // (len(self.slots) // self.workers)].put(index)
