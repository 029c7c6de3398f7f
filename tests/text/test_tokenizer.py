"""Tokenizer against transformers' AutoTokenizer on the same folders."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from tests.text.small_tokenizers import (
    TEXTS,
    byte_fallback,
    byte_level,
    llama_2,
    unigram,
    write_folder,
)
from tp_runtime.errors import ConfigError, InvalidRequestError
from tp_runtime.text.tokenizer import Tokenizer


def reference(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))


def truncating() -> Any:
    tokenizer = byte_level()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=64)
    return tokenizer


LLAMA = {
    "tokenizer_class": "LlamaTokenizer",
    "model_type": "llama",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
}
FOLDERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain byte-level": (byte_level, {}),
    "BOS asked for beside a tokenizer.json without it": (
        byte_level,
        {"bos_token": "<s>", "add_bos_token": True},
    ),
    "BOS there, EOS asked for": (
        byte_fallback,
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True},
    ),
    "BOS from the post-processor": (byte_fallback, {"bos_token": "<s>"}),
    "BOS there and refused": (
        byte_fallback,
        {"bos_token": "<s>", "add_bos_token": False},
    ),
    "special token that is not in tokenizer.json": (
        unigram,
        {"eos_token": "</s>", "pad_token": {"content": "<pad>", "__type": "AddedToken"}},
    ),
    "ordinary token named as special": (byte_level, {"eos_token": "the"}),
    "extra special tokens": (byte_level, {"extra_special_tokens": ["<|a|>", "<|b|>"]}),
    "added tokens listed in the config": (
        byte_level,
        {
            "eos_token": "<|end|>",
            "added_tokens_decoder": {
                "401": {"content": "<|end|>", "special": True, "normalized": False},
                "402": {"content": "<think>", "special": False, "normalized": False},
            },
        },
    ),
    "Llama 2's file": (llama_2, {**LLAMA}),
    "Llama 2's file, legacy": (llama_2, {**LLAMA, "legacy": True}),
    "Llama 2's file, no first space": (llama_2, {**LLAMA, "add_prefix_space": False}),
    "Llama's own class by its fast name": (
        byte_fallback,
        {**LLAMA, "tokenizer_class": "LlamaTokenizerFast", "legacy": True},
    ),
    "Llama 2's file in a Mistral model": (llama_2, {**LLAMA, "model_type": "mistral"}),
}


def real_folders() -> list[str]:
    """Tokenizers of published models, where there are any: the demo's model once it was made, and
    the folders in TP_RUNTIME_TEST_TOKENIZERS (separated by colons)."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tp_runtime"
    found = [str(path.parent) for path in sorted(cache.glob("[!.]*/tokenizer.json"))]
    return found + [f for f in os.environ.get("TP_RUNTIME_TEST_TOKENIZERS", "").split(":") if f]


@pytest.fixture(scope="module", params=[*FOLDERS, *real_folders()])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if request.param not in FOLDERS:
        return Tokenizer.from_folder(request.param), reference(Path(request.param))
    make, settings = FOLDERS[request.param]
    folder = write_folder(tmp_path_factory.mktemp("tokenizer"), make(), **settings)
    return Tokenizer.from_folder(folder), reference(folder)


def test_encodes_as_transformers_does(pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    marked = "".join(list(theirs.get_added_vocab())[:20])
    texts = [*TEXTS, f"a{marked}b {marked} the end", "</s>the", " leading", "trailing ", "", "  "]
    for text in texts:
        for special in (True, False):
            assert ours.encode(text, special) == theirs.encode(text, add_special_tokens=special)


def test_decodes_as_transformers_does(pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    rng = random.Random(0)
    assert ours.vocab_size == len(theirs)
    for _ in range(100):
        ids = [rng.randrange(ours.vocab_size) for _ in range(20)]
        for skip in (True, False):
            text = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip) == text
            stream = ours.detokenizer(skip)
            assert "".join(stream.push([i]) for i in ids) + stream.finish() == text


def test_special_tokens_are_those_of_transformers(pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    assert ours.special_tokens == theirs.special_tokens_map
    assert set(theirs.all_special_ids) <= ours.special_ids
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)


def test_renders_chats_as_transformers_does(pair: tuple[Tokenizer, Any]) -> None:
    """Only folders of published models have a template; the others must say so on both sides."""
    ours, theirs = pair
    chat = [{"role": "user", "content": "Hi <b>"}, {"role": "assistant", "content": "Hello"}]
    if theirs.chat_template is None:
        with pytest.raises(InvalidRequestError, match="base model without a chat template"):
            ours.render_chat(chat)
        return
    for messages in (chat, chat[:1], [{"role": "system", "content": "S"}, *chat[:1]]):
        for arguments in ({}, {"add_generation_prompt": False}, {"enable_thinking": False}):
            kwargs = {"add_generation_prompt": True, **arguments}
            expected = theirs.apply_chat_template(messages, tokenize=False, **kwargs)
            assert ours.render_chat(messages, None, arguments) == expected


def test_special_tokens_map_of_older_folders_is_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, byte_level())
    names = {"eos_token": {"content": "<|im_end|>", "lstrip": False}, "bos_token": "<s>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(names))
    ours, theirs = Tokenizer.from_folder(folder), reference(folder)
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.eos_token_id == theirs.eos_token_id is not None


def test_truncation_and_padding_in_the_file_are_not_applied_to_prompts(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, truncating())
    plain = Tokenizer(byte_level(), {}, None)
    assert Tokenizer.from_folder(folder).encode(TEXTS[0]) == plain.encode(TEXTS[0])


def test_added_tokens_with_spaces_read_as_they_are(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<a b>", normalized=False), "→!"])
    ours = Tokenizer.from_folder(write_folder(tmp_path, tokenizer))
    ids = ours.encode("x<a b>y →! z")
    assert ours.decode(ids) == "x<a b>y →! z"
    assert {"<a b>", "→!"} <= {ours.token(i) for i in ids}


def test_a_byte_level_file_is_left_as_it_is_whatever_class_its_config_names(tmp_path: Path) -> None:
    ours = Tokenizer.from_folder(write_folder(tmp_path, byte_level(), **LLAMA))
    plain = Tokenizer(byte_level(), {}, None)
    for text in TEXTS:
        assert ours.encode(text) == plain.encode(text)


def test_vocabulary_questions() -> None:
    ours = Tokenizer(byte_level(), {}, None)
    assert ours.knows(0)
    assert not ours.knows(ours.vocab_size)
    assert not ours.knows(-1)
    assert ours.token(ours.vocab_size + 7) == ""
    assert ours.token(ours.encode("<s>")[0]) == "<s>"


def test_text_with_a_lone_surrogate_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="lone surrogate at character 2"):
        Tokenizer(byte_level(), {}, None).encode("ab\ud800")


def test_a_folder_without_tokenizer_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer.json is missing"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path, byte_level())
    (folder / name).write_text('{"version": ')
    with pytest.raises(ConfigError, match=name):
        Tokenizer.from_folder(folder)


def older_folder(folder: Path) -> Path:
    """vocab.json and merges.txt, as GPT-2 was published."""
    model = json.loads(byte_level().to_str())["model"]
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>"}
    config = {"tokenizer_class": "GPT2Tokenizer", "chat_template": "{{ bos_token }}!", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_an_older_format_is_converted_once_by_a_child_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    folder = older_folder(tmp_path / "model")
    ours = Tokenizer.from_folder(folder)
    theirs = reference(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
    assert ours.render_chat([{"role": "user", "content": "x"}]) == "<s>!"
    assert sorted(p.name for p in folder.iterdir()) == [
        "merges.txt",
        "tokenizer_config.json",
        "vocab.json",
    ]
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("converted twice"))
    assert Tokenizer.from_folder(folder).encode(TEXTS[0]) == ours.encode(TEXTS[0])


def test_a_conversion_that_fails_tells_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tp_runtime.text.tokenizer_files._CONVERT", "raise SystemExit('no luck')")
    (tmp_path / "tokenizer.model").write_bytes(b"?")
    with pytest.raises(ConfigError, match="could not make one from the files there: no luck"):
        Tokenizer.from_folder(tmp_path)
    assert list((tmp_path / "cache/tp_runtime/tokenizers").iterdir()) == []


def test_neither_torch_nor_transformers_is_loaded() -> None:
    code = (
        "import sys, tp_runtime.text.tokenizer\n"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ)
    )
    assert run.stdout.strip() == "[]", run.stderr
