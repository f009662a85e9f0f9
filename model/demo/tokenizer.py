"""Builds the demo's tokenizer in the same way as Qwen2's: byte-level BPE after Qwen's splitting
pattern.

It is trained on the questions and answers of this folder until every word in them, after a space or
at the start of a line, is one token. Each digit is a separate token, and all 256 bytes are in the
vocabulary, so no text is unknown.
"""

import itertools

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

import questions
import talk
from draw import COLOURS, KINDS

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def wordings() -> list[str]:
    """All templates, filled in."""
    templates = list(
        itertools.chain(
            questions.DESCRIBE, questions.COUNT_SHAPES, questions.COUNT_SOME, questions.COLOUR, questions.KIND,
            questions.LEFTMOST, (w.replace("left", "right") for w in questions.LEFTMOST), questions.LARGEST,
            questions.SMALLEST, questions.NUMBER, questions.COLOURS_SEEN, questions.IS_IT, questions.BACKGROUND,
            questions.EXISTS, questions.LEAD_IN,
            itertools.chain.from_iterable(questions.ORDINAL.values()),
        )
    )  # fmt: skip
    lines = []
    for template in templates:
        for picture in dict.fromkeys(questions.PICTURE):
            for which, spelling in (("first", "colour"), ("second", "color")):
                filled = template.replace("{picture}", picture).replace("{which}", which)
                lines.append(filled.replace("{what}", "shapes").replace("{kind}", "shape").replace("{colour}", spelling))
    for kind, colour in itertools.product(KINDS, COLOURS):
        thing = f"{colour} {kind}"
        lines += [
            f"the {thing}", f"{thing}s", f"Is there {questions.with_article(thing)}?", f"There is no {kind}.",
            f"There are 2 {kind}s.", f"{questions.with_article(thing)}, {questions.with_article(thing)} and the number 1",
            f"{colour}", f"{kind}", f"a {kind}", f"an orange {kind} on a light background", "on a dark background",
            "nothing on a patterned background", "light", "dark", "yes", "no", "a number", "There is no number.", "an image", "objects", "digits",
        ]  # fmt: skip
    for answer, asked in talk.TALK:
        lines += [answer, *asked]
    lines += [talk.CANNOT, talk.NO_PICTURE, *talk.NEEDS_PICTURE, talk.SYSTEM, *talk.OTHER_SYSTEMS]
    lines += [template.replace("{x}", "") for template in talk.OUT_OF_REACH]
    return lines + ["system\n", "user\n", "assistant\n"] + [line.lower() for line in lines]


def build() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=5000,  # never reached: merging stops when every word is one token
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(wordings(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


if __name__ == "__main__":
    built = build()
    print(built.get_vocab_size(), "tokens;", built.encode("A made-up word: describe the 427 circles.").tokens)
