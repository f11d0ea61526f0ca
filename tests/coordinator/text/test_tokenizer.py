"""Tests that the tokenizer gives the same results as transformers and reports problems of a model directory."""

import contextlib
import datetime
import io
import json
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import processors

from services.common.errors import InvalidInput, NotFound
from services.coordinator.text.chat_template import ChatTemplate, TemplateRefusal, read_arguments
from services.coordinator.text.tokenizer import Tokenizer
from tests.support import raises

# Features that templates of well-known models use: macros, dates, tojson, break, generation marks and refusals.
EVERYTHING = """{{- bos_token }}
{%- macro header(role) -%}<|im_start|>{{ role }}
{% endmacro -%}
{%- set date = strftime_now("%d %b %Y") %}
{{- "Today: " + date + " " + {"a<b": [1, "é"]} | tojson }}
{{- "\\n" + {"z": 1, "a": 2} | tojson(indent=2, sort_keys=true) }}
{% for message in messages %}
    {% if message.role not in ("system", "user", "assistant") %}
        {{- raise_exception("unknown role " + message.role) }}
    {% endif %}
    {% if loop.index > 5 %}{% break %}{% endif %}
    {{- header(message.role) }}
    {% if message.role == "assistant" %}
        {%- generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
    {% else %}
        {{- message.content | trim }}{{ eos_token }}
    {% endif %}
{% endfor %}
{% if tools is not none %}tools{% endif %}
{%- if add_generation_prompt %}{{ header("assistant") }}{% endif %}"""

CHATS = [
    [{"role": "user", "content": "What is 12 + 30?"}],
    [{"role": "system", "content": " Be brief.\n"}, {"role": "user", "content": "Zoë sold 48 clips 🎉"}],
    [
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "<|im_end|> + 1"},
    ],
]


@pytest.fixture(scope="session")
def load_transformers():
    from transformers import AutoTokenizer

    return lambda directory: AutoTokenizer.from_pretrained(str(directory), local_files_only=True)


@pytest.mark.parametrize("template", [None, EVERYTHING], ids=["chatml", "everything"])
@pytest.mark.parametrize("chat", CHATS, ids=["user", "system", "turns"])
def test_templates_as_transformers(make_model, load_transformers, template, chat):
    directory = make_model() if template is None else make_model(chat_template=template)
    theirs = load_transformers(directory)
    ours = Tokenizer.load(directory, date=datetime.date.today())
    text = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert ours.render(chat) == text
    ids = theirs.apply_chat_template(chat, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert ours.encode(ours.render(chat)) == ids


@pytest.mark.parametrize("template", [None, EVERYTHING], ids=["chatml", "everything"])
def test_whole_conversations_as_transformers(make_model, load_transformers, template):
    directory = make_model() if template is None else make_model(chat_template=template)
    chat = [*CHATS[1], {"role": "assistant", "content": "24"}]
    text = load_transformers(directory).apply_chat_template(chat, tokenize=False)
    assert Tokenizer.load(directory, date=datetime.date.today()).render(chat, add_generation_prompt=False) == text


def test_template_variables_as_transformers(make_model, load_transformers):
    directory = make_model()
    theirs = load_transformers(directory)
    ours = Tokenizer.load(directory)
    text = theirs.apply_chat_template(CHATS[0], tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert "<think>" in text
    assert ours.render(CHATS[0], enable_thinking=False) == text


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(text=st.text(max_size=60) | st.sampled_from(["a<|im_end|>b", " <|im_start|> x", "it 's . don 't 2024"]))
def test_encode_and_decode_as_transformers(pair, text):
    ours, theirs = pair
    for add in (False, True):
        ids = theirs.encode(text, add_special_tokens=add)
        assert ours.encode(text, add_special_tokens=add) == ids
        assert ours.encode_batch([text], add_special_tokens=add) == [ids]
    for skip in (False, True):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.decode(ours.encode(text), skip_special_tokens=False) == unicodedata.normalize("NFC", text)


@pytest.fixture
def pair(make_model, load_transformers):
    directory = make_model()
    return Tokenizer.load(directory), load_transformers(directory)


def test_bos_only_where_asked(tokenizer):
    assert tokenizer.encode("clips", add_special_tokens=True) == [0, *tokenizer.encode("clips")]
    assert 0 not in tokenizer.encode("clips")


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(min_size=1, max_size=20), times=st.integers(0, 2), after=st.sampled_from(["", " <|im_end|>"]))
def test_a_text_begins_with_bos_once_and_is_continued(make_model, backend, text, times, after):
    """Tokenizers may add BOS, EOS, both or none; a text that begins with BOS was rendered with it."""
    for single in ("$A", "<|endoftext|> $A", "$A <|im_end|>", "<|endoftext|> <|im_start|> $A <|im_end|>"):
        own = tokenizers.Tokenizer.from_str(backend.to_str())
        ids = [(token, own.token_to_id(token)) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]
        own.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
        tokenizer = Tokenizer.load(make_model(tokenizer=json.loads(own.to_str())))
        before = single.partition("$A")[0].replace("> <", "><").strip()
        bos, plain = tokenizer.encode(before), tokenizer.encode(text + after)
        written = tokenizer.encode(before * times + text + after, add_special_tokens=True)
        assert written == bos * max(1, times) + plain
        assert tokenizer.encode_batch([before * times + text + after], add_special_tokens=True) == [written]


def test_tokens_that_only_the_config_knows(make_model, load_transformers):
    tokenizer = json.loads((make_model() / "tokenizer.json").read_text())
    next_id = len(tokenizer["model"]["vocab"])
    config = json.loads((make_model() / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {
        str(next_id): {"content": "<tool>", "special": False, "normalized": False},
        str(next_id + 1): {"content": "<|pad|>", "special": True, "normalized": False},
    }
    directory = make_model(tokenizer_config=config)
    ours, theirs = Tokenizer.load(directory), load_transformers(directory)
    ids = theirs.encode("a<tool>b<|pad|>", add_special_tokens=False)
    assert next_id in ids and next_id + 1 in ids
    assert ours.encode("a<tool>b<|pad|>") == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "a<tool>b"


@pytest.fixture
def with_older(make_model):
    """Writes a model whose special tokens are, as transformers 4 wrote them, also in a file of their own."""

    def make(special_tokens_map, **config):
        base = json.loads((make_model() / "tokenizer_config.json").read_text())
        base["tokenizer_class"] = "PreTrainedTokenizerFast"  # Qwen2Tokenizer drops lstrip and rstrip
        config = {key: value for key, value in (base | config).items() if value is not None}
        files = {"tokenizer_config": config, "special_tokens_map": special_tokens_map, "config": {"eos_token_id": 2}}
        return make_model(EVERYTHING, **files)

    return make


@pytest.mark.parametrize(
    ("special_tokens_map", "config"),
    [
        # Only there.
        ({"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}, {"bos_token": None, "eos_token": None}),
        # It wins over the config.
        ({"bos_token": {"content": "<|im_start|>", "special": True, "lstrip": False}}, {}),
        # Missing from tokenizer.json, as text and as an object; twice is once.
        ({"additional_special_tokens": ["<tool>", "<|im_end|>"]}, {}),
        ({"extra_special_tokens": [{"content": "<tool>", "lstrip": True, "rstrip": True}]}, {}),
        ({"additional_special_tokens": ["<tool>"]}, {"additional_special_tokens": ["<tool>"]}),
        ({}, {"additional_special_tokens": ["<tool>", "<call>"]}),
        ({}, {"extra_special_tokens": ["<tool>"]}),
        ({"mask_token": "<tool>"}, {}),
        ({"mask_token": {"content": "<tool>", "lstrip": True, "rstrip": True}}, {}),
        ({}, {"mask_token": {"content": "<tool>", "lstrip": True, "__type": "AddedToken"}}),
        # A plain word of the vocabulary becomes a token that is never split.
        ({"additional_special_tokens": ["a"]}, {}),
        # Beside added_tokens_decoder the file is not read.
        ({"bos_token": "<|im_start|>", "additional_special_tokens": ["<tool>"]}, {"added_tokens_decoder": {}}),
    ],
)
def test_special_tokens_of_older_models_as_transformers(with_older, load_transformers, special_tokens_map, config):
    directory = with_older(special_tokens_map, **config)
    ours, theirs = Tokenizer.load(directory, date=datetime.date.today()), load_transformers(directory)
    for text in ("a <tool> b", "<call><tool>ab", "clips<|im_end|>"):
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    rendered = theirs.apply_chat_template(CHATS[2], tokenize=False, add_generation_prompt=True)
    assert ours.render(CHATS[2]) == rendered
    assert theirs.eos_token_id in ours.eos_token_ids


def test_added_token_with_two_ids_is_an_error(make_model):
    directory = make_model(
        tokenizer_config={"eos_token": "<|im_end|>", "added_tokens_decoder": {"9": {"content": "<|im_end|>"}}}
    )
    with raises(InvalidInput, field="model"):
        Tokenizer.load(directory)


def test_leftover_truncation_and_padding_are_off(make_model):
    content = json.loads((make_model() / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    tokenizer = Tokenizer.load(make_model(tokenizer=content))
    text = "How many clips did Natalia sell altogether in April and May?"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.encode_batch(["a", text]) == [tokenizer.encode("a"), tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (0, 2)),
        ({"generation_config": None, "config": None}, (2,)),
        ({"generation_config": {"eos_token_id": 1}, "config": {"eos_token_id": [0]}}, (0, 1, 2)),
        ({"tokenizer_config": {}, "config": {"eos_token_id": 1}, "generation_config": {}}, (1,)),
        ({"tokenizer_config": {"eos_token": None}, "generation_config": {"eos_token_id": None}}, (2,)),
    ],
)
def test_eos_is_the_union(make_model, files, expected):
    assert Tokenizer.load(make_model(**files)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer": None}, "has no tokenizer: none of tokenizer.json"),
        ({"tokenizer": "{}"}, "transformers cannot load the tokenizer: KeyError"),
        ({"tokenizer_config": "{"}, "tokenizer_config.json is not JSON"),
        ({"config": "[]"}, "config.json is not a JSON object"),
        ({"tokenizer_config": {"eos_token": "</s>"}}, "eos_token '</s>' is not in tokenizer.json"),
        ({"tokenizer_config": {}, "generation_config": None, "config": None}, "no eos token in"),
        ({"chat_template": None, "tokenizer_config": {"chat_template": 5}}, "chat_template of .* is 5, not a text"),
        ({"tokenizer_config": {"added_tokens_decoder": {"1": {"a": 1}}}}, "without the text `content`"),
        ({"generation_config": {"eos_token_id": [0, "</s>"]}}, "generation_config.json: end token '</s>' is"),
        ({"generation_config": {"eos_token_id": -1}}, "generation_config.json: end token -1 is outside"),
        ({"config": {"model_type": "qwen3", "rms_norm_eps": "a"}}, "/config.json: transformers .*'rms_norm_eps'"),
        ({"special_tokens_map": "{"}, "special_tokens_map.json is not JSON"),
        ({"special_tokens_map": {"bos_token": 3}}, "bos_token has to be either str or AddedToken"),
    ],
)
def test_a_damaged_directory_is_named(make_model, files, message):
    directory = make_model(**files)
    with pytest.raises((InvalidInput, NotFound), match=message) as refused:
        Tokenizer.load(directory)
    assert str(directory) in refused.value.message and refused.value.metadata["field"] == "model"


def test_a_damaged_template_is_named(make_model, tmp_path):
    directory, own = make_model(chat_template="{% if %}"), tmp_path / "own.jinja"
    own.write_text("{% else %}")
    for template, source in ((None, directory / "chat_template.jinja"), (own, own)):
        with raises(InvalidInput, field="data.chat_template") as refused:
            Tokenizer.load(directory, chat_template=template)
        assert refused.value.message.startswith(f"{source}: ") and "line 1" in refused.value.message


@pytest.mark.parametrize("model_type", ["qwen2", "unknown"])
def test_code_of_a_model_is_never_run(make_model, model_type):
    code = {"auto_map": {"AutoConfig": "own.Own", "AutoTokenizer": ["own.Own", "own.Own"]}}
    own = {"tokenizer_class": "Own", "eos_token": "<|im_end|>"} | code
    directory = make_model(tokenizer_config=own, config={"model_type": model_type} | code)
    (directory / "own.py").write_text("raise SystemExit('the code was run')")
    with contextlib.suppress(InvalidInput):
        Tokenizer.load(directory)


def test_a_tokenizer_of_sentencepiece_is_converted(make_model, load_transformers):
    sentencepiece = pytest.importorskip("sentencepiece")
    texts, written = [f"How many clips are {i} + {i * 7}?" for i in range(200)], io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_writer=written, vocab_size=60, model_type="bpe", minloglevel=2
    )
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    files = {"tokenizer_config": config, "config": {"model_type": "llama"}, "generation_config": None}
    directory = make_model(tokenizer=None, **files)
    (directory / "tokenizer.model").write_bytes(written.getvalue())
    ours, theirs = Tokenizer.load(directory), load_transformers(directory)
    tokens = ours.encode(texts[0])
    assert tokens == theirs.encode(texts[0], add_special_tokens=False)
    assert ours.decode(tokens) == texts[0] and ours.eos_token_ids == (2,)
    (directory / "tokenizer.model").write_bytes(b"neither sentencepiece nor tiktoken")
    with raises(InvalidInput, field="model"):
        Tokenizer.load(directory)


def test_a_process_that_loads_a_tokenizer_imports_no_torch():
    code = (
        "import sys; from pathlib import Path\n"
        "from services.coordinator.text.tokenizer import Tokenizer\n"
        "Tokenizer.load(Path('deploy/quickstart/model'))\n"
        "print({'torch', 'vllm'} & sys.modules.keys())\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("set()\n", "")


def test_where_the_template_comes_from(make_model, tmp_path):
    config = {"eos_token": "<|im_end|>", "chat_template": "inline {{ messages[0].content }}"}
    chat = [{"role": "user", "content": "x"}]
    assert Tokenizer.load(make_model(None, tokenizer_config=config)).render(chat) == "inline x"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    directory = make_model(None, tokenizer_config=config | {"chat_template": named})
    assert Tokenizer.load(directory).render(chat) == "default"
    with raises(InvalidInput, field="data.chat_template"):
        Tokenizer.load(make_model(None, tokenizer_config=config | {"chat_template": named[:1]}))
    assert Tokenizer.load(make_model("file", tokenizer_config=config)).render(chat) == "file"
    (tmp_path / "own.jinja").write_text("own")
    assert Tokenizer.load(directory, chat_template=tmp_path / "own.jinja").render(chat) == "own"
    with raises(NotFound, field="data.chat_template"):
        Tokenizer.load(directory, chat_template=tmp_path / "none.jinja")
    (tmp_path / "own.jinja").write_bytes("Zoë".encode("latin-1"))
    with raises(InvalidInput, field="data.chat_template"):
        Tokenizer.load(directory, chat_template=tmp_path / "own.jinja")


def test_messages_need_a_template(make_model):
    tokenizer = Tokenizer.load(make_model(None))
    assert not tokenizer.has_chat_template
    with raises(InvalidInput, field="data.chat_template"):
        tokenizer.render(CHATS[0])


def test_the_date_is_never_the_clocks(make_model):
    directory = make_model(chat_template='{{ strftime_now("%Y-%m-%d") }}')
    with raises(InvalidInput, field="data.template_date") as caught:
        Tokenizer.load(directory).render(CHATS[0])
    assert not isinstance(caught.value, TemplateRefusal)
    assert Tokenizer.load(directory, date=datetime.date(2024, 7, 26)).render(CHATS[0]) == "2024-07-26"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].none.x }}", "has no attribute 'none'"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ messages.append(1) }}", "access to attribute 'append'"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages[0].content.index('</think>') }}", "substring not found"),
        ("{{ 1 // (messages | length - 1) }}", "by zero"),
        ("{{ range(10 ** 6) | list }}", "too big"),
        ("{{ cycler() }}", "at least one item"),
        ("{{ none | dictsort }}", "has no attribute 'items'"),
        ("{{ messages[0].content | truncate(1) }}", "expected length >= 3"),
        ("{{ messages[0].content * 10 ** 16 }}", "MemoryError"),
    ],
)
def test_refusals(template, message):
    with pytest.raises(TemplateRefusal, match=message):
        ChatTemplate(template, {}).render(CHATS[0])


def test_a_misspelled_template_variable_is_an_error(tokenizer):
    with raises(InvalidInput, field="data.chat_template_kwargs"):
        tokenizer.render(CHATS[0], enable_thinkng=False)


def test_a_text_that_the_vocabulary_lacks_is_named() -> None:
    tokenizer = Tokenizer.load(Path("deploy/quickstart/model"))
    assert tokenizer.encode_batch(["1+2="]) == [tokenizer.encode("1+2=")]
    with raises(InvalidInput, field="data"):
        tokenizer.encode_batch(["1+2=", "3 plus 4"])


@pytest.mark.parametrize(
    "source",
    ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% if x %}" * 5000 + "{% endif %}" * 5000, "{% break %}"],
    ids=["parentheses", "blocks", "break"],
)
def test_a_template_that_cannot_be_compiled_is_refused(source):
    with raises(InvalidInput, field="data.chat_template"):
        ChatTemplate(source, {})


def test_a_template_that_never_ends_is_refused():
    template = ChatTemplate("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", {})
    with raises(TemplateRefusal, field="messages"):
        template.render([])


@pytest.mark.parametrize(
    "arguments", ['{"a": 1', "[1]", "2", [1], [], 0, "[" * 100_000, '{"a": ' * 70 + "1" + "}" * 70]
)
def test_arguments_that_are_no_object(arguments: object):
    assert read_arguments(arguments) is None
    assert read_arguments("") == read_arguments(None) == read_arguments(" {} ") == {}
