"""Why a model folder cannot be served, told to the operator at start.

BadModelFolder              a file is missing or makes no sense
├── UnsupportedTokenizer    a tokenizer of a kind that we do not detokenise
└── BadTemplate             a chat template that does not compile
"""


class BadModelFolder(ValueError):
    """The message names the file and what is wrong with it."""


class UnsupportedTokenizer(BadModelFolder):
    """The message names the kind."""


class BadTemplate(BadModelFolder):
    """The message is the template engine's."""
