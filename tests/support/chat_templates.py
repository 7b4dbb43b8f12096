"""Chat templates of the kinds that families of models have, small ones."""

from typing import Final

LLAMA = """{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|system|>" }}{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {{- "You have these functions:\\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|end|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|' + message['role'] + '|>' + message['content'] | trim + '<|end|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}{{- "}" }}{{- "<|end|>" }}
    {%- else %}
        {{- "<|ipython|>" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}{{- "<|end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}
"""
QWEN = """{%- if tools %}
    {{- '<|system|>\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|end|>\\n" }}
{%- elif messages[0].role == 'system' %}{{- '<|system|>' + messages[0].content + '<|end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}{%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}
    {%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == "system" and loop.first %}{%- continue %}{%- endif %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string %}
        {{- '<|assistant|>' }}
        {%- if reasoning and loop.index0 > ns.last_query_index %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content.lstrip('\\n') }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
            {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}{{- '}</tool_call>' }}
        {%- endfor %}
    {%- else %}{{- '<|' + message.role + '|>' + content }}{%- endif %}
    {{- '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
# Asks whether a content is null, and joins arguments as a text.
DEEPSEEK = """{{- bos_token }}
{%- set ns = namespace(is_tool=false, is_first=true) %}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}{{- message['content'] }}{%- endif %}
    {%- if message['role'] == 'user' %}{{- '<|user|>' + message['content'] }}
    {%- elif message['role'] == 'assistant' and message['content'] is none %}
        {%- for tool in message['tool_calls'] %}
            {{- '<call>' + tool['function']['name'] + '\n' + tool['function']['arguments'] }}
        {%- endfor %}{{- '<|end|>' }}
    {%- elif message['role'] == 'assistant' %}
        {{- '<|assistant|>' + message['content'] + '<|end|>' }}
    {%- elif message['role'] == 'tool' %}{{- '<result>' + message['content'] }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
# Splits what an assistant said, without a look whether it is there.
REASONER = """{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1] %}
        {%- endif %}
        {{- '<|assistant|>' + content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<call>' + call.function.name + (call.function.arguments | tojson) }}
        {%- endfor %}{{- '<|end|>' }}
    {%- else %}{{- '<|' + message.role + '|>' + message.content }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|><think>\n' }}{%- endif %}"""
# Joins texts: null is no text.
CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
        {{- (call.function.arguments | tojson) + '}</tool_call>' }}
    {%- endfor %}{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
GEMMA = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set prefix = messages[0]['content'] + '\n\n' %}{%- set rest = messages[1:] %}
{%- else %}{%- set prefix = '' %}{%- set rest = messages %}{%- endif %}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception("Conversation roles must alternate") }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<turn>' + role + '\n' + (prefix if loop.first else '') }}
    {%- if message['content'] is string %}{{- message['content'] | trim }}
    {%- else %}
        {%- for item in message['content'] %}{{- item['text'] | trim }}{%- endfor %}
    {%- endif %}{{- '<end>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<turn>model\n' }}{%- endif %}"""
# Writes what is there, whatever it is.
PHI = """{% for message in messages %}{{ '<|' ~ message.role ~ '|>' }}
{{ message.content | trim }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
# Takes arguments apart.
GLM = """[gMASK]<sop>
{%- macro shown(content) %}{{- content if content is string else '' }}{%- endmacro %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {{- '<|assistant|>\n' + shown(m.content).strip() }}
        {%- if m.reasoning_content %}{{- '<think>' + m.reasoning_content + '</think>' }}{%- endif %}
        {%- for tc in m.tool_calls or [] %}
            {%- set tc = tc.function or tc %}{{- '<tool_call>' + tc.name }}
            {%- for k, v in tc.arguments.items() %}
                {{- '<k>' + k + '<v>' }}{{- v if v is string else v | tojson }}
            {%- endfor %}
        {%- endfor %}
    {%- else %}{{- '<|' + m.role + '|>\n' + shown(m.content) }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
# Counts.
LENGTHS = """{% for m in messages %}<|{{ m.role }}|>
{%- if m.content|length > 0 %}{{ m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}{% for k, v in c.function.arguments|items %}{{ k }}={{ v }};
{%- endfor %}{% endfor %}{% endfor %}"""

KINDS: Final = {
    "llama": LLAMA, "qwen": QWEN, "deepseek": DEEPSEEK, "reasoner": REASONER, "chatml": CHATML,
    "gemma": GEMMA, "phi": PHI, "glm": GLM, "lengths": LENGTHS,
}  # fmt: skip
