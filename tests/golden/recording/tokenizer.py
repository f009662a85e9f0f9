"""The real Qwen2.5 tokenizer with recorded ids, and the tiny tokenizer of the checkpoints."""

import tokenizers

from .files import write_json

STRINGS = [
    "", " ", "\n", "Hello, world!", "hello world", "Hello  world   three", "The quick brown fox jumps over the lazy dog.",
    "I'm you're we've he'll they'd it's don't I'M YOU'RE", "'s't 'S 'LL", "1234567890", "3.14159 and 1,000,000 or 0x1F",
    "   leading", "trailing   ", "tab\tand\t\ttabs", "line\nline\n\nline\r\nline\r\r\n  \n  x", " \n \n ", "\t \t\n",
    "fn main() {\n    let x: Vec<u8> = vec![0; 16];\n\tprintln!(\"{x:?}\");\n}\n", "for i in range(10):\n        print(i)",
    "<html><body class=\"a\">&amp;</body></html>", "https://example.com/a?b=c&d=%20#e", "snake_case camelCase kebab-case",
    "Zürich, naïve café, Ærøskøbing, łódź", "e\u0301 vs é; n\u0303 vs ñ; \u212b vs Å; \u1100\u1161", "Привет, как дела?",
    "你好，世界！今天天气怎么样？", "東京は日本の首都です。カタカナ、ひらがな", "안녕하세요 세계", "مرحبا بالعالم ١٢٣", "שלום עולם",
    "नमस्ते दुनिया १२३", "สวัสดีชาวโลก", "Γειά σου Κόσμε", "🙂👍🏽👨‍👩‍👧‍👦🇨🇭 emoji", "∑∫√≈≠ ½ ² ① Ⅷ ﬁ",
    "\u00a0nbsp\u2003em\u200bzero\u3000wide", "\ufeffbom\u0000nul\u0007bell", "!!!???...---===", "$$x^2$$ \\frac{a}{b}",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "<|vision_start|><|image_pad|><|vision_end|>What?",
    "<|endoftext|><|im_end|> <|im_end|>", "<tool_call>\n{\"name\": \"f\"}\n</tool_call>", "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>",
    "<|im_start|", "<|IM_START|>", "<|unknown|>", "a" * 50, " " * 33 + "x", "\n" * 9, "ab" * 20 + "\n" + "=" * 40,
]  # fmt: skip


def record(root, inputs):
    """Writes the real tokenizer.json, and the ids of `STRINGS` and the text that they decode to."""
    folder = root / "qwen2_5_tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(inputs.qwen2_5_tokenizer)
    tokenizer = tokenizers.Tokenizer.from_str(inputs.qwen2_5_tokenizer.decode())
    cases = []
    for string in STRINGS:
        ids = tokenizer.encode(string, add_special_tokens=False).ids
        cases.append({
            "text": string,
            "ids": ids,
            "decoded": tokenizer.decode(ids, skip_special_tokens=False),  # differs from `text` if NFC changed it
            "decoded_without_special": tokenizer.decode(ids, skip_special_tokens=True),
        })  # fmt: skip
    write_json(folder / "strings.json", {"vocabulary": tokenizer.get_vocab_size(), "cases": cases})


# How Qwen2's tokenizer splits text before BPE. Qwen3.5's keeps combining marks in the word of their letters.
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLIT_QWEN3_5 = SPLIT.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
MERGES = 98
TEXT_TOKENS = 256 + MERGES  # ids from here on are added tokens and padding
FIRST_ADDED = 151643  # the id of Qwen2.5's first added token
CORPUS = (
    "You are a helpful assistant. What is in this picture? The picture shows a red circle, a blue square and a green "
    "triangle. How many shapes are there? There are three shapes in the image. Describe the second image in one word. "
    "Compare the two pictures and say which is larger. A runtime that serves models never runs out of memory. "
    "The quick brown fox jumps over the lazy dog and it's not the only one that jumps. system user assistant "
)


def write_tiny_tokenizer(folder, settings, template, split=SPLIT):
    """Trains a byte-level BPE with Qwen's normalizer, splitter, decoder and added tokens, and 98 merges.

    `settings` is the real tokenizer_config.json. Returns the tokenizer, and the ids of the two tokens that end a text."""
    added_tokens = settings["added_tokens_decoder"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    byte_level = dict(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Split(tokenizers.Regex(split), "isolated"),
        tokenizers.pre_tokenizers.ByteLevel(**byte_level),
    ])  # fmt: skip
    tokenizer.post_processor = tokenizers.processors.ByteLevel(**byte_level)
    tokenizer.decoder = tokenizers.decoders.ByteLevel(**byte_level)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=TEXT_TOKENS, show_progress=False, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    tokenizer.add_tokens([
        tokenizers.AddedToken(token["content"], normalized=False, special=token["special"]) for token in added_tokens.values()
    ])  # fmt: skip
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|im_end|>")}
    first = tokenizer.token_to_id(added_tokens[str(FIRST_ADDED)]["content"])
    config = {key: value for key, value in settings.items() if key not in ("chat_template", "added_tokens_decoder")}
    config["added_tokens_decoder"] = {str(first + i): token for i, token in enumerate(added_tokens.values())}
    config["chat_template"] = template
    config["model_max_length"] = 4096
    write_json(folder / "tokenizer_config.json", config)
    return tokenizer, ids
