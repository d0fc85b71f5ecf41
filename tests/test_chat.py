"""Chat templates: rendered in a sandbox, cut into what is read and what is learned."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from mamba_ops.chat import ChatTemplate, learned_parts, load_template, render
from mamba_ops.config import TokenizerConfig
from mamba_ops.tokenizer import build_tokenizer

CHATML = """{% for message in messages %}<|{{ message.role }}|>
{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
{% else %}{{ message.content }}{{ eos_token }}
{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
TALK = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "A model."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "Why not."},
    {"role": "user", "content": "Bye."},
]


def template(tmp_path, text=CHATML):
    return ChatTemplate(text, {"eos_token": "</s>"}, tmp_path / "tokenizer_config.json")


def save(folder, **declared):
    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(declared))
    return folder


def test_what_the_assistant_says_is_learned(tmp_path):
    parts = learned_parts(template(tmp_path), TALK, "</s>", "a talk")
    assert parts == [
        (False, "<|system|>\nBe short.</s>\n<|user|>\nWho?</s>\n<|assistant|>\n"),
        (True, "A model.</s>"),
        (False, "<|user|>\nWhy?</s>\n<|assistant|>\n"),
        (True, "Why not."),
    ]


def test_an_assistant_that_begins_is_learned_with_its_heading(tmp_path):
    assert learned_parts(template(tmp_path), TALK[2:3], "none", "a talk") == [
        (False, ""),
        (True, "<|assistant|>\nA model.</s>"),
    ]


def test_a_template_that_changes_what_came_before_is_refused(tmp_path):
    changing = template(tmp_path, "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ValueError, match=r"a talk: the chat template .*; with message 2 it gives '3Be .*place of '2B"):
        learned_parts(changing, TALK, "</s>", "a talk")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ messages[0].name.first }}", "UndefinedError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ strftime_now('%d') }}", "UndefinedError: 'strftime_now' is undefined"),
    ],
)
def test_what_a_template_may_not_do_is_named(tmp_path, text, message):
    with pytest.raises(ValueError, match=rf"chat template of .*tokenizer_config\.json: {message}"):
        render(template(tmp_path, text), TALK, add_generation_prompt=False)


def test_templates_are_found_beside_the_tokenizer(tmp_path):
    with pytest.raises(ValueError, match=r"the corpus has messages, expected a chat_template in .*, got none"):
        load_template(save(tmp_path / "none"))
    with pytest.raises(ValueError, match="got int"):
        load_template(save(tmp_path / "number", chat_template=3))
    named = [{"name": "tool_use", "template": "tool"}, {"name": "default", "template": "default"}]
    assert load_template(save(tmp_path / "named", chat_template=named)).text == "default"
    tokens = {"eos_token": {"content": "</s>"}, "bos_token": "<s>", "pad_token": None}
    found = load_template(save(tmp_path / "a", chat_template="text", **tokens))
    assert (found.text, found.tokens) == ("text", {"eos_token": "</s>", "bos_token": "<s>"})
    (tmp_path / "a" / "chat_template.jinja").write_text("file")
    assert load_template(tmp_path / "a").text == "file"
    build_tokenizer(TokenizerConfig(path=str(tmp_path / "a"), end_of_text="</s>"), [], tmp_path / "built")
    assert load_template(tmp_path / "built").text == "file"


@pytest.mark.parity
@pytest.mark.parametrize(
    "text",
    [
        CHATML,
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] | upper }}] {{ m.content | trim }} {% endfor %}",
        "{% for m in messages if m.role != 'x' %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{{ m | tojson }}{% endfor %}",
        "{% if tools is not none %}tools{% endif %}{% set ns = namespace(n=0) %}{% for m in messages %}"
        "{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endfor %}",
    ],
)
@pytest.mark.parametrize("prompt", [True, False])
def test_transformers_renders_the_same(tmp_path, text, prompt):
    transformers = pytest.importorskip("transformers")
    folder = save(
        tmp_path / "t",
        chat_template=text,
        bos_token="</s>",
        eos_token="</s>",
        tokenizer_class="PreTrainedTokenizerFast",
    )
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(TALK, tokenize=False, add_generation_prompt=prompt)
    assert render(load_template(folder), TALK, add_generation_prompt=prompt) == expected
