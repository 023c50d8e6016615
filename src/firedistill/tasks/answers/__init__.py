"""Reads final answers: text to exact numbers (numbers.py) or to an option label (choices.py), and compares them with the gold.

A verdict decides which loss a response gets, so a misread answer teaches the wrong thing. The rules are strict where a text is
ambiguous ("10 or 42" is not an answer) and forgiving where only the typography varies ("$1,200.00" is 1200).

Every function accepts any string and takes time linear in its length. Nothing is evaluated: no `eval`, no computer algebra. All
repetitions in the regular expressions are bounded or possessive, and no pattern rescans text that an earlier attempt has scanned.
"""
