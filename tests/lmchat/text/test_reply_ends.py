"""Tokens that end a reply: of the configuration, the tokenizer, GGUF metadata and the template."""

import json

import gguf_files
import pytest
import tokenizers
from chat_models import CHATML, chat_model, make_tokenizer
from template_conversations import template_named, template_names, tokenizer_for

import lmchat
from lmchat.cli.info import chat_facts
from lmchat.text.prompt import PromptBuilder
from lmchat.text.template import ChatTemplate
from lmchat.text.tokenizer import Tokenizer
from turbomind.loading.loader import describe

OPTIONS = {"threads": 1, "cache_memory": "16MiB", "store": "memory"}


# --- the token that a template writes after a reply ----------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return tokenizer_for("qwen2.5", tmp_path_factory.mktemp("t"), True)


def ends_of(tokenizer, source, **tokens):
    builder = PromptBuilder(tokenizer, ChatTemplate(source, tokens))
    names = {i: text for text, i in tokenizer.added_texts.items()}
    return {names[i] for i in builder.end_token_ids}


# What the models' own generation configs have, apart from tokens that no template writes.
ENDS = {
    "Qwen-Qwen3-0.6B": "<|im_end|>",
    "meta-llama-Llama-3.1-8B-Instruct": "<|eot_id|>",
    "google-gemma-2-2b-it": "<end_of_turn>",
    "google-gemma-4-31B-it": "<turn|>",
    "microsoft-Phi-3.5-mini-instruct": "<|end|>",
    "ort-extensions--phi-4-base": "<|im_end|>",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "<｜end▁of▁sentence｜>",
    "mistral-common--v13": "</s>",
    "chujiezheng--llama-2-chat": "</s>",
    "ibm-granite-granite-3.3-2B-Instruct": "<|end_of_text|>",
    "HuggingFaceTB-SmolLM3-3B": "<|im_end|>",
    "GLM-4.6": "<|user|>",
    "openai-gpt-oss-120b": "<|return|>",
    "ByteDance-Seed-OSS": "<seed:eos>",
}


@pytest.mark.parametrize("name", ENDS)
def test_the_token_after_a_reply_in_a_real_template_ends_it(name, tokenizer):
    template = template_named(name)
    builder = PromptBuilder(tokenizer, template)
    assert ENDS[name] in tokenizer.special_texts
    assert set(builder.end_token_ids) == {tokenizer.special_texts[ENDS[name]]}


def test_no_real_template_ends_replies_where_their_reasoning_ends(tokenizer):
    for name in template_names():
        builder = PromptBuilder(tokenizer, template_named(name))
        form = builder.reasoning
        if form is not None:
            inner = [form.open, form.close, *form.skip]
            ids = {i for text in inner for i in tokenizer.encode(text, add_special_tokens=False)}
            assert ids.isdisjoint(builder.end_token_ids), name


BASE = "{% for m in messages %}<|user|>{{ m.content }}"


@pytest.mark.parametrize(
    ("after", "ends"),
    [
        ("<|end|>\n", {"<|end|>"}),
        (" \n<|end|><|user|>", {"<|end|>"}),
        ("{% if not loop.last %}<|end|>{% endif %}", {"<|end|>"}),
        ("{% if loop.last %}<|end|>{% endif %}", {"<|end|>", "<|user|>"}),
        ("", {"<|user|>"}),
        ("\nHuman: ", set()),
        ("text <|end|>", set()),
        ("{{ eos_token }}", {"<|end|>"}),
        ("{{ raise_exception('no') if m.role == 'assistant' }}<|end|>", set()),
    ],
)
def test_what_a_template_writes_after_a_reply(after, ends):
    backend = make_tokenizer()
    backend.add_tokens([tokenizers.AddedToken(t) for t in ("<|user|>", "<|end|>", "\n", "Human")])
    found = ends_of(Tokenizer(backend), f"{BASE}{after}{{% endfor %}}", eos_token="<|end|>")
    assert found == ends


def test_a_token_inside_of_replies_ends_none():
    """As in Solar's format, whose reasoning ends with the token that ends a reply, too."""
    backend = make_tokenizer()
    texts = ["<|user|>", "<|begin|>", "<|think|>", "<|content|>", "<|end|>"]
    backend.add_special_tokens(texts)
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}<|end|>{% else %}"
        "<|begin|>{% if m.reasoning_content %}<|think|>{{ m.reasoning_content }}<|end|><|begin|>"
        "{% endif %}<|content|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    )
    assert ends_of(Tokenizer(backend), source) == set()


# --- engines -------------------------------------------------------------------------------------

END, OTHER = 2, 0
PLAIN = CHATML.replace("<|im_end|>", "")
PLACES = {
    "generation_config": ("generation_config.json", {"eos_token_id": [END]}, PLAIN),
    "config": ("config.json", {"eos_token_id": END}, PLAIN),
    "tokenizer_config": ("tokenizer_config.json", {"eos_token": "<|im_end|>"}, PLAIN),
    "an added token": ("tokenizer_config.json", {"eos_token": {"content": "<|im_end|>"}}, PLAIN),
    "special_tokens_map": ("special_tokens_map.json", {"eos_token": "<|im_end|>"}, PLAIN),
    "the template": ("tokenizer_config.json", {}, CHATML),
}


def change(path, *removed, **values):
    described = json.loads(path.read_text()) if path.exists() else {}
    described = {key: value for key, value in described.items() if key not in removed}
    path.write_text(json.dumps({**described, **values}))


def ended(model, device, **more):
    """Returns the reply of a model that ends it as soon as it may."""
    with lmchat.ChatEngine(model, device=device, **OPTIONS) as engine:
        assert END in engine.info.eos_token_ids
        bias = {END: 1e6, OTHER: -1e6}
        settings = {"max_new_tokens": 9, "min_new_tokens": 3, "temperature": 0, "logit_bias": bias}
        return engine.session().send("hello", **{**settings, **more})


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_a_reply_ends_at_the_token_that_any_file_names(place, special, tmp_path, device):
    file, values, template = PLACES[place]
    folder = chat_model(tmp_path / "model", template=template)
    change(folder / "tokenizer_config.json", "eos_token")
    change(folder / "config.json", eos_token_id=OTHER)
    change(folder / "generation_config.json", eos_token_id=[OTHER])
    described = json.loads((folder / "tokenizer.json").read_text())
    described["added_tokens"][END]["special"] = special
    (folder / "tokenizer.json").write_text(json.dumps(described))
    change(folder / file, **values)
    reply = ended(folder, device)
    assert reply.finish_reason == "stop"
    assert len(reply.token_ids) == 4
    assert reply.token_ids[-1] == END
    assert "<|im_end|>" not in reply.text
    assert ended(folder, device, ignore_eos=True).finish_reason == "length"
    assert END in chat_facts(describe(folder))["eos_token_ids"]


@pytest.mark.parametrize("kind", [1, 3, 4])
@pytest.mark.parametrize("template", [CHATML, PLAIN])
def test_a_reply_ends_at_a_spelling_of_any_type_in_a_gguf_file(kind, template, tmp_path, device):
    folder = chat_model(tmp_path / "folder", template=template)
    change(folder / "tokenizer_config.json", eos_token="<|endoftext|>")
    metadata = gguf_files.byte_level(folder, "gpt-2")
    metadata["tokenizer.ggml.token_type"][END] = kind
    metadata["tokenizer.ggml.token_type"][1] = kind
    model = gguf_files.write_gguf(folder, tmp_path / "model.gguf", tokenizer=metadata)
    reply = ended(model, device)
    assert (reply.finish_reason, len(reply.token_ids)) == ("stop", 4)
    assert "<|im_end|>" not in reply.text
    with lmchat.ChatEngine(model, device=device, **OPTIONS) as engine:
        session = engine.session()
        session.send("a<|im_end|>b<|im_start|>", max_new_tokens=1, bad_words=[[1], [END]])
        expected = [template.count("<|im_start|>"), template.count("<|im_end|>")]
        assert [list(session.token_ids).count(i) for i in (1, END)] == expected


def test_an_end_token_that_replies_show_is_shown(tmp_path, device):
    """Some models end a reply at the end of a call of a tool."""
    close = "</tool_call>"
    call = f"(m.tool_calls | tojson + '{close}' if m.tool_calls else '') + '<|im_end|>'"
    folder = chat_model(tmp_path / "model", template=CHATML.replace("'<|im_end|>'", call))
    text = (folder / "tokenizer.json").read_text().replace("<|endoftext|>", close)
    described = json.loads(text)
    described["added_tokens"][OTHER]["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(described))
    change(folder / "tokenizer_config.json", "pad_token")
    change(folder / "generation_config.json", eos_token_id=[OTHER])
    with lmchat.ChatEngine(folder, device=device, **OPTIONS) as engine:
        bias = {OTHER: 1e6}
        reply = engine.session().send("hi", max_new_tokens=5, logit_bias=bias, temperature=0)
        assert (reply.finish_reason, reply.text) == ("stop", close)
        assert engine.tokenizer.encode(close, parse_special=False) != [OTHER]


@pytest.mark.parametrize("stop", ["<|im_start|>", "<|im_start|><|im_start|>"])
def test_a_stop_string_that_spells_a_hidden_token_ends_every_kind_of_reply(tmp_path, stop, device):
    folder = chat_model(tmp_path / "model")
    settings = {"max_new_tokens": 5, "temperature": 0, "logit_bias": {1: 1e6}}
    messages = [{"role": "user", "content": "hi"}]
    with lmchat.ChatEngine(folder, device=device, **OPTIONS) as engine:
        session = engine.session()
        for generate in (
            lambda **more: session.send("hi", **settings, **more),
            lambda **more: engine.chat(messages, **settings, **more),
            lambda **more: engine.generate("hi", **settings, **more),
        ):
            reply = generate(stop_strings=[stop])
            assert (reply.finish_reason, reply.text, reply.token_ids) == ("stop", "", [])
            assert generate().finish_reason == "length"
            reply = generate(stop_strings=["a<|im_start|>"])
            assert (reply.finish_reason, len(reply.token_ids)) == ("length", 5)
