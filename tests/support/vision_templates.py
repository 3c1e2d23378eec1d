"""Chat templates of models that take images: each does what its family's published one does."""

TEMPLATES = {
    # Roles have capitals; a message is its parts alone, and an image follows the colon at once.
    "smolvlm": (
        "<|im_start|>{% for m in messages %}{{ m['role'] | capitalize }}"
        "{{ ':' if m['content'][0]['type'] == 'image' else ': ' }}"
        "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
        "{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}"
        "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
    # All images of a message come first; no first token is written; answers are marked.
    "llava": (
        "{% for m in messages %}{% if m['role'] != 'system' %}{{ m['role'].upper() + ': ' }}"
        "{% endif %}{% for part in m['content'] | selectattr('type', 'equalto', 'image') %}"
        "{{ '<image>\\n' }}{% endfor %}{% if m['role'] != 'assistant' %}"
        "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}"
        "{{ part['text'] + ' ' }}{% endfor %}{% else %}"
        "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}"
        "{% generation %}{{ part['text'] + ' ' }}{% endgeneration %}{% endfor %}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
    ),
    # Adds a default system prompt; tells strings and parts apart.
    "qwen2_5_vl": (
        "{% set images = namespace(count=0) %}{% for m in messages %}"
        "{% if loop.first and m['role'] != 'system' %}<|im_start|>system\n"
        "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ m['role'] }}\n"
        "{% if m['content'] is string %}{{ m['content'] }}<|im_end|>\n{% else %}"
        "{% for part in m['content'] %}"
        "{% if part['type'] == 'image' or 'image' in part or 'image_url' in part %}"
        "{% set images.count = images.count + 1 %}"
        "{% if add_vision_id %}Picture {{ images.count }}: {% endif %}"
        "<|vision_start|><|image_pad|><|vision_end|>"
        "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # Adds nothing.
    "qwen3_vl": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
        "{% for part in m['content'] %}"
        "{% if part['type'] == 'image' or 'image' in part or 'image_url' in part %}"
        "<|vision_start|><|image_pad|><|vision_end|>"
        "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    # The system speaks within the user's first message; texts lose the spaces around them.
    "gemma3": (
        "{{ bos_token }}\n"
        "{%- set said = messages -%}{%- set before = '' -%}\n"
        "{%- if messages[0]['role'] == 'system' -%}\n"
        "    {%- set content = messages[0]['content'] -%}\n"
        "    {%- set before = content if content is string else content[0]['text'] -%}\n"
        "    {%- set before = before + '\\n\\n' -%}\n"
        "    {%- set said = messages[1:] -%}\n"
        "{%- endif -%}\n"
        "{%- for m in said -%}\n"
        "    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) -%}\n"
        "        {{ raise_exception('user and assistant must take turns') }}\n"
        "    {%- endif -%}\n"
        "    {%- set role = 'model' if m['role'] == 'assistant' else m['role'] -%}\n"
        "    {{ '<start_of_turn>' + role + '\\n' + (before if loop.first else '') }}\n"
        "    {%- if m['content'] is string -%}\n"
        "        {{ m['content'] | trim }}\n"
        "    {%- else -%}\n"
        "        {%- for part in m['content'] -%}\n"
        "            {%- if part['type'] == 'image' -%}\n"
        "                {{ '<start_of_image>' }}\n"
        "            {%- elif part['type'] == 'text' -%}\n"
        "                {{ part['text'] | trim }}\n"
        "            {%- endif -%}\n"
        "        {%- endfor -%}\n"
        "    {%- endif -%}\n"
        "    {{ '<end_of_turn>\\n' }}\n"
        "{%- endfor -%}\n"
        "{%- if add_generation_prompt -%}\n"
        "    {{ '<start_of_turn>model\\n' }}\n"
        "{%- endif -%}\n"
    ),
}
# Qwen's, with another placeholder, on a line of its own.
TEMPLATES["internvl"] = TEMPLATES["qwen3_vl"].replace(
    "<|vision_start|><|image_pad|><|vision_end|>", "<IMG_CONTEXT>\n"
)
TEMPLATES["mistral3"] = TEMPLATES["pixtral"] = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '[SYSTEM_PROMPT]' if m['role'] == 'system' else '[INST]' if m['role'] == 'user' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{{ '[IMG]' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}"
    "{{ '[/INST]' if m['role'] == 'user' else eos_token if m['role'] == 'assistant' }}"
    "{% endfor %}"
)
TEMPLATES["gemma4"] = TEMPLATES["gemma4_whole"] = (
    "{{ bos_token }}{% for m in messages %}"
    "<|turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] | trim }}{% else %}"
    "{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|image|>' }}"
    "{% elif part['type'] == 'text' %}{{ part['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
    "<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
TEMPLATES["llava_next"] = TEMPLATES["llava"]
TEMPLATES["qwen3_vl_moe"] = TEMPLATES["qwen3_5"] = TEMPLATES["qwen3_vl"]
TEMPLATES["glm4v"] = TEMPLATES["glm4v_moe"] = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|begin_of_image|><|image|><|end_of_image|>"
    "{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
TEMPLATES["idefics3"] = TEMPLATES["smolvlm"]
TEMPLATES["lfm2_vl"] = TEMPLATES["qwen3_vl"].replace(
    "<|vision_start|><|image_pad|><|vision_end|>", "<image>"
)
