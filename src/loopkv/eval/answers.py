"""Greedy answers of one model under several plans, at a fraction of the cost of running each plan alone.

Three kinds of work are shared, none of which changes what is read:

* the first 319 tokens of a prompt do not depend on the plan: they are computed once and copied into each plan's cache;
* prompts of similar length go through the model together;
* an answer that another plan gave is checked with one step (all its tokens as one chunk) instead of one step per token.
  Greedy decoding would have written exactly the tokens that agree; it goes on from the first that does not. With V
  precision a decode step reads other values than a chunk, so there every token is decoded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from loopkv.artifacts import Plan
from loopkv.engine.generation import Continuation, encode_prompt, end_tokens, greedy, prefill
from loopkv.engine.paged_engine import NewTokens, PagedEngine, pool_blocks
from loopkv.engine.text_stream import TextStream
from loopkv.layout import lay_out
from loopkv.models.base import LoopedModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWER_END = "\n"


class AnswerBatch:
    """A few prompts, answered under one plan after the other.

    Args:
        model, tokenizer: the model and its tokenizer.
        exact: the plan that codes nothing; its engine computes what all plans share.
        prompts: texts, by any key.
        guesses: for each prompt a likely answer, with its end.
        max_tokens: longest answer.
    """

    def __init__(
        self,
        model: LoopedModel,
        tokenizer: PreTrainedTokenizerBase,
        exact: Plan,
        prompts: Mapping[str, str],
        guesses: Mapping[str, str],
        max_tokens: int,
    ) -> None:
        self._model, self._tokenizer, self._exact, self._max_tokens = model, tokenizer, exact, max_tokens
        self._ends = end_tokens(model, tokenizer)
        self._longest_guess = min(max_tokens, exact.policy.max_exact_chunk_tokens)
        self._ids = {key: encode_prompt(model, tokenizer, text, max_tokens) for key, text in prompts.items()}
        self._guesses: dict[str, list[int]] = {}
        self.guess(guesses)
        self._shared = self._engine(exact)
        self._prefixes = {key: self._shared.new_request() for key in self._ids}
        rows = [NewTokens(self._prefixes[key], ids[: self._shared_tokens(ids)]) for key, ids in self._ids.items()]
        prefill(self._shared, [row for row in rows if row.ids])

    def guess(self, guesses: Mapping[str, str]) -> None:
        """Expect these answers from now on."""
        for key, text in guesses.items():
            self._guesses[key] = [int(i) for i in self._tokenizer(text).input_ids][: self._longest_guess]

    def answer(self, plan: Plan, keys: Sequence[str]) -> dict[str, str]:
        """Greedy answers of the prompts ``keys`` under ``plan``, each up to its first newline."""
        engine = self._engine(plan)
        texts = {
            key: Continuation(
                prompt=self._ids[key],
                request=engine.adopt(self._shared, self._prefixes[key]),
                stream=TextStream(self._tokenizer, self._ids[key], (ANSWER_END,)),
                ends=self._ends,
                max_tokens=self._max_tokens,
            )
            for key in keys
        }
        rest = [NewTokens(text.request, text.prompt[text.request.tokens :]) for text in texts.values()]
        logits = dict(zip(keys, prefill(engine, rest), strict=True))
        if plan.tau is None:
            logits = self._check_guesses(engine, texts, logits)
        while logits:
            for key, its in logits.items():
                texts[key].take(greedy(its))
            logits = _step(engine, {key: texts[key] for key in logits if texts[key].finish is None})
        return {key: text.stream.text for key, text in texts.items()}

    def _check_guesses(
        self, engine: PagedEngine, texts: Mapping[str, Continuation], logits: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Let each text take what greedy decoding would write of its guess; logits of the texts that go on."""
        tried = {key: guess for key in texts if (guess := self._guesses[key]) and greedy(logits[key]) == guess[0]}
        if not tried:
            return dict(logits)
        forks = {key: engine.fork(texts[key].request) for key in tried}
        out = engine.step([NewTokens(forks[key], guess) for key, guess in tried.items()], every_position=True)
        after = dict(logits)
        agreed: dict[str, list[int]] = {}
        for (key, guess), its in zip(tried.items(), out, strict=True):
            count = 1
            while count < len(guess) and greedy(its[count - 1]) == guess[count]:
                count += 1
            agreed[key] = guess[:count]
            for token in agreed[key]:
                if texts[key].finish is None:
                    texts[key].take(token)
            if count == len(guess):
                forks[key], texts[key].request = texts[key].request, forks[key]
                after[key] = its[-1]
            engine.release(forks[key])
        going_on = {key: text for key, text in texts.items() if text.finish is None}
        partly = [key for key in going_on if key in tried and len(agreed[key]) < len(tried[key])]
        if partly:
            out = engine.step([NewTokens(texts[key].request, agreed[key]) for key in partly])
            after |= dict(zip(partly, out, strict=True))
        return {key: after[key] for key in going_on}

    def _shared_tokens(self, ids: Sequence[int]) -> int:
        """Prompt tokens computed once for all plans; at least one is left, whose logits start the answer."""
        return min(self._exact.policy.first_coded_position, len(ids) - 1)

    def _engine(self, plan: Plan) -> PagedEngine:
        layout = lay_out(plan, exact_itemsize=self._model.dtype.itemsize)
        lengths = [len(ids) + self._max_tokens for ids in self._ids.values()]
        blocks = pool_blocks(layout, lengths * 2, plan.policy.max_exact_chunk_tokens)  # each text and its fork
        return PagedEngine(self._model, plan, blocks=blocks, layout=layout)


def _step(engine: PagedEngine, texts: Mapping[str, Continuation]) -> dict[str, Tensor]:
    """One decode step of texts that go on."""
    if not texts:
        return {}
    out = engine.step([NewTokens(text.request, text.tokens[-1:]) for text in texts.values()])
    return dict(zip(texts, out, strict=True))
