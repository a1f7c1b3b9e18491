"""`python -m engine.batch_reference`: docs/generation-file.md, from the records that lines become."""

import sys
from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec

from engine.batch_file import OutputLine, PromptLine
from engine.batch_options import parse_options
from engine.documented import allowed, field_texts
from protocol.sampling import SamplingParams

HEAD = """\
# Files of prompts and results

What `kvferry generate` (or `python -m engine`) reads and writes: JSON objects, one a line, in UTF-8. Empty lines are
skipped. This page is written by `python -m engine.batch_reference`.

## A line of the input

Exactly one of `prompt`, `prompt_token_ids` and `messages`, and what else is wanted. `null` stands for the default.
Other fields are refused, with the name that was probably meant.

"""
SAMPLING_HEAD = """
Sampling parameters. Where the default is an option, it holds for all lines that do not say. Stop strings are not
offered here. `logit_bias` may also be an object of token ids, as in OpenAI's API: `{"50256": -100}`.

"""
OUTPUT_HEAD = """
## A line of the output

"""
REST = """
With `n` above 1 a line has `n` results: those of the further sequences, `ID__child#1`, `ID__child#2` and so on, then
that of `ID`. An id that an earlier line has taken, a further sequence's among them, is refused.

Results come in the order of the lines, so each waits until all lines before its own are done; with `--as-completed`
each is written at once. A line that cannot be used has its error there and does not stop the others.

A generation ends with `length` at the end of the model's context, however many tokens were asked for; with
`max_new_tokens` of a million it may take long to get there. If the cache (`--num-blocks` times `--page-size` tokens) is
smaller than the context, what outgrows it fails, with the tokens so far. A prompt that is longer than either is an
error.

## The output file, interruptions, exit codes

The output file is opened, and what was in it lost, when the first result is written: whatever fails before that leaves
the file as it was. Each result is in the file as soon as it is written. After Ctrl-C or SIGTERM no line is begun or
waited for, and what is finished is written, with gaps where lines were not done; a second signal stops at once. The
last line on standard error says how many lines were done.

| exit code | meaning |
|---|---|
| 0 | every line has its results |
| 1 | some lines failed, or the results could not all be written |
| 2 | nothing was run: wrong options, a file or a model that cannot be used, too little memory |
| 130, 143 | interrupted by Ctrl-C, by SIGTERM |
"""


def reference() -> str:
    """The page's text."""
    defaults = parse_options("kvferry generate", ["--model", "DIR", "--input", "-", "--output", "-"]).defaults
    results = [f"| `{name}` | {text} |\n" for name, text in field_texts(OutputLine).items()]
    return "".join(
        [
            HEAD,
            *_fields(PromptLine, {}),
            SAMPLING_HEAD,
            *_fields(SamplingParams, defaults),
            OUTPUT_HEAD,
            "| field | meaning |\n|---|---|\n",
            *results,
            REST,
        ]
    )


def _fields(record: type[msgspec.Struct], options: Mapping[str, Any]) -> list[str]:
    """`options`: defaults that the command line sets."""
    texts, hints = field_texts(record), get_type_hints(record, include_extras=True)
    rows = ["| field | allowed | default | meaning |\n", "|---|---|---|---|\n"]
    for field in msgspec.structs.fields(record):
        default, option = field.default, ""
        if field.name in options:
            default, option = options[field.name], f"`--{field.name.replace('_', '-')}`, "
        what = allowed(hints[field.name]).removesuffix(", or None")
        rows.append(f"| `{field.name}` | {what} | {option}{_shown(default)} | {texts[field.name]} |\n")
    return rows


def _shown(default: Any) -> str:
    if default in (None, ()):
        return "none"
    return f"`{msgspec.json.encode(default).decode()}`"


if __name__ == "__main__":
    sys.stdout.write(reference())
