"""Greedy and beam search, whatever framework the model is of."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from common.subwords import BEGIN, END


def search(next_scores: Callable[[np.ndarray], np.ndarray], limits: np.ndarray, beam: int) -> list[list[int]]:
    """The best translation of each sentence of a batch that a beam search finds; with a beam of 1, the greedy one.

    In each step every one of ``beam`` hypotheses of a sentence goes on with every token, and the ``beam`` likeliest of all these
    stay; one that has ended stays as it is. The end decides by log-probability a token (Wu et al. 2016, with exponent 1).

    Arguments:
        next_scores: from hypotheses, int64 of shape (sentences, beam, tokens so far), to the log-probabilities of the next token,
            (sentences, beam, vocabulary); what it says of those that have ended doesn't matter.
        limits: the most tokens of each sentence's translation.
        beam: 1 or more.

    Returns:
        Tokens, without BEGIN and END.
    """
    sentences = len(limits)
    tokens = np.full((sentences, beam, 1), BEGIN)
    scores = np.full((sentences, beam), -np.inf)
    scores[:, 0] = 0  # all start the same
    lengths, ended = np.zeros((sentences, beam)), np.zeros((sentences, beam), bool)
    rows = np.arange(sentences)[:, None]
    while not ended.all():
        following = next_scores(tokens).astype(np.float64)
        following[ended] = -np.inf
        following[ended, END] = 0
        vocabulary = following.shape[-1]
        candidates = (scores[..., None] + following).reshape(sentences, -1)
        best = np.argpartition(-candidates, beam - 1, axis=1)[:, :beam]
        scores, parents = candidates[rows, best], best // vocabulary
        tokens = np.concatenate([tokens[rows, parents], (best % vocabulary)[..., None]], axis=2)
        lengths, ended = lengths[rows, parents], ended[rows, parents]
        lengths = lengths + ~ended
        ended = ended | (tokens[..., -1] == END) | (lengths >= limits[:, None])
    winners = np.argmax(scores / lengths, axis=1)
    found = []
    for hypotheses, winner in zip(tokens, winners):
        words = hypotheses[winner, 1:].tolist()
        found.append(words[:words.index(END)] if END in words else words)
    return found
