"""Grammars: what is compiled and what is refused, which ids may follow, where a text may end."""

from __future__ import annotations

import json
import subprocess
import sys
from array import array

import numpy as np
import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from tests.import_scan import ROOT
from tests.text.small_tokenizers import byte_fallback, byte_level
from tp_runtime.errors import InvalidRequestError, RequestFailedError
from tp_runtime.sampling_params import StructuredOutputsParams
from tp_runtime.text.grammar import Grammar, GrammarCompiler, TokenMask, _Vocabulary
from tp_runtime.text.tokenizer import Tokenizer

VOCAB = 420
"""Of the model; the tokenizer has fewer ids."""
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def _tokenizer(raw: RawTokenizer) -> Tokenizer:
    raw.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    return Tokenizer(raw, {}, None)


TOKENIZER = _tokenizer(byte_level())
END = TOKENIZER._tokenizer.token_to_id("<|im_end|>")
COMPILER = GrammarCompiler(TOKENIZER, [END], VOCAB)


def allowed(mask: TokenMask | None) -> set[int]:
    assert mask is not None
    if mask.ids:
        return set(array("i", mask.ids))
    bits = np.unpackbits(np.frombuffer(mask.bits, np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def grammar(**fields: object) -> Grammar:
    return COMPILER.compile(StructuredOutputsParams(**fields))  # type: ignore[arg-type]


def push(grammar: Grammar, text: str) -> None:
    """Every token must be among the allowed ones."""
    for token_id in TOKENIZER.encode(text, add_special_tokens=False):
        assert token_id in allowed(grammar.next_mask()), (text, TOKENIZER.token(token_id))
        grammar.consume([token_id])


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "age": 12}',
        '{"name":"Größe 🇫🇷 \\n","age":-1}',
        '{\n    "name": "",\n    "age": 0\n}',
    ],
)
def test_a_text_that_is_valid_can_be_written_and_ends_the_sample(text):
    g = grammar(json=PERSON)
    push(g, text)
    assert g.next_mask() is None


def test_a_schema_may_come_as_text_and_json_object_takes_any_object():
    for g in (grammar(json=json.dumps(PERSON)), grammar(json_object=True)):
        push(g, '{"name": "x", "age": 1')
    assert TOKENIZER.encode("[", False)[0] not in allowed(grammar(json_object=True).next_mask())


@pytest.mark.parametrize("text", ['{"nome"', '{"name": 1', '{"age"', "[", " {", '{"name": "x"}'])
def test_a_text_that_is_not_valid_cannot_be_written(text):
    g = grammar(json=PERSON)
    with pytest.raises((AssertionError, RequestFailedError)):
        push(g, text)
        raise RequestFailedError("it could")
    assert g.next_mask() is not None


def test_white_space_has_a_bound():
    g = grammar(json_object=True)
    push(g, "{")
    for _ in range(100):
        spaces = [i for i in allowed(g.next_mask()) if not TOKENIZER.token(i).strip()]
        if not spaces:
            return
        g.consume(spaces[:1])
    raise AssertionError("a model could write spaces for ever")


def test_end_ids_are_allowed_exactly_where_the_text_may_end():
    stop = 5
    g = COMPILER.compile(StructuredOutputsParams(regex="[0-9]{2,4}"), [stop])
    for count in range(4):
        ends = {END, stop} & allowed(g.next_mask())
        assert ends == ({END, stop} if count >= 2 else set())
        g.consume(TOKENIZER.encode("7", add_special_tokens=False))
    assert g.next_mask() is None


def test_ignore_eos_forbids_the_models_end_id_and_the_text_still_ends():
    g = COMPILER.compile(StructuredOutputsParams(regex="[0-9]{1,2}"), ends=False)
    push(g, "1")
    assert END not in allowed(g.next_mask())
    push(g, "2")
    assert g.next_mask() is None


def test_ids_that_the_tokenizer_does_not_know_are_never_allowed():
    g = grammar(regex="(?s:.*)")
    ids = allowed(g.next_mask())
    assert max(ids) < TOKENIZER.vocab_size < VOCAB
    assert ids & TOKENIZER.special_ids == {END}


def test_a_list_of_ids_and_a_bit_for_each_say_the_same(monkeypatch):
    masks = []
    for listed in (0, 1000):
        monkeypatch.setattr("tp_runtime.text.grammar.MAX_LISTED", listed)
        masks.append(grammar(json_object=True).next_mask())
    assert masks[0].bits and masks[1].ids
    assert allowed(masks[0]) == allowed(masks[1])


def test_a_model_without_end_ids_ends_by_its_grammar():
    compiler = GrammarCompiler(TOKENIZER, [], VOCAB)
    g = compiler.compile(StructuredOutputsParams(choice=["yes", "no"]))
    for token_id in TOKENIZER.encode("yes", add_special_tokens=False):
        ids = allowed(g.next_mask())
        assert token_id in ids
        assert max(ids) < TOKENIZER.vocab_size
        g.consume([token_id])
    assert g.next_mask() is None


@pytest.mark.parametrize("choice", [["a", "ab"], ['q"uote', "back\\slash", "new\nline"], ["é🇫🇷"]])
def test_choices_are_texts_as_they_are(choice):
    for text in choice:
        g = grammar(choice=choice)
        push(g, text)
        mask = g.next_mask()
        assert mask is None or END in allowed(mask)


def test_copies_go_their_own_ways():
    first = grammar(choice=["yes", "no"])
    second = first.copy()
    push(first, "yes")
    push(second, "no")
    assert first.next_mask() is None and second.next_mask() is None
    assert len(allowed(grammar(choice=["yes", "no"]).next_mask())) >= 2  # and the kept one stays


def test_a_resumed_sample_consumes_what_it_has_without_its_end_id():
    g = grammar(regex="[0-9]{2,4}")
    g.consume([*TOKENIZER.encode("12", add_special_tokens=False), END])
    assert END in allowed(g.next_mask())
    with pytest.raises(RequestFailedError, match="grammar"):
        g.consume(TOKENIZER.encode("x", add_special_tokens=False))


@pytest.mark.parametrize("raw", [byte_fallback(), byte_fallback(strip=False), byte_level()])
@pytest.mark.parametrize("text", ["the é", " the", "", "th", "🇫🇷 x", "is is", "\n"])
def test_what_must_follow_is_tokenized_as_it_is_written(raw, text):
    tokenizer = Tokenizer(raw, {}, None)
    vocabulary = _Vocabulary(tokenizer, (2,))
    for part in (text.encode(), text.encode()[1:]):  # also from the middle of a character
        assert b"".join(vocabulary.tokens[i] for i in vocabulary(part)) == part


def test_sentencepiece_like_tokens():
    tokenizer = Tokenizer(byte_fallback(), {}, None)
    compiler = GrammarCompiler(tokenizer, [2], tokenizer.vocab_size)
    g = compiler.compile(StructuredOutputsParams(choice=["the é", "this"]))
    text = "the é".encode()
    while text:
        fits = {
            i: tokenizer.token_bytes(i)
            for i in allowed(g.next_mask())
            if text.startswith(tokenizer.token_bytes(i))
        }
        best = max(fits, key=lambda i: len(fits[i]))
        g.consume([best])
        text = text[len(fits[best]) :]
    assert g.next_mask() is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"json": {"type": "person"}}, "Invalid type: person"),
        ({"json": {"not": {"type": "string"}}}, 'Unimplemented keys: ["not"]'),
        ({"json": {"$ref": "#/$defs/nope"}}, "/$defs/nope"),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 2}}, "minimum"),
        ({"json": "{"}, "truncated"),
        ({"json": "[]"}, "must be an object"),
        ({"json": "[" * 100_000}, "JSON schema"),
        ({"json": '{"not":' * 500 + "{}" + "}" * 500}, "JSON schema"),
        ({"json": {"x-guidance": 3}}, "JSON schema"),
        ({"regex": "(?<=a)b"}, "look-around"),
        ({"regex": "("}, "unclosed group"),
    ],
)
def test_what_cannot_be_compiled_is_one_sentence_that_says_why(fields, words):
    with pytest.raises(InvalidRequestError) as refusal:
        grammar(**fields)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "json_object": True}, "exactly one"),
        ({"choice": []}, "none empty"),
        ({"choice": ["a", ""]}, "none empty"),
        ({"regex": "a" * (1 << 20)}, "bytes"),
        ({"json": {"enum": [object()]}}, "not a JSON schema"),
    ],
)
def test_what_is_no_wish_at_all_is_refused_before_it_is_sent(fields, words):
    with pytest.raises(InvalidRequestError, match=words):
        StructuredOutputsParams(**fields).validate()


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidRequestError, match="pip install llguidance"):
        GrammarCompiler(TOKENIZER, [END], VOCAB).load()


def test_grammars_load_neither_torch_nor_transformers(tmp_path):
    TOKENIZER._tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    source = (
        "import sys\n"
        "import tp_runtime.coordinator.process\n"
        "from tp_runtime.sampling_params import StructuredOutputsParams\n"
        "from tp_runtime.text.grammar import GrammarCompiler\n"
        "from tp_runtime.text.tokenizer import Tokenizer\n"
        f"compiler = GrammarCompiler(Tokenizer.from_folder({str(tmp_path)!r}), [1], 420)\n"
        "assert compiler.compile(StructuredOutputsParams(json_object=True)).next_mask()\n"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])\n"
    )
    run = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.strip() == "[]", run.stdout + run.stderr
