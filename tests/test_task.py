"""The embedded task: the answer depends on the prompt, no constant policy scores, nothing leaks."""

from __future__ import annotations

from collections import Counter

import torch

from rlk.task import DIGITS, LANGUAGES, make_model, make_task, make_tokenizer, spelled_right


def test_training_and_held_out_prompts_are_disjoint_and_whole():
    task = make_task(0)
    train, held_out = ({example["prompt"] for example in part} for part in (task.train, task.held_out))
    assert not train & held_out
    assert len(train | held_out) == len(LANGUAGES) * 10**DIGITS
    assert len(held_out) == 200
    assert make_task(0) == task
    assert make_task(1) != task


def test_answers_by_hand():
    answers = {e["prompt"]: e["answer"] for part in (make_task(0).train, make_task(0).held_out) for e in part}
    assert answers["english 3 1 4 ="] == "three one four"
    assert answers["spanish 3 1 4 ="] == "tres uno cuatro"
    assert answers["spanish 0 9 0 ="] == "cero nueve cero"


def test_the_best_constant_policy_scores_a_tenth_at_most():
    """A reward is a mean over places, so the best constant answer takes the best word of each place on its own."""
    task = make_task(0)
    for part in (task.train, task.held_out):
        places = [Counter(example["answer"].split()[place] for example in part) for place in range(DIGITS)]
        best = sum(max(count.values()) / len(part) for count in places) / DIGITS
        assert best < 0.12
        constant = " ".join(count.most_common(1)[0][0] for count in places)
        scored = sum(spelled_right(constant, example) for example in part) / len(part)
        assert abs(scored - best) < 1e-9


def test_a_policy_that_ignores_the_instruction_scores_half():
    examples = make_task(0).train
    english = [" ".join(LANGUAGES["english"][int(d)] for d in e["prompt"].split()[1:-1]) for e in examples]
    mean = sum(spelled_right(text, example) for text, example in zip(english, examples)) / len(examples)
    assert 0.4 < mean < 0.6


def test_partial_answers_are_worth_their_part():
    example = {"answer": "tres uno cuatro"}
    assert spelled_right("tres uno cuatro", example) == 1.0
    assert spelled_right("tres dos cuatro", example) == 2 / 3
    assert spelled_right("uno tres cuatro", example) == 1 / 3
    assert spelled_right("", example) == 0.0
    assert spelled_right("tres uno cuatro cinco", example) == 1.0


def test_the_tokenizer_gives_a_word_a_token_and_back():
    tokenizer = make_tokenizer()
    for example in make_task(0).train[:50]:
        ids = tokenizer(example["prompt"])["input_ids"]
        assert len(ids) == DIGITS + 2
        assert tokenizer.decode(ids) == example["prompt"]
    assert len(tokenizer) == 2 + 10 + 2 + 20


def test_the_model_follows_its_seed_and_leaves_the_generator_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, two, other = make_model(0, 34), make_model(0, 34), make_model(1, 34)
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters()))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
