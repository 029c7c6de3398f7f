"""Sampling and stopping as a user meets them: one server of two ranks, every parameter through it.

What each parameter does to the logits is tested in tests/ops/sampling, that TP size and batch do
not show in tests/workers; here it is that nothing gets lost between the caller and the sampler.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.tiny_models import END_ID, TOKENIZER_SIZE, make_tiny
from torchrun_examples import batch_file
from tp_runtime import LLM, SamplingParams
from tp_runtime.errors import InvalidRequestError

VOCAB = 331
SECOND_END = 7
PROMPT = [5, 6, 7, 8, 9]
FREE = {"max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = make_tiny(
        "qwen3", tmp_path_factory.mktemp("models") / "tiny", eos_token_id=[END_ID, SECOND_END]
    )
    with LLM(folder, 2, device="cpu", max_model_len=256, num_kv_blocks=512) as started:
        yield started


@pytest.fixture
def client(llm):
    return llm.client


def ids(client, prompt=PROMPT, **fields) -> list[int]:
    return client.generate(prompt, **fields).token_ids


def test_a_seed_gives_the_same_text_alone_in_a_batch_and_beside_requests_without_one(client):
    ways = [
        SamplingParams(seed=11, **FREE),
        SamplingParams(seed=12, top_k=20, top_p=0.9, **FREE),
        SamplingParams(seed=13, min_p=0.02, temperature=1.4, **FREE),
        SamplingParams(seed=14, repetition_penalty=1.2, presence_penalty=0.5, logprobs=2, **FREE),
        SamplingParams(temperature=0.0, **FREE),
    ]
    alone = [client.generate(PROMPT, way).token_ids for way in ways]
    noise = [SamplingParams(**FREE)] * 7
    batch = client.generate([PROMPT] * 12, [*ways, *noise])
    assert [output.token_ids for output in batch[: len(ways)]] == alone
    unseeded = [tuple(output.token_ids) for output in batch[len(ways) :]]
    assert len(set(unseeded)) == len(unseeded)
    again = client.generate(PROMPT, seed=batch[-1].seed, **FREE)
    assert again.token_ids == batch[-1].token_ids


def test_temperature_zero_top_k_one_and_a_tiny_top_p_are_greedy(client):
    greedy = ids(client, temperature=0.0, **FREE)
    assert ids(client, top_k=1, seed=1, **FREE) == greedy
    assert ids(client, top_p=1e-9, seed=1, **FREE) == greedy
    assert ids(client, min_p=1.0, seed=1, **FREE) == greedy


def test_truncation_that_cuts_nothing_changes_nothing(client):
    plain = ids(client, seed=3, **FREE)
    for off in ({"top_k": 0}, {"top_k": -1}, {"top_k": VOCAB}, {"top_k": 10**9}, {"top_p": 1.0}):
        assert ids(client, seed=3, **off, **FREE) == plain, off


def test_bias_forces_and_forbids(client):
    assert set(ids(client, logit_bias={42: 1000.0}, **FREE)) == {42}
    greedy = ids(client, temperature=0.0, **FREE)
    without = ids(client, temperature=0.0, logit_bias={greedy[0]: -1000.0}, **FREE)
    assert greedy[0] not in without
    with pytest.raises(InvalidRequestError, match=str(VOCAB)):
        client.generate(PROMPT, logit_bias={VOCAB: 1.0})


def test_penalties_keep_tokens_from_coming_again(client):
    strong = {"temperature": 0.0, "frequency_penalty": 2.0, "presence_penalty": 2.0}
    strong["repetition_penalty"] = 50.0
    drawn = ids(client, **strong, **FREE)
    assert max(Counter(drawn).values()) == 1
    assert not set(drawn) & set(PROMPT)  # repetition looks at the prompt too


@pytest.mark.parametrize("end", [END_ID, SECOND_END])
def test_each_of_several_end_ids_stops_unless_ignored_or_too_early(client, end):
    bias = {end: 1000.0}
    output = client.generate(PROMPT, logit_bias=bias, max_tokens=5)
    assert (output.token_ids, output.finish_reason, output.text) == ([end], "stop", "")
    ignored = client.generate(PROMPT, logit_bias=bias, max_tokens=5, ignore_eos=True)
    assert (ignored.token_ids, ignored.finish_reason) == ([end] * 5, "length")
    late = client.generate(PROMPT, logit_bias=bias, max_tokens=9, min_tokens=4)
    assert len(late.token_ids) == 5
    assert not set(late.token_ids[:4]) & {END_ID, SECOND_END}
    assert (late.token_ids[4], late.finish_reason) == (end, "stop")


def test_stop_ids_are_named_and_work_beside_ignore_eos(client):
    output = client.generate(
        PROMPT, logit_bias={99: 1000.0}, stop_token_ids=[98, 99], ignore_eos=True, max_tokens=5
    )
    assert (output.token_ids, output.stop_reason, output.text) == ([99], 99, "")


def test_no_token_and_one_token(client):
    nothing = client.generate(PROMPT, max_tokens=0, prompt_logprobs=1)
    assert (nothing.token_ids, nothing.text, nothing.finish_reason) == ([], "", "length")
    assert len(nothing.prompt_logprobs) == len(PROMPT)
    assert len(ids(client, max_tokens=1, ignore_eos=True)) == 1
    with pytest.raises(InvalidRequestError, match="min_tokens"):
        client.generate(PROMPT, max_tokens=1, min_tokens=2)


def test_without_max_tokens_an_answer_fills_the_context(client):
    output = client.generate(PROMPT, ignore_eos=True)
    assert len(output.token_ids) == 256 - len(PROMPT)
    assert output.finish_reason == "length"


def test_samples_differ_and_come_again_with_their_seed(client):
    three = client.generate(PROMPT, n=3, seed=5, **FREE)
    assert [sample.index for sample in three.outputs] == [0, 1, 2]
    assert len({tuple(sample.token_ids) for sample in three.outputs}) == 3
    again = client.generate([PROMPT, PROMPT], n=3, seed=5, **FREE)[1]
    assert [s.token_ids for s in again.outputs] == [s.token_ids for s in three.outputs]
    texts = ["", "", ""]
    for chunk in client.generate(PROMPT, n=3, seed=5, stream=True, **FREE):
        texts[chunk.index] += chunk.text
    assert texts == [sample.text for sample in three.outputs]


def test_echo_is_the_prompts_text_and_the_samples(client):
    output = client.generate("Where does", n=2, seed=1, prompt_logprobs=0, logprobs=0, **FREE)
    assert output.echo() == "Where does" + output.text
    assert output.echo(1) == "Where does" + output.outputs[1].text
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert client.generate("Where does", max_tokens=0).echo() == "Where does"
    with pytest.raises(ValueError, match="detokenize"):
        client.generate(PROMPT, max_tokens=0).echo()


def test_a_stop_string_ends_a_stream_where_it_ends_the_whole_answer(client):
    """Taken from the text itself, so that it spans tokens and chunks."""
    whole = client.generate("The quick", temperature=0.0, max_tokens=60, ignore_eos=True).text
    middle = len(whole) // 2
    stop = whole[middle : middle + 5]
    cut = whole.index(stop)
    for inside in (False, True):
        fields = {"stop": [stop, "never said \N{SNOWMAN}"], "include_stop_str_in_output": inside}
        fields |= {"temperature": 0.0, "max_tokens": 60, "ignore_eos": True}
        output = client.generate("The quick", **fields)
        assert output.text == whole[: cut + len(stop)] if inside else whole[:cut]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        chunks = list(client.generate("The quick", stream=True, **fields))
        assert "".join(chunk.text for chunk in chunks) == output.text
        assert [token for chunk in chunks for token in chunk.token_ids] == output.token_ids


def test_ids_past_the_tokenizer_are_no_text_and_no_error(client):
    output = client.generate(PROMPT, logit_bias={TOKENIZER_SIZE + 3: 1000.0}, **FREE)
    assert set(output.token_ids) == {TOKENIZER_SIZE + 3}
    assert output.text == ""


def test_logprobs_name_chosen_and_top(client):
    output = client.generate(PROMPT, temperature=0.0, logprobs=3, max_tokens=4, ignore_eos=True)
    assert [entry.chosen.token_id for entry in output.logprobs] == output.token_ids
    for entry in output.logprobs:
        assert entry.chosen.rank == 1
        assert entry.top[0] == entry.chosen
        assert [each.rank for each in entry.top] == [1, 2, 3]
        assert [each.logprob for each in entry.top] == sorted(
            (each.logprob for each in entry.top), reverse=True
        )


def test_a_thousand_prompts_come_back_in_order_under_a_progress_bar(llm, capsys):
    prompts = [[1 + i % 300, 1 + i // 300, 4] for i in range(1000)]
    lengths = [1 + i % 3 for i in range(1000)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths
    ]
    outputs = llm.generate(prompts, params, use_tqdm=True)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.token_ids) for output in outputs] == lengths
    shown = capsys.readouterr().err
    assert "1000/1000" in shown
    assert "prefill" in shown.rpartition("\r")[2]
    assert "decode" in shown.rpartition("\r")[2]


def test_the_batch_file_example_keeps_order_and_names_what_could_not_run(client):
    lines = [
        json.dumps({"prompt": "a", "max_tokens": 3, "ignore_eos": True}),
        "not json",
        json.dumps({"prompt": "a", "top_pp": 1}),
        json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}),
    ] * 30
    records = list(batch_file.answers(client, lines))
    for start in range(0, len(records), 4):
        first, second, third, fourth = records[start : start + 4]
        assert len(first["token_ids"]) == 3
        assert second["error"].startswith("JSONDecodeError")
        assert "top_pp" in third["error"]
        assert 1 <= len(fourth["token_ids"]) <= 2
