"""Hidden states of responses, and the EMA teacher: its weights, its prompts, its views, and what it reads for them."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from firedistill import Example, FeedbackField, Verdict
from firedistill.memory import BatchLimit
from firedistill.models.attention import use_own_attention
from firedistill.models.lora import add_lora
from firedistill.models.states import ResponseStates, forward_batches, score_responses, unwrap
from firedistill.ops import Head, check_head
from firedistill.prompts import PromptEncoder, student_messages, teacher_messages
from firedistill.rollout import Response, Rollout
from firedistill.teacher import Teacher
from firedistill.teacher.ema import EMAWeights
from firedistill.teacher.prefix_cache import common_prefix
from tiny import ToyTask, byte_tokenizer, enable_checkpointing, random_model

PROMPTS = [[5, 6, 7, 8, 9], [10, 11], [12], [13, 14, 15, 16, 17, 18, 19]]
RESPONSES = [[20, 21], [22, 23, 24, 25, 26, 2], [27], []]


# ---- States ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("max_tokens", [None, 1, 14, 1000])
def test_states_equal_those_of_each_response_alone(kind, max_tokens):
    model = random_model(kind, dtype=torch.float64)
    states = score_responses(model, PROMPTS, RESPONSES, max_tokens=max_tokens)
    assert states.lengths == [2, 6, 1, 0] and states.hidden.shape == (9, 32)
    head = Head.of(model)
    for prompt, response, found in zip(PROMPTS, RESPONSES, states.hidden.split(states.lengths), strict=True):
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : len(prompt) - 1 + len(response)]
        torch.testing.assert_close(head(found), logits, rtol=1e-9, atol=1e-9)


def test_selection_and_weights():
    states = score_responses(random_model(), PROMPTS, RESPONSES)
    chosen = states.select([2, 0])
    torch.testing.assert_close(chosen.hidden, torch.cat([states.hidden[8:9], states.hidden[:2]]))
    assert chosen.lengths == [1, 2]
    torch.testing.assert_close(states.token_weights(), torch.tensor([1 / 2] * 2 + [1 / 6] * 6 + [1.0]))
    assert states.select([]).hidden.shape == (0, 32)
    neighbours = states.select([1, 2])
    assert torch.equal(neighbours.hidden, states.hidden[2:9]) and neighbours.lengths == [6, 1]
    assert neighbours.hidden.data_ptr() == states.hidden[2:].data_ptr(), "a view, not a copy"


def test_numbers_of_responses_reach_their_tokens_without_a_wait():
    """A device without values shows that the host knows their number."""
    lengths, values = [2, 0, 3], [True, False, 7]
    found = ResponseStates(torch.empty(5, 4), lengths).per_token(values)
    assert found.tolist() == [1, 1, 7, 7, 7] and found.dtype == torch.float32
    assert ResponseStates(torch.empty(5, 4, device="meta"), lengths).per_token(values).shape == (5,)


def test_forward_batches_stay_within_the_limit():
    lengths = [3, 4, 4, 9, 30]
    batches = forward_batches(lengths, 13)
    assert [list(b) for b in batches] == [[0, 1, 2], [3], [4]]
    assert forward_batches([], 5) == []


def test_check_head_refuses_a_model_that_does_more():
    model = random_model()
    check_head(model, Head.of(model))
    head = Head.of(model)
    head.scale = 2.0
    with pytest.raises(ValueError, match="does not reproduce"):
        check_head(model, head)


# ---- Views of the teacher --------------------------------------------------------------------------------------------------

# Text of the feedback fields by response: three, one, none and two of them, so that views depart in different places.
FIELDS = [("a long first field " * 2, "second", "third"), ("only one",), (), ("two", "of them")]


def example(number: int = 0) -> Example:
    return Example(f"toy/train/{number}", f"Question {number}: why?", "even")


def rollout(ids: list[int], texts: tuple[str, ...] = ("first", "second"), number: int = 0) -> Rollout:
    fields = tuple(FeedbackField(f"field{j}", text) for j, text in enumerate(texts))
    return Rollout(example(number), [5, 6, 7], Response(ids, "", True), Verdict(False, None, "even"), fields, number)


def rollouts_with_different_fields() -> list[Rollout]:
    generator = torch.Generator().manual_seed(1)
    lengths = (3, 5, 4, 6)
    ids = [torch.randint(3, 263, (n,), generator=generator).tolist() for n in lengths]
    return [rollout(tokens, texts, number) for number, (tokens, texts) in enumerate(zip(ids, FIELDS, strict=True))]


def teacher_of(model, tokenizer=None, **options) -> Teacher:
    return Teacher(model, ToyTask(), PromptEncoder(tokenizer or byte_tokenizer()), **options)


def moved_teacher(kind: str = "qwen2", **options) -> Teacher:
    """Student and teacher differ."""
    teacher = teacher_of(random_model(kind, dtype=torch.float64), **options)
    with torch.no_grad():
        for parameter in teacher.weights.parameters.values():
            parameter.mul_(1.05)
    return teacher


def scored(teacher: Teacher, rollouts: list[Rollout], view, lengths=None) -> torch.Tensor:
    """The states of a view by one forward pass per response, from the messages on."""
    lengths = lengths if lengths is not None else [len(rollout.response_ids) for rollout in rollouts]
    prompts = [teacher.encoder.encode(teacher_messages(teacher.task, r.example, r.feedback, view)) for r in rollouts]
    with teacher.weights.applied():
        ids = [r.response_ids[:length] for r, length in zip(rollouts, lengths, strict=True)]
        return score_responses(teacher.model, prompts, ids, max_tokens=1).hidden


def tokens_read(teacher: Teacher) -> int:
    """Tokens that went through the model since the last call."""
    return teacher.take_metrics().row().get("teacher_tokens", 0)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("share_prefixes", [True, False])
def test_views_equal_one_forward_pass_per_response(kind, share_prefixes):
    teacher = moved_teacher(kind, share_prefixes=share_prefixes)
    rollouts = [rollout([20, 21, 22]), rollout([23, 2], ("another first field", "second"), 1), rollout([24], number=2)]
    for views, lengths in ((["full"], None), ([1, "full", 0, "none"], [2, 2, 0]), ([0, 1], None)):
        found = teacher.states(rollouts, views, lengths)
        for view, states in zip(views, found, strict=True):
            assert states.lengths == (lengths or [3, 2, 1]) and not states.hidden.requires_grad
            torch.testing.assert_close(states.hidden, scored(teacher, rollouts, view, lengths), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(teacher.full(rollouts).hidden, scored(teacher, rollouts, "full"), rtol=1e-9, atol=1e-9)
    row = teacher.take_metrics().row()
    assert row["teacher_tokens"] > 0 and row["seconds_score"] > 0 and not teacher.take_metrics().row()


def test_no_responses_have_no_states():
    teacher = moved_teacher()
    for states in teacher.states([], ["full", 0]):
        assert states.hidden.shape == (0, 32) and states.lengths == []
    assert teacher.full([]).hidden.shape == (0, 32) and tokens_read(teacher) == 0


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_shared_prefixes_save_work_and_change_nothing_else(kind):
    """Views that depart in different places, scored in two calls as FIRE does, against one forward pass per view."""
    rollouts = [
        rollout([20, 21, 22], ("x" * 30, "y" * 9, "z" * 6, "last")),
        rollout([23, 2], ("u" * 17, "y" * 9, "z" * 6, "last")),
    ]
    shared = moved_teacher(kind, share_prefixes=True)
    plain = moved_teacher(kind, share_prefixes=False, limit=BatchLimit(100, "tokens", ""))
    for views in (["full"], [0, 1, 2, 3]):
        for a, b in zip(shared.states(rollouts, views), plain.states(rollouts, views), strict=True):
            assert a.lengths == b.lengths == [3, 2]
            torch.testing.assert_close(a.hidden, b.hidden, rtol=1e-9, atol=1e-9)
    prompts = [[shared.prompt_ids(rollout, view) for view in ("full", 0, 1, 2, 3)] for rollout in rollouts]
    tree = sum(
        len({prefix for prompt in of_rollout for prefix in prefixes(prompt + rollout.response_ids)})
        for of_rollout, rollout in zip(prompts, rollouts, strict=True)
    )
    # The second rollout begins as the first one does, and that is read once. A shared node may be read twice where a response begins
    # (its first state is needed); never more.
    tree -= common_prefix(prompts[0][0], prompts[1][0])
    read = tokens_read(shared)
    assert tree <= read <= tree + 5 * 2 * 2 < tokens_read(plain)


@pytest.mark.parametrize("most_tokens", [1, 700, 2000])
def test_sequences_that_are_read_together_do_not_see_each_other(most_tokens, monkeypatch):
    """In bfloat16 with the package's own attention, in passes of one sequence and of several."""
    monkeypatch.setattr("firedistill.teacher.teacher.PACKED_TOKENS", most_tokens)
    model = random_model(dtype=torch.bfloat16)
    use_own_attention(model)
    rollouts = [
        rollout([20, 21, 22], number=0),
        rollout([23, 2], ("another first field", "second"), 1),
        rollout([24], number=2),
    ]
    found = teacher_of(model, share_prefixes=True).states(rollouts, ["full", 0, 1])
    exact = teacher_of(copy.deepcopy(model).double(), share_prefixes=False).states(rollouts, ["full", 0, 1])
    plain = teacher_of(model, share_prefixes=False).states(rollouts, ["full", 0, 1])
    for view, expected, other in zip(found, exact, plain, strict=True):
        norm = expected.hidden.norm()
        gap, usual = (float((states.hidden.double() - expected.hidden).norm() / norm) for states in (view, other))
        assert gap <= 1.5 * usual < 0.05


class Squares(TorchDispatchMode):
    """Records the largest side of a square matrix that an operation returns."""

    side = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor) and output.dim() > 1 and output.shape[-1] == output.shape[-2]:
            self.side = max(self.side, output.shape[-1])
        return output


def test_no_mask_has_the_tokens_of_all_sequences_on_both_sides():
    rollouts = [rollout([20 + number, 21], (f"first {number}", "second"), number) for number in range(9)]
    shared = moved_teacher("llama", share_prefixes=True)
    with Squares() as squares:
        shared.states(rollouts, ["full", 0, 1])
    longest = max(len(shared.prompt_ids(r, view)) for r in rollouts for view in ("full", 0, 1)) + 2
    assert 0 < squares.side <= longest < tokens_read(shared)


def test_a_model_whose_layers_do_not_get_the_packed_sequences_is_read_in_batches(caplog):
    model = random_model(dtype=torch.float64)
    layer, forward = model.model.layers[1].self_attn, model.model.layers[1].self_attn.forward
    layer.forward = lambda *args, packed=None, **kwargs: forward(*args, **kwargs)
    teacher, members = teacher_of(model, share_prefixes=True), [rollout([20, 21, 22]), rollout([23], number=1)]
    expected = teacher_of(random_model(dtype=torch.float64), share_prefixes=False).states(members, ["full", 1])
    for found, states in zip(teacher.states(members, ["full", 1]), expected, strict=True):
        torch.testing.assert_close(found.hidden, states.hidden, rtol=1e-9, atol=1e-9)
    assert not teacher.share_prefixes and "Qwen2ForCausalLM" in caplog.text


def prefixes(ids: list[int]) -> list[tuple[int, ...]]:
    return [tuple(ids[: n + 1]) for n in range(len(ids))]


def test_members_of_a_group_read_their_prompt_once_per_teacher():
    teacher = moved_teacher(share_prefixes=True)
    group = [rollout([20], ("same", "one")), rollout([21, 22], ("same", "two")), rollout([23], ("same", "six"))]
    prompts = [teacher.prompt_ids(member, "full") for member in group]
    shared = common_prefix(common_prefix_of(prompts[0], prompts[1]), prompts[2])
    own = sum(len(prompt) - shared for prompt in prompts) + 4
    assert shared > 300
    torch.testing.assert_close(teacher.full(group).hidden, scored(teacher, group, "full"), rtol=1e-9, atol=1e-9)
    assert tokens_read(teacher) == shared + own
    teacher.full(group)
    again = tokens_read(teacher)
    assert again == 2 * 3 + 1, "the last token of each prompt, whose state predicts the response, and the response"
    before = teacher.full(group).hidden
    tokens_read(teacher)
    teacher.update()  # other weights: nothing that was read counts
    found = teacher.full(group).hidden
    assert tokens_read(teacher) == shared + own and (found - before).abs().max() > 1e-3
    torch.testing.assert_close(found, scored(teacher, group, "full"), rtol=1e-9, atol=1e-9)
    teacher.forget()
    teacher.full(group)
    assert tokens_read(teacher) == shared + own


def test_only_what_a_later_view_reads_is_kept():
    rollouts = [rollout([20, 21, 22], ("same", "one")), rollout([23, 24], ("same", "two")), rollout([25], ("other", "six"))]
    kept, dropped = moved_teacher(share_prefixes=True), moved_teacher(share_prefixes=True)
    assert torch.equal(kept.full(rollouts).hidden, dropped.full(rollouts, keep=False).hidden)
    assert tokens_read(kept) == tokens_read(dropped)
    prompts = [kept.prompt_ids(member, "full") for member in rollouts]
    assert [kept.caches[member].ids for member in rollouts] == prompts, "prompts without responses"
    first, second = (common_prefix(prompts[0], prompts[other]) for other in (1, 2))
    assert second <= first < len(prompts[0]), "the others are read after the first one"
    assert [len(dropped.caches[member].ids) for member in rollouts] == [first, 0, 0]
    for teacher in (kept, dropped):
        for member in rollouts:
            cache = teacher.caches[member]
            assert len(cache.layers) == (2 if cache.ids else 0)
            for tensor in itertools.chain(*cache.layers):
                assert tensor.shape[-2] == len(cache.ids)
                assert tensor.untyped_storage().nbytes() == tensor.nbytes
        again = teacher.states(rollouts, ["full", 0])
        torch.testing.assert_close(again[0].hidden, scored(teacher, rollouts, "full"), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(again[1].hidden, scored(teacher, rollouts, 0), rtol=1e-9, atol=1e-9)


def common_prefix_of(first: list[int], second: list[int]) -> list[int]:
    return first[: common_prefix(first, second)]


@pytest.mark.parametrize("share_prefixes", [True, False])
@pytest.mark.parametrize("tokens", [[0, 2, 4, 9, 11, 15], [1, 3, 12], [8, 11], [9], [16, 17], list(range(18)), []], ids=str)
def test_states_without_fields_are_those_of_the_views_at_the_requested_tokens(share_prefixes, tokens):
    """Responses 0 to 3 have tokens 0-2, 3-7, 8-11 and 12-17, and three, one, no and two fields."""
    teacher, rollouts = moved_teacher(share_prefixes=share_prefixes), rollouts_with_different_fields()
    full = teacher.full(rollouts)
    tokens_read(teacher)
    if share_prefixes:
        teacher.forget()  # what the full view has read is not needed
    found = teacher.states_without_fields(rollouts, full, torch.tensor(tokens, dtype=torch.long))
    response = full.per_token(range(4))
    position = torch.cat([torch.arange(length) for length in full.lengths])
    read = sorted({int(response[token]) for token in tokens})
    assert found.shape == (max((len(rollouts[i].feedback) for i in read), default=0), len(tokens), 32)
    for k, token in enumerate(tokens):
        member = rollouts[int(response[token])]
        for j, states in enumerate(found[:, k]):
            view = j if j < len(member.feedback) else "full"
            expected = scored(teacher, [member], view)[int(position[token])]
            torch.testing.assert_close(states, expected, rtol=1e-9, atol=1e-9)
    last = {i: max(int(position[token]) for token in tokens if response[token] == i) + 1 for i in read}
    naive = sum(len(teacher.prompt_ids(rollouts[i], j)) + last[i] for i in read for j in range(len(rollouts[i].feedback)))
    cost = tokens_read(teacher)
    assert cost <= naive if share_prefixes else cost == naive, "each view up to the last requested token of its response"
    if not read:
        assert cost == 0


class MaskReads(TorchDispatchMode):
    """Counts the operations for which the host waits to learn what a mask selects, or a value."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        masks = name in ("index", "index_put_") and any(i is not None and i.dtype == torch.bool for i in args[1])
        if masks or name in ("nonzero", "_local_scalar_dense", "_unique2"):
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def test_the_states_of_views_are_put_in_their_places_without_waits(monkeypatch):
    """Beside the one read of `tokens`, which the host needs to choose what is read; reading itself is not counted."""
    teacher, rollouts = moved_teacher(share_prefixes=False), rollouts_with_different_fields()
    full, read = teacher.full(rollouts), teacher.states

    def uncounted(*arguments):
        with _disable_current_modes():
            return read(*arguments)

    monkeypatch.setattr(teacher, "states", uncounted)
    with MaskReads() as reads:
        teacher.states_without_fields(rollouts, full, torch.tensor([0, 2, 4, 9, 11, 15]))
    assert reads.found == []


def test_a_prompt_is_tokenized_once(monkeypatch):
    teacher, members = moved_teacher(share_prefixes=False), [rollout([20, 21]), rollout([22], number=1)]
    encode, encoded = PromptEncoder(teacher.encoder.tokenizer).encode, []
    encode_pieces = teacher.encoder.encode_pieces
    monkeypatch.setattr(teacher.encoder, "encode_pieces", lambda prompts: encoded.extend(prompts) or encode_pieces(prompts))
    for member in members:
        expected = encode(teacher_messages(teacher.task, member.example, member.feedback, 1))
        assert teacher.prompt_ids(member, 1) == expected
        assert teacher.view_tokens(member, 1) == len(expected) + len(member.response_ids)
    for _ in range(2):
        teacher.states(members, [1])
    assert len(encoded) == 2
    full = teacher.full(members)
    teacher.states_without_fields(members, full, torch.arange(3))
    teacher.update()
    teacher.states(members, ["full", 0, 1, "none"])
    assert len(encoded) == 2 * 4
    assert teacher.prompt_ids(members[0], "none") == encode(student_messages(teacher.task, members[0].example))
    with pytest.raises(ValueError, match="2 fields"):
        teacher.prompt_ids(members[0], 2)


def test_prompts_are_tokenized_together(monkeypatch):
    teacher, members = moved_teacher(share_prefixes=False), [rollout([20, 21]), rollout([22], number=1)]
    calls, encode_pieces = [], teacher.encoder.encode_pieces
    monkeypatch.setattr(teacher.encoder, "encode_pieces", lambda prompts: calls.append(len(prompts)) or encode_pieces(prompts))
    for member in members:
        teacher.render(member, ["full", 0, "full"])
    assert calls == []
    teacher.states(members, ["full", 0])
    teacher.render(members[0], ["full", 1])
    for member in members:
        for view in ("full", 0, 1):
            messages = teacher_messages(teacher.task, member.example, member.feedback, view)
            assert teacher.prompt_ids(member, view) == PromptEncoder(teacher.encoder.tokenizer).encode(messages)
    assert calls == [4, 1, 1]


def test_a_prompt_that_cannot_be_tokenized_does_not_stop_others(monkeypatch):
    teacher, members = moved_teacher(share_prefixes=False), [rollout([20, 21]), rollout([22], number=1)]
    encode_pieces = teacher.encoder.encode_pieces
    with monkeypatch.context() as patched:
        patched.setattr(teacher.encoder, "encode_pieces", lambda prompts: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            teacher.prompt_ids(members[0], "full")
    calls = []
    monkeypatch.setattr(teacher.encoder, "encode_pieces", lambda prompts: calls.append(len(prompts)) or encode_pieces(prompts))
    assert teacher.prompt_ids(members[1], "full") and calls == [1]


def test_views_are_rendered_all_or_none(monkeypatch):
    teacher, member = moved_teacher(share_prefixes=False), rollout([20, 21])
    with pytest.raises(ValueError, match="2 fields"):
        teacher.render(member, ["full", 0, 2])
    assert teacher.rendered == {}


def test_the_teacher_does_not_keep_rollouts():
    teacher = moved_teacher(share_prefixes=True)
    members = [rollout([20, 21])]
    teacher.full(members)
    gone = weakref.ref(members.pop())
    teacher.forget()
    gc.collect()
    assert gone() is None


def test_the_teacher_reads_in_evaluation_mode_while_the_student_trains():
    """Checkpointing in training mode drops the cache of a shared prefix, and dropout would blur the teacher."""
    model = add_lora(random_model(dtype=torch.float32), dropout=0.5)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.fill_(0.05)
    teacher, member = teacher_of(model, share_prefixes=True), rollout([20, 21], ("x" * 30, "y" * 9))
    views = ["full", 0, 1]
    prompts = [teacher.prompt_ids(member, view) for view in views]
    expected = score_responses(model.eval(), prompts, [[20, 21]] * 3).hidden.detach()
    model.train()
    enable_checkpointing(model.get_base_model())
    found = torch.cat([states.hidden for states in teacher.states([member], views)])
    torch.testing.assert_close(found, expected)
    assert model.training and all(module.training for module in model.modules())


# ---- Weights ---------------------------------------------------------------------------------------------------------------


def lora_model():
    model = add_lora(random_model())
    generator = torch.Generator().manual_seed(3)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.data.normal_(std=0.3, generator=generator)
    return model


def test_applied_lends_the_teachers_weights_and_restores_the_students():
    model = lora_model()
    teacher = EMAWeights(model, 0.5)
    before = score_responses(model, PROMPTS, RESPONSES).hidden
    pointers = {name: p.data_ptr() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in teacher.parameters.values():
            p.add_(0.1)
    moved = score_responses(model, PROMPTS, RESPONSES).hidden
    with teacher.applied():
        lent = score_responses(model, PROMPTS, RESPONSES).hidden
        assert not lent.requires_grad
    torch.testing.assert_close(lent, before)
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == pointers
    torch.testing.assert_close(score_responses(model, PROMPTS, RESPONSES).hidden, moved)
    with pytest.raises(RuntimeError), teacher.applied():
        raise RuntimeError
    torch.testing.assert_close(score_responses(model, PROMPTS, RESPONSES).hidden, moved)


def test_the_gradient_survives_a_teacher_pass_under_checkpointing():
    """Recomputation in the backward pass must see the student, not the teacher that scored in between."""
    gradients = []
    for between in (False, True):
        model = lora_model().train()
        enable_checkpointing(model, {"use_reentrant": False})
        teacher = EMAWeights(model, 0.5)
        for shadow in teacher.shadow.values():
            shadow.add_(0.2)
        hidden = score_responses(model, PROMPTS, RESPONSES).hidden
        if between:
            with teacher.applied():
                score_responses(model, PROMPTS, RESPONSES)
        hidden.square().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and gradients[0]
    for name in gradients[0]:
        torch.testing.assert_close(gradients[0][name], gradients[1][name])


def test_ema_accumulates_in_float32_over_a_bfloat16_student(tmp_path):
    layer = torch.nn.Linear(4, 4).bfloat16()
    teacher = EMAWeights(layer, 0.01)
    start = layer.weight.detach().float().clone()
    layer.weight.data += 1.0
    for _ in range(100):
        teacher.update()
    expected = start + (layer.weight.float() - start) * (1 - 0.99**100)
    torch.testing.assert_close(teacher.shadow["weight"], expected, rtol=1e-4, atol=1e-4)
    apart = (teacher.shadow[name].double() - p.detach().double() for name, p in layer.named_parameters())
    assert teacher.distance() == pytest.approx(torch.cat([d.flatten() for d in apart]).norm().item(), rel=1e-6)
    teacher.save(tmp_path)
    other = EMAWeights(torch.nn.Linear(4, 4).bfloat16(), 0.01)
    other.load(tmp_path)
    assert torch.equal(other.shadow["weight"], teacher.shadow["weight"])
    with pytest.raises(ValueError, match="another model"):
        EMAWeights(torch.nn.Linear(5, 4), 0.01).load(tmp_path)
    with pytest.raises(ValueError, match="ema_rate"):
        EMAWeights(layer, -0.1)
    assert math.isclose(teacher.rate, 0.01)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_of_a_teacher_whose_head_is_trained(tied):
    model = random_model(tied=tied)
    teacher = teacher_of(model, rate=0.5, temperature=2.0)
    projection = unwrap(model).get_output_embeddings()
    projection.weight.data += 1.0
    values = teacher.weights.values_for(projection)
    torch.testing.assert_close(values["weight"], projection.weight - 1.0)
    hidden = torch.randn(5, 32)
    torch.testing.assert_close(teacher.head(hidden), hidden @ (projection.weight - 1.0).T / 2)
    teacher.update()
    torch.testing.assert_close(teacher.head(hidden), hidden @ (projection.weight - 0.5).T / 2)


def test_the_head_of_a_teacher_whose_head_is_frozen():
    model = lora_model()
    hidden = torch.randn(5, 32)
    torch.testing.assert_close(teacher_of(model).head(hidden), Head.of(unwrap(model))(hidden))
