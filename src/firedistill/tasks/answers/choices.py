"""Reads option labels: which option a response chooses."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from firedistill.tasks.answers.numbers import stated_values
from firedistill.tasks.answers.text import (
    ANSWER_MARKER,
    BLANK,
    MAX_LINE_CHARACTERS,
    Answer,
    after_last,
    boxed,
    clean,
    last_line,
    to_ascii,
)


def choice_answer(response: str, labels: Sequence[str], options: Sequence[str] = ()) -> Answer:
    """The option that a response chooses, as one of `labels`.

    >>> choice_answer("**Answer:** (b).", "ABCD")
    Answer(value='B', well_formed=True)
    >>> choice_answer("Answer: B) 21.5", "ABCD", ["20", "21.5", "22", "23"])
    Answer(value='B', well_formed=True)
    >>> choice_answer("Answer: B or C", "ABCD")
    Answer(value=None, well_formed=False)

    The answer is the last `Answer: X` whose X is a label: alone, or followed by its bracket, punctuation, or the option's own
    text. Without one, the last line that consists of a label, or the last `option X` or `(X)`, is extracted: after the last
    `Answer:` with any text, if there is one, or where this text is `option X`, `the answer is X` or `(X) because ...`. A letter in
    prose is never an answer: "a" and "I" are English words.

    Args:
        labels: the labels of this example; any other letter is not an answer.
        options: the options' texts in the order of `labels`. Without them, any text may follow a label and its bracket.
    """
    lines = to_ascii(response).split("\n")
    stated: str | None = None  # the text after the last `Answer:` that has any
    after = lines
    for number, line in reversed(list(enumerate(lines))):
        for content in reversed(ANSWER_MARKER.split(line)[1:]):
            label = _leading_label(content, labels, options)
            if label is not None:
                return Answer(label, True)
            if stated is None and content.strip(BLANK):
                stated, after = content, lines[number + 1 :]
    mentioned = _mentioned_label(after, labels)
    return Answer(mentioned or (stated and _named_option(stated, labels, options)), False)


def lenient_choice_correct(response: str, labels: Sequence[str], options: Sequence[str], gold: str) -> bool:
    """Whether any recognizable choice of the response is the gold: a diagnostic, like `lenient_numeric_correct`.

    Besides the answer of `choice_answer`, these are recognized: the last `\\boxed{B}`, "the answer is B", `Answer: B because ...`,
    the last `option B`, a lone label or `B) ...` as the last line, and the option's own text as the last line or after `Answer:`.
    """
    return any(label is not None and label == gold for label in _lenient_labels(to_ascii(response), labels, options))


_MENTION = re.compile(r"(?<!\w)(?:option[\s*_`(\[]{1,8}+(\w{1,8}+)(?!\w)|\(\s{0,3}+(\w{1,8}+)\s{0,3}+\)(?!\w))", re.IGNORECASE)
_OPTION = re.compile(
    r"[\s*_`]{0,8}+(?:the\s{1,3}+)?(?:correct\s{1,3}+)?(?:option|choice|answer)(?!\w)(?:\s{1,3}+is(?!\w))?+"
    r"[\s*_`:]{0,8}+(?:option(?!\w)[\s*_`:]{0,8}+)?+",
    re.IGNORECASE,
)
_REASONED = re.compile(
    r"[\s*_`(\[]{0,8}+(\w{1,8}+)(?!\w)[)\]*_`:]{0,4}+\s{1,8}+"
    r"(?:because|since|as(?!\s{1,8}+well)|(?:is|was)\s{1,8}+(?:the\s{1,3}+)?(?:only\s{1,3}+)?(?:correct|right|best|true))(?!\w)",
    re.IGNORECASE,
)
_FITS = re.compile(r"\s{1,3}+(?:is|was|fits|remains|follows)(?!\w)")
_SECOND_ROMAN = re.compile(r"\(\s?ii\s?\)", re.IGNORECASE)
_CHOICE_PHRASE = re.compile(
    r"(?<![^\W_])(?:answer|option|choice)[\s*_`]{0,8}+(?:is|:)(?!\w)[\s*_`:]{0,8}+(?:option(?!\w)[\s*_`]{0,8}+)?+",
    re.IGNORECASE,
)
_VERB = re.compile(r"\s{1,8}+(?:is|was|as|because|since)(?!\w)")
_WORD = re.compile(r"\w{1,8}+(?!\w)")
_JOINER = re.compile(r"[\s)*\],/&]{1,8}+(?:(?:or|and)(?!\w))?+[\s(*\[]{0,8}+", re.IGNORECASE)
_NEXT_LETTER = re.compile(r"\s{0,8}+[^\W\d_]")
_ALTERNATIVE = re.compile(r"[\s*_`)(]{0,8}+(?:,?\s{0,3}+(?:or|and)(?!\w)|[/&]|(,))[\s*_`)(]{0,8}+", re.IGNORECASE)
_OPENERS = " ([<\"'*$#"
_CLOSERS = " )]>.,;:!?\"'*$\\\u2026\x00"
_CHECK_MARKS = "\u2705\u2713\u2714"


def _label_named(text: str, labels: Sequence[str]) -> str | None:
    return next((label for label in labels if label.upper() == text.upper()), None)


def _leading_label(content: str, labels: Sequence[str], options: Sequence[str]) -> str | None:
    """The label that a line states, if nothing but the option's own text follows it."""
    text = clean(content).lstrip(_OPENERS)
    word = _WORD.match(text)
    label = _label_named(word[0], labels) if word else None
    if label is None:
        return None
    rest = text[len(label) :]
    remainder = rest.strip(_CLOSERS).lstrip(_OPENERS)
    decoration = "" if any(option and not option.strip(_CHECK_MARKS) for option in options) else _CHECK_MARKS
    if not remainder.strip(f"-\u2014 {decoration}"):
        return label
    if text[0].islower() and rest[0] == " " and any(_same_option(text, option) for option in options):
        return None  # "a car", which is another option
    own_text = dict(zip(labels, options, strict=False)).get(label)
    if own_text is None:
        return label if rest[0] in ")].:" and not _names_a_label(remainder, labels) else None
    undashed = remainder.removeprefix("- ").removeprefix("\u2014").removeprefix("= ")
    return label if any(_same_option(found, own_text) for found in (remainder, undashed)) else None


def _named_option(content: str, labels: Sequence[str], options: Sequence[str]) -> str | None:
    """The label of a text like `option X`, `the answer is X` or `(X) because ...`; None if others are mentioned as well."""
    start = _OPTION.match(content)
    rest = content[start.end() :] if start else content
    if not start and not rest.lstrip(BLANK).startswith("("):
        return None
    reasoned = _REASONED.match(rest)
    label = _leading_label(rest, labels, options) or (_label_named(reasoned[1], labels) if reasoned else None)
    mentioned = {_mention(match, labels) for match in _MENTION.finditer(content)} - {None, label}
    return None if mentioned or (label == "I" and _SECOND_ROMAN.search(content)) else label


def _names_a_label(text: str, labels: Sequence[str]) -> bool:
    return any(_label_named(word, labels) is not None for word in re.findall(r"\w++", text))


def _same_option(found: str, option: str) -> bool:
    """Whether a cleaned text is the option's own, up to case, spaces, typography, and the notation of a number."""
    option = clean(to_ascii(option))
    if _comparable(found) == _comparable(option):
        return _comparable(found) != ""
    values, words = stated_values(found), [_initials(text) for text in (found, option)]
    same_words = words[0] == words[1] or [] in words  # "21.5 kilometers" is "21.5 km", "100% red" is not "100% pink"
    return same_words and values is not None and len(values) == 1 and values == stated_values(option)


def _initials(text: str) -> list[str]:
    """The first letters of the words, without the sign of a product."""
    return [word[0].lower() for word in re.findall(r"[^\W\d_]++", text) if word.lower() != "x"]


def _comparable(cleaned: str) -> str:
    return cleaned.lower().strip(_OPENERS + _CLOSERS)


def _mentioned_label(lines: Sequence[str], labels: Sequence[str]) -> str | None:
    """The label of the last line that consists of one, or of the last `option X` or `(X)`, whichever comes later."""
    roman = any(map(_SECOND_ROMAN.search, lines))  # "statements (i) and (ii)"
    in_brackets = [label for label in labels if not (roman and label == "I")]
    for line in reversed(lines):
        alone = _lone_label(line, labels)
        if alone is not None:
            return alone
        mentions = [(label, match) for match in _MENTION.finditer(line) if (label := _mention(match, in_brackets)) is not None]
        if mentions:
            label, last = mentions[-1]
            for other, match in mentions[-2:-1]:
                joined = _ALTERNATIVE.fullmatch(line[match.end() : last.start()][:40])
                # "(A), (B)", but not "unlike option A, option B fits"
                if other != label and joined and not (joined[1] and _FITS.match(line, last.end())):
                    return None
            return label
    return None


def _lone_label(line: str, labels: Sequence[str]) -> str | None:
    if not line or len(line) > MAX_LINE_CHARACTERS:
        return None
    return _label_named(clean(line).strip(_OPENERS + _CLOSERS + _CHECK_MARKS), labels)


def _mention(match: re.Match[str], labels: Sequence[str]) -> str | None:
    """The label that `option X` or `(X)` mentions; None if the letter is an English word, as in "the option I prefer"."""
    word = match[1] or match[2]
    if match[1] in ("a", "i", "I") and _is_prose(match.string, match.end()):
        return None
    return _label_named(word, labels)


def _is_prose(text: str, end: int) -> bool:
    """Whether the letter that ends here may be the English "a" or "I": another word follows that is not an option's verb."""
    return _NEXT_LETTER.match(text, end) is not None and _VERB.match(text, end) is None


def _lenient_labels(plain: str, labels: Sequence[str], options: Sequence[str]) -> Iterator[str | None]:
    yield choice_answer(plain, labels, options).value
    yield _mentioned_label(plain.split("\n"), labels)
    for statement in (boxed(plain), after_last(_CHOICE_PHRASE, plain), after_last(ANSWER_MARKER, plain)):
        if statement:
            yield _stated_label(statement, labels)
            yield _label_of_text(statement, labels, options)
    line = last_line(plain)
    yield _lone_label(line, labels)
    yield _leading_label(line, labels, options)
    yield _label_of_text(line, labels, options)


def _stated_label(statement: str, labels: Sequence[str]) -> str | None:
    """The label at the start of a statement, unless it is an English word or one of several alternatives."""
    text = statement.lstrip(_OPENERS)
    word = _WORD.match(text)
    if word is None or (word[0] in ("a", "A", "i", "I") and _is_prose(text, word.end())):
        return None
    joiner = _JOINER.match(text, word.end())
    other = _WORD.match(text, joiner.end()) if joiner else None
    if other and other[0] not in ("a", "i", "I") and _label_named(other[0], labels):
        return None
    return _label_named(word[0], labels)


def _label_of_text(text: str, labels: Sequence[str], options: Sequence[str]) -> str | None:
    """The label of the only option whose own text this is."""
    if len(text) > MAX_LINE_CHARACTERS:
        return None
    matching = [label for label, option in zip(labels, options, strict=False) if _same_option(text, option)]
    return matching[0] if len(matching) == 1 else None
