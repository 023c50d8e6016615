"""The teacher: the weights that see the feedback and re-score the student's responses, by default an average of the student."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from firedistill.memory import TOKENS_PER_FORWARD, BatchLimit, scoring_limit
from firedistill.metrics import Metrics
from firedistill.models.states import ResponseStates, score_responses, unwrap
from firedistill.ops import Head
from firedistill.prompts import Message, PromptEncoder, View, field_groups, teacher_messages
from firedistill.rollout import Rollout
from firedistill.tasks import Example, Task
from firedistill.tasks.types import FeedbackField
from firedistill.teacher.ema import EMAWeights, FixedWeights
from firedistill.teacher.prefix_cache import NotPacked, Prefix, Reading, common_prefix, read, shares_prefixes

logger = logging.getLogger(__name__)

PACKED_TOKENS = 1024  # on a CPU, enough for the rate of its matrix products


class Teacher:
    """The teacher's weights, the prompts with feedback, and the hidden states of responses under them.

    A *view* is a teacher prompt: `"full"` has all feedback fields, `j` all but field j, `(i, j)` all but these fields, and `"none"` is
    the student's own prompt.

    Args:
        model: the student with its adapter; the teacher puts its own weights into it while it reads. A separate model is named by
            `weights`.
        task: builds the prompts.
        encoder: tokenizes them.
        rate: `1 - mu`, the weight of the new student in each update: 1 for the live student, 0 for the student at its start.
        temperature: of the scored distributions.
        share_prefixes: read what the views of a rollout share once, response by response. A GPU is better served by large batches;
            None decides by the device.
        limit: padded tokens per forward pass of the batched path.
        feedback: False gives every view the student's own prompt.
        groups: by patterns of field names, the groups of fields that are removed together.
        most_views: views without a field or group that a response may have; of more, neighbouring ones are removed together.
        weights: of a separate model; by default an average of the student with the given rate.
        vocabulary_size: V of the student's head, to which the head of a separate model is cut; by default its own.

    Attributes:
        metrics: tokens and seconds that reading took since `take_metrics`.

    Raises:
        ValueError: the model has no trainable parameter, or the rate is outside [0, 1].
    """

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        encoder: PromptEncoder,
        *,
        rate: float = 0.03,
        temperature: float = 1.0,
        share_prefixes: bool | None = None,
        limit: BatchLimit | None = None,
        feedback: bool = True,
        groups: Mapping[str, str] | None = None,
        most_views: int | None = None,
        weights: FixedWeights | None = None,
        vocabulary_size: int | None = None,
    ):
        self.model, self.task, self.encoder, self.temperature = model, task, encoder, temperature
        self.device = next(model.parameters()).device
        self.weights: EMAWeights | FixedWeights = weights or EMAWeights(model, rate)
        self.feedback, self.groups, self.most_views = feedback, dict(groups or {}), most_views
        self.vocabulary_size = vocabulary_size
        self.limit = limit or scoring_limit(TOKENS_PER_FORWARD)
        self.share_prefixes = shares_prefixes(share_prefixes, model, self.device)
        self.metrics = Metrics()
        self.prompts: WeakKeyDictionary[Rollout, dict[View, list[int]]] = WeakKeyDictionary()
        self.rendered: dict[Rollout, dict[View, list[str]]] = {}  # prompts that are not tokenized yet
        self.caches: dict[Rollout, Prefix] = {}

    # ---- Weights -------------------------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """`teacher <- mu teacher + (1 - mu) student` (eq. sdpo_updates), after an executed optimizer update."""
        self.forget()
        self.weights.update()

    @property
    def head(self) -> Head:
        """The language-model head under the teacher's weights: the student's own unless the head is trained."""
        causal_lm = unwrap(self.model)
        override = self.weights.values_for(causal_lm.get_output_embeddings())
        return Head.of(causal_lm, self.temperature, override, rows=self.vocabulary_size)

    # ---- Prompts -------------------------------------------------------------------------------------------------------------------

    def prompt_ids(self, rollout: Rollout, view: View) -> list[int]:
        """Token ids of the prompt of a view; tokenized once per rollout.

        Raises:
            TaskFault: as `encode`.
        """
        if view not in self.prompts.get(rollout, {}):
            self.render(rollout, [view])
            waiting, self.rendered = self.rendered, {}
            places = [(of_rollout, its_view) for of_rollout, pieces in waiting.items() for its_view in pieces]
            found = self.encoder.encode_pieces([pieces for of_views in waiting.values() for pieces in of_views.values()])
            for (of_rollout, its_view), ids in zip(places, found, strict=True):
                self.prompts.setdefault(of_rollout, {})[its_view] = ids
        return self.prompts[rollout][view]

    def render(self, rollout: Rollout, views: Sequence[View]) -> None:
        """Make the prompts of these views, which are tokenized together when `prompt_ids` needs one.

        Raises:
            TaskFault: as `encode`.
        """
        known = self.prompts.get(rollout, {}).keys() | self.rendered.get(rollout, {}).keys()
        new = {
            view: self.encoder.pieces(self.messages(rollout.example, rollout.feedback, view))
            for view in views
            if view not in known
        }
        if new:
            self.rendered.setdefault(rollout, {}).update(new)

    def messages(self, example: Example, feedback: Sequence[FeedbackField], view: View) -> list[Message]:
        """The prompt about an example under a view."""
        return teacher_messages(self.task, example, feedback, view if self.feedback else "none")

    def encode(self, example: Example, feedback: Sequence[FeedbackField]) -> list[int]:
        """Token ids of the prompt about an example with this feedback.

        Raises:
            TaskFault: the prompt cannot be built.
        """
        return self.encoder.encode(self.messages(example, feedback, "full"))

    def view_tokens(self, rollout: Rollout, view: View) -> int:
        """Tokens of prompt and response under a view."""
        return len(self.prompt_ids(rollout, view)) + len(rollout.response_ids)

    # ---- States --------------------------------------------------------------------------------------------------------------------

    def full(self, rollouts: Sequence[Rollout], keep: bool = True) -> ResponseStates:
        """Hidden states of the responses under the view with all feedback; without gradient. `keep` as in `states`."""
        (states,) = self.states(rollouts, ["full"], keep=keep)
        return states

    def states(
        self, rollouts: Sequence[Rollout], views: Sequence[View], lengths: Sequence[int] | None = None, keep: bool = True
    ) -> list[ResponseStates]:
        """Hidden states of the responses, one `ResponseStates` per view; without gradient.

        Args:
            lengths: how many tokens of each response to read; all by default.
            keep: keep the keys and values of the prompts until `forget`, for other views of these rollouts. Where none follows,
                False needs less memory.

        Raises:
            OutOfMemory: a single response does not fit.
        """
        lengths = list(lengths) if lengths is not None else [len(rollout.response_ids) for rollout in rollouts]
        if not (rollouts and views):
            width = unwrap(self.model).config.get_text_config().hidden_size
            return [ResponseStates(torch.empty(0, width, device=self.device), []) for _ in views]
        with self.metrics.timed("seconds_score", self.device):
            of_each = zip(rollouts, lengths, strict=True)
            longest = max(len(self.prompt_ids(rollout, view)) + length for rollout, length in of_each for view in views)
            for attempt in self.limit.attempts(longest * len(rollouts) * len(views)):
                with attempt, self.weights.applied():
                    if self.share_prefixes:
                        try:
                            return self._read_shared(rollouts, views, lengths, keep)
                        except NotPacked as reason:
                            logger.warning("%s: the teacher reads views in batches, without shared prefixes", reason)
                            self.forget()
                            self.share_prefixes = False
                    return self._read_in_batches(rollouts, views, lengths)
                self.forget()
                self.share_prefixes = False  # keys and values of whole prompts are what memory is short of
        raise AssertionError("attempts end with a result or an error")

    def states_without_fields(self, rollouts: Sequence[Rollout], full: ResponseStates, tokens: Tensor) -> Tensor:
        """The teacher's states without each field, or group of fields, at K tokens of the responses; `[B, K, H]`.

        The views of a response are read up to the last of these tokens, and not at all if it has none. B is the largest number of
        views; a response with fewer repeats its full view.

        Args:
            full: states of the rollouts under the full view.
            tokens: `[K]`, ascending indices into the tokens of `full`.
        """
        starts = [0, *accumulate(full.lengths)]
        places: dict[int, list[tuple[int, int]]] = {}  # of each response: indices into `tokens`, positions in the response
        for row, token in enumerate(tokens.tolist()):
            i = bisect_right(starts, token) - 1
            places.setdefault(i, []).append((row, token - starts[i]))
        same_views: dict[tuple[View, ...], list[int]] = {}
        for i in places:
            same_views.setdefault(tuple(view for _, view in field_groups(rollouts[i].feedback)), []).append(i)
        states = full.hidden[tokens].repeat(max(map(len, same_views), default=0), 1, 1)
        for without, members in same_views.items():
            ends = [places[i][-1][1] + 1 for i in members]
            offsets = accumulate(ends, initial=0)
            moved = [(row, at + offset) for i, offset in zip(members, offsets, strict=False) for row, at in places[i]]
            rows, found = torch.tensor(moved).to(tokens.device, non_blocking=True).unbind(-1)
            for j, view in enumerate(self.states([rollouts[i] for i in members], without, ends)):
                states[j, rows] = view.hidden[found]
        return states

    def forget(self) -> None:
        """Free the keys and values of what was read; they hold for the current weights only."""
        self.caches.clear()

    def take_metrics(self) -> Metrics:
        """`teacher_tokens` and `seconds_score` since the last call."""
        taken, self.metrics = self.metrics, Metrics()
        return taken

    def _read_shared(
        self, rollouts: Sequence[Rollout], views: Sequence[View], lengths: Sequence[int], keep: bool
    ) -> list[ResponseStates]:
        """Read once what prompts of several rollouts share, then what the views of a rollout share."""
        prompts = [[self.prompt_ids(rollout, view) for view in views] for rollout in rollouts]
        responses = [rollout.response_ids[:length] for rollout, length in zip(rollouts, lengths, strict=True)]
        readings: dict[tuple[int, int], Reading] = {}  # by rollout and view
        new = [i for i, rollout in enumerate(rollouts) if rollout not in self.caches]
        order = [[new[place] for place in wave] for wave in waves([prompts[i][0] for i in new])]
        for position, wave in enumerate(order):
            later = [prompts[i][0] for others in order[position + 1 :] for i in others]
            for i in wave:
                prompt = prompts[i][0]
                kept = len(prompt) if keep or len(views) > 1 else max((common_prefix(prompt, p) for p in later), default=0)
                readings[i, 0] = Reading(prompt, responses[i], self._known(prompt), kept)
            self._read([readings[i, 0] for i in wave])
            self.caches |= {rollouts[i]: readings[i, 0].kept for i in wave}
        others = [(i, v) for i in range(len(rollouts)) for v in range(len(views)) if (i, v) not in readings]
        readings |= {(i, v): Reading(prompts[i][v], responses[i], self.caches[rollouts[i]]) for i, v in others}
        self._read([readings[place] for place in others])
        states = [[readings[i, v].states for i in range(len(rollouts))] for v in range(len(views))]
        return [ResponseStates(torch.cat(of_view), list(lengths)) for of_view in states]

    def _known(self, prompt: list[int]) -> Prefix | None:
        """What was read with the longest beginning of this prompt."""
        return max(self.caches.values(), key=lambda known: common_prefix(known.ids, prompt), default=None)

    def _read(self, readings: Sequence[Reading]) -> None:
        most_tokens = packed_tokens(self.limit.size, self.device)
        self.metrics.total(teacher_tokens=read(self.model, readings, most_tokens))

    def _read_in_batches(
        self, rollouts: Sequence[Rollout], views: Sequence[View], lengths: Sequence[int]
    ) -> list[ResponseStates]:
        prompts = [self.prompt_ids(rollout, view) for view in views for rollout in rollouts]
        responses = [rollout.response_ids[:length] for rollout, length in zip(rollouts, lengths, strict=True)] * len(views)
        states = score_responses(self.model, prompts, responses, max_tokens=self.limit.size)
        self.metrics.total(teacher_tokens=sum(map(len, prompts)) + sum(map(len, responses)))
        return [states.select(range(v * len(rollouts), (v + 1) * len(rollouts))) for v in range(len(views))]


def waves(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Indices of the prompts, in lists that are read one after the other: each prompt after the one that it shares most with."""
    found: list[list[int]] = []
    depth: list[int] = []
    for i, prompt in enumerate(prompts):
        shared = [common_prefix(other, prompt) for other in prompts[:i]]
        most = max(shared, default=0)
        depth.append(depth[shared.index(most)] + 1 if most else 0)
        if depth[i] == len(found):
            found.append([])
        found[depth[i]].append(i)
    return found


def packed_tokens(limit: int, device: torch.device) -> int:
    """Tokens of sequences that share prefixes, per forward pass, where padded batches have `limit` tokens."""
    return min(limit, PACKED_TOKENS) if device.type == "cpu" else limit
