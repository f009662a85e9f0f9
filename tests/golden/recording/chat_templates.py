"""Chat templates in Jinja: our own wordings of released templates, and edits of them."""


def qwen2_5_vl_template():
    """Our own wording of the template of Qwen/Qwen2.5-VL-*-Instruct and Qwen2-VL. It renders the same text."""
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
    """Our own wording of the template of Qwen/Qwen3-VL-*-Instruct. It renders the same text.

    It was compared with the released template as a test of TensorSharp (github.com/zhongkaifu/TensorSharp) quotes it from
    the official GGUF file, SHA-256 3636d0f0bd6bef02654cdffdc447b79cb2cef8ab02cc75267345946291a489e4."""
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
    """Our own wording of the template of OpenGVLab/InternVL3-*-hf. It renders the same text."""
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
    """ChatML for contents that are strings, as OpenGVLab/InternVL3_5-* ships it. It has no rule for pictures."""
    return (
        "{%- for message in messages -%}\n"
        "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}\n"
        "{%- endfor -%}\n"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}\n"
    )


def qwq_template(qwen2_5):
    """A template that renders the text of QwQ-32B's, made by editing Qwen2.5's.

    It differs from Qwen2.5's in three ways: there is no default system prompt, the thoughts of every answer except the
    last message are removed, and the generation prompt opens a thought."""
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
    """Our own wording of how Llama 3.1's model card describes tools called by JSON.

    The tools are in the first user message, or in the system message if the option asks for it. A turn has one call.
    Results have the role `ipython`."""
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
