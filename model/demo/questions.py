"""Questions about a scene, each in several wordings and with one right answer.

Answers are meant to be compared exactly. "Describe" lists the shapes from left to right, then the
number, then the background: "a red circle, a blue star and the number 42 on a dark background".
"""

from draw import COLOURS, KINDS, Scene, pick

PICTURE = ("picture", "picture", "picture", "image", "image", "photo")

DESCRIBE = (
    "Describe the {picture}.",
    "Describe this {picture}.",
    "What is in the {picture}?",
    "What is in this {picture}?",
    "What do you see?",
    "What can you see?",
    "What do you see in the {picture}?",
    "What can you see in this {picture}?",
    "What does the {picture} show?",
    "What does this {picture} show?",
    "What is shown in the {picture}?",
    "What is this?",
    "Tell me what you see.",
    "Tell me what is in the {picture}.",
    "Please describe the {picture}.",
    "Can you describe this {picture}?",
    "Give me a description of the {picture}.",
    "Describe it.",
    "Describe what you see.",
    "Describe all that is in the {picture}.",
    "What is on the {picture}?",
    "What's in the {picture}?",
    "What's in this {picture}?",
    "What shapes do you see?",
    "What shapes can you see here?",
    "Which shapes do you see?",
    "Which shapes are there?",
    "What shapes are in the {picture}?",
    "Which shapes are in the {picture}?",
    "List the shapes.",
    "List all you see.",
    "Name the shapes.",
    "Name everything you see.",
    "Describe everything in the {picture}.",
)
COUNT_SHAPES = (
    "How many shapes are there?",
    "How many shapes are in the {picture}?",
    "How many shapes are there in the {picture}?",
    "How many shapes are in this {picture}?",
    "How many shapes do you see?",
    "How many shapes can you see?",
    "How many shapes does the {picture} show?",
    "Count the shapes.",
    "Count all shapes in the {picture}.",
    "How many objects are there?",
    "How many shapes?",
    "Tell me how many shapes there are.",
    "Please count the shapes.",
)
COUNT_SOME = (  # {what}: "circles", "red shapes" or "red circles"
    "How many {what} are there?",
    "How many {what} are in the {picture}?",
    "How many {what} are there in the {picture}?",
    "How many {what} are in this {picture}?",
    "How many {what} do you see?",
    "How many {what} can you see?",
    "How many {what} does the {picture} show?",
    "Count the {what}.",
    "Count the {what} in the {picture}.",
    "How many {what}?",
    "Tell me how many {what} there are.",
    "Please count the {what}.",
)
COLOUR = (
    "What {colour} is the {kind}?",
    "What {colour} is the {kind}?",
    "Which {colour} is the {kind}?",
    "What is the {colour} of the {kind}?",
    "What {colour} does the {kind} have?",
    "Which {colour} does the {kind} have?",
    "What {colour} is the {kind} in the {picture}?",
    "Tell me the {colour} of the {kind}.",
    "Name the {colour} of the {kind}.",
    "The {kind} is what {colour}?",
)
KIND = (
    "Which shape is {colour}?",
    "What shape is {colour}?",
    "What is {colour}?",
    "What is {colour} in the {picture}?",
    "Which of the shapes is {colour}?",
    "What is the {colour} shape?",
    "Name the {colour} shape.",
)
LEFTMOST = (
    "Which shape is leftmost?",
    "Which shape is the leftmost?",
    "What is the leftmost shape?",
    "What shape is leftmost?",
    "Which shape is on the left?",
    "Which shape is on the left side?",
    "What shape is on the left?",
    "What is the shape on the left?",
    "Which one is leftmost?",
    "Which one is on the left?",
    "Which shape is furthest left?",
    "Which shape is furthest to the left?",
    "Which shape is farthest to the left?",
    "Which shape is most to the left?",
    "What shape is on the far left?",
    "Name the leftmost shape.",
    "Which is the leftmost shape in the {picture}?",
)
LARGEST = (
    "Which shape is largest?",
    "Which shape is the largest?",
    "What is the largest shape?",
    "What shape is the largest?",
    "Which shape is biggest?",
    "Which one is the largest?",
    "Which one is largest?",
    "Which one is the biggest?",
    "What's the largest shape?",
    "What's the largest?",
    "What's the biggest?",
    "Which shape is the biggest?",
    "What is the biggest shape?",
    "Name the largest shape.",
    "Which is the largest shape in the {picture}?",
    "Which is the biggest shape in the {picture}?",
    "Which of the shapes is the largest?",
)
SMALLEST = tuple(
    wording.replace("largest", "smallest").replace("biggest", "smallest") for wording in LARGEST if "big" not in wording
)
NUMBER = (
    "What number is written?",
    "What number is written in the {picture}?",
    "What number is written here?",
    "Which number is written?",
    "Which number is written in the {picture}?",
    "What number is in the {picture}?",
    "What number is in this {picture}?",
    "Which number is in the {picture}?",
    "What number is shown?",
    "Which number is shown?",
    "What number do you see?",
    "Which number do you see?",
    "What number can you see?",
    "What is the number?",
    "What is the number in the {picture}?",
    "What is written in the {picture}?",
    "What does the number say?",
    "What's the number?",
    "What number is this?",
    "Which number is this?",
    "What does it say?",
    "Read it.",
    "What number does the {picture} show?",
    "Read the number.",
    "Read the number in the {picture}.",
    "Please read the number.",
    "Can you read the number?",
    "Tell me the number.",
    "What digits are written?",
    "Which digits do you see?",
)
COLOURS_SEEN = (
    "What {colour}s do you see?",
    "What {colour}s can you see?",
    "Which {colour}s do you see?",
    "Which {colour}s are there?",
    "What {colour}s are there?",
    "What {colour}s are in the {picture}?",
    "Which {colour}s are in the {picture}?",
    "What {colour}s are the shapes?",
    "List the {colour}s.",
    "Name the {colour}s.",
)
IS_IT = ("Is the {kind} {colour}?", "Is the {kind} in the {picture} {colour}?")
BACKGROUND = (
    "Is the background light or dark?",
    "Is the background dark or light?",
    "What is the background?",
    "What is the background like?",
    "Is it light or dark?",
    "Is the {picture} light or dark?",
)
EXISTS = (  # {what}: "circle", "red circle", "red shape" or "number", with its article
    "Is there {what}?",
    "Is there {what} in the {picture}?",
    "Do you see {what}?",
    "Can you see {what}?",
    "Does the {picture} show {what}?",
)

LEAD_IN = ("Please ", "Now ", "And ", "And now ", "So ", "OK, ", "Well, ", "Hello! ", "Hi, ", "Now tell me: ", "Look: ")

# Kinds that training conversations ask for more often, because the model learns reading and listing
# last.
TRAINING_WEIGHT = {"number": 4.0, "describe": 3.0, "leftmost": 1.3, "rightmost": 1.3, "largest": 1.3}


def with_article(words: str) -> str:
    return ("an " if words[0] in "aeiou" else "a ") + words


def named(shape) -> str:
    return f"{shape.colour} {shape.kind}"


def listed(things: list[str]) -> str:
    return "".join(things) if len(things) < 2 else ", ".join(things[:-1]) + " and " + things[-1]


def description(scene: Scene) -> str:
    things = [with_article(named(shape)) for shape in scene.shapes]
    if scene.number is not None:
        things.append(f"the number {scene.number.text}")
    return f"{listed(things) or 'nothing'} on a {scene.background} background"


def word(rng, template: str, **parts: str) -> str:
    """Fills in a wording. Sometimes writes it as people type: with an introductory word, in lower
    case, or without punctuation."""
    text = template.format(**{"picture": pick(rng, PICTURE), **parts})
    if rng.random() < 0.06:
        text = pick(rng, LEAD_IN) + text[0].lower() + text[1:]
    chance = rng.random()
    if chance < 0.06:
        text = text.lower()
    elif chance < 0.1:
        text = text.lower().rstrip("?.")
    elif chance < 0.14:
        text = text.rstrip("?.")
    return text


def extreme(scene: Scene, largest: bool):
    """The clearly largest (or smallest) shape, by area and by radius. None if there is a near
    tie."""
    sign = 1 if largest else -1
    first, *others = sorted(scene.shapes, key=lambda shape: -sign * shape.size)
    for other in others:
        by_area, by_reach = first.size / other.size, first.radius / other.radius
        if by_area**sign < 1.3 or by_reach**sign < 1.12:
            return None
    return first


def count_answer(scene: Scene, colour: str | None, kind: str | None) -> str:
    fits = [s for s in scene.shapes if colour in (None, s.colour) and kind in (None, s.kind)]
    return str(len(fits))


def ask_describe(rng, scene):
    return pick(rng, DESCRIBE), {}, description(scene)


def ask_count_shapes(rng, scene):
    return pick(rng, COUNT_SHAPES), {}, count_answer(scene, None, None)


def likely(rng, present: list[str], options) -> str:
    """An option that is present, in most cases, so that "0" and "no" are not the best guess."""
    return pick(rng, present) if present and rng.random() < 0.65 else pick(rng, options)


def ask_count_kind(rng, scene):
    kind = likely(rng, [s.kind for s in scene.shapes], KINDS)
    if rng.random() < 0.15:
        colour = likely(rng, [s.colour for s in scene.shapes], tuple(COLOURS))
        return pick(rng, COUNT_SOME), {"what": f"{colour} {kind}s"}, count_answer(scene, colour, kind)
    return pick(rng, COUNT_SOME), {"what": f"{kind}s"}, count_answer(scene, None, kind)


def ask_count_colour(rng, scene):
    colour = likely(rng, [s.colour for s in scene.shapes], tuple(COLOURS))
    return pick(rng, COUNT_SOME), {"what": f"{colour} shapes"}, count_answer(scene, colour, None)


def ask_colour(rng, scene):
    """The color of the only shape of a kind. Sometimes there is no such shape or there are several,
    and the answer says so."""
    kinds = [s.kind for s in scene.shapes]
    unique = [s for s in scene.shapes if kinds.count(s.kind) == 1]
    spelling = pick(rng, ("colour", "color"))
    if not unique or rng.random() < 0.08:
        kind = pick(rng, KINDS)
        if kinds.count(kind) == 0:
            return pick(rng, COLOUR), {"kind": kind, "colour": spelling}, f"There is no {kind}."
        if kinds.count(kind) > 1:
            answer = f"There are {kinds.count(kind)} {kind}s."
            return pick(rng, COLOUR), {"kind": kind, "colour": spelling}, answer
    shape = pick(rng, unique) if unique else None
    if shape is None:
        return None
    return pick(rng, COLOUR), {"kind": shape.kind, "colour": spelling}, shape.colour


def ask_kind(rng, scene):
    colours = [s.colour for s in scene.shapes]
    unique = [s for s in scene.shapes if colours.count(s.colour) == 1]
    if not unique:
        return None
    shape = pick(rng, unique)
    return pick(rng, KIND), {"colour": shape.colour}, f"the {shape.kind}"


def ask_colours(rng, scene):
    """The colors of the shapes, each once, from left to right."""
    spelling = pick(rng, ("colour", "color"))
    colours = list(dict.fromkeys(shape.colour for shape in scene.shapes))
    if not colours:
        return None
    return pick(rng, COLOURS_SEEN), {"colour": spelling}, listed(colours)


def ask_leftmost(rng, scene):
    if not scene.shapes:
        return None
    return pick(rng, LEFTMOST), {}, f"the {named(scene.shapes[0])}"


def ask_rightmost(rng, scene):
    if not scene.shapes:
        return None
    return pick(rng, LEFTMOST).replace("left", "right"), {}, f"the {named(scene.shapes[-1])}"


def ask_largest(rng, scene):
    shape = extreme(scene, True) if scene.shapes else None
    return shape and (pick(rng, LARGEST), {}, f"the {named(shape)}")


def ask_smallest(rng, scene):
    shape = extreme(scene, False) if scene.shapes else None
    return shape and (pick(rng, SMALLEST), {}, f"the {named(shape)}")


def ask_number(rng, scene):
    if scene.number is None:
        return (pick(rng, NUMBER), {}, "There is no number.") if rng.random() < 0.1 else None
    return pick(rng, NUMBER), {}, scene.number.text


def ask_background(rng, scene):
    return pick(rng, BACKGROUND), {}, scene.background


def ask_exists(rng, scene):
    if rng.random() < 0.15:
        return pick(rng, EXISTS), {"what": "a number"}, "yes" if scene.number else "no"
    if scene.shapes and rng.random() < 0.25:
        shape = pick(rng, scene.shapes)
        if count_answer(scene, None, shape.kind) == "1":
            colour = likely(rng, [shape.colour], tuple(COLOURS))
            return pick(rng, IS_IT), {"kind": shape.kind, "colour": colour}, "yes" if colour == shape.colour else "no"
    shape = pick(rng, scene.shapes) if scene.shapes and rng.random() < 0.5 else None
    colour = shape.colour if shape else pick(rng, tuple(COLOURS))
    kind = shape.kind if shape else pick(rng, KINDS)
    form = rng.random()
    colour, kind = (None if form < 0.3 else colour), (None if 0.3 <= form < 0.6 else kind)
    what = with_article(" ".join(filter(None, (colour, kind or "shape"))))
    return pick(rng, EXISTS), {"what": what}, "no" if count_answer(scene, colour, kind) == "0" else "yes"


ASK = {
    "describe": ask_describe,
    "count_shapes": ask_count_shapes,
    "count_kind": ask_count_kind,
    "count_colour": ask_count_colour,
    "colour": ask_colour,
    "colours": ask_colours,
    "kind": ask_kind,
    "leftmost": ask_leftmost,
    "rightmost": ask_rightmost,
    "largest": ask_largest,
    "smallest": ask_smallest,
    "number": ask_number,
    "background": ask_background,
    "exists": ask_exists,
}


def ask(rng, scene: Scene, kind: str):
    """(question, answer), or None if this kind has no clear answer for the scene."""
    asked = ASK[kind](rng, scene)
    return asked and (word(rng, asked[0], **asked[1]), asked[2])


def one_question(rng, scene: Scene, training: bool = False) -> tuple[str, str, str]:
    """(kind, question, answer) for any kind that fits the scene, all equally likely, or weighted
    for training."""
    kinds = list(ASK)
    weights = [TRAINING_WEIGHT.get(kind, 1.0) if training else 1.0 for kind in kinds]
    total = sum(weights)
    while True:
        mark = rng.random() * total
        for kind, weight in zip(kinds, weights):
            mark -= weight
            if mark < 0:
                break
        asked = ask(rng, scene, kind)
        if asked:
            return kind, *asked


ORDINAL = {  # wordings about one of two pictures
    "describe": ("Describe the {which} {picture}.", "What is in the {which} {picture}?", "What does the {which} {picture} show?"),
    "count_shapes": ("How many shapes are in the {which} {picture}?", "How many shapes are there in the {which} {picture}?"),
    "number": ("What number is in the {which} {picture}?", "Read the number in the {which} {picture}."),
    "leftmost": ("Which shape is leftmost in the {which} {picture}?", "Which is the leftmost shape in the {which} {picture}?"),
    "background": ("Is the {which} {picture} light or dark?",),
}


def one_ordinal_question(rng, scenes: list[Scene]) -> tuple[str, str, str]:
    """A question about the first or the second of two pictures."""
    while True:
        place = int(rng.integers(0, 2))
        kind = pick(rng, tuple(ORDINAL))
        asked = ASK[kind](rng, scenes[place])
        if asked:
            return kind, word(rng, pick(rng, ORDINAL[kind]), which=("first", "second")[place]), asked[2]
